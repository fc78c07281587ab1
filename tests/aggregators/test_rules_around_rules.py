"""Unit sum, rules of normalized rows, and protected losses: EnCodec's balancer, rows divided by hand, SciPy."""

import numpy as np
import pytest
import torch
from bounds import eps, half_the_digits
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import nnls

import functional_jd as jd
from functional_jd import aggregators
from functional_jd.testing import jacobians

ROWS = torch.tensor([[3.0, 4.0, 0.0], [0.0, -2.0, 1.0], [100.0, 1.0, -1.0]], dtype=torch.float64)
LOSSES = torch.tensor([0.5, 4.0, 100.0], dtype=torch.float64)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.999])
def test_with_momentum_it_is_the_balancer_of_encodec(momentum):
    """Section 3.4: g_i times u_i by the bias-corrected moving average of its norm."""
    u, state, total, share = [1.0, 2.0, 1.0], None, torch.zeros(3, dtype=torch.float64), 0.0
    for call in range(6):
        rows = ROWS * torch.tensor([[1.0 + call], [0.5**call], [1.0]])
        total, share = momentum * total + rows.norm(dim=1), momentum * share + 1
        found = jd.aggregate(jd.unit_sum(u, momentum), rows, state)
        torch.testing.assert_close(found.direction, torch.tensor(u).double() / (total / share) @ rows)
        state = found.state


def test_a_row_of_zeros_has_no_weight_and_vanishes_slowly_with_momentum():
    rows = ROWS * torch.tensor([[1.0], [0.0], [1.0]])
    thirds = torch.tensor([1 / 15, 0, 1 / 3 / 10002**0.5], dtype=torch.float64)
    torch.testing.assert_close(jd.aggregate(jd.unit_sum(), rows).weights, thirds)
    rule = jd.unit_sum(momentum=0.9)
    small = jd.aggregate(rule, ROWS * torch.tensor([[1.0], [1e-3], [1.0]]), jd.aggregate(rule, ROWS).state)
    assert 100 * (small.weights[1] * ROWS[1] * 1e-3).norm() < 1 / 3  # which it is without momentum


RULES = [jd.mgda(), jd.cagrad(0.5), jd.upgrad(), jd.config(), jd.mean(), jd.nash_mtl(), jd.clipped(2.0), jd.stch()]
SIZES = {"norm": ROWS.norm(dim=1), "loss": LOSSES, "both": ROWS.norm(dim=1) * LOSSES}


@pytest.mark.parametrize("by", SIZES)
@pytest.mark.parametrize("rule", RULES)
def test_a_normalized_rule_receives_the_divided_rows(rule, by):
    found = jd.aggregate(aggregators.normalized(rule, by), ROWS, losses=LOSSES)
    expected = jd.aggregate(rule, ROWS / SIZES[by][:, None], losses=LOSSES)
    torch.testing.assert_close(found.direction, expected.direction)
    torch.testing.assert_close(found.weights, expected.weights / SIZES[by])


@pytest.mark.parametrize("by", SIZES)
@pytest.mark.parametrize("rule", [jd.mgda(), jd.mean(), jd.trimmed_mean(1), jd.imtl_l(), jd.db_mtl()])
def test_in_a_step_the_engine_gives_it_the_same(rule, by):
    losses = lambda w: (torch.tensor([[1.0, 2.0], [-3.0, 0.5], [0.1, 9.0]], dtype=w.dtype) @ w - 1).square()
    start = torch.tensor([0.3, 0.2], dtype=torch.float64)
    how = {"losses": losses, "aggregator": aggregators.normalized(rule, by), "optimizer": jd.sgd(1.0)}
    if rule.view.products == "rows":
        with pytest.raises(ValueError, match="rule must have one weight per row"):
            jd.step(jd.train_state(start, **how), **how)
        return
    state, info = jd.step(jd.train_state(start, **how), **how)
    J, L = jd.jacobian_fn(losses)(start)
    found = jd.aggregate(how["aggregator"], J, losses=L)
    torch.testing.assert_close(info.weights, found.weights)
    torch.testing.assert_close(start - state.params, found.direction)


