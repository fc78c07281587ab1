"""`python tests/benchmarks/fronts_table.py [--page REPORT.md]`: what fronts are worth, and what they take.

Sixteen solutions (fifteen of three losses) of test problems, by Adam, on one thread. Where `libmoon.solver.gradient` is
found, the same methods of LibMOON run too, in turns, from the same starts, at the same rates, for as many steps.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout, suppress
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from io import StringIO
from itertools import pairwise
from statistics import median
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from page import command, line, table
from sklearn.datasets import load_diabetes, load_digits
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, pad

import functional_jd as jd
from functional_jd import fronts

SIZE = 10


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
    """Losses of one solution, a reference, the hypervolume of the whole front up to it, and the size of parameters.

    Where the front is not known, `whole` is the box up to the reference.
    """

    losses: Callable[[Tensor], Tensor]
    reference: Tensor
    whole: float
    size: int = SIZE


def problem_of(losses: Callable[[Tensor], Tensor], reference: float, points: Tensor) -> Problem:
    limit = torch.full((2,), reference, dtype=torch.float64)
    return Problem(losses, limit, float(fronts.hypervolume(points, limit)))


def line_of_vlmop2() -> Tensor:
    at = torch.linspace(-1, 1, 2001, dtype=torch.float64) / math.sqrt(SIZE)
    return torch.vmap(vlmop2)(at.unsqueeze(1).expand(-1, SIZE))


def standardized(x: Tensor) -> Tensor:
    return (x - x.mean(0)) / x.std(0).clamp(min=1e-6)


def layers(w: Tensor, *widths: int) -> list[Tensor]:
    """Matrices `[out, in + 1]` of layers between these widths, from one vector, which has entries of order one."""
    shapes = [(b, a + 1) for a, b in pairwise(widths)]
    parts = w.split([a * b for a, b in shapes])
    return [part.reshape(shape) / math.sqrt(shape[1]) for part, shape in zip(parts, shapes, strict=True)]


def size_of(*widths: int) -> int:
    return sum(b * (a + 1) for a, b in pairwise(widths))


def affine(layer: Tensor, x: Tensor) -> Tensor:
    return pad(x, (0, 1), value=1.0) @ layer.mT


def fairness() -> Problem:
    """Patients with diabetes: who has a high blood pressure? In one sex 61 % have it, in the other 35 %. Cross entropy,
    and the squared difference of the mean answers, over what the labels have.
    """
    data = load_diabetes(scaled=False)
    columns = torch.tensor(data.data, dtype=torch.float32)
    pressure, sex = columns[:, 3], columns[:, 1] == columns[:, 1].amax()
    label = (pressure > pressure.median()).float()
    x = standardized(torch.cat([columns[:, :3], columns[:, 4:]], 1))
    usual = (label[sex].mean() - label[~sex].mean()).square()

    def losses(w: Tensor) -> Tensor:
        hidden, last = layers(w, 9, 8, 1)
        out = affine(last, affine(hidden, x).tanh())[:, 0]
        gap = out[sex].sigmoid().mean() - out[~sex].sigmoid().mean()
        return torch.stack([binary_cross_entropy_with_logits(out, label), gap.square() / usual])

    return Problem(losses, torch.ones(2, dtype=torch.float64), 1.0, size_of(9, 8, 1))


def beta_vae() -> Problem:
    """Handwritten digits: the squared error of the reconstruction over their variance, and the divergence of the code
    from a normal distribution, in tens of nats. The noise is drawn once.
    """
    images = torch.tensor(load_digits().data[:128], dtype=torch.float32) / 16
    centred = images - images.mean(0)
    noise = torch.randn(len(images), 4, generator=torch.Generator().manual_seed(0))
    there, back = (64, 16, 8), (4, 16, 64)

    def losses(w: Tensor) -> Tensor:
        encode, code, decode, last = (*layers(w[: size_of(*there)], *there), *layers(w[size_of(*there) :], *back))
        mean, log_deviation = affine(code, affine(encode, centred).tanh()).split(4, 1)
        drawn = mean + log_deviation.exp() * noise
        error = (affine(last, affine(decode, drawn).tanh()) - centred).square().sum(1).mean()
        divergence = (mean.square() + (2 * log_deviation).exp() - 1 - 2 * log_deviation).sum(1).mean() / 2
        return torch.stack([error / centred.square().sum(1).mean(), divergence / 10])

    return Problem(losses, torch.ones(2, dtype=torch.float64), 1.0, size_of(*there) + size_of(*back))


PROBLEMS = {
    "ZDT1": lambda: problem_of(partial(zdt, lambda f, g: 1 - (f / g).sqrt()), 1.1, curve(lambda t: 1 - t.sqrt())),
    "ZDT2": lambda: problem_of(partial(zdt, lambda f, g: 1 - (f / g).square()), 1.1, curve(lambda t: 1 - t.square())),
    "ZDT3": lambda: problem_of(partial(zdt, zdt3), 2.1, curve(lambda t: zdt3(t, torch.ones(())))),
    "VLMOP2": lambda: problem_of(vlmop2, 1.1, line_of_vlmop2()),
    # Outside of the unit ball: an eighth of it is pi / 6.
    "DTLZ2": lambda: Problem(dtlz2, torch.full((3,), 1.1, dtype=torch.float64), 1.1**3 - math.pi / 6),
    "fairness": fairness,
    "beta-VAE": beta_vae,
}


# Each figure is the best of these rates; a budget of `STEPS` gradients for each solution, and as many steps.
RATES, STEPS = (0.3, 0.1, 0.03), 200
# Times are the least of so many medians in turns: other work on the machine only adds to them.
ROUNDS = 3
WORTH = ("problem", "method", "equal gradients", "LibMOON", "equal steps", "LibMOON", "CPU ms a step", "LibMOON")
WAYS = {"eager": False, "operators": "eager", "compiled": True}
TIMES = ("method", *WAYS, "LibMOON", *(f"{way} / LibMOON" for way in WAYS))


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
    """Losses `[K, m]` before each step, when that began or ended in seconds of the CPU, and the gradients it takes."""

    losses: list[Tensor]
    times: list[float]
    gradients: int


def ours(
    problem: Problem, method: Method, starts: Tensor, preferences: Tensor, rate: float, *, compile: bool | str = False
) -> Outcome:
    rule = method.rule(problem, preferences)
    view = (rule if isinstance(rule, fronts.Population) else rule(preferences[0])).view
    # One backward pass with a weighted sum of each solution, or one for each loss.
    found = Outcome([], [], 1 if view.products == "none" else preferences.shape[1])

    def keep(info: Any) -> None:
        found.losses.append(info.losses.detach())
        found.times.append(time.process_time())

    given = {"start": starts} if method.together else {"start": starts[0], "preferences": preferences}
    how = {"losses": problem.losses, "rule": rule, "optimizer": jd.adamw(rate, weight_decay=0.0)}
    fronts.train(batches=[()] * STEPS, on_step=keep, compile=compile, **given, **how)
    return found


def theirs(problem: Problem, method: Method, starts: Tensor, preferences: Tensor, rate: float) -> Outcome:
    file, name, further = method.peer
    m = preferences.shape[1]
    home, found = "libmoon.solver.gradient.methods", Outcome([], [], m + 1)
    loop, module = import_module(f"{home}.base_solver"), import_module(f"{home}.{file}")
    for place in (loop, module):
        place.get_hv_ref = lambda _: problem.reference.numpy()  # their table has other references
    loop.HV = lambda ref_point: SimpleNamespace(do=lambda _: 0.0)  # is no part of a step
    losses = torch.vmap(problem.losses)

    def evaluate(w: Tensor) -> Tensor:
        found.times.append(time.process_time())
        values = losses(w)
        found.losses.append(values.detach())
        return values

    given = SimpleNamespace(evaluate=evaluate, n_obj=m, n_var=problem.size, problem_name="without")
    further = {"tol": 0.0} | further if name == "GradHVSolver" else further
    solver = getattr(module, name)(problem=given, prefs=preferences, step_size=rate, n_epoch=STEPS, **further)
    solver.verbose = False  # which only one of their solvers sets
    with redirect_stdout(StringIO()):
        solver.solve((starts if method.together else starts[:1].expand_as(starts)).clone())
    return found


def setting(problem: Problem) -> tuple[Tensor, Tensor]:
    """Starts of all solutions, and their preferences."""
    m = len(problem.reference)
    lattice = fronts.lattice(m, {2: 17, 3: 7}[m])
    preferences = lattice[(lattice > 0).all(1)].float()
    return 0.5 * torch.randn(len(preferences), problem.size, generator=torch.Generator().manual_seed(0)), preferences


@cache
def has_peer() -> bool:
    return find_spec("libmoon") is not None and find_spec("libmoon.solver.gradient") is not None


def milliseconds(outcomes: Sequence[Outcome]) -> float:
    """The median of the steps."""
    return median(b - a for outcome in outcomes for a, b in pairwise(outcome.times)) * 1e3


def share(problem: Problem, outcomes: Sequence[Outcome], gradients: int | None = None) -> str:
    """The part of the front's hypervolume after so many gradients, or all steps, in per cent: at the best rate."""
    if not outcomes:
        return "-"

    def worth(outcome: Outcome) -> float:
        step = STEPS if gradients is None else max(1, gradients // outcome.gradients)
        return float(fronts.hypervolume(outcome.losses[step - 1], problem.reference)) / problem.whole * 100

    return f"{max(map(worth, outcomes)):.1f}"


def worth_lines(problems: Sequence[str], methods: Sequence[str]) -> Iterator[str]:
    """What fronts are worth."""
    yield from table(WORTH, []).splitlines()
    for name in problems:
        problem = PROBLEMS[name]()
        starts, preferences = setting(problem)
        for label in methods:
            own, peer = _in_turns(problem, METHODS[label], starts, preferences)
            shares = [share(problem, side, budget) for budget in (STEPS, None) for side in (own, peer)]
            times = [f"{milliseconds(side):.1f}" if side else "-" for side in (own, peer)]
            yield line((name, label, *shares, *times))


def _in_turns(
    problem: Problem, method: Method, starts: Tensor, preferences: Tensor
) -> tuple[list[Outcome], list[Outcome]]:
    runs = has_peer() and len(problem.reference) in method.peer_losses
    own: list[Outcome] = []
    peer: list[Outcome] = []
    for rate in RATES:
        own.append(ours(problem, method, starts, preferences, rate))
        if runs:
            with suppress(ValueError):  # with which CVXOPT ends some of its programs, and the training
                peer.append(theirs(problem, method, starts, preferences, rate))
    return own, peer


def times_lines(name: str) -> Iterator[str]:
    """What a step takes on one problem, in milliseconds of the CPU."""
    yield from table(TIMES, []).splitlines()
    problem = PROBLEMS[name]()
    given = setting(problem)
    for label, method in METHODS.items():
        sides = [partial(ours, compile=way) for way in WAYS.values()] + [theirs] * has_peer()
        found = [[side(problem, method, *given, 0.1) for side in sides] for _ in range(ROUNDS)]
        ms = [min(milliseconds([outcome]) for outcome in outcomes) for outcomes in zip(*found, strict=True)]
        ratios = [f"{x / ms[-1]:.2f}" if has_peer() else "-" for x in ms[: len(WAYS)]]
        cells = [f"{x:.1f}" for x in ms] + ["-"] * (not has_peer())
        yield line((label, *cells, *ratios))


if __name__ == "__main__":
    torch.set_num_threads(1)
    tables = {
        "fronts": lambda _: worth_lines([*PROBLEMS], [*METHODS]),
        "times of fronts": lambda _: times_lines("VLMOP2"),
    }
    command(__file__, __doc__, tables)
