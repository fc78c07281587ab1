"""The fused attention of all examples at once against one example after the other: values, norms and directions."""

import pytest
import torch
from bounds import check_within, eps
from jacobian_by_hand import leaves, rows_of
from modes import Called
from torch.nn import functional as F  # noqa: N812 - torch's own name for it
from zoo import numbers

from functional_jd import per_example, squared_norms_fn

# As many as features, so that a dimension of examples that is taken for one of features shows.
M = 4
PARAMS = {"w": numbers(4, 4), "b": numbers(4, seed=1)}
X, SHARED = numbers(M, 3, 4, seed=3), numbers(2, 3, 2, seed=6)
MASK = torch.ones(3, 3, dtype=torch.bool).tril()


linear = lambda p, x: F.linear(x, p["w"], p["b"])
heads = lambda p, x: linear(p, x).reshape(3, 2, 2).transpose(0, 1)


def attention(p, x, *how):
    return F.scaled_dot_product_attention(heads(p, x), heads(p, x.cos()), heads(p, x.sin()), *how)


def of_a_batch(p, x):
    q = heads(p, x)[None]
    return F.scaled_dot_product_attention(q, q.cos(), q.sin(), None, 0.0, True, scale=0.3)


def by_keywords_behind_masks(p, x):
    q, mask = heads(p, x), MASK & (x[:, 0] < 9)
    return F.scaled_dot_product_attention(query=q, key=q.cos(), value=q, attn_mask=mask)


TOGETHER = {"plain": attention, "of a batch": of_a_batch, "behind a mask": lambda p, x: attention(p, x, MASK)}
"""Attention that torch's kernel computes once for all examples."""
APART = {
    "behind masks of examples": lambda p, x: attention(p, x, MASK & (x[:, 0] < 9)),
    "to what all share": lambda p, x: F.scaled_dot_product_attention(heads(p, x), SHARED, SHARED.cos()),
    "of one head": lambda p, x: F.scaled_dot_product_attention(linear(p, x), x, x.cos()),
    "by keywords behind masks": by_keywords_behind_masks,
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", [*TOGETHER, *APART])
def test_norms_and_directions_are_those_of_one_example_after_the_other(name):
    f, x = (TOGETHER | APART)[name], X
    loss = lambda p, x: (f(p, x) ** 2).sum()
    losses = lambda p: torch.stack([loss(p, example) for example in x])
    values, rows = losses(PARAMS), torch.cat([leaf.flatten(1) for leaf in rows_of(losses, PARAMS)], 1)
    with Called() as called:
        squares, found, pullback = squared_norms_fn(per_example(loss))(PARAMS, x)
    weights = numbers(M, seed=7)
    direction = torch.cat([g.flatten() for g in leaves(pullback(weights)[0])])
    lengths = rows.square().sum(1)
    assert (found - values).abs().max() <= 2**8 * eps() * values.abs().max()
    check_within(squares, lengths, 2**10 * eps() * lengths)
    check_within(direction, weights @ rows, 2**10 * eps() * (weights.abs() @ lengths.sqrt()))
    assert ("_scaled_dot_product_flash_attention_for_cpu" in called.names) == (name in TOGETHER)


def test_what_torch_refuses_of_one_example_is_refused():
    with pytest.raises((RuntimeError, ValueError), match="should not be set"):
        squared_norms_fn(per_example(lambda p, x: attention(p, x, MASK, 0.0, True).sum()))(PARAMS, X)