def test_normalized_composes():
    both = aggregators.normalized(jd.cr_mogm(aggregators.normalized(jd.mgda(), "loss")), "norm")
    fresh, repeated = jd.held(both)
    found = jd.aggregate(fresh, ROWS, losses=LOSSES)
    again = jd.aggregate(repeated, ROWS, found.state, losses=LOSSES)
    assert torch.equal(found.weights, again.weights)
    grouped = jd.grouped({"a": aggregators.normalized(jd.mgda()), "b": jd.mean()})
    assert jd.aggregate(grouped, {"a": ROWS, "b": ROWS}).direction["a"].isfinite().all()
    with pytest.raises(ValueError, match=r"^normalized: rule must be for all parameters, found a rule by groups"):
        aggregators.normalized(grouped)
    assert jd.aggregate(aggregators.normalized(jd.mgda(), "loss"), ROWS, losses=-LOSSES).direction.isnan().all()
    unit = aggregators.normalized(jd.gradnorm())  # whose norms are all one: rounding rows to float32 tells nothing
    assert not jd.aggregate(unit, ROWS.float(), losses=torch.ones(len(ROWS))).state.logits.any()


@given(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=4), st.floats(0.1, 10.0))
def test_uw_so_is_the_softmax_of_inverse_losses(losses, temperature):
    losses = torch.tensor(losses, dtype=torch.float64)
    found = jd.aggregate(aggregators.uw_so(temperature), torch.eye(len(losses)), losses=losses).weights
    torch.testing.assert_close(found, torch.softmax(1 / losses / temperature, 0))


def projected(x, guarded):
    """The point nearest to x with no negative product with any guarded row."""
    lengths = np.linalg.norm(guarded, axis=1)
    unit = guarded[lengths > 0] / lengths[lengths > 0, None]
    return x if len(unit) == 0 else x + unit.T @ nnls(unit.T, -x)[0]


@given(jacobians((2, 5), wide=False), st.data())
def test_the_direction_is_scipys_projection(rows, data):
    J = torch.as_tensor(rows, dtype=torch.float64)
    chosen = data.draw(st.lists(st.integers(0, len(J) - 1), min_size=1, unique=True))
    rule = data.draw(st.sampled_from([jd.total(), jd.mgda(), jd.constant([(-1.0) ** i for i in range(len(J))])]))
    x = jd.aggregate(rule, J).direction
    found = jd.aggregate(aggregators.protect(rule, chosen), J).direction
    size = J.norm(dim=1).sum()
    assert (J[chosen] @ found >= -(2**22) * eps() * size * J[chosen].norm(dim=1)).all()
    np.testing.assert_allclose(
        found, projected(x.numpy(), J[chosen].numpy()), atol=half_the_digits(1 + size.item()) * 64
    )


def test_a_name_is_an_index_also_in_a_step_with_scales():
    def losses(w):
        return {"safety": (w[0] - 1).square(), "task": (w[0] + w[1] + 2).square()}

    start = torch.tensor([1.2, 0.0])
    found = []
    for primary in ("safety", ["safety"], 0):
        rule = aggregators.protect(jd.constant([0.0, 1.0]), primary)
        how = {"losses": losses, "aggregator": rule, "optimizer": jd.sgd(0.01)}
        state = jd.train_state(start, scale=jd.scale_state(1024.0, shape=(2,)), **how)
        found.append(jd.step(state, **how)[0].params)
    assert all(torch.equal(found[0], other) for other in found[1:])
    assert losses(found[0])["safety"] <= losses(start)["safety"]


UNPROTECTED = [
    (jd.grouped({"a": jd.mean()}), 0, ValueError, "^protect: rule must be for all parameters"),
    (jd.mean(), 2, ValueError, "indices below 2 .* found 2"),
    (jd.mean(), "a", ValueError, "found 'a'"),
    (jd.trimmed_mean(0), 0, ValueError, "one weight per row"),
]


@pytest.mark.parametrize(("rule", "primary", "error", "message"), UNPROTECTED)
def test_what_cannot_be_protected_is_an_error(rule, primary, error, message):
    with pytest.raises(error, match=message):
        jd.aggregate(aggregators.protect(rule, primary), torch.eye(2))
