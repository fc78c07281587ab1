"""Losses at given buffers: what a step sees, for every kind, and under every transform."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call

import functional_jd as fj
from functional_jd.objectives import at_buffers

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
NET = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 2)).double()
WHOLE, TRUNK, HEAD = map(fj.functional, (NET, NET[:2], NET[2:]))
BUFFERS = {name: x + 0.5 if x.is_floating_point() else x.clone() for name, x in NET.named_buffers()}
PARAMS = {name: p.detach() for name, p in NET.named_parameters()}
OF_TRUNK = {name: p for name, p in PARAMS.items() if name[0] in "01"}
OF_HEAD = {name: p for name, p in PARAMS.items() if name[0] == "3"}


def plain(params, buffers, x):
    found, buffers = WHOLE(params, buffers, x)
    return (found - 1).square().mean(0), buffers


def features(shared, buffers, x):
    return TRUNK(shared, buffers, x)


def heads(own, h, buffers, x):
    found, _ = HEAD(own, {}, h)
    return (found - 1).square().mean(0) + 0 * buffers["1.running_var"].sum(), buffers


def scaled(params, buffers, x):
    return (params["w"] @ x * buffers["factor"] - 1).square(), buffers


CASES = {
    "plain": (plain, PARAMS, BUFFERS),
    "multitask": (fj.multitask(features, heads), {"shared": OF_TRUNK, "heads": OF_HEAD}, BUFFERS),
    "per_example": (fj.per_example(scaled), {"w": X[0]}, {"factor": X[0, 0]}),
}
case = pytest.mark.parametrize(("losses", "params", "buffers"), CASES.values(), ids=CASES)


def by_hand(params, x, name):
    """Rows of the parameter by plain autograd through the module itself, in training mode."""
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 2)).double()
    net.load_state_dict(params | BUFFERS)
    values = (net(x) - 1).square().mean(0)
    return torch.stack([torch.autograd.grad(y, net.get_parameter(name), retain_graph=True)[0] for y in values])


def test_rows_are_those_of_the_module_itself():
    jacobian, values = fj.jacobian_fn(at_buffers(plain, BUFFERS))(PARAMS, X)
    tasks, params, _ = CASES["multitask"]
    rows, of_tasks = fj.jacobian_fn(at_buffers(tasks, BUFFERS))(params, X)
    for name in OF_TRUNK:
        torch.testing.assert_close(jacobian[name], by_hand(PARAMS, X, name))
        torch.testing.assert_close(rows.shared[name], by_hand(PARAMS, X, name))
    torch.testing.assert_close(of_tasks, values)


@case
def test_values_and_gramian_are_those_of_the_step_and_buffers_stay(losses, params, buffers):
    method = {"losses": losses, "aggregator": fj.upgrad(), "optimizer": fj.sgd(0.1), "engine": "jacobian"}
    state = fj.train_state(params, X, buffers=buffers, **method)
    before = {name: x.clone() for name, x in state.buffers.items()}
    held = at_buffers(losses, state.buffers)
    jacobian, values = fj.jacobian_fn(held)(params, X)
    of_trunk = getattr(jacobian, "shared", jacobian)
    state_after, info = fj.step(state, X, **method)
    assert torch.equal(values, info.losses)
    assert torch.equal(fj.views.gramian(of_trunk), info.gramian)
    assert torch.equal(held(params, X), info.losses)
    assert all(torch.equal(x, before[name]) for name, x in state.buffers.items())
    assert losses is CASES["per_example"][0] or not torch.equal(
        state_after.buffers["1.running_mean"], before["1.running_mean"]
    )


def test_what_a_forward_writes_into_its_buffers_stays_in_the_copy():
    def counting(params, buffers, x):
        buffers["n"].add_(1)
        return (params["w"] * x).mean(0) * buffers["n"], buffers

    buffers = {"n": torch.zeros(())}
    held = at_buffers(counting, buffers)
    first, again = (held({"w": X[0]}, X) for _ in range(2))
    assert torch.equal(first, again)
    assert buffers["n"] == 0


@case
@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp", "compile"])
def test_composes_with_transforms(losses, params, buffers, transform):
    floating = {name: x for name, x in buffers.items() if x.is_floating_point()}

    def gains(given):
        gramian, values, _ = fj.gramian_fn(at_buffers(losses, buffers | given))(params, X)
        return gramian.sum() + values.sum()

    if transform == "vmap":
        two = {name: torch.stack([x, 2 * x]) for name, x in floating.items()}
        loop = torch.stack([gains({name: x[i] for name, x in two.items()}) for i in range(2)])
        torch.testing.assert_close(torch.vmap(gains)(two), loop)
    elif transform == "compile":
        compiled = torch.compile(gains, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(floating), gains(floating))
    else:
        tangents = {name: torch.ones_like(x) for name, x in floating.items()}
        if transform == "grad":
            slopes = torch.func.grad(gains)(floating)
            found = sum(x.sum() for x in slopes.values())
        else:
            found = torch.func.jvp(gains, (floating,), (tangents,))[1]
        step = 1e-5  # a tenth of the digits lost to curvature, a third to rounding
        sides = [gains({name: x + sign * step for name, x in floating.items()}) for sign in (1, -1)]
        torch.testing.assert_close(found, (sides[0] - sides[1]) / (2 * step), rtol=1e-7, atol=1e-9)


@given(st.lists(st.floats(-3, 3, width=32), min_size=4, max_size=4), st.floats(-3, 3, width=32))
def test_the_losses_are_those_of_a_call_with_the_buffers(weights, factor):
    params, buffers = {"w": torch.tensor(weights).to(X)}, {"factor": torch.tensor(factor).to(X)}
    loop = torch.stack([scaled(params, buffers, x)[0] for x in X])
    torch.testing.assert_close(at_buffers(fj.per_example(scaled), buffers)(params, X), loop)


def test_eval_mode_ignores_the_batch_by_its_buffers():
    """The held buffers are used: in eval mode, losses follow the running mean that is given."""
    net = nn.BatchNorm1d(4).double().eval()
    losses = lambda params, buffers, x: (functional_call(net, (params, buffers), (x,)).mean(0), buffers)
    buffers = dict(net.named_buffers()) | {"running_mean": torch.full((4,), 2.0).to(X)}
    values = at_buffers(losses, buffers)(dict(net.named_parameters()), X)
    torch.testing.assert_close(values, (X.mean(0) - 2) / (1 + net.eps) ** 0.5)


REFUSED = {
    "sets": (fj.per_example({"a": scaled}), {}, TypeError, "or multitask or per_example losses, found ExampleSets"),
    "no function": (3, {}, TypeError, "losses must be a function"),
    "no tensors": (plain, {"n": 3}, TypeError, "a pytree of tensors"),
    "a key": (fj.per_example(scaled), {"key": fj.random.key(0)}, ValueError, "without a key, found 'key'"),
    "a key alone": (
        fj.per_example(scaled),
        fj.random.key(0),
        ValueError,
        "without a key, found a key and nothing else, .* or, to evaluate without dropout, per_example of a loss",
    ),
}


@pytest.mark.parametrize(("losses", "buffers", "error", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_held_is_refused(losses, buffers, error, words):
    with pytest.raises(error, match=rf"^at_buffers: .*{words}"):
        at_buffers(losses, buffers)


def test_losses_without_buffers_are_told_apart():
    with pytest.raises(
        TypeError, match=r"^at_buffers: expected functions that return \(losses, buffers\), found Tensor"
    ):
        at_buffers(lambda params, buffers, x: x.mean(0), BUFFERS)(PARAMS, X)
