"""How the networks of `physics.py` are trained: every method advances its parameters and returns them."""

from collections.abc import Callable, Sequence
from functools import partial
from math import cos, pi
from typing import Any

import soap
import torch
from equations import Equation, Params, by_autograd, by_func
from torch import Tensor

import functional_jd as jd

Method = Callable[[float], Params]
"""One step, or one call of a closure with several, from the share of the time that is spent; returns the parameters."""
Maker = Callable[[int], Method]
"""From the seed of a network."""

ADAM_RATES = (3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
SOAP_RATES = (3e-3, 1e-2, 3e-2, 1e-1)
# A grid as the public code of natural gradients for equations searches it in each step; dampings are a grid of ours.
ENGD_RATES = [2.0**-k for k in range(31)] + [0.0]
ENGD_DAMPINGS = (1e-2, 1e-3, 1e-4, 1e-6)
# The same for all equations.
OUR_RATES, OUR_DAMPING = [2.0**-k for k in range(11)], 1e-3


def contenders(equation: Equation) -> dict[str, dict[str, Maker]]:
    """The settings of each method, in order where they are numbers."""
    engd = lambda damping: partial(residuals, equation, jd.natural_gradient(damping), ENGD_RATES)
    return {
        "Adam": {f"rate {rate:g}": partial(adam, equation, rate) for rate in ADAM_RATES},
        "SOAP": {f"rate {rate:g}": partial(with_soap, equation, rate) for rate in SOAP_RATES},
        "LBFGS": {str(d).removeprefix("torch."): partial(lbfgs, equation, d) for d in (torch.float32, torch.float64)},
        "ENGD-W": {f"damping {damping:g}": engd(damping) for damping in ENGD_DAMPINGS},
        "natural_gradient": {
            f"damping {OUR_DAMPING:g}": partial(residuals, equation, jd.natural_gradient(OUR_DAMPING), OUR_RATES)
        },
        "levenberg_marquardt": {
            f"damping {OUR_DAMPING:g}": partial(residuals, equation, jd.levenberg_marquardt(OUR_DAMPING), OUR_RATES)
        },
    }


def residuals(equation: Equation, rule: jd.Aggregator, rates: Sequence[float], seed: int) -> Method:
    """A rule for residuals, each divided so that the sum of squares is the sum of mean squares; eager, in float64."""
    inside, edge, known = equation.points()
    share = (equation.weight / len(edge)) ** 0.5
    losses = jd.per_example(
        {
            "inside": lambda params, x: equation.inside_residual(params, x, by_func) / len(inside) ** 0.5,
            "edge": lambda params, x, known: (equation.value(params, x) - known) * share,
        }
    )
    how: dict[str, Any] = {
        "losses": losses,
        "aggregator": rule,
        "optimizer": jd.line_search(jd.sgd(1.0), list(rates)),
        "engine": "jacobian",
    }
    batch = {"inside": inside, "edge": edge}, {"edge": known}
    state = [jd.train_state(equation.network(seed), *batch, **how)]

    def advance(_: float) -> Params:
        state[0], _ = jd.step(state[0], *batch, **how)
        return state[0].params

    return advance


def adam(equation: Equation, rate: float, seed: int) -> Method:
    """Adam in one graph in float32, derivatives by `torch.func.grad`, all parameters in one vector; a falling rate."""
    points = tuple(x.float() for x in equation.points())
    start = equation.network(seed)
    flat = torch.cat([p.flatten() for p in start]).float()
    held = [(flat, torch.zeros_like(flat), torch.zeros_like(flat), torch.tensor(0.0))]
    shapes = tuple(p.shape for p in start)
    step = _in_one_graph(_adam, equation, shapes)

    def advance(share: float) -> Params:
        held[0] = step(points, _falling(rate, share), *held[0])
        return _leaves(shapes, held[0][0])

    return advance


def _adam(equation: Equation, shapes: Any, points: Any, rate: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
    flat, first, second, t = state
    loss = lambda flat: sum(equation.losses(_leaves(shapes, flat), points, by_func).values())
    gradient, t = torch.func.grad(loss)(flat), t + 1
    first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient.square()
    size = rate * (1 - 0.999**t).sqrt() / (1 - 0.9**t)
    return flat - size * first / (second.sqrt() + 1e-8), first, second, t


def with_soap(equation: Equation, rate: float, seed: int) -> Method:
    """SOAP in float32, in one graph but for the turn of the bases, with a falling rate."""
    points = tuple(x.float() for x in equation.points())
    params = [p.float() for p in equation.network(seed)]
    held = [(params, [soap.start(g) for g in _gradient(equation, params, points)], torch.tensor(0.0))]
    step = _in_one_graph(_soap, equation)

    def advance(share: float) -> Params:
        params, moments, t = step(points, _falling(rate, share), *held[0])
        if int(t) % soap.EVERY == 0:
            moments = [soap.turned(each) for each in moments]
        held[0] = params, moments, t
        return params

    return advance


def _soap(equation: Equation, points: Any, rate: Tensor, params: Params, moments: Any, t: Tensor) -> Any:
    gradients, t = _gradient(equation, params, points), t + 1
    each = zip(params, gradients, moments, strict=True)
    params, moments = zip(*(soap.advance(p, g, m, rate, t) for p, g, m in each), strict=True)
    return list(params), list(moments), t


def _gradient(equation: Equation, params: Params, points: Any) -> Params:
    return torch.func.grad(lambda params: sum(equation.losses(params, points, by_func).values()))(params)


def _falling(rate: float, share: float) -> Tensor:
    """By half a cosine, to zero when the time is over."""
    return torch.tensor(rate * (1 + cos(pi * share)) / 2)


_compiled: dict[str, Callable[..., Any]] = {}


def forget() -> None:
    """Drop what was compiled, so that torch does not count other equations as recompilations."""
    torch._dynamo.reset()
    _compiled.clear()


def _in_one_graph(step: Callable[..., Any], equation: Equation, *args: Any) -> Callable[..., Any]:
    name = f"{step.__name__} {equation.name}"
    if name not in _compiled:
        _compiled[name] = torch.compile(partial(step, equation, *args), fullgraph=True)
    return _compiled[name]


def _leaves(shapes: Any, flat: Tensor) -> Params:
    pieces = flat.split([shape.numel() for shape in shapes])
    return [piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def lbfgs(equation: Equation, dtype: torch.dtype, seed: int) -> Method:
    """torch's, with its strong Wolfe search, eager, twenty iterations for each call."""
    points = tuple(x.to(dtype) for x in equation.points())
    params = [p.to(dtype).requires_grad_() for p in equation.network(seed)]
    optimizer = torch.optim.LBFGS(params, history_size=50, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = sum(equation.losses(params, points, by_autograd).values())
        loss.backward()
        return loss

    def advance(_: float) -> Params:
        optimizer.step(closure)
        return params

    return advance
