"""MGDA: the shortest direction that a mean of the rows can have."""

import torch

from functional_jd.aggregation.aggregate import Aggregator
from functional_jd.aggregation.lifts import stateless
from functional_jd.aggregation.views import gramian
from functional_jd.core.types import Gramian, Weights
from functional_jd.solvers.dual_cone import cosines
from functional_jd.solvers.lcp import linear_complementarity


def mgda() -> Aggregator:
    """The point of least norm in the convex hull of the rows.

    `weights = argmin { w'G w : w >= 0, sum(w) = 1 }`. With C the cosines and `b = min(norms) / norms`, w is in the
    proportions of `v b`, where `v = argmin { v'C v + (1 - b'v)^2 : v >= 0 }`: a problem of linear complementarity of
    order one, whatever the norms are.

    Returns:
        A rule that looks at the Gramian. Weights `[m]`, float64, in the simplex; where rows are dependent, several
        weights may give the one direction. Differentiable twice with respect to the Gramian, where weights are unique
        and the set of positive ones does not change.

    Laws:
        Never conflicts: `<direction, g_i> >= |direction|^2`, with equality where a row has weight. Scales as the
        Jacobian does; never longer than the shortest row, and as exact as that row is, however long others are. Zero if
        and only if the Jacobian is stationary. Equal rows share one weight. If rows are zero, they share all of it. A
        Gramian that is not finite gives weights NaN.

    Source:
        Desideri, Multiple-gradient descent algorithm (MGDA) for multiobjective optimization, Comptes Rendus
        Mathematique 350, 2012, theorem 2.2; as a quadratic program in the weights: Sener & Koltun, Multi-task learning
        as multi-objective optimization, NeurIPS 2018, equation 3.

    Differs:
        Exact, where the reference code takes at most 100 Frank-Wolfe steps.
    """

    def weigh(G: Gramian) -> Weights:
        C, norms = cosines(G)
        blank = G.diagonal() == 0
        shortest = torch.where(blank, 0, norms).amin().detach()  # a factor of b, which is that of w
        b = torch.where(blank, 1, shortest / norms)
        # Rows of zeros stand apart from each other, so that their shares are unique, and equal.
        M = C + torch.diag(blank.to(C.dtype)) + b.unsqueeze(1) * b
        v = linear_complementarity(M, -b.unsqueeze(0), quiet=True).squeeze(0)
        w = v * b
        return w / w.sum()

    return stateless(gramian, weigh)
