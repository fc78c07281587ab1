"""Sets of points, of which some are not dominated by others."""

from typing import Any

import torch
from torch import Tensor

from functional_jd.core.arguments import refuse


def non_dominated(points: Tensor) -> Tensor:
    """Return which points are not dominated by any other point.

    `p` dominates `q` if `p_i <= q_i` for all i, and `p_i < q_i` for some.

    Args:
        points: `[K, m]`, losses: smaller is better.

    Returns:
        bool `[K]`. Equal points do not dominate each other; a point that is not finite counts as dominated.

    Raises:
        TypeError, ValueError: not a floating-point tensor `[K, m]`.

    Laws:
        Equivariant to permutations of the points, invariant to permutations of the losses and to increasing functions
        of each loss. Time and memory grow as `K^2 m`.
    """
    check_matrix("non_dominated", "points", points)
    left, right = points.unsqueeze(-2), points.unsqueeze(-3)
    dominated = ((right <= left).all(-1) & (right < left).any(-1)).any(-1)
    return ~dominated & points.isfinite().all(-1)


def check_matrix(where: str, name: str, value: Any, cure: str = "Stack the losses of K points.") -> None:
    """Raise unless a value is a floating-point tensor `[K, m]`, one row for each point or preference."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.layout != torch.strided:
        refuse(where, name, "a floating-point tensor [K, m]", value, "Convert it with .double().")
    if value.ndim != 2 or not value.shape[1]:
        refuse(where, name, "[K, m], one in a row", value, cure, ValueError)
