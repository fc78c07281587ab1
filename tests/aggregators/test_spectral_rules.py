"""Aligned-MTL, ConFIG and IMTL-G: what eigenvalues and cosines decide, the papers' forms, nearly parallel rows."""

import pytest
import torch
from bounds import check_derivatives, check_within, eps, gramian_bound, product_bound
from sequences import DEPENDENT, J3
from torch.func import jacfwd, jacrev

import functional_jd as jd


def aligned(J, preference=None, scale_mode="min"):
    return jd.aggregate(jd.aligned_mtl(preference, scale_mode), J).direction


@pytest.mark.parametrize("scale", [1e-150, 1e-18, 1e18, 1e150])
def test_it_scales_as_the_jacobian_does(scale):
    weights = jd.aggregate(jd.aligned_mtl(), J3).weights
    bound = 4 * torch.linalg.cond(J3) ** 2 * product_bound(weights, J3)
    check_within(aligned(scale * J3) / scale, aligned(J3), bound)


@pytest.mark.parametrize("m", [2, 20])
def test_rows_of_very_different_lengths_count_as_dependent_from_the_bound_on(m):
    bound = 1 / (8 * m * eps()) ** 0.5
    assert bound == pytest.approx({2: 1.7e7, 20: 5e6}[m], rel=0.07)
    for factor, shares in ((0.99, True), (1.01, False)):
        lengths = torch.ones(m, dtype=torch.float64)
        lengths[0] = factor * bound
        found = aligned(torch.diag(lengths))
        if shares:  # orthogonal rows: each has its share of the shortest length
            torch.testing.assert_close(found, torch.full_like(found, 1 / m))
        else:  # only the longest is left, and its length with it
            torch.testing.assert_close(found, torch.where(lengths > 1, lengths / m, 0))


def test_derivatives_are_right_where_other_eigenvalues_coincide():
    J = torch.diag(torch.tensor([1.0, 2, 2], dtype=torch.float64))  # the smallest is simple
    check_derivatives(jacrev(aligned)(J), aligned, J)
    J = torch.eye(3, dtype=torch.float64)
    rmse = lambda J: aligned(J, None, "rmse")
    check_derivatives(jacrev(rmse)(J), rmse, J)
    assert jacrev(aligned)(J).isfinite().all()


def of_config(J, preference=None):
    return jd.aggregate(jd.config(preference), J).direction


@pytest.mark.parametrize("J", [J3, DEPENDENT])
@pytest.mark.parametrize("size", [1e-300, 1e-160, 1e160, 1e300])
def test_only_ratios_of_the_preference_matter(J, size):
    u = torch.tensor([1.0, 2, 0.5], dtype=torch.float64)
    check_within(of_config(J, size * u), of_config(J, u), gramian_bound(J, of_config(J, u).abs().max()))


def of_imtl_g(J):
    return jd.aggregate(jd.imtl_g(), J).direction


@pytest.mark.parametrize("exponent", [-100, -40, 0, 40, 100])
def test_rows_of_zeros_do_not_tell_what_is_short(exponent):
    J = torch.tensor([[0.0], [1.0], [1.0]], dtype=torch.float64) * 2.0**exponent
    torch.testing.assert_close(of_imtl_g(J), J[1])


@pytest.mark.parametrize(("direction", "length"), [(of_config, 2.5), (of_imtl_g, 1.2)], ids=["config", "imtl_g"])
@pytest.mark.parametrize("angle", [1e-2, 1e-3, 1e-4])
def test_derivatives_are_accurate_where_two_rows_are_nearly_parallel(angle, direction, length):
    half, norms = torch.tensor(angle / 2, dtype=torch.float64), torch.tensor([[2.0], [3.0]], dtype=torch.float64)

    def turned(x):  # the first row turns away from the second one by x
        angles = torch.stack([half + x, -half])
        return direction(norms * torch.stack([angles.cos(), angles.sin()], dim=1))

    # ConFIG: halfway between both rows, as long as their projections on it: `5 cos(half + x / 2)` at the angle x / 2.
    # IMTL-G: the weights stay 3/5 and 2/5, so that it is `12/5 cos(half + x / 2)` at the same angle.
    expected = length * torch.stack([-half.sin(), half.cos()])
    slope = jacfwd(turned)(torch.zeros((), dtype=torch.float64))
    check_within(slope, expected, 64 * eps() / angle**3)  # what rounding of the cosines does to them
