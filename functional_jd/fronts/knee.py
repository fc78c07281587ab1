"""The point of a front to take where nothing else is preferred."""

import torch
from torch import Tensor

from functional_jd.fronts.points import check_matrix, non_dominated


def knee(points: Tensor) -> Tensor:
    """Return which point gains most in some losses for what it loses in the others: the knee of the front.

    `argmin_k sum_i (p_ki - ideal_i) / (nadir_i - ideal_i)` over the points that are not dominated, with the smallest
    and largest losses among those as ideal and nadir

    Args:
        points: `[K, m]`, losses: smaller is better.

    Returns:
        int64 `[]`, its index; the first of several.

    Raises:
        TypeError, ValueError: not a floating-point tensor `[K, m]`, or no points.

    Laws:
        Not dominated, as far as a point is finite. Invariant to permutations of the losses, and to scaling and shifting
        each. A loss that is the same everywhere on the front does not count.

    Source:
        Das, On characterizing the "knee" of the Pareto curve based on normal-boundary intersection, Structural
        Optimization 18, 1999: the point of the front that is farthest from the plane through its ends.

    Differs:
        For more than two losses, the plane is that of `sum_i = 1` in losses between ideal and nadir.

    Example:
        >>> int(knee(torch.tensor([[0.0, 1.0], [0.1, 0.2], [1.0, 0.0]])))
        1
    """
    check_matrix("knee", "points", points)
    if not len(points):
        raise ValueError("knee: points must be at least one, found none. Pass losses [K, m].")
    points = points.double()
    on_front = non_dominated(points).unsqueeze(-1)
    ideal = torch.where(on_front, points, torch.inf).amin(0)
    width = torch.where(on_front, points, -torch.inf).amax(0) - ideal
    distances = torch.where(width > 0, (points - ideal) / width, 0.0).sum(1, keepdim=True)
    return torch.where(on_front, distances, torch.inf).argmin()
