"""Nash-MTL: its equation, the product of gains, the peer's numbers over several calls, derivatives by differences."""

import numpy as np
import pytest
import torch
from bounds import check_within, eps, gramian_bound
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.optimize import minimize
from sequences import J3, differences
from torch.func import grad, hessian, jacfwd, jacrev

from functional_jd.aggregation.aggregate import aggregate
from functional_jd.aggregators.nash_mtl import nash_mtl

SEQUENCE = [J3, J3.flip(0) + 1, 3 * J3.flip(1), J3 + J3.flip(1)]


def direction(J, max_norm=1.0):
    return aggregate(nash_mtl(max_norm), J).direction


def directions(rule, jacobians):
    state, found = None, []
    for J in jacobians:
        d, _, state = aggregate(rule, J, state)
        found.append(d)
    return torch.stack(found)


def independent_jacobians():
    shapes = st.integers(1, 5).flatmap(lambda m: st.tuples(st.just(m), st.integers(m, 6)))
    return shapes.flatmap(lambda shape: hnp.arrays(np.float64, shape, elements=st.integers(-4, 4).map(float)))


def residual_bound(J, w):
    """What sums may round off in `w_i <g_i, sum_j w_j g_j>`, which is one."""
    return 4 * sum(J.shape) * eps() * w * (J.abs() @ (J.abs().T @ w))


@given(independent_jacobians())
def test_everyone_gains_in_inverse_proportion_to_its_weight(J):
    assume(np.linalg.matrix_rank(J) == len(J))
    J = torch.from_numpy(J)
    d, w, state = aggregate(nash_mtl(max_norm=0), J)
    assert (w > 0).all()
    check_within(w * (J @ d), torch.ones_like(w), residual_bound(J, w))
    torch.testing.assert_close(d.norm(), torch.tensor(len(J) ** 0.5, dtype=torch.float64))
    clipped, shorter, same = aggregate(nash_mtl(), J)
    torch.testing.assert_close(clipped, d / max(1.0, len(J) ** 0.5))
    torch.testing.assert_close(shorter, w / max(1.0, len(J) ** 0.5))
    assert all(torch.equal(a, b) for a, b in zip(state, same, strict=True))


@pytest.mark.parametrize("m", [8, 16, 32, 64])
@pytest.mark.parametrize("lean", [0.0, 1.0])
def test_the_residual_is_rounding_from_few_rows_to_many(m, lean):
    generator = torch.Generator().manual_seed(m)
    J = torch.randn(m, 2 * m, generator=generator, dtype=torch.float64)
    J = J + lean * torch.randn(2 * m, generator=generator, dtype=torch.float64)
    w = aggregate(nash_mtl(max_norm=0), J).weights
    check_within(w * (J @ J.T @ w), torch.ones_like(w), residual_bound(J, w))


def test_no_other_direction_of_that_length_has_a_greater_product_of_gains():
    d = direction(J3).numpy()

    def loss(x):
        gains = J3.numpy() @ (x / np.linalg.norm(x))
        return np.inf if gains.min() <= 0 else -np.log(gains).sum()

    begin = d + 0.1 * np.array([1.0, -1, 0.5, 0.2])
    best = minimize(loss, begin, method="Nelder-Mead", options={"xatol": 1e-10, "fatol": 1e-14, "maxiter": 4000}).x
    np.testing.assert_allclose(d, best / np.linalg.norm(best), atol=1e-6)


@pytest.mark.parametrize(("max_norm", "expected"), [(1.0, [0.0542, 0.7061]), (0.0, [0.0766, 0.9985])])
def test_published_values(max_norm, expected):
    J = torch.tensor([[-4.0, 1, 1], [6, 1, 1]])
    torch.testing.assert_close(direction(J, max_norm), torch.tensor([*expected, expected[-1]]), rtol=0, atol=1e-4)


# TorchJD 0.18 with cvxpy 1.9 and ECOS 2.0, NashMTL(3, max_norm, update_weights_every) on SEQUENCE, float64, rounded.
@pytest.mark.parametrize(
    ("max_norm", "every", "expected"),
    [
        (
            1.0,
            1,
            [
                [0.812673, 0.466792, -0.340985, 0.07346],
                [0.715141, 0.574886, 0.153124, 0.366923],
                [0.07346, -0.340985, 0.466792, 0.812673],
                [0.66056, 0.252311, 0.252311, 0.66056],
            ],
        ),
        (
            1.0,
            2,
            [
                [0.812673, 0.466792, -0.340985, 0.07346],
                [0.722124, 0.565918, 0.161287, 0.363677],
                [0.07346, -0.340985, 0.466792, 0.812673],
                [0.511609, 0.072635, 0.072635, 0.511609],
            ],
        ),
        (
            0.0,
            2,
            [
                [1.407591, 0.808508, -0.590604, 0.127237],
                [2.56124, 2.007205, 0.572054, 1.289895],
                [0.127237, -0.590604, 0.808508, 1.407591],
                [0.511609, 0.072635, 0.072635, 0.511609],
            ],
        ),
    ],
)
def test_the_peer_agrees_over_several_calls(max_norm, every, expected):
    found = directions(nash_mtl(max_norm, every), SEQUENCE)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=2e-5)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("place", [(0, 0), (2, 2), (0, 1)])
