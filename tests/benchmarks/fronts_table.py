"""`python tests/benchmarks/fronts_table.py [--page docs/benchmarks.md]`: what fronts are worth, and what they take.

Sixteen solutions (fifteen of three losses) of test problems, by Adam, on one thread. Where `libmoon.solver.gradient` is
found, the same methods of LibMOON run too, from the same starts, at the same rate, for as many steps. Both sides see
problems without bounds, ZDT and DTLZ through a sigmoid, and losses that are not negative.
"""

import argparse
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from io import StringIO
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from page import with_table
from torch import Tensor

import functional_jd as jd
from functional_jd import fronts

SIZE, RATE, STEPS, EARLY = 10, 0.1, 200, 50
HEAD = (
    "problem",
    "method",
    f"after {EARLY} steps",
    "LibMOON",
    f"after {STEPS} steps",
    "LibMOON",
    "ms a step",
    "LibMOON",
)


def zdt(shape: Callable[[Tensor, Tensor], Tensor], w: Tensor) -> Tensor:
    x = torch.sigmoid(w)
    g = 1 + 9 * x[1:].mean()
    return torch.stack([x[0], g * shape(x[0], g)])


def zdt3(f: Tensor, g: Tensor) -> Tensor:
    return 2 - (f / g).sqrt() - f / g * torch.sin(10 * math.pi * f)  # one more than usual


def dtlz2(w: Tensor) -> Tensor:
    x = torch.sigmoid(w)
    g, (a, b) = (x[2:] - 0.5).square().sum(), x[:2] * math.pi / 2
    return (1 + g) * torch.stack([a.cos() * b.cos(), a.cos() * b.sin(), a.sin()])


def vlmop2(w: Tensor) -> Tensor:
    at = 1 / math.sqrt(len(w))
    return torch.stack([1 - (-(w - at).square().sum()).exp(), 1 - (-(w + at).square().sum()).exp()])


def curve(f: Callable[[Tensor], Tensor]) -> Tensor:
    """Points of a front of two losses."""
    t = torch.linspace(0, 1, 2001, dtype=torch.float64)
    return torch.stack([t, f(t)], 1)


class Problem(NamedTuple):
    """Losses of one solution, a reference, and the hypervolume of the whole front up to it."""

    losses: Callable[[Tensor], Tensor]
    reference: Tensor
    whole: float


def problem_of(losses: Callable[[Tensor], Tensor], reference: float, points: Tensor) -> Problem:
    limit = torch.full((2,), reference, dtype=torch.float64)
    return Problem(losses, limit, float(fronts.hypervolume(points, limit)))


def line_of_vlmop2() -> Tensor:
    at = torch.linspace(-1, 1, 2001, dtype=torch.float64) / math.sqrt(SIZE)
    return torch.vmap(vlmop2)(at.unsqueeze(1).expand(-1, SIZE))


PROBLEMS = {
    "ZDT1": lambda: problem_of(partial(zdt, lambda f, g: 1 - (f / g).sqrt()), 1.1, curve(lambda t: 1 - t.sqrt())),
    "ZDT2": lambda: problem_of(partial(zdt, lambda f, g: 1 - (f / g).square()), 1.1, curve(lambda t: 1 - t.square())),
    "ZDT3": lambda: problem_of(partial(zdt, zdt3), 2.1, curve(lambda t: zdt3(t, torch.ones(())))),
    "VLMOP2": lambda: problem_of(vlmop2, 1.1, line_of_vlmop2()),
    # Outside of the unit ball: an eighth of it is pi / 6.
    "DTLZ2": lambda: Problem(dtlz2, torch.full((3,), 1.1, dtype=torch.float64), 1.1**3 - math.pi / 6),
}


class Method(NamedTuple):
    """One method on both sides.

    Attributes:
        rule: `rule(problem, preferences)`: what `fronts.train` takes.
        peer: the module and the name of LibMOON's solver, and further arguments of it.
        together: whether its solutions start apart.
        peer_losses: for how many losses theirs works.
    """

    rule: Callable[[Problem, Tensor], Any]
    peer: tuple[str, str, dict[str, Any]]
    together: bool = False
    peer_losses: tuple[int, ...] = (2, 3)


def inverse(preference: Tensor) -> Tensor:
    return (1 / preference) / (1 / preference).sum()


