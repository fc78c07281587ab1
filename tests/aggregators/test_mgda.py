"""MGDA: the least norm, certified by duality."""

import pytest
import torch
from bounds import check_within, eps, half_the_digits
from hypothesis import given
from hypothesis import strategies as st
from sequences import integer_jacobians, random_rows

import functional_jd as jd

# By how much a search may miss a bound, relative to the terms.
MISSED = 1e-12


def direction(J):
    return jd.aggregate(jd.mgda(), J).direction


def gap(J):
    """By how much `<d, g_i> >= |d|^2` is missed, in units of the row and of the shortest one; weights checked too."""
    w = jd.aggregate(jd.mgda(), J).weights
    assert w.min() >= -4 * eps()
    assert abs(w.sum() - 1) <= 4 * len(w) * eps()
    norms, d = torch.linalg.vector_norm(J, dim=1), w @ J
    return float(((d @ d - J @ d) / norms).max() / norms.min())


@pytest.mark.parametrize("m", [2, 3, 5, 8, 16, 32, 64, 100, 128])
def test_the_duality_gap_is_rounding(m):
    J = random_rows(m, m + 5)
    spread = 10 ** torch.linspace(-12, 12, m, dtype=torch.float64).unsqueeze(1)
    shifted, ranks = J - 0.9 * J.mean(0), [(seed, r) for seed in range(6) for r in (1, 3, m // 2, m // 2 + 1) if r]
    low = [random_rows(m, r, seed=seed) @ random_rows(r, r + 4, seed=seed + 1) for seed, r in ranks]
    for rows in (J, shifted, J - J.mean(0), *low, torch.cat([J, J]), torch.cat([J, -2 * J]), spread * shifted):
        assert gap(rows) <= 64 * sum(rows.shape) * eps()


@given(integer_jacobians())
def test_rows_of_zeros_share_all_the_weight(J):
    zero = (J == 0).all(1)
    if zero.any():
        assert (direction(J) == 0).all()
        torch.testing.assert_close(jd.aggregate(jd.mgda(), J).weights, zero.double() / zero.sum())


def capped(J, cap):
    """Certify the weights: in the capped simplex, and no allowed weights u have `<u'J, d> < |d|^2`."""
    result = jd.aggregate(jd.mgda(cap=cap), J)
    w, d = result.weights, result.direction
    m, norms = len(J), torch.linalg.vector_norm(J, dim=1)
    assert w.min() >= -MISSED
    assert w.max() <= cap * (1 + MISSED)
    assert abs(w.sum() - 1) <= 4 * m * eps()
    order = (J @ d).argsort()  # the least <u'J, d> gives as much as is allowed to rows with the least gains
    u = torch.zeros_like(w).index_put((order,), (1 - cap * torch.arange(m).double()).clamp(0, cap))
    assert d @ d - u @ J @ d <= MISSED * (w @ norms) * ((u + w) @ norms)


shares = st.sampled_from([0.0, 1 / 64, 1 / 4, 1 / 3, 1 / 2, 7 / 8])


def cap_of(J, share):
    return share + (1 - share) / len(J)


@given(integer_jacobians(), shares)
def test_a_cap_gives_the_least_norm_of_degenerate_rows(J, share):
    capped(J, cap_of(J, share))


@pytest.mark.parametrize("m", [2, 3, 5, 8, 16, 32, 64])
def test_a_cap_of_many_and_of_dependent_rows(m):
    J = random_rows(m, m + 5, seed=m)
    spread = 10 ** torch.linspace(-6, 6, m, dtype=torch.float64).unsqueeze(1)
    low = J[:, : m // 2 + 1] @ random_rows(m // 2 + 1, m + 5, seed=1)
    plane = J[:, :2]
    for rows in (J, J - 0.9 * J.mean(0), J - J.mean(0), low, plane, plane.abs(), torch.cat([J, J])[:64], spread * J):
        for share in (0.01, 0.1, 0.5):
            for unit in (1.0, 1e-20, 1e20):
                capped(unit * rows, cap_of(rows, share))


def test_the_ends_are_mgda_and_the_mean():
    for m in (1, 2, 3, 7, 49):
        J = random_rows(m, 4, seed=m)
        assert torch.equal(jd.aggregate(jd.mgda(cap=1), J).weights, jd.aggregate(jd.mgda(), J).weights)
        torch.testing.assert_close(jd.aggregate(jd.mgda(cap=1 / m), J).weights, jd.aggregate(jd.mean(), J).weights)
        found = jd.aggregate(jd.mgda(cap=torch.tensor(1.0)), J).direction
        check_within(found, direction(J), half_the_digits(J.norm()))


def test_caps_out_of_range_raise_by_name():
    for cap in (0.0, -1.0, 1.01, float("nan")):
        with pytest.raises(ValueError, match=r"^mgda: cap must be in \(0, 1\], found"):
            jd.mgda(cap=cap)
    how = {"losses": lambda p: torch.stack([p.sum(), -p.sum(), p @ p]), "aggregator": jd.mgda(cap=0.3)}
    error = r": cap must be at least 1 / 3, as weights sum to 1, found 0.3. Pass a larger weight.$"
    with pytest.raises(ValueError, match="^train_state" + error):
        jd.train_state(torch.ones(2), optimizer=jd.sgd(0.1), **how)
    with pytest.raises(ValueError, match="^aggregate" + error):
        jd.aggregate(jd.mgda(cap=0.3), torch.ones(3, 2))
    assert jd.aggregate(jd.mgda(cap=torch.tensor(0.3)), torch.ones(3, 2)).weights.isnan().all()
