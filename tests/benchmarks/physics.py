"""`python tests/benchmarks/physics.py [SECONDS] [--root .]`: networks solve equations.

The error that is reached in so many seconds of CPU time, 5 by default, one thread, for three seeds, by each method of
`physics_methods.py`. All minimize the same sum of mean squares at the same points. An error is the relative L2
distance to the solution at other points: validation points choose the setting of a method, by the first seed, and the
moment of each run; the error at test points is shown.
"""

import argparse
import os
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import process_time
from typing import NamedTuple

os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")

import torch
from equations import EQUATIONS, Equation
from page import put
from page import table as markdown
from physics_methods import Maker, Method, contenders, forget

SEEDS = range(3)
# At most this part of a baseline's error is asked of `OURS`.
OURS = "natural_gradient"
GOALS = {
    "Helmholtz": {"Adam": 1 / 200, "LBFGS": 1 / 5},
    "Poisson 5-d": {"Adam": 1 / 30, "LBFGS": 1 / 5},
    "Burgers": {"Adam": 1 / 10, "LBFGS": 1 / 5},
}
# An error is looked at so often in a run.
_LOOKS = 20
Errors = tuple[float, float]
"""At validation points, and at test points."""


class Found(NamedTuple):
    """What a method reached with the best of its settings.

    Attributes:
        setting: its name.
        at_end: whether it is the first or the last of several numbers, so that one beyond them may be better.
        errors: at test points, for each seed.
    """

    setting: str
    at_end: bool
    errors: list[float]

    @property
    def mean(self) -> float:
        """The geometric mean."""
        return statistics.geometric_mean(self.errors)


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


def best_setting(settings: dict[str, Maker], run: Callable[[Method], Errors], seeds: Sequence[int] = SEEDS) -> Found:
    """The first seed tries all settings, and its validation points choose; the other seeds run with that one."""
    next(iter(settings.values()))(seeds[0])(0.0)  # compiles
    tried = {name: run(make(seeds[0])) for name, make in settings.items()}
    best = min(tried, key=tried.__getitem__)
    ends = {next(iter(settings)), next(reversed(settings))} if len(settings) > 2 else set()
    return Found(best, best in ends, [tried[best][1], *(run(settings[best](seed))[1] for seed in seeds[1:])])


def race(equation: Equation, seconds: float) -> dict[str, Found]:
    """What each method reached."""
    forget()
    run = lambda method: least_error(equation, method, seconds)
    return {name: best_setting(settings, run) for name, settings in contenders(equation).items()}


def rows(name: str, found: dict[str, Found]) -> Iterator[tuple[str, ...]]:
    """A row for each method: the errors, their mean, and our mean by it, with the goal."""
    for method, (setting, at_end, errors) in found.items():
        ratio, goal = found[OURS].mean / found[method].mean, GOALS.get(name, {}).get(method)
        judged = "" if goal is None else f"{_part(goal)}, {'reached' if ratio <= goal else 'missed'}"
        yield (
            name,
            _shown(method),
            setting + " (the end of its grid)" * at_end,
            *(f"{error:.2g}" for error in errors),
            f"{found[method].mean:.2g}",
            "" if method == OURS else _part(ratio),
            judged,
        )


def missed(found: dict[str, dict[str, Found]]) -> str:
    """The sentence that says which goals beside Adam are missed, and by how much."""
    ratios = {name: found[name][OURS].mean / found[name]["Adam"].mean for name in GOALS if name in found}
    late = [f"{_part(GOALS[n]['Adam'])} on {n} ({_part(r)})" for n, r in ratios.items() if r > GOALS[n]["Adam"]]
    met = [f"{_part(GOALS[n]['Adam'])} on {n} ({_part(r)})" for n, r in ratios.items() if r <= GOALS[n]["Adam"]]
    parts = [f"{what}: {', '.join(each)}." for what, each in (("Missed", late), ("Reached", met)) if each]
    return f"The goals for `{OURS}` were parts of Adam's error. " + " ".join(parts)


def _part(ratio: float) -> str:
    return f"1/{1 / ratio:.3g}" if ratio < 1 else f"{ratio:.3g}"


def table(found: dict[str, dict[str, Found]]) -> str:
    """Every run in Markdown."""
    seeds = [f"seed {seed}" for seed in SEEDS]
    head = ("equation", "method", "setting", *seeds, "mean", f"`{OURS}` to it", "goal")
    return markdown(head, [row for name, each in found.items() for row in rows(name, each)])


def means(found: dict[str, dict[str, Found]]) -> str:
    """A column for each method, and the sentence on goals."""
    methods = list(next(iter(found.values())))[::-1]
    head = ("equation", *map(_shown, methods), f"`{OURS}` / Adam")
    lines = [
        (name, *(f"{each[method].mean:.2g}" for method in methods), _part(each[OURS].mean / each["Adam"].mean))
        for name, each in found.items()
    ]
    return markdown(head, lines) + "\n\n" + missed(found)


def _shown(method: str) -> str:
    return f"`{method}`" if method.islower() else method


def main(arguments: Sequence[str] | None = None) -> None:
    """Print every equation's rows as they come; at the end write the tables, if there are pages."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seconds", nargs="?", type=float, default=5.0)
    parser.add_argument("--root", type=Path, help="write the tables into the pages of this clone")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    print(f"relative L2 errors after {options.seconds:g} s of CPU time, three seeds, their geometric mean", flush=True)
    found = {}
    for equation in EQUATIONS:
        found[equation.name] = race(equation, options.seconds)
        print("\n".join("  ".join(row) for row in rows(equation.name, found[equation.name])), flush=True)
    print(missed(found))
    if options.root:
        pages = ("tests/benchmarks/REPORT.md", "equations", table), ("docs/guides/physics.md", "errors", means)
        for page, name, made in pages:
            put(options.root / page, name, made(found), "physics.py")


if __name__ == "__main__":
    main()
