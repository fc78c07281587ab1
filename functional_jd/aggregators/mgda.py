"""MGDA: the min-norm point in the convex hull of the rows."""

import torch

from functional_jd.aggregation import Aggregator, Gramian, Solver, Weights, gramian, runs_on_host, stateless
from functional_jd.core.safe import cosines
from functional_jd.solvers.lcp import linear_complementarity


def mgda(*, solver: Solver = "host") -> Aggregator:
    """The point of least norm in the convex hull of the rows.

    `weights = argmin { w'G w : w >= 0, sum(w) = 1 }`. With C the cosines and `b = min(norms) / norms`, w is
    proportional to `v b`, where `v = argmin { v'C v + (1 - b'v)^2 : v >= 0 }`: of order one, whatever the norms are.

    Args:
        solver: `"host"` or `"device"`.

    Returns:
        A rule that needs the Gramian. Weights lie in the simplex, and are not unique for dependent rows. Twice
        differentiable where they are unique and the set of positive ones does not change.

    Guarantees:
        Never conflicts: `<direction, g_i> >= |direction|^2`, with equality where the weight is positive. Homogeneous;
        accurate relative to the shortest row, to 1e-16 k^2 where rows cancel that are k times as long. Zero if and only
        if the Jacobian is stationary. Equal rows share one weight. Rows of zeros share all of it.

    Source:
        Desideri, Multiple-gradient descent algorithm (MGDA), Comptes Rendus Mathematique 350, 2012, theorem 2.2; as a
        quadratic program: Sener & Koltun, Multi-task learning as multi-objective optimization, NeurIPS 2018, equation
        3. Exact here, where their code takes at most 100 Frank-Wolfe steps.
    """

    def weigh(G: Gramian) -> Weights:
        C, norms = cosines(G)
        is_zero = G.diagonal() == 0
        shortest = torch.where(is_zero, 0, norms).amin().detach()  # cancels in w
        b = torch.where(is_zero, 1, shortest / norms)
        # Rows of zeros become orthogonal unit rows, so that their weights are unique and equal.
        M = C + torch.diag(is_zero.to(C.dtype)) + b.unsqueeze(1) * b
        v = linear_complementarity(M, -b.unsqueeze(0), solver=solver).squeeze(0)
        w = v * b
        return w / w.sum()

    return stateless(gramian, weigh, on_host=runs_on_host(solver))
