"""`make optimizers-study`: does the optimizer hide the rule? SGD with momentum, AdamW and Muon under the same rules.

Stores what it trains in `optimizers.json`, and writes the tables of `REPORT.md`. `--page` writes them from what is
stored; `--quick` trains little in two draws, prints scores, and stores nothing. See `PROTOCOL.md`.
"""

import json
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))  # the package of this clone

from pages import table, write_between
from problems import PROBLEMS
from study_cells import Cell, digits, tuned
from study_format import counted, points, signed, spelled
from study_rules import Method, backward_passes, methods_for
from study_statistics import REFERENCE, Difference, difference
from study_training import LOOKS, Trained, draws_of, optimizer_for
from torch import Tensor

import functional_jd as jd

STORED = Path(__file__).with_name("optimizers.json")
REPORT = Path(__file__).with_name("REPORT.md")
MARKS = "<!-- begin: made by tests/evidence, optimizers -->", "<!-- end: optimizers -->"
DEVELOPMENT = ("tumours", "diabetes", "helmholtz", "fairness", "bandit", "unbalanced", "units", "two_digits")
METHODS = (REFERENCE, "mean", "upgrad", "config", "nash_mtl", "unit_sum", "alternating")
ALTERNATING = "alternating"  # of `config`; it has an optimizer of its own, like Adam
DRAWS, BEYOND = 5, ("better", "worse")
Cells = dict[str, Cell]


def sgd(rate: Any) -> jd.Optimizer:
    """SGD with momentum, at a rate in units of the first direction, so that the units of losses do not matter."""
    inner = jd.sgd(rate, momentum=0.9)

    def update(direction: Any, state: Any, params: Any) -> Any:
        kept, unit = state
        flat = torch.cat([d.flatten() for d in direction.values()]).double()  # whose squares do not underflow
        unit = torch.where(unit > 0, unit, flat.square().mean().sqrt().float())
        in_units = {name: d / torch.where(unit > 0, unit, 1) for name, d in direction.items()}
        params, kept = inner.update(in_units, kept, params)
        return params, (kept, unit)

    return jd.Optimizer(lambda params: (inner.init(params), torch.tensor(0.0)), update)


def muon(rate: Any) -> jd.Optimizer:
    """Muon for matrices and AdamW for vectors.

    `torch.optim.Muon` works in place and takes no vmap: these are its formulas, in float32, at the rate of AdamW.
    """

    def update(direction: Any, state: Any, params: Any) -> Any:
        kept = {name: torch.lerp(state[name], d, 0.05) for name, d in direction.items()}
        moved = {
            name: p - 0.2 * max(p.shape) ** 0.5 * rate * orthogonal(torch.lerp(direction[name], kept[name], 0.95))
            for name, p in params.items()
        }
        return moved, kept

    matrices = jd.Optimizer(lambda params: {name: torch.zeros_like(p) for name, p in params.items()}, update)
    label = lambda name, leaf: "matrices" if leaf.ndim == 2 else "vectors"
    return jd.by_label({"matrices": matrices, "vectors": optimizer_for(rate)}, label)


def orthogonal(G: Tensor) -> Tensor:
    """A matrix with the singular vectors of another, and singular values near 1, by five steps of Newton and Schulz."""
    X = G.mT if G.shape[0] > G.shape[1] else G
    largest = X.abs().amax()
    X = X / torch.where(largest > 0, largest, 1)  # no square underflows, whatever the unit
    X = X / torch.linalg.matrix_norm(X).clamp(min=1e-7)
    for _ in range(5):
        A = X @ X.mT
        X = 3.4445 * X + (-4.775 * A + 2.0315 * A @ A) @ X
    return X.mT if G.shape[0] > G.shape[1] else X


OPTIMIZERS: dict[str, Callable[[Any], jd.Optimizer]] = {"SGD": sgd, "AdamW": optimizer_for, "Muon": muon}


def keys() -> list[tuple[str, str, str]]:
    """Problem, optimizer and method of every cell."""
    every = product(DEVELOPMENT, OPTIMIZERS, METHODS)
    return [(problem, name, method) for problem, name, method in every if method != ALTERNATING or name == "AdamW"]


