"""What `advise` sees and says on the problems of the study, and how good that is. Its thresholds were chosen on the
development problems, before the protocol was frozen; here nothing is chosen.
"""

from typing import Any

import torch
from study_problem import Data, Problem
from study_training import Draws, batch_of, generators, optimizer_for
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