@pytest.mark.parametrize("max_norm", [0.0, 1.0, torch.tensor(1.0)])
def test_a_repeated_call_shows_that_the_gramian_is_not_finite(max_norm, place, bad):
    rule, J = nash_mtl(max_norm, every=3), torch.tensor([[1.0, 0.5, 0.0], [-0.5, 1.0, 0.2], [0.3, 0.0, 2.0]])
    G = (J @ J.T).double()
    _, state = rule.update(G, rule.init(G))
    broken = G.clone()
    broken[place] = broken[place[::-1]] = bad
    for weights in (rule.update(broken, state)[0], torch.vmap(rule.update, (0, None))(broken[None], state)[0][0]):
        assert weights.isnan().all()
    assert rule.update(broken, state)[1].weights.isnan().all()
    assert rule.update(G, state)[0].isfinite().all()


def test_scales_of_rows_do_not_matter():
    scales = torch.tensor([[1e-18], [1.0], [1e18]], dtype=torch.float64)
    check_within(direction(scales * J3), direction(J3), gramian_bound(J3))
    check_within(direction(1e-18 * J3), direction(J3), gramian_bound(J3))


def test_zero_equal_and_stationary_rows():
    check_within(direction(torch.cat([0 * J3[:1], J3])), direction(J3), gramian_bound(J3))
    torch.testing.assert_close(direction(J3[[0, 0]]), J3[0] / J3[0].norm())
    assert (direction(0 * J3) == 0).all()
    assert (direction(torch.cat([J3, -J3.sum(0, keepdim=True)])) == 0).all()
    assert (direction(torch.cat([J3, -2 * J3[:1]])) == 0).all()


@pytest.mark.parametrize("cosine", [-1.0, -1 + 1e-9, -0.5, 0.0, 0.9, 1.0])
def test_two_rows_have_the_bisector_of_length_root_two(cosine):
    second = torch.tensor([cosine, (1 - cosine**2) ** 0.5], dtype=torch.float64)
    J = torch.stack([torch.tensor([1.0, 0], dtype=torch.float64), 1e6 * second])
    middle = J[0] + second
    expected = 0 * middle if cosine == -1 else middle / middle.norm() * 2**0.5
    check_within(direction(J, 0.0), expected, 16 * eps() / (1 + cosine) if cosine > -1 else 0.0)
    assert torch.equal(direction(torch.stack([J[0], 0 * J[0]])), J[0])
    assert jacrev(direction)(J).isfinite().all()


@pytest.mark.parametrize("max_norm", [0.0, 1.0])
def test_first_and_second_derivatives_are_those_of_differences(max_norm):
    f = lambda J: direction(J, max_norm)
    torch.testing.assert_close(jacrev(f)(J3), differences(f, J3), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(jacfwd(f)(J3), differences(f, J3), rtol=1e-6, atol=1e-8)
    first = lambda J: f(J)[0]
    torch.testing.assert_close(hessian(first)(J3), differences(grad(first), J3), rtol=1e-6, atol=1e-7)


def test_derivatives_flow_through_the_state():
    rule = nash_mtl(0.0, every=2)
    f = lambda J: directions(rule, [J, SEQUENCE[1]])[1]
    torch.testing.assert_close(jacrev(f)(J3), differences(f, J3), rtol=1e-6, atol=1e-8)


def test_a_batch_of_states_steps_and_compiles():
    rule = nash_mtl(every=2)
    batch = torch.stack(SEQUENCE)
    first = lambda J: aggregate(rule, J)
    second = torch.vmap(lambda J, state: aggregate(rule, J, state)[::2])
    states = torch.vmap(first)(batch).state
    loop = [aggregate(rule, J.flip(0), aggregate(rule, J).state) for J in batch]
    found, after = second(batch.flip(1), states)
    torch.testing.assert_close(found, torch.stack([one.direction for one in loop]))
    torch.testing.assert_close(after.weights, torch.stack([one.state.weights for one in loop]))
    compiled = torch.compile(second, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(batch.flip(1), states)[0], found)
