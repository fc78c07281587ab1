"""Solutions that descend, and repel one another where their losses are close."""

import torch
from torch import Tensor

from functional_jd.aggregation.views import gramian_and_losses
from functional_jd.aggregators.mgda import mgda
from functional_jd.core.arguments import NOT_NEGATIVE, POSITIVE, Number, number
from functional_jd.core.safe import divide
from functional_jd.core.types import Gramian, Weights
from functional_jd.fronts.population import Population


def moo_svgd(repulsion: Number = 1.0, bandwidth: Number | None = None) -> Population:
    """A population that spreads over the front by repulsion, without preferences and without a reference.

    With `kappa_kj = exp(-|L_k - L_j|^2 / h)`, and w*_k the weights of `mgda` for solution k,

    `w_k = max(0, sum_j (kappa_kj w*_k + repulsion d kappa_kj / d L_k))`

    so that solutions that are close drive each other apart along the front.

    Args:
        repulsion: how much the second term counts; not negative. A number or a tensor `[]`.
        bandwidth: h, in squared units of the losses; positive. A number or a tensor `[]`; `None`: in every step the
            lower median of `|L_k - L_j|^2` over all pairs, divided by `K^(2 / (m - 1))`, so that neighbours repel.

    Returns:
        A `Population` that needs Gramians and losses; its solutions start apart, and the losses are in like units.
        Weights `[K, m]`, float64, not negative: their sum is not one. Differentiable, except for the set of positive
        weights, of `mgda` too, and the pair of the median.

    Guarantees:
        Equivariant to permutations. A solution far from all others descends by `mgda`. With two losses, a solution at
        the end of the front stays there. A solution that is not finite has NaN weights, and does not touch the others.

    Source:
        Liu, Tong & Liu, Profiling Pareto front with multi-objective Stein variational gradient descent, NeurIPS 2021.

    Differences:
        The reference code adds `sum_j kappa_kj g*_j`, directions at the parameters of other solutions, along which the
        losses of solution k may grow. Its weights may be negative: repulsion drives the ends of a front beyond it.
    """
    strength = number("repulsion", repulsion, NOT_NEGATIVE, "The default is 1.0.")
    if bandwidth is not None:
        bandwidth = number("bandwidth", bandwidth, POSITIVE, "None takes the median.")
    descend = mgda().update

    def weigh(seen: tuple[Gramian, Tensor]) -> Weights:
        gramians, losses = seen
        losses = losses.double()
        finite = losses.isfinite().all(-1, keepdim=True)
        losses, both = torch.where(finite, losses, 0), finite & finite.mT
        apart = losses.unsqueeze(1) - losses.unsqueeze(0)
        squares = apart.square().sum(-1)
        h = _usual_bandwidth(squares, both, losses.shape[1]) if bandwidth is None else losses.new_ones(()) * bandwidth
        # At a bandwidth of zero, where most pairs coincide, all that does not is far.
        kernel = torch.where(both, (-divide(squares, h, torch.where(squares > 0, torch.inf, 0))).exp(), 0)
        own = torch.vmap(lambda G: descend(G, ())[0])(gramians)
        apart = divide(-2 * (kernel.unsqueeze(-1) * apart).sum(1), h)
        return torch.where(finite, (kernel.sum(1, keepdim=True) * own + strength * apart).clamp(min=0), torch.nan)

    return Population(gramian_and_losses, weigh)


def _usual_bandwidth(squares: Tensor, both: Tensor, m: int) -> Tensor:
    """The lower median of the squared distances of all pairs of finite solutions, divided as above; 0 for none."""
    k = len(squares)
    if k == 1:
        return squares.new_zeros(())
    rows, columns = torch.triu_indices(k, k, 1, device=squares.device)
    pairs = torch.where(both, squares, torch.nan)[rows, columns]
    return pairs.nanmedian().nan_to_num(0.0) / both.diagonal().sum().to(pairs) ** (2 / max(m - 1, 1))
