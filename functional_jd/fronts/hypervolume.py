"""The volume that a set of points dominates, and solutions that ascend it."""

import torch
from torch import Tensor

from functional_jd.aggregation.hyper_parameters import Numbers, per_objective
from functional_jd.aggregation.views import losses
from functional_jd.core.arguments import refuse
from functional_jd.core.safe import divide, nonzero
from functional_jd.core.types import Weights
from functional_jd.fronts.points import check_matrix
from functional_jd.fronts.population import Population

# The memory grows as K^(m - 1).
MOST_LOSSES = 4
# How far the reference stands behind a solution that is beyond it, relative to the loss.
_MARGIN = 0.1


def hypervolume(points: Tensor, reference: Tensor) -> Tensor:
    """Return the volume that the points dominate, up to a reference point.

    The measure of all `y <= reference` with `y >= p` for some point p.

    Args:
        points: `[K, m]`, losses: smaller is better; m at most 4.
        reference: `[m]`, what every useful point dominates: the worst losses that count, in their units.

    Returns:
        float64 `[]`, in the product of the units of the losses. Exact to rounding; differentiable with respect to both
        where no two points share a coordinate.

    Guarantees:
        Invariant to permutations, duplicates and dominated points; grows with every new point that is not dominated.
        Points beyond the reference add nothing. A point with NaN gives NaN. Composes with vmap, grad, jvp and compile.
        Time and memory grow as `K^(m - 1)`.

    Source:
        Zitzler & Thiele, Multiobjective evolutionary algorithms: a comparative case study and the strength Pareto
        approach, IEEE Transactions on Evolutionary Computation 3, 1999.

    Example:
        >>> hypervolume(torch.tensor([[0.0, 0.5], [0.5, 0.0]]), torch.ones(2))
        tensor(0.7500, dtype=torch.float64)
    """
    check_matrix("points", points)
    m = points.shape[-1]
    if not isinstance(reference, Tensor) or not reference.is_floating_point() or reference.shape != (m,):
        cure = "Pass the worst losses that count."
        refuse("reference", f"a floating-point tensor [{m}], one per loss", reference, cure, ValueError)
    if m > MOST_LOSSES:
        cure = "For more, use moocore.hypervolume(points, ref=reference), which has no derivative."
        refuse("points", f"of at most {MOST_LOSSES} losses, as memory grows as K^(m - 1)", m, cure, ValueError)
    reference = reference.double()
    if not len(points):
        return reference.sum() * 0.0
    return volume(torch.minimum(points.double(), reference), reference)


def volume(points: Tensor, reference: Tensor) -> Tensor:
    """The volumes of sets of points `[..., K, m]` that are nowhere beyond the reference.

    Cut at the points' last coordinates: between two of them, the slice is the part that points below dominate in the
    other coordinates. All terms are non-negative, so nothing cancels.
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
    return (thickness * volume(torch.where(below, others.unsqueeze(-3), reference[:-1]), reference[:-1])).sum(-1)


def hypervolume_gradient(reference: Numbers) -> Population:
    """A population that ascends the volume that its solutions dominate.

    `w_k = -v_k / |v_k|`, with `v_k = d hypervolume(points of the front of k) / d L_k`

    A solution that is dominated belongs to a later front: what is not dominated once the fronts before are removed.

    Args:
        reference: `[m]`, what every useful point dominates: the worst losses that count. If a solution is beyond it,
            a tenth beyond the worst solution takes its place.

    Returns:
        A `Population` that needs the losses, at most four; its solutions start apart. Weights `[K, m]`, float64, of
        length 1 in each row. Differentiable where no two points share a coordinate.

    Guarantees:
        No weight is negative. Equivariant to permutations; of two equal solutions the later one counts as dominated. A
        solution that is not finite has NaN weights, and does not touch the others. Time and memory grow as `K^m`, plus
        `K^3`.

    Source:
        Deist, Grewal, Dankers, Alderliesten & Bosman, Multi-objective learning to predict Pareto fronts using
        hypervolume maximization, arXiv 2102.04523; fronts of dominated solutions, and the length, as in
        Wang, Deutz, Back & Emmerich, Hypervolume indicator gradient ascent multi-objective optimization, EMO 2017.

    Differences:
        The reference code moves the reference also where a solution is less than a tenth before it.
    """
    bounds = per_objective("reference", reference)

    def weigh(points: Tensor) -> Weights:
        if points.shape[-1] > MOST_LOSSES:
            cure = "For more, give each solution a preference: lattice(m, divisions)."
            refuse("losses", f"at most {MOST_LOSSES}, as memory grows as K^m", points.shape[-1], cure, ValueError)
        points = points.double()
        finite = points.isfinite().all(-1, keepdim=True)
        known = torch.where(finite, points, -torch.inf)
        worst, sizes = known.amax(0), torch.where(finite, points, 0).abs().amax(0)
        limit = bounds(points[0]).double()
        limit = torch.where(worst < limit, limit, worst + _MARGIN * nonzero(sizes))
        fronts = _fronts(torch.where(finite, points, torch.inf)) & finite.mT
        of_fronts = lambda points: volume(torch.where(fronts.unsqueeze(-1), points, limit), limit).sum()
        slopes = torch.func.grad(of_fronts)(torch.where(finite, points, limit))
        return torch.where(finite, divide(-slopes, torch.linalg.vector_norm(slopes, dim=-1, keepdim=True)), torch.nan)

    return Population(losses, weigh)


def _fronts(points: Tensor) -> Tensor:
    """Which points `[K, m]` each front has, bool `[K, K]`: front r has those above which chains of r points end.

    Each point of a chain dominates the next. The longest ones are found by squares of a matrix, with sums for products
    and maxima for sums.
    """
    k = len(points)
    left, right = points.unsqueeze(1), points.unsqueeze(0)
    places = torch.arange(k, device=points.device)
    before = places.unsqueeze(1) < places
    dominates = (left <= right).all(-1) & ((left < right).any(-1) | before)
    chains = torch.where(dominates, 1.0, torch.where(places.unsqueeze(1) == places, 0.0, -torch.inf))
    for _ in range((k - 1).bit_length()):
        chains = (chains.unsqueeze(-1) + chains).amax(1)
    return places.unsqueeze(1) == chains.amax(0)
