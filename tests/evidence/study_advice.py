"""What `advise` sees and says on the problems of the study, and how good that is. Its thresholds were chosen on the
development problems, before the protocol was frozen; here nothing is chosen.
"""

from typing import Any

from study_problem import Problem
from study_training import Draws, window

import functional_jd as jd

FIGURES = ("conflict", "imbalance", "rank", "noise")
RATE, SHARE = 4e-3, 0.1  # of the training that it looks at: its rate, and the share of the largest number of steps
FROZEN = {"imbalance": 10.0, "conflict": 1.0, "rescale": "nash_mtl", "project": "aligned_mtl"}


def figures(problem: Problem, draws: Draws, steps: int) -> dict[str, Any]:
    """In every draw the figures, and the rule that is named."""
    gramians, _ = window(problem, draws, RATE, max(4, int(SHARE * steps)))
    said = [jd.diagnostics.advise(G) for G in gramians]
    return {
        "rule": [one.rule for one in said],
        "verdict": [one.verdict for one in said],
        **{key: [float(f"{getattr(one, key):.4g}") for one in said] for key in FIGURES},
    }
