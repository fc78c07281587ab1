"""Fronts in place of mean scores: a method is trained with many preferences, and their ends make a front."""

from collections.abc import Callable

import torch
from study_cells import RATES as SMALLER
from study_cells import Cell, digits, machine
from study_problem import Problem
from study_rules import Method, backward_passes
from study_training import Draws, train
from torch import Tensor

import functional_jd as jd
from functional_jd import Aggregator, fronts

PREFIX = "front_"
RATES = (*SMALLER, 0.256)
ON = ("fairness", "loans", "bandit", "beta_vae")
SHARES = (0.25, 0.5, 1.0)
# From a preference to a rule; in this order they are trained.
FAMILIES: dict[str, Callable[[Tensor], Aggregator]] = {
    "sums": jd.constant,
    "stch": lambda u: jd.stch(0.1, u),
    "upgrad": lambda u: jd.upgrad(preference=u),
    "epo": jd.epo,
    "tchebycheff": jd.tchebycheff,
    "pbi": lambda u: jd.pbi(5.0, u),
}


def preferences() -> Tensor:
    """Eleven preferences `[11, 2]`, with odds from 1/100 to 100."""
    odds = torch.logspace(-2, 2, 11)
    return torch.stack([odds, torch.ones_like(odds)], 1) / (1 + odds[:, None])


def front_cell(problem: Problem, family: str, draws: Draws, steps: int) -> Cell:
    """Train with all preferences and rates. Stored: the scores of each training at a quarter, a half and all steps."""
    wanted, d = preferences(), len(draws.data)
    pairs = [(u, rate) for u in range(len(wanted)) for rate in range(len(RATES))]
    c = len(pairs)
    rates = torch.tensor([RATES[rate] for _, rate in pairs])[:, None].expand(c, d)
    marks = wanted[[u for u, _ in pairs]].repeat_interleave(d, 0)
    weights = draws.standard.expand(c, d, problem.m)
    run = train(problem, Method(FAMILIES[family]), draws, rates, weights, steps, marks=marks, whole=True)
    looks = [round(share * len(run.parts)) - 1 for share in SHARES]
    return {
        "candidates": [{"preference": u, "rate": RATES[rate]} for u, rate in pairs],
        "front": {  # [3, c, d, 2]
            "validation": digits(run.validation_parts[looks].tolist()),
            "test": digits(run.parts[looks].tolist()),
        },
        "skipped": digits(float(run.skipped.mean())),
        "passes": backward_passes(lambda _: FAMILIES[family](wanted[0]), problem.m),
        "seconds": digits(run.seconds),
        "machine": machine(),
    }


def points_of(cell: Cell, share: int = 2) -> tuple[Tensor, Tensor]:
    """The scores of all candidates, on validation and on test, each `[d, c, 2]`."""
    found = (torch.tensor(cell["front"][split][share], dtype=torch.float64) for split in ("validation", "test"))
    validation, test = (scores.transpose(0, 1) for scores in found)
    return validation, test


def on_the_front(validation: Tensor) -> Tensor:
    """Which candidates no other dominates, of scores `[c, 2]`."""
    return fronts.non_dominated(-validation)


def area(points: Tensor) -> Tensor:
    """The area that points `[c, 2]` of scores dominate, up to (0, 0)."""
    return fronts.hypervolume(-points, torch.zeros(points.shape[1]))


def worth(cell: Cell, share: int = 2) -> Tensor:
    """Of each draw `[d]`, the area on test of the front that validation chooses."""
    validation, test = points_of(cell, share)
    return torch.stack([area(t[on_the_front(v)]) for v, t in zip(validation, test, strict=True)])


def utility(cell: Cell, share: int = 2) -> Tensor:
    """Of each draw `[d]`, what somebody gets on test who weighs scores by w and 1 - w and chooses on validation; the
    mean over w = 0, 1/20, ..., 1.
    """
    validation, test = points_of(cell, share)
    weights = fronts.lattice(2, 20)  # [21, 2]
    chosen = (validation @ weights.T).argmax(1)  # [d, 21]
    got = (test @ weights.T).gather(1, chosen[:, None])[:, 0]
    return got.mean(1)


def beside_sums(sums: Cell, points: Tensor) -> tuple[Tensor, Tensor]:
    """Single solutions, one in each draw, scores `[d, 2]` on test, beside the front of sums: whether a solution of the
    front is better in both, and the area that the single one adds.
    """
    validation, test = points_of(sums)
    fronts_of_sums = [t[on_the_front(v)] for v, t in zip(validation, test, strict=True)]
    behind = torch.stack([(front > p).all(1).any() for front, p in zip(fronts_of_sums, points, strict=True)])
    more = [area(torch.cat([front, p[None]])) - area(front) for front, p in zip(fronts_of_sums, points, strict=True)]
    return behind, torch.stack(more)


def sizes(cell: Cell) -> tuple[float, float]:
    """How many solutions are on a front, the mean over draws; and the share of them whose rate is at an edge."""
    validation, _ = points_of(cell)
    at_edge = torch.tensor([c["rate"] in (RATES[0], RATES[-1]) for c in cell["candidates"]])
    kept = torch.stack([on_the_front(v) for v in validation])  # [d, c]
    return float(kept.sum() / len(kept)), float((kept & at_edge).sum() / kept.sum())
