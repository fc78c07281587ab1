"""Sets of points: evenly spread preferences, which losses are not dominated by others, and which to choose."""

from itertools import combinations
from math import comb
from typing import Any

import torch
from torch import Tensor

from functional_jd.core.arguments import check_integer, refuse

_MOST = 2**20


def non_dominated(points: Tensor) -> Tensor:
    """Return which points are not dominated by any other point.

    `p` dominates `q` if `p_i <= q_i` for all i, and `p_i < q_i` for some.

    Args:
        points: `[K, m]`, losses: smaller is better.

    Returns:
        bool `[K]`. Equal points do not dominate each other; a point that is not finite counts as dominated.

    Guarantees:
        Invariant to increasing functions of each loss. Time and memory grow as `K^2 m`.
    """
    check_matrix("points", points)
    left, right = points.unsqueeze(-2), points.unsqueeze(-3)
    return ~((right <= left).all(-1) & (right < left).any(-1)).any(-1) & points.isfinite().all(-1)


def knee(points: Tensor) -> Tensor:
    """Return which point gains most in some losses for what it loses in the others: the knee of the front.

    `argmin_k sum_i (p_ki - ideal_i) / (nadir_i - ideal_i)` over the points that are not dominated, with the smallest
    and largest losses among those as ideal and nadir

    Args:
        points: `[K, m]`, losses: smaller is better.

    Returns:
        int64 `[]`, its index; the first of several.

    Guarantees:
        Not dominated, as far as a point is finite. Invariant to scaling and shifting each loss. A loss that is the same
        everywhere on the front does not count.

    Source:
        Das, On characterizing the "knee" of the Pareto curve based on normal-boundary intersection, Structural
        Optimization 18, 1999: the point of the front that is farthest from the plane through its ends.

    Differences:
        For more than two losses, the plane is that of `sum_i = 1` in losses between ideal and nadir.
    """
    check_matrix("points", points)
    if not len(points):
        raise ValueError("knee: points must be at least one, found none. Pass losses [K, m].")
    points = points.double()
    on_front = non_dominated(points).unsqueeze(-1)
    ideal = torch.where(on_front, points, torch.inf).amin(0)
    width = torch.where(on_front, points, -torch.inf).amax(0) - ideal
    distances = torch.where(width > 0, (points - ideal) / width, 0.0).sum(1, keepdim=True)
    return torch.where(on_front, distances, torch.inf).argmin()


def lattice(m: int, divisions: int) -> Tensor:
    """Return preferences that are spread evenly over the simplex.

    All `u >= 0` with `sum_i u_i = 1` whose entries are multiples of `1 / divisions`, in ascending order.

    Args:
        m: the number of objectives.
        divisions: into how many parts each edge of the simplex is divided.

    Returns:
        float64 `[K, m]`, with `K = (divisions + m - 1)! / (divisions! (m - 1)!)`: `divisions + 1` for two objectives;
        at most 2^20.

    Guarantees:
        The corners, which leave all objectives but one aside, are among the rows; with `divisions >= m`, so are some
        whose entries are all positive.

    Source:
        Das & Dennis, Normal-boundary intersection: a new method for generating the Pareto surface in nonlinear
        multicriteria optimization problems, SIAM Journal on Optimization 8, 1998, section 3.3.
    """
    check_integer("m", m, 1, "It counts objectives.")
    check_integer("divisions", divisions, 1, "For two objectives there are divisions + 1 preferences.")
    count = comb(divisions + m - 1, m - 1)
    if count > _MOST:
        expected = f"such that there are at most 2^20 preferences, not {count}"
        refuse("divisions", expected, divisions, "Take fewer.", ValueError)
    # A preference is a row of `divisions` stars that m - 1 bars part: entry i counts the stars before bar i.
    places = list(combinations(range(divisions + m - 1), m - 1))
    bars = torch.tensor(places, dtype=torch.float64).reshape(count, m - 1)
    edges = torch.nn.functional.pad(bars, (1, 0), value=-1.0)
    return (torch.nn.functional.pad(bars, (0, 1), value=divisions + m - 1.0) - edges - 1) / divisions


def check_matrix(name: str, value: Any, cure: str = "Stack the losses of K points.") -> Tensor:
    """Return a floating-point tensor `[K, m]`, one row for each point or preference; raise for another value."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.layout != torch.strided:
        refuse(name, "a floating-point tensor [K, m]", value, "Convert it with .double().")
    if value.ndim != 2 or not value.shape[1]:
        refuse(name, "[K, m], one in a row", value, cure, ValueError)
    return value
