"""Derivatives in the rows and in the hyper-parameters, against differences of exact solutions, at degenerate points."""

from decimal import Decimal

import pytest
import torch
from bounds import eps
from exact.cones import fair_weights, least_norm_weights, of_greatest_least_gain, on_dual_cone
from exact.decimals import decimals, eigen, length, lengths, precisely, root, solved, unit_rows
from exact.rows import gaussian, near, resolution
from torch.func import grad, jvp

from functional_jd import aggregate, aligned_mtl, cagrad, config, dualproj, fairgrad, imtl_g, mgda, nash_mtl, upgrad

# With 80 digits, differences are as good as derivatives: to 1e-40 or so.
STEP = Decimal("1e-20")
SPREAD = torch.tensor([[2.0**20], [1.0], [2.0**-20]], dtype=torch.float64)

POINTS = {
    "generic": gaussian(1, 3, 4),
    "more rows than columns": gaussian(12, 3, 2).abs(),
    "spread": gaussian(3, 3, 4) * SPREAD,
    "tiny": gaussian(4, 3, 4) * 2.0**-100,
    "huge": gaussian(5, 3, 4) * 2.0**100,
    "nearly dependent": near(gaussian(6, 3, 4), 6, 1e-3),
    "nearly stationary": near(gaussian(7, 3, 4), 7, 1e-3, -1.0),
    "nearly dependent and spread": near(gaussian(8, 3, 4), 8, 1e-2) * SPREAD,
}
independent = {name: J for name, J in POINTS.items() if len(J) <= J.shape[1]}
of_one_size = {name: J for name, J in independent.items() if "spread" not in name}
U = [1.0, 2.0, 0.5]
of_bargain = lambda E: fair_weights(E, Decimal(1)) @ E


def of_config(E, u):
    N, norms = unit_rows(E)
    a = solved(N @ N.T, u)
    return (norms @ u) / (a @ u) * (a @ N)


def of_imtl_g(E):
    N, norms = unit_rows(E)
    v = solved(N @ N.T, 0 * norms + 1) / norms
    return v / sum(v) @ E


def of_aligned_mtl(E, u):
    values, V = eigen(E @ E.T)
    return min(values).sqrt() * (V @ (V.T @ u / root(values)) @ E)


# Each rule of its rows and of one number, and the solution, where that is known in closed form or by a search.
RULES = {
    "upgrad": (lambda x: upgrad([x, *U[1:]]), lambda E, x: x_first(x) @ on_dual_cone(E, list(E))[0], 1.5, POINTS),
    "dualproj": (lambda x: dualproj([x, *U[1:]]), lambda E, x: on_dual_cone(E, [x_first(x) @ E])[0][0], 1.5, POINTS),
    "mgda": (lambda x: mgda(), lambda E, x: least_norm_weights(E) @ E, None, POINTS),
    "cagrad": (cagrad, lambda E, x: of_greatest_least_gain(E, x)[0], 0.5, POINTS),
    "fairgrad .2": (fairgrad, lambda E, x: fair_weights(E, x) @ E, 0.2, POINTS),
    "fairgrad 5": (fairgrad, lambda E, x: fair_weights(E, x) @ E, 5.0, POINTS),
    "nash_mtl": (nash_mtl, lambda E, x: x * of_bargain(E) / length(of_bargain(E)), 0.75, POINTS),
    "config": (lambda x: config([x, *U[1:]]), lambda E, x: of_config(E, x_first(x)), 1.5, independent),
    "imtl_g": (lambda x: imtl_g(), lambda E, x: of_imtl_g(E), None, independent),
    "aligned_mtl": (lambda x: aligned_mtl([x, *U[1:]]), lambda E, x: of_aligned_mtl(E, x_first(x)), 1.5, of_one_size),
}


def x_first(x):
    u = decimals(U)
    u[0] = x
    return u


@pytest.mark.parametrize(("rule", "point"), [(rule, point) for rule, row in RULES.items() for point in row[3]])
def test_derivatives_are_those_of_the_solution_and_vmap_is_the_loop(rule, point):
    build, solution, hyper, points = RULES[rule]
    J, x = points[point], torch.tensor(hyper or 0.0, dtype=torch.float64)
    along = gaussian(99, *J.shape) * torch.linalg.vector_norm(J, dim=1, keepdim=True)
    f = lambda t: aggregate(build(x), J + t * along).direction
    g = lambda x: aggregate(build(x), J).direction
    zero, one = torch.zeros_like(x), torch.ones_like(x)
    cotangent = gaussian(98, J.shape[1])
    with precisely():
        E, S, X = decimals(J), decimals(along), Decimal(float(x))
        first, last = solution(E - STEP * S, X), solution(E + STEP * S, X)
        slope = (last - first) / (2 * STEP)
        size = length(slope) + length(first) + (max(lengths(E)) if rule in ("upgrad", "dualproj") else 0)
        error = Decimal(64 * sum(J.shape) * eps() / resolution(J) ** 3) * size
        assert length(decimals(jvp(f, (zero,), (one,))[1]) - slope) <= error
        backward = decimals(grad(lambda J: aggregate(build(x), J).direction @ cotangent)(J))
        assert abs((backward * S).sum() - decimals(cotangent) @ slope) <= error * length(decimals(cotangent)) * 4
        if hyper is not None:
            slope = (solution(E, X + STEP) - solution(E, X - STEP)) / (2 * STEP)
            error = Decimal(64 * sum(J.shape) * eps() / resolution(J) ** 3) * (length(slope) + size)
            assert length(decimals(jvp(g, (x,), (one,))[1]) - slope) <= error
        batch = torch.stack([J, J.flip(0), 2 * J])
        found = torch.vmap(lambda J: aggregate(build(x), J).direction)(batch)
        loop = torch.stack([aggregate(build(x), J).direction for J in batch])
        assert length((decimals(found) - decimals(loop)).ravel()) <= error * 2
