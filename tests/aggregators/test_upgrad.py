"""UPGrad: the laws of the paper, the reference on the rows themselves, and every transform."""

import pytest
import torch
from bounds import check_within, cone_bound, eps, product_bound
from hypothesis import given
from sequences import integer_jacobians, random_rows

from functional_jd.aggregation.aggregate import aggregate
from functional_jd.aggregators.upgrad import upgrad


def direction(J, preference=None):
    return aggregate(upgrad(preference), J).direction


def rounding(J):
    """How far two means of projected rows may lie apart."""
    return cone_bound(J) * float(torch.linalg.vector_norm(J, dim=1).mean())


@pytest.mark.parametrize("cosine", [1e-3, 1e-6, 1e-9, 1e-12])
@pytest.mark.parametrize("m", [2, 3, 30])
def test_the_slightest_conflict_counts(m, cosine):
    J = torch.eye(m, dtype=torch.float64)
    J[1, 0] = -cosine
    only_the_second = [float(i == 1) for i in range(m)]
    result = aggregate(upgrad(only_the_second), J)
    check_within(result.direction, torch.eye(m, dtype=torch.float64)[1], product_bound(result.weights, J))


@given(integer_jacobians())
def test_equal_to_the_mean_where_nothing_conflicts(J):
    assert torch.equal(aggregate(upgrad(), J.abs()).weights, torch.full((len(J),), 1 / len(J), dtype=torch.float64))


@given(integer_jacobians())
def test_a_row_of_zeros_counts_as_preferred_and_changes_nothing(J):
    m = len(J)
    padded = aggregate(upgrad(), torch.cat([J, torch.zeros_like(J[:1])]))
    check_within(padded.direction * (m + 1), direction(J) * m, m * rounding(J))
    assert padded.weights[m] == 1 / (m + 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_low_precision_jacobians_have_float64_weights(dtype):
    # Rows of norm 1e3 overflow a float16 Gramian, rows of 1e-4 vanish in it.
    for scale in (1e3, 1e-4):
        J = (scale * torch.randn(5, 8, generator=torch.Generator().manual_seed(1))).to(dtype)
        result, wide = aggregate(upgrad(), J), aggregate(upgrad(), J.double())
        assert (result.weights.dtype, result.direction.dtype) == (torch.float64, dtype)
        torch.testing.assert_close(result.weights, wide.weights)
        # The products are of the dtype, and cancel: they are larger than their sum. Then the sum is rounded.
        terms = product_bound(result.weights, J.double(), torch.float32 if dtype.itemsize < 4 else dtype)
        smallest = eps(dtype) * torch.finfo(dtype).smallest_normal
        check_within(result.direction, wide.direction, terms + eps(dtype) * wide.direction.abs() + smallest)


def loss(J, u):
    return direction(J, u).square().sum()


@pytest.mark.parametrize("m", [2, 4])
def test_a_batch_of_second_derivatives_is_the_loop_and_compiles(m):
    f = torch.func.hessian(loss)
    J, u = random_rows(3, m, 5, seed=m), 0.5 + random_rows(3, m, seed=m).abs()
    expected = torch.stack([f(*pair) for pair in zip(J, u, strict=True)])
    torch.testing.assert_close(torch.vmap(f)(J, u), expected)
    torch._dynamo.reset()
    if m == 2:  # the compiler cannot trace forward mode under vmap
        compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(J[0], u[0]), expected[0])


@pytest.mark.inductor
def test_compiles_to_machine_code():
    J = torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(0))
    f = lambda J: (direction(J), torch.func.grad(lambda J: direction(J).square().sum())(J))
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(torch.vmap(f), fullgraph=True)(J), torch.vmap(f)(J))
