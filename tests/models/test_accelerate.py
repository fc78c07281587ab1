"""A loop of Accelerate, which differentiates the weighted sum of the losses, beside our step."""

import pytest
import torch
from inputs import library
from torch import nn

import functional_jd as fj

RATE, EXAMPLES, WIDTH = 0.1, 8, 7


def loop_of_accelerate(accelerator, net, batches, rule):
    """Train the module in place, with the weights of a rule."""
    apply = fj.functional(net)
    losses_of = lambda output, y: ((output - y) ** 2).mean(0)
    weights_of = fj.weights_fn(lambda params, x, y: losses_of(apply(params, {}, x)[0], y), rule)
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE, momentum=0.9)
    loader = torch.utils.data.DataLoader(batches, batch_size=None)
    net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    memory = None
    for x, y in loader:
        params = dict(accelerator.unwrap_model(net).named_parameters())
        weights, _, memory = weights_of(params, x, y, state=memory)
        accelerator.backward(weights @ losses_of(net(x), y))
        optimizer.step()
        optimizer.zero_grad()
    return dict(accelerator.unwrap_model(net).named_parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rule", [fj.upgrad(), fj.random_weights(fj.random.key(1))], ids=["upgrad", "random_weights"])
def test_a_loop_of_accelerate_with_weights_trains_as_our_step(rule, dtype):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(5, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3)).to(dtype)
        batches = [(torch.randn(EXAMPLES, 5, dtype=dtype), torch.randn(EXAMPLES, 3, dtype=dtype)) for _ in range(10)]
    apply, start = fj.functional(net), {name: p.detach().clone() for name, p in net.named_parameters()}
    losses = lambda params, x, y: ((apply(params, {}, x)[0] - y) ** 2).mean(0)
    how = {"losses": losses, "aggregator": rule, "optimizer": fj.sgd(RATE, momentum=0.9)}
    state, moved = fj.train_state(start, *batches[0], **how), 0.0
    for batch in batches:
        rows = fj.jacobian_fn(losses)(state.params, *batch)[0]
        state, info = fj.step(state, *batch, **how)
        terms = max(torch.tensordot(info.weights, row.double().abs(), 1).max() for row in rows.values())
        moved += 10 * RATE * float(terms)  # the momentum repeats each step up to ten times
    found = loop_of_accelerate(library("accelerate").Accelerator(cpu=True), net, batches, rule)
    bound = EXAMPLES * WIDTH * torch.finfo(dtype).eps * moved  # as many terms in each sum
    for name, p in found.items():
        torch.testing.assert_close(p.detach(), state.params[name], rtol=0, atol=bound)
        assert (p - start[name]).abs().max() > 1e3 * bound, "it has moved, by more than roundings"
