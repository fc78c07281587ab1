"""Nash-MTL: its equation, the product of gains, the peer's numbers over several calls, derivatives by differences."""

import pytest
import torch
from bounds import check_derivatives, check_within, eps
from sequences import J3
from torch.func import jacrev

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


def residual_bound(J, w):
    """What sums may round off in `w_i <g_i, sum_j w_j g_j>`, which is one."""
    return 4 * sum(J.shape) * eps() * w * (J.abs() @ (J.abs().T @ w))


@pytest.mark.parametrize("m", [8, 16, 32, 64])
@pytest.mark.parametrize("lean", [0.0, 1.0])
def test_the_residual_is_rounding_from_few_rows_to_many(m, lean):
    generator = torch.Generator().manual_seed(m)
    J = torch.randn(m, 2 * m, generator=generator, dtype=torch.float64)
    J = J + lean * torch.randn(2 * m, generator=generator, dtype=torch.float64)
    w = aggregate(nash_mtl(max_norm=0), J).weights
    check_within(w * (J @ J.T @ w), torch.ones_like(w), residual_bound(J, w))


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


@pytest.mark.parametrize("cosine", [-1.0, -1 + 1e-9, -0.5, 0.0, 0.9, 1.0])
def test_two_rows_have_the_bisector_of_length_root_two(cosine):
    second = torch.tensor([cosine, (1 - cosine**2) ** 0.5], dtype=torch.float64)
    J = torch.stack([torch.tensor([1.0, 0], dtype=torch.float64), 1e6 * second])
    middle = J[0] + second
    expected = 0 * middle if cosine == -1 else middle / middle.norm() * 2**0.5
    check_within(direction(J, 0.0), expected, 16 * eps() / (1 + cosine) if cosine > -1 else 0.0)
    assert torch.equal(direction(torch.stack([J[0], 0 * J[0]])), J[0])
    assert jacrev(direction)(J).isfinite().all()


def test_derivatives_flow_through_the_state():
    rule = nash_mtl(0.0, every=2)
    f = lambda J: directions(rule, [J, SEQUENCE[1]])[1]
    check_derivatives(jacrev(f)(J3), f, J3)
