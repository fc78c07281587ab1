"""MGDA: the min-norm point in the convex hull of the rows, each with at most a given weight."""

import torch
from torch import Tensor

from functional_jd.aggregation import Aggregator, Gramian, Solver, Weights, gramian, runs_on_host, stateless
from functional_jd.core.arguments import ABOVE_0_TO_1, Number, number, refuse
from functional_jd.core.safe import nonzero
from functional_jd.solvers.lcp import linear_complementarity, solution
from functional_jd.solvers.search import empty, matvec, opaque, per_problem

# How far weights may exceed the cap, and gradients a level, relative to the numbers that they are sums of.
_TOLERANCE = 1e-12


def mgda(*, cap: Number = 1.0, solver: Solver = "auto") -> Aggregator:
    """The point of least norm in the convex hull of the rows, with no weight above a cap.

    `weights = argmin { w'G w : 0 <= w <= cap, sum(w) = 1 }`. With C the cosines and `b = min(norms) / norms`, w is
    proportional to `v b`, where `v = argmin { v'C v + (1 - b'v)^2 : v >= 0 }`: of order one, whatever the norms are.

    Args:
        cap: the largest weight, from 1 / m, which gives `mean()`, to 1.
        solver: `"auto"`, `"host"` or `"device"`, where a cap below 1 takes `3 m + 8` searches: so auto is the host.

    Returns:
        A rule that needs the Gramian. Weights lie in the simplex, and are not unique for dependent rows. Twice
        differentiable where they are unique and the sets of weights at 0 and at the cap do not change.

    Guarantees:
        Never conflicts: `<direction, g_i> >= |direction|^2`, with equality where the weight is positive. Homogeneous;
        accurate relative to the shortest row, to 1e-16 k^2 where rows cancel that are k times as long. Zero if and only
        if the Jacobian is stationary. Without a cap, a row of zeros makes it zero. With a cap below 1,
        `u'J direction >= |direction|^2` for all weights u that it allows, to 1e-12; rows at the cap may conflict.

    Source:
        Desideri, Comptes Rendus Mathematique 350, 2012, theorem 2.2; Sener & Koltun, NeurIPS 2018, equation 3, whose
        code takes at most 100 Frank-Wolfe steps. Exact here. The cap, `1 / (alpha m)`: arXiv 2605.30452.
    """
    cap = number("cap", cap, ABOVE_0_TO_1, "It is the largest weight: 1 for none.")
    is_plain = not isinstance(cap, Tensor) and cap == 1
    on_host = runs_on_host(solver, cap, auto=True)
    if not is_plain and solver == "auto":
        solver, on_host = "host", bool(on_host)

    def check(G: Gramian) -> tuple[()]:
        if not isinstance(cap, Tensor) and cap < 1 / len(G):
            refuse("cap", f"at least 1 / {len(G)}, as weights sum to 1", cap, "Pass a larger weight.", ValueError)
        return ()

    def weigh(G: Gramian) -> Weights:
        check(G)
        norms = G.detach().diagonal().sqrt()
        if is_plain:
            return _solved(*_problem(G, norms), None, solver)
        most = per_problem(cap, norms)
        top = _rows_at_the_cap(G.detach(), most.detach(), solver=solver)
        T, M, b, _ = _below_the_cap(G, norms, most, top)
        return _solved(M, b, (top == 0).unsqueeze(0), solver) @ T

    rule = stateless(gramian, weigh)._replace(on_host=on_host)
    return rule if is_plain else rule._replace(init=check)


def _solved(M: Tensor, b: Tensor, allowed: Tensor | None, solver: Solver) -> Weights:
    w = linear_complementarity(M, -b.unsqueeze(0), allowed, solver).squeeze(0) * b
    return w / w.sum()


def _problem(G: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
    """`M = C + b b'`, and b, for points with these inner products, in units n, which cancel in w."""
    unit, b = nonzero(n), torch.where(n == 0, 1, n.amin(-1, keepdim=True) / n)
    C = G / unit.unsqueeze(-1) / unit.unsqueeze(-2)
    # Points of zeros become orthogonal unit vectors, so that their weights are unique and equal.
    return C + torch.diag_embed((n == 0).to(C.dtype)) + b.unsqueeze(-1) * b.unsqueeze(-2), b


def _below_the_cap(G: Tensor, norms: Tensor, cap: Tensor, top: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The problem of the points `h_i = cap (sum of the rows at the cap) + rest g_i`: h by rows, M, b, and its units."""
    rest = 1 - cap * top.sum(-1, keepdim=True)
    T = torch.diag_embed(rest.expand_as(top)) + (cap * top).unsqueeze(-2)
    n = matvec(T.detach(), norms)  # not the lengths of h, whose parts may cancel
    return T, *_problem(T @ G @ T.mT, n.masked_fill(top > 0, torch.inf)), n


def _search(gramians: Tensor, caps: Tensor, fixed: bool) -> Tensor:
    """1 for rows at the cap, else 0; NaN without an end. Rows on the wrong side change it, later one by one."""
    m = gramians.shape[-1]
    G, cap = gramians.reshape(-1, m, m), caps.reshape(-1, 1)
    top = wrong = torch.zeros_like(G[:, 0])
    norms, places = G.diagonal(dim1=-2, dim2=-1).sqrt(), torch.arange(m, device=G.device)
    for count in range(3 * m + 8):
        T, M, b, n = _below_the_cap(G, norms, cap, top)
        x = solution(M, -b.unsqueeze(-2), (top == 0).unsqueeze(-2), fixed).squeeze(-2) * b
        x = x / x.sum(-1, keepdim=True)
        w, slack = matvec(T.mT, x), _TOLERANCE * (x * n).sum(-1, keepdim=True) * norms
        gradient = matvec(G, w)
        level = torch.where(top > 0, torch.inf, gradient + slack).amin(-1, keepdim=True)
        wrong = torch.where(top > 0, gradient - slack > level, w > cap * (1 + _TOLERANCE))
        if not fixed and not wrong.any():
            break
        if count > m + 4:  # all at once may go round
            wrong = wrong & (places == wrong.to(torch.int8).argmax(-1, keepdim=True))
        top = torch.where(wrong, 1 - top, top)
    return torch.where(wrong.any(-1, keepdim=True), torch.nan, top).view((*caps.shape[:-1], m))


_rows_at_the_cap = opaque("functional_jd::rows_at_the_cap", _search, lambda G, _: empty(G[..., 0]), inputs=2)
