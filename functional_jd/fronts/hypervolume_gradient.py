"""Solutions that together dominate as much as they can."""

import torch
from torch import Tensor

from functional_jd.aggregation.hyper_parameters import Numbers, per_objective
from functional_jd.aggregation.views import losses
from functional_jd.core.safe import divide, nonzero
from functional_jd.core.types import Weights
from functional_jd.fronts.hypervolume import MOST_LOSSES, volume
from functional_jd.fronts.population import Population

# How far the reference stands behind a solution that is beyond it, relative to the loss.
_MARGIN = 0.1


def hypervolume_gradient(reference: Numbers) -> Population:
    """A population that ascends the volume of what its solutions dominate.

    `w_k = -v_k / |v_k|`, with `v_k = d hypervolume(points of the front of k) / d L_k`

    A solution that is dominated belongs to a later front: what is not dominated once the fronts before are removed.

    Args:
        reference: `[m]`, what every useful point dominates: the worst losses that count. Where a solution is beyond it,
            a tenth beyond the worst solution takes its place.

    Returns:
        A `Population` that needs the losses, at most four; its solutions start apart. Weights `[K, m]`, float64, of
        length 1 in each row. Differentiable with respect to losses and reference, where no two points share a
        coordinate.

    Raises:
        TypeError, ValueError: `reference` not floating-point, not finite or not one per loss; more than four losses.

    Laws:
        No weight is negative. Equivariant to permutations of the losses, and of solutions that differ; of two equal
        solutions the later one counts as dominated. A solution whose losses are not finite has NaN weights, and does
        not touch the others. Time and memory grow as `K^m`, plus `K^3`.

    Source:
        Deist, Grewal, Dankers, Alderliesten & Bosman, Multi-objective learning to predict Pareto fronts using
        hypervolume maximization, arXiv 2102.04523; fronts of dominated solutions, and the length, as in
        Wang, Deutz, Back & Emmerich, Hypervolume indicator gradient ascent multi-objective optimization, EMO 2017.

    Differs:
        The reference code moves the reference also where a solution is less than a tenth before it.

    Example:
        >>> starts = torch.tensor([[-0.4], [0.1], [0.3]])  # K = 3 solutions of one parameter
        >>> losses = lambda w: torch.stack([(w - 1).square().sum(), (w + 1).square().sum()])
        >>> method = {"losses": losses, "rule": fronts.hypervolume_gradient([5.0, 5.0]), "optimizer": sgd(0.02)}
        >>> front = fronts.train(starts, [()] * 200, **method)
    """
    bounds = per_objective("hypervolume_gradient", "reference", reference)

    def weigh(points: Tensor) -> Weights:
        if points.shape[-1] > MOST_LOSSES:
            raise ValueError(
                f"hypervolume_gradient: losses must be at most {MOST_LOSSES}, found {points.shape[-1]}: its memory "
                "grows as K^m. For more, give each solution a preference: lattice(m, divisions)."
            )
        points = points.double()
        finite = points.isfinite().all(-1, keepdim=True)
        known = torch.where(finite, points, -torch.inf)
        worst, sizes = known.amax(0), torch.where(finite, points, 0).abs().amax(0)
        limit = bounds(points[0]).double()
        limit = torch.where(worst < limit, limit, worst + _MARGIN * nonzero(sizes))
        fronts = _fronts(torch.where(finite, points, torch.inf)) & finite.mT
        slopes = torch.func.grad(_volume_of_fronts)(torch.where(finite, points, limit), fronts, limit)
        lengths = torch.linalg.vector_norm(slopes, dim=-1, keepdim=True)
        return torch.where(finite, divide(-slopes, lengths), torch.nan)

    return Population(losses, weigh)


def _volume_of_fronts(points: Tensor, fronts: Tensor, limit: Tensor) -> Tensor:
    """The sum of the hypervolumes of fronts, bool `[K, K]`: which points each has."""
    return volume(torch.where(fronts.unsqueeze(-1), points, limit), limit).sum()


def _fronts(points: Tensor) -> Tensor:
    """Which points `[K, m]` each front has, bool `[K, K]`: front r has those above which chains of r points end.

    A chain is of points of which each dominates the next. The longest ones are found by doubling: squares of a matrix,
    with sums for products and maxima for sums.
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