METHODS = {
    "hypervolume gradient": Method(
        lambda problem, _: fronts.hypervolume_gradient(problem.reference), ("gradhv_solver", "GradHVSolver", {}), True
    ),
    "MOO-SVGD": Method(lambda *_: fronts.moo_svgd(), ("moosvgd_solver", "MOOSVGDSolver", {}), True, (2,)),
    "Pareto MTL": Method(
        lambda _, preferences: fronts.pmtl(preferences, STEPS),  # theirs ends its first phase when all have arrived
        ("pmtl_solver", "PMTLSolver", {"tol": 0.0, "folder_name": None}),
        peer_losses=(2,),
    ),
    "EPO": Method(lambda *_: lambda u: jd.epo(inverse(u)), ("epo_solver", "EPOSolver", {})),
    "Tchebycheff": Method(lambda *_: jd.tchebycheff, ("base_solver", "GradAggSolver", {"agg_name": "Tche"})),
    "grid of weights": Method(lambda *_: jd.constant, ("base_solver", "GradAggSolver", {"agg_name": "LS"})),
}


class Outcome(NamedTuple):
    """Losses `[K, m]` before each step, and when each began or ended, in seconds."""

    losses: list[Tensor]
    times: list[float]


def ours(problem: Problem, method: Method, starts: Tensor, preferences: Tensor) -> Outcome:
    found = Outcome([], [])

    def keep(info: Any) -> None:
        found.losses.append(info.losses)
        found.times.append(time.perf_counter())

    given = {"start": starts} if method.together else {"start": starts[0], "preferences": preferences}
    how = {"losses": problem.losses, "rule": method.rule(problem, preferences)}
    fronts.train(batches=[()] * STEPS, optimizer=jd.adamw(RATE, weight_decay=0.0), on_step=keep, **given, **how)
    return found


def theirs(problem: Problem, method: Method, starts: Tensor, preferences: Tensor) -> Outcome:
    file, name, further = method.peer
    home, found = "libmoon.solver.gradient.methods", Outcome([], [])
    loop, module = import_module(f"{home}.base_solver"), import_module(f"{home}.{file}")
    for place in (loop, module):
        place.get_hv_ref = lambda _: problem.reference.numpy()  # their table has other references
    loop.HV = lambda ref_point: SimpleNamespace(do=lambda _: 0.0)  # is no part of a step
    losses = torch.vmap(problem.losses)

    def evaluate(w: Tensor) -> Tensor:
        found.times.append(time.perf_counter())
        values = losses(w)
        found.losses.append(values.detach())
        return values

    given = SimpleNamespace(evaluate=evaluate, n_obj=preferences.shape[1], n_var=SIZE, problem_name="without")
    further = {"tol": 0.0} | further if name == "GradHVSolver" else further
    solver = getattr(module, name)(problem=given, prefs=preferences, step_size=RATE, n_epoch=STEPS, **further)
    solver.verbose = False  # which only one of their solvers sets
    with redirect_stdout(StringIO()):
        solver.solve((starts if method.together else starts[:1].expand_as(starts)).clone())
    return found


def milliseconds(outcome: Outcome | None) -> str:
    """The median of the steps."""
    if outcome is None:
        return "-"
    return f"{median(b - a for a, b in pairwise(outcome.times)) * 1e3:.1f}"


def share(problem: Problem, outcome: Outcome | None, step: int) -> str:
    """The part of the front's hypervolume before a step, in per cent."""
    if outcome is None:
        return "-"
    return f"{float(fronts.hypervolume(outcome.losses[step - 1], problem.reference)) / problem.whole * 100:.1f}"


def lines(problems: Sequence[str], methods: Sequence[str]) -> Iterator[str]:
    has_peer = find_spec("libmoon") is not None and find_spec("libmoon.solver.gradient") is not None
    yield from (_line(HEAD), _line(["---"] * len(HEAD)))
    for name in problems:
        problem = PROBLEMS[name]()
        m = len(problem.reference)
        lattice = fronts.lattice(m, {2: 17, 3: 7}[m])
        preferences = lattice[(lattice > 0).all(1)].float()
        starts = 0.5 * torch.randn(len(preferences), SIZE, generator=torch.Generator().manual_seed(0))
        for label in methods:
            method = METHODS[label]
            own = ours(problem, method, starts, preferences)
            runs = has_peer and m in method.peer_losses
            peer = theirs(problem, method, starts, preferences) if runs else None
            shares = [share(problem, side, step) for step in (EARLY, STEPS) for side in (own, peer)]
            yield _line((name, label, *shares, milliseconds(own), milliseconds(peer)))


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """One table, on stdout, and between the marks of a page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", nargs="+", choices=tuple(PROBLEMS), default=tuple(PROBLEMS))
    parser.add_argument("--methods", nargs="+", choices=tuple(METHODS), default=tuple(METHODS))
    parser.add_argument("--page", type=Path, help="a Markdown file with marks for the table")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")  # the peer's
    found: list[str] = []
    for line in lines(options.problems, options.methods):
        print(line, flush=True)
        found.append(line)
    if options.page:
        text = with_table(options.page.read_text(), "fronts", "\n".join(found), "fronts_table.py")
        options.page.write_text(text)


if __name__ == "__main__":
    sys.exit(main())
