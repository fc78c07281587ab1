"""The cells of the study, and how each is trained."""

import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from itertools import groupby
from typing import Any

import torch
from problems import PROBLEMS
from study_cells import SEARCHES, Cell, path_of, store, under_method
from study_fronts import FAMILIES, ON, front_cell, worth
from study_fronts import PREFIX as FRONT
from study_peers import ALL, PREFIX, peer_cell
from study_problem import Data, Problem
from study_rules import methods_for
from study_training import Draws, batch_of, draws_of, generators, optimizer_for
from torch import Tensor

import functional_jd as jd

FIGURES = ("conflict", "imbalance", "rank", "noise")
RATE, SHARE = 4e-3, 0.1  # of the training that it looks at: its rate, and the share of the largest number of steps
FROZEN = {"imbalance": 10.0, "conflict": 1.0, "rescale": "nash_mtl", "project": "aligned_mtl"}


def figures(problem: Problem, draws: Draws, steps: int) -> dict[str, Any]:
    """In every draw the figures, and the rule that is named."""
    pairs = zip(draws.data, generators(draws.numbers), strict=True)
    said = [jd.diagnostics.advise(window(problem, *pair, max(4, int(SHARE * steps)))) for pair in pairs]
    return {
        "rule": [one.rule for one in said],
        "verdict": [one.verdict for one in said],
        **{key: [float(f"{getattr(one, key):.4g}") for one in said] for key in FIGURES},
    }


def window(problem: Problem, data: Data, source: torch.Generator, length: int) -> Tensor:
    """Gramians `[k, m, m]` of the first k steps under `mean`."""
    parts = {"losses": problem.losses, "aggregator": jd.mean(), "optimizer": optimizer_for(RATE)}
    params, rows = problem.init(source), batch_of(problem, data, source)
    state, found = jd.train_state(params, *rows, **parts), []
    for _ in range(length):
        found.append(jd.views.gramian(jd.jacobian_fn(problem.losses)(state.params, *rows)[0]))
        state, _ = jd.step(state, *rows, **parts)
        rows = batch_of(problem, data, source)
    return torch.stack(found)


PEERS = ("units", "diabetes", "tumours", "unbalanced", "fairness", "diamonds", "computers", "households", "loans")
LARGE = ("graphs", "convolutions", "characters")
OF_LARGE = (
    "mean standardised start unit_sum nash_mtl config upgrad random_search advice uw_standardised aligned_mtl imtl_g "
    "geometric_mean famo"
)
PACKAGES = {"tpe": "optuna"} | {PREFIX + rule: "torchjd" for rule in ALL}  # that methods need


def names_for(problem: str) -> list[str]:
    """All methods of a problem, but those of the peer and those that make fronts."""
    entry = PROBLEMS[problem]
    if problem in LARGE:
        return OF_LARGE.split()
    searches = () if entry.exchangeable else SEARCHES
    return [*methods_for(entry.m, entry.exchangeable), *searches, "advice"]


def queue() -> Iterator[tuple[str, str]]:
    """Problem and method of every cell."""
    for name, entry in PROBLEMS.items():
        names = [] if entry.front_only else names_for(name)
        names += [PREFIX + rule for rule in ALL if name in PEERS]
        names += [FRONT + family for family in FAMILIES if name in ON]
        yield from ((name, method) for method in names)


def cell_of(problem: Problem, method: str, draws: Draws, steps: int) -> Cell:
    """Train a cell."""
    if method == "advice":
        return figures(problem, draws, steps)
    if method in SEARCHES:
        return SEARCHES[method](problem, draws, steps)
    if method.startswith(FRONT):
        return front_cell(problem, method.removeprefix(FRONT), draws, steps)
    if method.startswith(PREFIX):
        return peer_cell(problem, method.removeprefix(PREFIX), draws, steps)
    return under_method(problem, methods_for(problem.m)[method], draws, steps)


def lacks_package(method: str) -> bool:
    """Whether the method needs a package that is not installed."""
    return method in PACKAGES and find_spec(PACKAGES[method]) is None


def run(only: list[str], methods: Sequence[str] = ()) -> None:
    """Train what is not stored yet, of these problems and methods or all."""
    begin = time.perf_counter()
    wanted = [(p, m) for p, m in queue() if (not only or p in only) and (not methods or m in methods)]
    todo = [(p, m) for p, m in wanted if not path_of(p, m).exists() and not lacks_package(m)]
    for name, own in groupby(todo, key=lambda cell: cell[0]):
        problem = PROBLEMS[name].build()
        draws = draws_of(problem, problem.draws)
        for _, method in own:
            if path_of(name, method).exists():
                continue  # another process has trained it meanwhile
            cell = cell_of(problem, method, draws, problem.steps)
            store(cell, path_of(name, method))
            print(f"{name:14} {method:26} {said(cell)}  {time.perf_counter() - begin:6.0f} s", flush=True)


def said(cell: Cell) -> str:
    """The mean test score of a cell, and its steps; of a front, the area."""
    if "front" in cell:
        return f"{float(worth(cell).mean()):.3f}  area of the front"
    if "test" not in cell:
        return ""
    chosen = [cell["test"][c][d][-1] for d, c in enumerate(cell["chosen"])]
    return f"{sum(chosen) / len(chosen):.3f}  {max(cell['steps'])} steps"
