"""Protect: the nearest direction along which the primary losses do not rise, against SciPy."""

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


@given(jacobians((1, 5)))
def test_with_all_losses_primary_it_is_dualproj(rows):
    J = torch.as_tensor(rows, dtype=torch.float64)
    u = [1.0] * len(J)
    found = jd.aggregate(aggregators.protect(jd.constant(u), list(range(len(J)))), J).weights
    torch.testing.assert_close(found, jd.aggregate(jd.dualproj(u), J).weights)


def test_one_loss_is_protected_as_in_gru():
    """The gradient that unlearns without its part against the gradient that retains."""
    J = torch.tensor([[2.0, -3.0, 1.0], [1.0, 1.0, 0.5]], dtype=torch.float64)
    unlearn, retain = J
    expected = unlearn - (unlearn @ retain) / (retain @ retain) * retain
    rule = aggregators.protect(jd.constant([1.0, 0.0]), 1)
    torch.testing.assert_close(jd.aggregate(rule, J).direction, expected)
    assert torch.equal(jd.aggregate(rule, J.abs()).direction, J.abs()[0])  # no conflict


def test_a_name_is_an_index_also_in_a_step_with_scales():
    def losses(w):
        return {"safety": (w[0] - 1).square(), "task": (w[0] + w[1] + 2).square()}

    start = torch.tensor([1.2, 0.0])
    found = []
    for primary in ("safety", ["safety"], 0):
        how = {
            "losses": losses,
            "aggregator": aggregators.protect(jd.constant([0.0, 1.0]), primary),
            "optimizer": jd.sgd(0.01),
        }
        state = jd.train_state(start, scale=jd.scale_state(1024.0, shape=(2,)), **how)
        found.append(jd.step(state, **how)[0].params)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert losses(found[0])["safety"] <= losses(start)["safety"]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: aggregators.protect(jd.mean(), 1.5),
            TypeError,
            "^protect: primary must be a name, an index, or a list of",
        ),
        (lambda: aggregators.protect(jd.mean(), []), TypeError, "^protect: primary must be"),
        (
            lambda: aggregators.protect(jd.grouped({"a": jd.mean()}), 0),
            ValueError,
            "^protect: rule must be for all parameters",
        ),
        (
            lambda: jd.aggregate(aggregators.protect(jd.mean(), 2), torch.eye(2)),
            ValueError,
            "indices below 2 .* found 2",
        ),
        (lambda: jd.aggregate(aggregators.protect(jd.mean(), "a"), torch.eye(2)), ValueError, "found 'a'"),
        (
            lambda: jd.aggregate(aggregators.protect(jd.trimmed_mean(0), 0), torch.eye(2)),
            ValueError,
            "one weight per row",
        ),
    ],
)
def test_what_cannot_be_protected_is_an_error(call, error, message):
    with pytest.raises(error, match=message):
        call()
