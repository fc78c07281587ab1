"""Recurrent layers of single examples under vmap, beside torch's own layers of the whole batch in a loop."""

import warnings

import pytest
import torch
from bounds import check_within, eps
from torch import nn
from torch.func import functional_call

import functional_jd as fj

FORMS = {
    "lstm": lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True, batch_first=True),
    "projected": lambda: nn.LSTM(3, 4, bias=False, proj_size=2),
    "gru": lambda: nn.GRU(3, 4, num_layers=2, batch_first=True),
    "both_ways": lambda: nn.GRU(3, 4, bidirectional=True, bias=False),
    "tanh": lambda: nn.RNN(3, 4, bidirectional=True),
    "relu": lambda: nn.RNN(3, 4, nonlinearity="relu", batch_first=True),
}


class Answers(nn.Module):
    """One number from the outputs and from the last states of a layer, for a batch of one."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer.double()

    def forward(self, x):
        output, states = self.layer(x[None] if self.layer.batch_first else x[:, None])
        states = states if isinstance(states, tuple) else (states,)
        return output.square().sum() + sum((1 + k) * state.sin().sum() for k, state in enumerate(states))


def problem(form):
    torch.manual_seed(0)
    model = Answers(FORMS[form]())
    losses = fj.per_example(lambda params, x: functional_call(model, params, (x,)))
    return model, losses, {name: p.detach() for name, p in model.named_parameters()}, torch.randn(5, 6, 3).double()


@pytest.mark.parametrize("form", FORMS)
def test_values_rows_and_products_without_a_loop_are_those_of_torch(form):
    model, losses, params, x = problem(form)
    values = [model(one) for one in x]
    rows = [torch.cat([g.flatten() for g in torch.autograd.grad(value, list(model.parameters()))]) for value in values]
    expected = torch.stack(rows)
    with warnings.catch_warnings():
        warnings.simplefilter("error", fj.SlowPathWarning)
        found = losses(params, x)
        jacobian, _ = fj.jacobian_fn(losses)(params, x)
        gramian, _, pullback = fj.gramian_fn(losses)(params, x)
        squares, _, _ = fj.squared_norms_fn(losses)(params, x)
        direction, _ = pullback(torch.arange(5.0))
    # Six steps, two layers, twice as many passes: each rounds some dozen sums of at most eight terms of order 1.
    bound = 2**10 * eps(torch.float64) * expected.abs().amax()
    check_within(found, torch.stack(values).detach(), torch.full_like(found, float(bound)))
    joined = torch.cat([jacobian[name].flatten(1) for name, _ in model.named_parameters()], 1)
    check_within(joined, expected, torch.full_like(expected, float(bound)))
    most = 2 * bound * expected.norm(dim=1).max() * expected.shape[1] ** 0.5
    check_within(gramian, expected @ expected.mT, most.expand(5, 5))
    check_within(squares, expected.square().sum(1), most.expand(5))
    joined = torch.cat([direction[name].flatten() for name, _ in model.named_parameters()])
    check_within(joined, torch.arange(5.0).double() @ expected, (10 * bound).expand_as(joined))


def test_under_transforms_values_and_rows_are_those_of_torch():
    model, losses, params, x = problem("lstm")
    expected = torch.stack([model(one) for one in x]).detach()
    bound = torch.full_like(expected, 2**10 * float(eps(torch.float64) * expected.abs().amax()))
    check_within(torch.vmap(lambda x: losses(params, x))(x[None])[0], expected, bound)
    check_within(torch.func.jvp(lambda x: losses(params, x), (x,), (torch.zeros_like(x),))[0], expected, bound)
    grad = torch.func.grad(lambda params: losses(params, x).sum())(params)
    total = torch.autograd.grad(sum(model(one) for one in x), list(model.parameters()))
    for (name, _), row in zip(model.named_parameters(), total, strict=True):
        check_within(grad[name], row, torch.full_like(row, float(bound[0] * 10)))


def test_dropout_between_layers_is_left_to_torch():
    model = nn.LSTM(3, 4, num_layers=2, dropout=0.5)
    losses = fj.per_example(lambda params, x: functional_call(model, params, (x[:, None],))[0].sum())
    with pytest.warns(fj.SlowPathWarning, match="evaluates one example after the other"):
        losses(dict(model.named_parameters()), torch.randn(2, 3, 3))
