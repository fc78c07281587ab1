"""Losses that contain derivatives, written in every style and run in every precision, against closed forms in float64.

All weights, points and data are positive, and the network `v exp(W x + b)` has positive derivatives of all orders: the
sum of the absolute terms of every row is the row of the same losses with all differences turned into sums.
"""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from bounds import check_within, eps
from jacobian_by_hand import rows_of
from torch.func import grad, hessian, jvp, vmap

import functional_jd as fj

# Roundings on the way to a row: ten by each of the three passes (values, two derivatives), and as many backwards.
ROUNDINGS = 64
# Terms of very different size, and scales that bring their derivatives into the range of float16.
WEIGHTS = torch.tensor([2.0**10, 2.0**-20])
SCALES = torch.tensor([2.0**-12, 2.0**22])
VISCOSITY, WAVES = 0.1, 2.0


def positive(*shape, seed):
    return 0.1 + 0.8 * torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def weights(d, width=6):
    return {"w": positive(width, d, seed=1), "b": positive(width, seed=2), "v": positive(1, width, seed=3)}


def network(p, x):
    hidden = torch.exp(torch.nn.functional.linear(x, p["w"], p["b"]))
    return torch.nn.functional.linear(hidden, p["v"]).squeeze(-1)


# Each returns the first and the second derivatives along the axes, `[points, d]`.


def by_jvp(u, x):
    def along(f, axis):
        tangent = torch.zeros_like(x)
        tangent[:, axis] = 1
        return lambda x: jvp(f, (x,), (tangent,))[1]

    axes = range(x.shape[1])
    first, second = [along(u, i) for i in axes], [along(along(u, i), i) for i in axes]
    return tuple(torch.stack([f(x) for f in each], dim=1) for each in (first, second))


def by_grad(u, x):
    slope = grad(lambda x: u(x).sum())
    seconds = [grad(lambda x, i=i: slope(x)[:, i].sum())(x)[:, i] for i in range(x.shape[1])]
    return slope(x), torch.stack(seconds, dim=1)


def by_autograd(u, x):
    x = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(u(x).sum(), x, create_graph=True)
    axes = range(x.shape[1])
    seconds = [torch.autograd.grad(slope[:, i].sum(), x, create_graph=True)[0][:, i] for i in axes]
    return slope, torch.stack(seconds, dim=1)


def in_closed_form(p, x):
    terms = torch.exp(x @ p["w"].mT + p["b"]) * p["v"]
    return terms @ p["w"], terms @ p["w"].square()


by_hessian = lambda u, x: (by_grad(u, x)[0], vmap(hessian(u))(x).diagonal(dim1=-2, dim2=-1))
STYLES = {"jvp": by_jvp, "grad": by_grad, "hessian": by_hessian, "autograd": by_autograd}


burgers = lambda u, first, second, x, sign: first[:, 0] + u * first[:, 1] + sign * VISCOSITY * second[:, 1]
helmholtz = lambda u, first, second, x, sign: second.sum(1) + WAVES**2 * u + sign * x.prod(1)
poisson = lambda u, first, second, x, sign: second.sum(1) + sign * x.sum(1)


PROBLEMS = {"burgers": (burgers, 2), "helmholtz": (helmholtz, 2), "poisson": (poisson, 5)}


def losses_of(equation, derivatives, sign=-1):
    """Of `derivatives(p, x) -> (first, second)`: what is left of the equation inside, and of the values at the edge."""

    def losses(p, x, edge):
        first, second = derivatives(p, x)
        inside = equation(network(p, x), first, second, x, sign)
        at_edge = network(p, edge) + sign * edge.sum(1)
        return (torch.stack([inside.square().mean(), at_edge.square().mean()]) * WEIGHTS.to(inside)).unbind()

    return losses


def styled(style):
    return lambda p, x: STYLES[style](lambda x: network(p, x), x)


def plain_rows(losses, params, *batch):
    return dict(zip(sorted(params), rows_of(losses, params, *batch), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("problem", PROBLEMS)
def test_rows_of_equations_in_every_style(problem, dtype):
    equation, d = PROBLEMS[problem]
    params, batch = weights(d), (positive(6, d, seed=4), positive(4, d, seed=5))
    expected = plain_rows(losses_of(equation, in_closed_form), params, *batch)
    terms = plain_rows(losses_of(equation, in_closed_form, sign=1), params, *batch)
    inputs = [{name: leaf.float() for name, leaf in params.items()}, *(x.float() for x in batch)]
    for style in STYLES:
        losses = losses_of(equation, styled(style))
        run = losses if dtype == torch.float32 else fj.autocast(losses, dtype)
        rows, _, finite = fj.jacobian_fn(run, scale=SCALES)(*inputs)
        assert finite.all()
        for name in params:
            check_within(rows[name].double(), expected[name], ROUNDINGS * eps(dtype) / 2 * terms[name])


def test_whole_steps_compile_to_one_graph():
    """With `grad` twice: on derivatives of `hessian`, torch.compile fails in torch itself."""
    equation, d = PROBLEMS["helmholtz"]
    params = {name: leaf.float() for name, leaf in weights(d).items()}
    batch = (positive(6, d, seed=4).float(), positive(4, d, seed=5).float())
    half = fj.autocast(losses_of(equation, styled("grad")), torch.bfloat16)
    how = {"losses": half, "aggregator": fj.mean(), "optimizer": fj.sgd(1e-6)}
    state = fj.train_state(params, *batch, scale=fj.scale_state(1.0, shape=(2,)), **how)
    expected, _ = fj.step(state, *batch, **how)
    torch.compiler.reset()
    found, info = torch.compile(partial(fj.step, **how), backend="eager", fullgraph=True)(state, *batch)
    assert info.moved
    torch.testing.assert_close(found.params, expected.params)


@pytest.mark.parametrize("style", ["grad", "hessian", "autograd"])
def test_residuals_one_per_point_are_the_rows_of_a_loop(style):
    """With `torch.autograd.grad` inside, which vmap refuses, they come out of a loop, and a warning says so."""
    equation, d = PROBLEMS["helmholtz"]
    params, x = weights(d), positive(6, d, seed=4)
    residual = lambda p, x: equation(network(p, x[None]), *styled(style)(p, x[None]), x[None], -1)[0]
    says = pytest.warns(fj.SlowPathWarning, match="jacobian_fn") if style == "autograd" else nullcontext()
    with says:
        rows, _ = fj.jacobian_fn(fj.per_example(residual))(params, x)
    expected = plain_rows(lambda p: equation(network(p, x), *in_closed_form(p, x), x, -1).unbind(), params)
    for name in params:
        torch.testing.assert_close(rows[name], expected[name])
