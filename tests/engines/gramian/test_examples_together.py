"""Ops on all examples at once against one example after the other: values, norms and directions, of every argument."""

import pytest
import torch
from bounds import check_within, eps
from jacobian_by_hand import leaves, rows_of
from modes import Called
from torch import nn
from zoo import numbers

from functional_jd import per_example, squared_norms_fn

F = nn.functional

# As many as features, so that a dimension of examples that is taken for one of features shows.
M = 4
PARAMS = {"w": numbers(4, 4), "b": numbers(4, seed=1), "n": numbers(4, seed=2) + 2}
SHARED, BIASES = numbers(2, 3, 2, seed=6), numbers(3, 4, seed=5)
MASK = torch.ones(3, 3, dtype=torch.bool).tril()


linear = lambda p, x, y: F.linear(x, p["w"], p["b"])
heads = lambda p, x: linear(p, x, None).reshape(3, 2, 2).transpose(0, 1)


def attention(p, x, *how):
    return F.scaled_dot_product_attention(heads(p, x), heads(p, x.cos()), heads(p, x.sin()), *how)


def of_a_batch(p, x):
    q = heads(p, x)[None]
    return F.scaled_dot_product_attention(q, q.cos(), q.sin(), None, 0.0, True, scale=0.3)


def by_keywords_behind_masks(p, x):
    q, mask = heads(p, x), MASK & (x[:, 0] < 9)
    return F.scaled_dot_product_attention(query=q, key=q.cos(), value=q, attn_mask=mask)


entropy = lambda p, x, y, **how: F.cross_entropy(linear(p, x, y), y, **how)


FLASH = "_scaled_dot_product_flash_attention_for_cpu"
TOGETHER = {
    "linear": ("addmm", linear),
    "linear of one position": ("addmm", lambda p, x, y: F.linear(x[0], p["w"], bias=p["b"])),
    "attention": (FLASH, lambda p, x, y: attention(p, x)),
    "attention of a batch": (FLASH, lambda p, x, y: of_a_batch(p, x)),
    "attention behind a mask": (FLASH, lambda p, x, y: attention(p, x, MASK)),
}
"""The op of torch that losses call once for all examples, and the losses."""
APART = {
    "linear to one number": lambda p, x, y: F.linear(linear(p, x, y), PARAMS["b"]),
    "linear with a bias for each position": lambda p, x, y: F.linear(x, p["w"], BIASES),
    "frozen linear": lambda p, x, y: F.linear(F.linear(x, p["w"]), PARAMS["w"], PARAMS["b"]).mul_(2),
    "layer norm": lambda p, x, y: F.layer_norm(linear(p, x, y), (4,), p["n"], p["b"], 0.1),
    "layer norm of all positions": lambda p, x, y: F.layer_norm(linear(p, x, y), (3, 4), eps=0.1),
    "group norm": lambda p, x, y: F.group_norm(linear(p, x, y).mT[None], 2, p["n"], p["b"], eps=0.1),
    "attention behind masks of examples": lambda p, x, y: attention(p, x, MASK & (x[:, 0] < 9)),
    "attention to what all share": lambda p, x, y: F.scaled_dot_product_attention(heads(p, x), SHARED, SHARED.cos()),
    "attention of one head": lambda p, x, y: F.scaled_dot_product_attention(linear(p, x, y), x, x.cos()),
    "attention by keywords behind masks": lambda p, x, y: by_keywords_behind_masks(p, x),
    "entropy": lambda p, x, y: F.cross_entropy(linear(p, x, y)[0], y[0]),
    "entropy without reduction": lambda p, x, y: entropy(p, x, y, reduction="none", ignore_index=1),
    "entropy of positions": lambda p, x, y: entropy(p, x, y, ignore_index=1),
    "entropy summed": lambda p, x, y: F.cross_entropy(linear(p, x, y).mT[None], y[None], reduction="sum"),
    "entropy of probabilities": lambda p, x, y: F.cross_entropy(linear(p, x, y), x.softmax(-1)),
    "smoothed entropy": lambda p, x, y: entropy(p, x, y, label_smoothing=0.1),
    "weighted entropy": lambda p, x, y: entropy(p, x, y, weight=PARAMS["n"]),
}


def batch(m=M):
    x = numbers(m, 3, 4, seed=3)
    return x, torch.arange(3 * m).reshape(m, 3) % 4


def one_by_one(loss, x, y):
    losses = lambda p: torch.stack([loss(p, *example) for example in zip(x, y, strict=True)])
    return losses(PARAMS), torch.cat([leaf.flatten(1) for leaf in rows_of(losses, PARAMS)], 1)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", [*TOGETHER, *APART])
def test_norms_and_directions_are_those_of_one_example_after_the_other(name):
    op, f = TOGETHER.get(name) or (None, APART[name])
    loss = lambda p, x, y: (f(p, x, y) ** 2).sum()
    x, y = batch()
    values, rows = one_by_one(loss, x, y)
    with Called() as called:
        squares, found, pullback = squared_norms_fn(per_example(loss))(PARAMS, x, y)
    weights = numbers(M, seed=7)
    direction = torch.cat([g.flatten() for g in leaves(pullback(weights)[0])])
    lengths = rows.square().sum(1)
    assert (found - values).abs().max() <= 2**8 * eps() * values.abs().max()
    check_within(squares, lengths, 2**10 * eps() * lengths)
    check_within(direction, weights @ rows, 2**10 * eps() * (weights.abs() @ lengths.sqrt()))
    assert op is None or op in called.names


def test_what_is_ignored_has_no_mean():
    x, y = batch()
    y = torch.where(torch.arange(M)[:, None] == 1, 3, y % 3)
    loss = lambda p, x, y: F.cross_entropy(linear(p, x, y), y, ignore_index=3)
    squares, values, _ = squared_norms_fn(per_example(loss))(PARAMS, x, y)
    expected, rows = one_by_one(loss, x, y)
    assert values.isnan().tolist() == expected.isnan().tolist() == [False, True, False, False]
    assert torch.equal(squares.isnan(), rows.isnan().any(1))


@pytest.mark.parametrize(
    ("f", "words"),
    [
        (lambda p, x, y: attention(p, x, MASK, 0.0, True), "should not be set"),
        (lambda p, x, y: F.group_norm(linear(p, x[:1], y), 4), "more than 1"),
    ],
)
def test_what_torch_refuses_of_one_example_is_refused(f, words):
    with pytest.raises((RuntimeError, ValueError), match=words):
        squared_norms_fn(per_example(lambda p, x, y: f(p, x, y).sum()))(PARAMS, *batch())
