"""UPGrad and DualProj: the laws of the paper, references on the rows themselves, and every transform."""

import pytest
import torch
from bounds import check_within, cone_bound, eps, product_bound, projection_bound
from hypothesis import given
from scipy.optimize import nnls
from sequences import integer_jacobians, random_rows

import functional_jd as jd


def of_upgrad(J, preference=None):
    return jd.aggregate(jd.upgrad(preference), J).direction


def rounding(J):
    """How far two means of projected rows may lie apart."""
    return cone_bound(J) * float(torch.linalg.vector_norm(J, dim=1).mean())


@pytest.mark.parametrize("cosine", [1e-3, 1e-6, 1e-9, 1e-12])
@pytest.mark.parametrize("m", [2, 3, 30])
def test_the_slightest_conflict_counts(m, cosine):
    J = torch.eye(m, dtype=torch.float64)
    J[1, 0] = -cosine
    only_the_second = [float(i == 1) for i in range(m)]
    result = jd.aggregate(jd.upgrad(only_the_second), J)
    check_within(result.direction, torch.eye(m, dtype=torch.float64)[1], product_bound(result.weights, J))


@given(integer_jacobians())
def test_equal_to_the_mean_where_nothing_conflicts(J):
    for rule in (jd.upgrad(), jd.dualproj()):
        weights = jd.aggregate(rule, J.abs()).weights
        assert torch.equal(weights, torch.full((len(J),), 1 / len(J), dtype=torch.float64))


@given(integer_jacobians())
def test_a_row_of_zeros_counts_as_preferred_and_changes_nothing(J):
    m = len(J)
    padded = jd.aggregate(jd.upgrad(), torch.cat([J, torch.zeros_like(J[:1])]))
    check_within(padded.direction * (m + 1), of_upgrad(J) * m, m * rounding(J))
    assert padded.weights[m] == 1 / (m + 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_low_precision_jacobians_have_float64_weights(dtype):
    # Rows of norm 1e3 overflow a float16 Gramian, rows of 1e-4 vanish in it.
    for scale in (1e3, 1e-4):
        J = (scale * torch.randn(5, 8, generator=torch.Generator().manual_seed(1))).to(dtype)
        result, wide = jd.aggregate(jd.upgrad(), J), jd.aggregate(jd.upgrad(), J.double())
        assert (result.weights.dtype, result.direction.dtype) == (torch.float64, dtype)
        torch.testing.assert_close(result.weights, wide.weights)
        # The products are of the dtype, and cancel: they are larger than their sum. Then the sum is rounded.
        terms = product_bound(result.weights, J.double(), torch.float32 if dtype.itemsize < 4 else dtype)
        smallest = eps(dtype) * torch.finfo(dtype).smallest_normal
        check_within(result.direction, wide.direction, terms + eps(dtype) * wide.direction.abs() + smallest)


def loss(J, u):
    return of_upgrad(J, u).square().sum()


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
    f = lambda J: (of_upgrad(J), torch.func.grad(lambda J: of_upgrad(J).square().sum())(J))
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(torch.vmap(f), fullgraph=True)(J), torch.vmap(f)(J))


def of_dualproj(J, preference=None):
    return jd.aggregate(jd.dualproj(preference), J).direction


def projection(J, x):
    """x projected on the dual cone of the rows, by non-negative least squares on the unit rows, and its rounding."""
    N = torch.nn.functional.normalize(J, dim=1)
    length = max(float(x.norm()), 1e-300)
    s = torch.from_numpy(nnls(N.T.numpy(), -(x / length).numpy(), maxiter=100 * len(J))[0])
    return x + length * s @ N, float(torch.linalg.vector_norm(J, dim=1).max()) * projection_bound(N, s)


@pytest.mark.parametrize("m", [2, 5, 16, 64])
def test_exact_to_rounding(m):
    for J in (random_rows(m, m + 5), random_rows(m, m + 5) - 0.9 * random_rows(m, m + 5).mean(0)):
        check_within(of_dualproj(J), *projection(J, J.mean(0)))


@pytest.mark.parametrize("m", [5, 40])
def test_rows_of_very_different_norms_are_not_conflicted_with(m):
    generator = torch.Generator().manual_seed(m)
    J = torch.randn(m, m + 5, generator=generator, dtype=torch.float64)
    scaled = J * 10 ** (36 * torch.rand(m, 1, generator=generator, dtype=torch.float64) - 18)
    d = of_dualproj(scaled)
    expected, rounding = projection(scaled, scaled.mean(0))
    assert (J @ d / torch.linalg.vector_norm(J, dim=1)).min() >= -rounding
    check_within(d, expected, rounding)
