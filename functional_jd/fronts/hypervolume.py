"""What a set of points is worth as an approximation of the Pareto front."""

import torch
from torch import Tensor

from functional_jd.core.arguments import refuse
from functional_jd.fronts.points import check_matrix

# The memory grows as K^(m - 1).
MOST_LOSSES = 4


def hypervolume(points: Tensor, reference: Tensor) -> Tensor:
    """Return the volume of what the points dominate, up to a reference point.

    The measure of all `y <= reference` with `y >= p` for some point p.

    Args:
        points: `[K, m]`, losses: smaller is better; m at most 4.
        reference: `[m]`, what every useful point dominates: the worst losses that count, in their units.

    Returns:
        float64 `[]`, in the product of the units of the losses. Exact to rounding; differentiable with respect to both,
        wherever no two points share a coordinate: the derivative with respect to a dominated point is 0.

    Laws:
        Invariant to permutations of the points and of the losses, to duplicates and dominated points; grows with every
        new point that is not dominated. Points beyond the reference, and no points at all, add nothing. Scaling loss i,
        its reference too, by c multiplies the volume by c. A point with NaN gives NaN. Composes with vmap, grad, jvp
        and compile. Time and memory grow as `K^(m - 1)`.

    Source:
        Zitzler & Thiele, Multiobjective evolutionary algorithms: a comparative case study and the strength Pareto
        approach, IEEE Transactions on Evolutionary Computation 3, 1999.

    Example:
        >>> hypervolume(torch.tensor([[0.0, 0.5], [0.5, 0.0]]), torch.ones(2))
        tensor(0.7500, dtype=torch.float64)
    """
    check_matrix("hypervolume", "points", points)
    m = points.shape[-1]
    if not isinstance(reference, Tensor) or not reference.is_floating_point() or reference.shape != (m,):
        cure = "Pass the worst losses that count."
        refuse("hypervolume", "reference", f"a floating-point tensor [{m}], one per loss", reference, cure, ValueError)
    if m > MOST_LOSSES:
        raise ValueError(
            f"hypervolume: points must have at most {MOST_LOSSES} losses, found {m}: its memory grows as K^(m - 1). "
            "For more, use moocore.hypervolume(points, ref=reference), which has no derivative."
        )
    reference = reference.double()
    if not len(points):
        return reference.sum() * 0.0
    return volume(torch.minimum(points.double(), reference), reference)


def volume(points: Tensor, reference: Tensor) -> Tensor:
    """The volumes of sets of points `[..., K, m]` that are nowhere beyond the reference.

    Cut at the points' last coordinates: between two of them, the slice is what the points below dominate in the other
    coordinates. All terms are non-negative, so nothing cancels.
    """
    last, bound = points[..., -1], reference[-1]
    if points.shape[-1] == 1:
        return bound - last.amin(-1)
    last, order = last.sort(dim=-1)
    thickness = torch.cat([last[..., 1:], bound.expand_as(last[..., :1])], -1) - last
    others = points[..., :-1].take_along_dim(order.unsqueeze(-1), -2)
    if others.shape[-1] == 1:  # the slices of an area are as high as the lowest point so far
        return (thickness * (reference[0] - others[..., 0].cummin(-1).values)).sum(-1)
    k = points.shape[-2]
    below = torch.ones(k, k, dtype=torch.bool, device=points.device).tril().unsqueeze(-1)
    slices = torch.where(below, others.unsqueeze(-3), reference[:-1])
    return (thickness * volume(slices, reference[:-1])).sum(-1)