def cell_of(problem: Any, optimizer: str, method: str, draws: Any, steps: int) -> Cell:
    """Train one method under one optimizer with all rates; test scores after all steps, and after as many passes."""
    if method == ALTERNATING:
        build = lambda lr: jd.aggregators.alternating(jd.config(), problem.m, lr=lr, eps=1e-20)
        chosen, own = Method(lambda _: build(0.0)[0]), lambda rate: build(rate)[1]
    else:
        chosen, own = methods_for(problem.m)[method], OPTIMIZERS[optimizer]
    runs, order, top = tuned(problem, chosen, draws, steps, own)
    passes = backward_passes(chosen.build, problem.m)
    return {
        "steps": digits(chosen_by_validation(runs, LOOKS)),
        "passes": digits(chosen_by_validation(runs, max(1, LOOKS // passes))),
        "rate": top,
        "inside": min(order) < top < max(order),
        "taken": max(run.steps for run in runs),
        "skipped": digits(float(torch.cat([run.skipped for run in runs]).mean())),
    }


def chosen_by_validation(runs: list[Trained], looks: int) -> list[float]:
    """The test score of each draw, at the rate and moment that validation chooses among the first looks."""
    best = [run.validation[:looks].max(0) for run in runs]  # [c, d]
    test = torch.cat([run.test.gather(0, b.indices[None])[0] for run, b in zip(runs, best, strict=True)])
    place = torch.cat([b.values for b in best]).argmax(0)
    return test.gather(0, place[None])[0].tolist()


def run(problems: Sequence[str], draws: int | None = None, steps: int | None = None) -> Cells:
    """Train the cells of these problems, in so many draws and steps, or as many as the study has."""
    cells: Cells = {}
    begin = time.perf_counter()
    for name in problems:
        problem = PROBLEMS[name].build()
        rows = draws_of(problem, draws or DRAWS)
        for _, optimizer, method in [key for key in keys() if key[0] == name]:
            cell = cells[f"{name}/{optimizer}/{method}"] = cell_of(
                problem, optimizer, method, rows, steps or problem.steps
            )
            took = time.perf_counter() - begin
            print(f"{name:10} {optimizer:6} {method:13} {mean(cell['steps']):.3f}  {took:6.0f} s", flush=True)
    return cells


def against(cells: Cells, problem: str, optimizer: str, method: str, at: str = "steps") -> Difference | None:
    """The paired difference to standardised sums under the same optimizer, at equal "steps" or "passes"."""
    if (problem, optimizer, method) not in keys():
        return None
    pair = (cells[f"{problem}/{optimizer}/{name}"] for name in (method, REFERENCE))
    ours, theirs = (torch.tensor(cell[at], dtype=torch.float64) for cell in pair)
    return difference(ours, theirs, PROBLEMS[problem].shared)


def spread(cells: Cells, problem: str, optimizer: str, at: str) -> float:
    """The score of the best rule less that of the worst, with all losses on one scale: without `mean` as they come."""
    wanted = [method for method in METHODS if method not in ("mean", "upgrad", ALTERNATING)]
    scores = [mean(cells[f"{problem}/{optimizer}/{method}"][at]) for method in wanted]
    return max(scores) - min(scores)


def short(cells: Cells) -> str:
    """A row a method, two columns an optimizer: mean differences over problems, and how many are beyond intervals."""
    columns = list(product(OPTIMIZERS, ("steps", "passes")))
    rows = []
    for method in METHODS[1:]:
        own = [[against(cells, problem, name, method, at) for problem in DEVELOPMENT] for name, at in columns]
        shown = ["-" if None in x else f"{signed(mean(d.mean for d in x))} ({counted(x, BEYOND)})" for x in own]
        rows.append([spelled(method), *shown])
    spreads = [mean(spread(cells, problem, *column) for problem in DEVELOPMENT) for column in columns]
    rows.append(["spread of rules", *(f"{100 * value:.1f}" for value in spreads)])
    return table(["", *(f"{name}, equal {at}" for name, at in columns)], rows)


def whole(cells: Cells) -> list[str]:
    """A row a problem and optimizer, a column a method, at equal steps, with intervals."""
    rows = []
    for problem, name in product(DEVELOPMENT, OPTIMIZERS):
        reference = f"{mean(cells[f'{problem}/{name}/{REFERENCE}']['steps']):.3f}"
        rows.append([problem, name, reference, *(points(against(cells, problem, name, m)) for m in METHODS[1:])])
    at_edge = sum(not cell["inside"] for cell in cells.values())
    words = f"{len(cells)} of {len(keys())} cells; the best rate lies at an edge of the extended grid in {at_edge}"
    return [table(["", "optimizer", spelled(REFERENCE), *map(spelled, METHODS[1:])], rows), f"{words} of them."]


WORDS = """Differences to standardised sums under the same optimizer, in hundredths of the score: the mean over eight development problems
in five draws. In brackets: on how many problems the 95 % interval leaves out 0, better / worse.

- `alternating(config(), m)` has an optimizer of its own, which is like Adam: it stands in the columns of AdamW.
- *Equal passes*: a rule that takes m backward passes a step takes 1 / m of the steps.
- *Spread of rules*: the best less the worst of standardised sums, `config()`, `nash_mtl()` and *unit_sum*, the mean over problems.
  The results of these four do not depend on units."""  # noqa: E501 - pages are wider


def write_page(cells: Cells, report: Path = REPORT) -> None:
    """Write both tables into the report."""
    write_between(report, *MARKS, "\n\n".join([WORDS, short(cells), *whole(cells)]))


def main(arguments: list[str] | None = None) -> None:
    """Train, store, and write the tables."""
    parser = ArgumentParser("python tests/evidence/study_optimizers.py", None, __doc__)
    parser.add_argument("--quick", action="store_true", help="two problems, few steps: stores nothing")
    parser.add_argument("--page", action="store_true", help="only write the pages from what is stored")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if given.quick:
        run(DEVELOPMENT[:2], 2, 40)
        return
    if not given.page:
        lines = (f"{json.dumps(key)}: {json.dumps(cell)}" for key, cell in run(DEVELOPMENT).items())
        STORED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    write_page(json.loads(STORED.read_text()))


if __name__ == "__main__":
    main()
