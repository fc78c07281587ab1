"""Rows of low precision that depend on one another up to rounding: no direction conflicts with them."""

import itertools

import pytest
import torch
from bounds import check_within, eps, half_the_digits
from scipy.optimize import nnls

import functional_jd as jd
from functional_jd.aggregation.combine import weights_to_sum

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
RULES = {"upgrad": jd.upgrad, "dualproj": jd.dualproj, "mgda": jd.mgda}


def dependent(seed, m, rank, dtype, n=10):
    """m rows of this rank, and an outside row, rounded."""
    draw = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(shape, generator=draw, dtype=torch.float64)
    return torch.cat([normal(m, rank) @ normal(rank, n), normal(1, n)]).to(dtype)


def stationary(seed, m, n, rank):
    """Rows, some of which have a positive combination that is zero; the others have none."""
    draw = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(shape, generator=draw, dtype=torch.float64)
    half = (torch.arange(m) < m // 2).double()
    fixed = torch.stack([half, 1 - half], 1) * normal(m, 1).abs()
    basis = torch.linalg.qr(torch.cat([fixed, normal(m, m - 2)], 1)).Q[:, 1 : rank + 1]
    return basis * normal(rank).abs() @ torch.linalg.qr(normal(n, n)).Q[:rank]


def check_law(J, direction):
    """`J d >= -c eps |J| |d|`, beside what float64 cannot tell from zero."""
    info, J, d = torch.finfo(J.dtype), J.double(), direction.double()
    rounding = 64 * info.eps * (d.norm() + len(d) * info.smallest_normal) + 2.0**-40 * J.abs().max()
    assert (J @ d >= -rounding * J.norm(dim=1)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", RULES)
def test_no_row_is_conflicted_with(name, dtype):
    rule, cancelled = RULES[name](), 0
    for seed in range(60):
        J = dependent(seed, 3 + seed % 5, 2, dtype)
        found = jd.aggregate(rule, J)
        check_law(J, found.direction)
        terms = found.weights * J.double().norm(dim=1)
        cancelled += bool(found.direction.norm() < 1e-5 * terms.norm())
        if seed % 8 == 2 and dtype != torch.float16:
            for engine in ("jacobian", "gramian"):
                how = {"losses": lambda p, J=J: J @ p, "aggregator": rule, "optimizer": jd.sgd(1.0), "engine": engine}
                state, _ = jd.step(jd.train_state(torch.zeros(10, dtype=dtype), **how), **how)
                check_law(J, -state.params)
    assert cancelled or dtype != torch.float32, "no case of the bug"


@pytest.mark.parametrize("name", RULES)
def test_transforms_sum_in_float64_too(name):
    J = torch.stack([dependent(seed, 4, 2, torch.float32) for seed in (2, 7, 12, 17)])
    direction = lambda J: jd.aggregate(RULES[name](), J).direction
    compiled = torch.compile(direction, fullgraph=True, backend="aot_eager")
    for rows, found in zip(J, torch.vmap(direction)(J), strict=True):
        check_law(rows, found)
        check_law(rows, compiled(rows))
    value, tangent = torch.func.jvp(direction, (J[0],), (J[0],))  # homogeneous: the derivative along J is A(J)
    check_law(J[0], value)
    check_law(J[0], tangent)
    slope = torch.func.grad(lambda J: direction(J) @ value)(J[0])
    assert abs((slope * J[0]).sum() - value @ value) <= 1e-4 * (value @ value) + 1e-9


@pytest.mark.parametrize("name", ["upgrad", "dualproj"])
def test_weights_for_autograd_are_as_small_as_the_direction_allows(name):
    largest = 0.0
    for seed in range(60):
        J = dependent(seed, 3 + seed % 5, 2, torch.float32)
        p = torch.zeros(10, requires_grad=True)
        losses = lambda p, J=J: J @ p
        weights = jd.weights_fn(losses, RULES[name]())(p.detach()).weights
        (weights @ losses(p)).backward()
        check_law(J, p.grad)
        assert weights.abs().max() < 200
        largest = max(largest, jd.aggregate(RULES[name](), J).weights.abs().max())
    assert largest > 1e5


def test_weights_for_autograd_are_zero_where_the_direction_would_be_rounding():
    J = torch.tensor([[1.0, 2.0], [-3.0, -6.0], [1.0, 2.0 + 2.0**-22]])
    weights = jd.weights_fn(lambda p: J @ p, jd.mgda())(torch.zeros(2)).weights
    assert not weights.any()


@pytest.mark.parametrize(("n", "rank"), [(10, 10), (10, 5), (10, 1), (100, 1), (100, 18)])
def test_stationary_rows_in_float32_are_not_conflicted_with(n, rank):
    for seed, name in itertools.product(range(3), RULES):
        J = stationary(seed, 20, n, rank)
        check_law(J.float(), jd.aggregate(RULES[name](), J.float()).direction)
        # A positive combination of half of the rows is zero: no direction of the cone has a gain of these.
        found = jd.aggregate(RULES[name](), J).direction
        check_within(J[:10] @ found, torch.zeros(10), 1e-6 * J.norm())


@pytest.mark.parametrize(("n", "rank"), [(10, 10), (10, 5), (100, 10), (100, 18)])
def test_a_projection_is_exact_for_rows_moved_by_some_roundings(n, rank):
    """Among nearly stationary rows, one rounding of a row moves the projection by as much as its length. So another
    order of the rows may give another direction. Each meets the conditions of the projection to the rows' rounding.
    """
    draw, moved = torch.Generator().manual_seed(0), 0.0
    for seed in range(4):
        J = stationary(seed, 20, n, rank).float()
        for rows in (J, J[torch.randperm(20, generator=draw)]):
            for preference in (torch.full((20,), 1 / 20, dtype=torch.float64), torch.eye(20, dtype=torch.float64)[3]):
                found, wide = jd.aggregate(jd.dualproj(preference), rows), rows.double()
                lengths = wide.norm(dim=1)
                s, d = (found.weights - preference) * lengths, found.weights @ wide
                gains, rounding = wide @ d / lengths, 64 * eps(J.dtype) * d.norm() + 2.0**-40 * (1 + s.max())
                assert (s >= 0).all()
                assert (gains >= -rounding).all()
                assert (gains[s > 0] <= rounding).all()
        shifted = J.double() * (1 + eps(J.dtype) * torch.randn(J.shape, generator=draw, dtype=torch.float64))
        apart = jd.aggregate(jd.upgrad(), J).direction - jd.aggregate(jd.upgrad(), shifted).direction
        moved = max(moved, float(apart.norm() / J.norm(dim=1).mean()))
    assert moved > 1e-4, "no case of it"


@pytest.mark.parametrize("alpha", [0.02, 0.5, 0.9, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_fairgrad_ends_among_stationary_rows_where_none_loses(alpha, dtype):
    for seed, (n, rank) in itertools.product(range(5), [(10, 10), (10, 5), (100, 10)]):
        J = stationary(seed, 20, n, rank).to(dtype).double()
        weights = jd.aggregate(jd.fairgrad(alpha), J.to(dtype)).weights
        terms = (weights * J.norm(dim=1)).sum()
        check_within((J @ (weights @ J)).clamp(max=0), torch.zeros(20), 8 * half_the_digits(terms) * J.norm(dim=1))


@pytest.mark.parametrize("n", [10, 100])
def test_dependent_rows_have_the_projection_of_float64(n):
    for seed in range(3):
        J = stationary(seed, 20, n, 1)
        N, x = torch.nn.functional.normalize(J, dim=1, eps=1e-9), J.mean(0)
        s = nnls(N.mT.numpy(), -(x / x.norm()).numpy(), maxiter=10_000)[0]
        expected = x + x.norm() * torch.from_numpy(s) @ N
        check_within(jd.aggregate(jd.dualproj(), J.float()).direction, expected, 64 * eps(torch.float32) * x.norm())


def test_weights_that_cancel_are_summed_in_float64_whatever_the_dtype_of_the_rule():
    """A rule of one's own may return float32 weights. One row is a sum of two others, up to the rounding of float32."""
    draw = torch.Generator().manual_seed(0)
    J = torch.randn(4, 50, generator=draw)
    J[2] = 0.3 * J[0] + 0.7 * J[1]
    weights = torch.tensor([0.3e6, 0.7e6, -1e6, 1.0])
    expected = weights.double() @ J.double()
    found = jd.aggregate(jd.stateless(jd.views.gramian, lambda G: weights), J).direction
    check_within(found, expected.float(), eps(torch.float32) * expected.abs().float())
    assert weights_to_sum(weights.double(), J.square().sum(1), [J])[1].dtype == torch.float32  # norms do not tell
