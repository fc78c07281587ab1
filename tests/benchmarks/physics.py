"""`python tests/benchmarks/physics.py [SECONDS [EQUATION ...]]`: how well networks solve equations in equal time.

The error that is reached in so many seconds of CPU time, 8 by default, one thread, for three seeds: `step` with
`natural_gradient` and `line_search`, eager, in float64, beside Adam in one graph in float32, with the best of four
rates, which falls to zero with the time, and LBFGS with its strong Wolfe search, eager, in float32 and in float64. All
minimize the same sum of mean squares at the same points. An error is the relative L2 distance to the solution at other
points: validation points choose the rate and the moment of the run, and the error at test points is shown.
"""

import os
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from time import process_time
from typing import Any

os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")

import torch
from equations import EQUATIONS, Equation, Params, by_autograd, by_func, value
from torch import Tensor

import functional_jd as jd

SEEDS = range(3)
RATES = (3e-3, 1e-2, 3e-2, 1e-1)
STEPS = [1.0, 0.4, 0.1, 0.02]
DAMPING = 1e-3  # for all equations
# Our error by that of Adam, and by that of the better of LBFGS in both precisions.
GOALS = {"Helmholtz": (1 / 200, 1 / 5), "Poisson 5-d": (1 / 30, 1 / 5), "Burgers": (1 / 10, 1 / 5)}
# An error is looked at so often in a run.
_LOOKS = 20
Method = Callable[[float], Params]
"""One step, or one call of a closure with several, from the share of the time that is spent; returns the parameters."""
Errors = tuple[float, float]
"""At validation points, and at test points."""


def least_error(
    equation: Equation, advance: Method, seconds: float, clock: Callable[[], float] = process_time
) -> Errors:
    """The errors where that at validation points is least, within so many seconds; looking does not count."""
    spent, least, look = 0.0, (float("inf"), float("inf")), 1
    while spent < seconds:
        start = clock()
        params = advance(spent / seconds)
        spent += clock() - start
        if spent >= look * seconds / _LOOKS:
            least = min(least, (equation.error(params, "validation"), equation.error(params, "test")))
            look = int(spent * _LOOKS / seconds) + 1
    return least


def ours(equation: Equation, seed: int) -> Method:
    """Natural gradients of the residuals, each divided so that the sum of squares is the sum of mean squares."""
    inside, edge, known = equation.points()
    share = (equation.weight / len(edge)) ** 0.5
    residuals = jd.per_example(
        {
            "inside": lambda params, x: equation.inside_residual(params, x, by_func) / len(inside) ** 0.5,
            "edge": lambda params, x, known: (value(params, x) - known) * share,
        }
    )
    how: dict[str, Any] = {
        "losses": residuals,
        "aggregator": jd.natural_gradient(DAMPING),
        "optimizer": jd.line_search(jd.sgd(1.0), STEPS),
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
    step = _adam_step(equation, shapes)

    def advance(share: float) -> Params:
        held[0] = step(points, torch.tensor(rate * (1 - share)), *held[0])
        return _leaves(shapes, held[0][0])

    return advance


_compiled: dict[str, Callable[..., Any]] = {}


def _adam_step(equation: Equation, shapes: tuple[torch.Size, ...]) -> Callable[..., Any]:
    if equation.name not in _compiled:
        torch._dynamo.reset()
        _compiled[equation.name] = torch.compile(partial(_adam, equation, shapes), fullgraph=True)
    return _compiled[equation.name]


def _adam(equation: Equation, shapes: Any, points: Any, rate: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
    flat, first, second, t = state
    loss = lambda flat: sum(equation.losses(_leaves(shapes, flat), points, by_func).values())
    gradient, t = torch.func.grad(loss)(flat), t + 1
    first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient.square()
    size = rate * (1 - 0.999**t).sqrt() / (1 - 0.9**t)
    return flat - size * first / (second.sqrt() + 1e-8), first, second, t


def _leaves(shapes: Any, flat: Tensor) -> Params:
    pieces = flat.split([shape.numel() for shape in shapes])
    return [piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def lbfgs(equation: Equation, dtype: torch.dtype, seed: int) -> Method:
    """torch's, twenty iterations for each call."""
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


def errors(equation: Equation, seconds: float) -> dict[str, list[float]]:
    """By method, the error at test points for each seed; Adam's rate is chosen by the first seed."""
    adam(equation, RATES[0], 0)(0.0)  # compiles
    ours(equation, 0)(0.0)
    shown = lambda method: least_error(equation, method, seconds)[1]
    tried = {rate: least_error(equation, adam(equation, rate, SEEDS[0]), seconds) for rate in RATES}
    best = min(tried, key=tried.__getitem__)
    found = {f"Adam {best:g}": [tried[best][1]] + [shown(adam(equation, best, s)) for s in SEEDS[1:]]}
    for name, dtype in (("LBFGS float32", torch.float32), ("LBFGS float64", torch.float64)):
        found[name] = [shown(lbfgs(equation, dtype, s)) for s in SEEDS]
    return found | {"ours": [shown(ours(equation, s)) for s in SEEDS]}


def report(equation: Equation, found: dict[str, list[float]]) -> Iterator[str]:
    """A line for each method: the errors, their geometric mean; for the peers our error by theirs, and the goal."""
    means = {name: statistics.geometric_mean(each) for name, each in found.items()}
    lbfgs = min((name for name in means if name.startswith("LBFGS")), key=means.__getitem__)
    judged = dict(zip((next(iter(found)), lbfgs), GOALS[equation.name], strict=True))
    for name, each in found.items():
        line = f"{equation.name:12} {name:14}" + "".join(f"{e:9.1e}" for e in each) + f"{means[name]:12.1e}"
        if name in judged:
            ratio, goal = means["ours"] / means[name], judged[name]
            line += f"   ours is 1/{1 / ratio:<6.3g} goal 1/{1 / goal:<4.0f} {'reached' if ratio <= goal else 'MISSED'}"
        yield line


def main(arguments: list[str]) -> None:
    """Print every equation's lines as they come."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    seconds, *names = arguments or ["8"]
    print(f"relative L2 errors after {seconds} s of CPU time, seeds {', '.join(map(str, SEEDS))}, geometric mean")
    for equation in EQUATIONS:
        if not names or equation.name in names:
            print("\n".join(report(equation, errors(equation, float(seconds)))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
