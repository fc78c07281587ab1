"""ConFIG: the same cosine with every row, and as long as the rows agree with it."""

import torch

from functional_jd.aggregation.aggregate import Aggregator
from functional_jd.aggregation.lifts import stateless
from functional_jd.aggregation.per_objective import Numbers, preferences
from functional_jd.aggregation.views import gramian
from functional_jd.core.types import Gramian, Weights
from functional_jd.solvers.dual_cone import cosines
from functional_jd.solvers.spectral import pseudo_inverse

# Below this part of the preference, what the unit rows can reach is rounding.
_VANISHING = 1e-10


def config(preference: Numbers | None = None) -> Aggregator:
    """Go where the cosines with all rows are as preferred, as far as the rows together project on that direction.

    `direction = (sum_i <g_i, b>) b` with `b = N^+ u / |N^+ u|`, N the unit rows n_i. In terms of their cosines C:
    `a = C^+ u`, `N^+ u = sum_i a_i n_i`, `<n_i, N^+ u> = (C a)_i`, so `weights = a / norms (norms'C a) / (a'C a)`.

    Args:
        preference: u `[m]`, non-negative, finite, floating-point, at least one positive; only ratios matter; `None`
            means all equal. Copied: what happens to the tensor afterwards is not seen.

    Returns:
        A rule that looks at the Gramian. Weights `[m]`, float64; differentiable with respect to the Gramian while the
        rank of its cosines stays what it is.

    Raises:
        TypeError: a preference that is not floating-point.
        ValueError: a preference of another shape, negative, not finite, or zero (not checked under a transform, where
            values are not known); at the call, not one per row.

    Laws:
        Linearly independent rows: the cosines of direction and rows are in the proportions of u, so that nobody is
        conflicted with. Dependent rows: as nearly so as least squares can; then it may conflict. Scaling one row
        changes the length only; scales as the Jacobian does. Rows of zeros get weight 0. Where the preference is
        orthogonal to all cosines that a direction can have (opposite rows, equally preferred; zeros): weights 0. A
        Gramian that is not finite gives weights NaN. The eigenvalues wait for the device.

    Source:
        Liu, Chu, Thuerey, ConFIG: towards conflict-free training of physics informed neural networks, arXiv 2408.11104,
        equations 2 and 3.

    Differs:
        The pseudo-inverse is taken of the cosines, where eigenvalues below `8 m eps` of the largest count as zero: unit
        rows whose condition number is above 1e7 count as dependent.
    """
    u = preferences(preference, "config")

    def weigh(G: Gramian) -> Weights:
        C, norms = cosines(G)
        wanted = u(G)
        a = pseudo_inverse(C) @ wanted
        reached = C @ a
        vanishing = reached.abs().amax() <= _VANISHING * wanted.amax()
        length = (norms @ reached) / torch.where(vanishing, 1, a @ reached)
        return torch.where(vanishing, 0, length * a / norms)

    return stateless(gramian, weigh)
