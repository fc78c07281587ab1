"""Ops on all examples at once against one example after the other: values, norms and directions, of every argument."""

import pytest
import torch
from bounds import check_within, eps
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from zoo import numbers

from functional_jd import squared_norms_fn
from functional_jd.objectives import per_example

F = nn.functional

# As many as features, so that a dimension of examples that is taken for one of features shows.
M = 4
PARAMS = {"w": numbers(4, 4), "b": numbers(4, seed=1), "n": numbers(4, seed=2) + 2}
SHARED, BIASES = numbers(2, 3, 2, seed=6), numbers(3, 4, seed=5)
MASK = torch.ones(3, 3, dtype=torch.bool).tril()


def linear(p, x, y):
    return F.linear(x, p["w"], p["b"])


def linear_of_one_position(p, x, y):
    return F.linear(x[0], p["w"], bias=p["b"])


def linear_to_one_number(p, x, y):
    return F.linear(linear(p, x, y), PARAMS["b"])


def linear_with_a_bias_for_each_position(p, x, y):
    return F.linear(x, p["w"], BIASES)


def frozen_linear(p, x, y):
    return F.linear(F.linear(x, p["w"]), PARAMS["w"], PARAMS["b"]).mul_(2)


def layer_norm(p, x, y):
    return F.layer_norm(linear(p, x, y), (4,), p["n"], p["b"], 0.1)


def layer_norm_of_all_positions(p, x, y):
    return F.layer_norm(linear(p, x, y), (3, 4), eps=0.1)


def group_norm(p, x, y):
    return F.group_norm(linear(p, x, y).mT[None], 2, p["n"], p["b"], eps=0.1)


def heads(p, x):
    return linear(p, x, None).reshape(3, 2, 2).transpose(0, 1)


def attention(p, x, y):
    return F.scaled_dot_product_attention(heads(p, x), heads(p, x.cos()), heads(p, x.sin()))


def attention_of_a_batch(p, x, y):
    q = heads(p, x)[None]
    return F.scaled_dot_product_attention(q, q.cos(), q.sin(), None, 0.0, True, scale=0.3)


def attention_behind_a_mask(p, x, y):
    return F.scaled_dot_product_attention(heads(p, x), heads(p, x.cos()), heads(p, x.sin()), MASK)


def attention_behind_masks_of_examples(p, x, y):
    return F.scaled_dot_product_attention(heads(p, x), heads(p, x), heads(p, x), MASK & (x[:, 0] < 9))


def attention_to_what_all_share(p, x, y):
    return F.scaled_dot_product_attention(heads(p, x), SHARED, SHARED.cos())


def attention_of_one_head(p, x, y):
    return F.scaled_dot_product_attention(linear(p, x, y), x, x.cos())


def attention_by_keywords_behind_masks(p, x, y):
    q, mask = heads(p, x), MASK & (x[:, 0] < 9)
    return F.scaled_dot_product_attention(query=q, key=q.cos(), value=q, attn_mask=mask)


def entropy(p, x, y):
    return F.cross_entropy(linear(p, x, y)[0], y[0])


def entropy_without_reduction(p, x, y):
    return F.cross_entropy(linear(p, x, y), y, reduction="none", ignore_index=1)


def entropy_of_positions(p, x, y):
    return F.cross_entropy(linear(p, x, y), y, ignore_index=1)


def entropy_summed(p, x, y):
    return F.cross_entropy(linear(p, x, y).mT[None], y[None], reduction="sum")


def entropy_of_probabilities(p, x, y):
    return F.cross_entropy(linear(p, x, y), x.softmax(-1))


def smoothed_entropy(p, x, y):
    return F.cross_entropy(linear(p, x, y), y, label_smoothing=0.1)


def weighted_entropy(p, x, y):
    return F.cross_entropy(linear(p, x, y), y, PARAMS["n"])


TOGETHER = {
    linear: "addmm",
    linear_of_one_position: "addmm",
    attention: "_scaled_dot_product_flash_attention_for_cpu",
    attention_of_a_batch: "_scaled_dot_product_flash_attention_for_cpu",
    attention_behind_a_mask: "_scaled_dot_product_flash_attention_for_cpu",
}
"""Losses, and the op of torch that they call once for all examples."""

APART = [
    linear_to_one_number,
    linear_with_a_bias_for_each_position,
    frozen_linear,
    layer_norm,
    layer_norm_of_all_positions,
    group_norm,
    entropy,
    entropy_without_reduction,
    entropy_of_positions,
    entropy_summed,
    attention_behind_masks_of_examples,
    attention_to_what_all_share,
    attention_of_one_head,
    attention_by_keywords_behind_masks,
    entropy_of_probabilities,
    smoothed_entropy,
    weighted_entropy,
]


class Called(TorchDispatchMode):
    """The ops that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def batch(m=M):
    x = numbers(m, 3, 4, seed=3)
    return x, torch.arange(3 * m).reshape(m, 3) % 4


def one_by_one(loss, x, y):
    points = {name: p.clone().requires_grad_() for name, p in PARAMS.items()}
    rows, values = [], []
    for example in zip(x, y, strict=True):
        values.append(loss(points, *example))
        found = torch.autograd.grad(values[-1], list(points.values()), allow_unused=True)
        rows.append(
            torch.cat([(0 * p if g is None else g).flatten() for g, p in zip(found, points.values(), strict=True)])
        )
    return torch.stack(values).detach(), torch.stack(rows).detach()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("f", [*TOGETHER, *APART], ids=lambda f: f.__name__)
def test_norms_and_directions_are_those_of_one_example_after_the_other(f):
    loss = lambda p, x, y: (f(p, x, y) ** 2).sum()
    x, y = batch()
    values, rows = one_by_one(loss, x, y)
    with Called() as called:
        squares, found, pullback = squared_norms_fn(per_example(loss))(PARAMS, x, y)
    weights = numbers(M, seed=7)
    direction = torch.cat([g.flatten() for g in pullback(weights)[0].values()])
    lengths = rows.square().sum(1)
    assert (found - values).abs().max() <= 2**8 * eps() * values.abs().max()
    check_within(squares, lengths, 2**10 * eps() * lengths)
    check_within(direction, weights @ rows, 2**10 * eps() * (weights.abs() @ lengths.sqrt()))
    if f in TOGETHER:
        assert TOGETHER[f] in called.names


def test_what_is_ignored_has_no_mean():
    x, y = batch()
    y = torch.where(torch.arange(M)[:, None] == 1, 3, y % 3)
    loss = lambda p, x, y: F.cross_entropy(linear(p, x, y), y, ignore_index=3)
    squares, values, _ = squared_norms_fn(per_example(loss))(PARAMS, x, y)
    expected, rows = one_by_one(loss, x, y)
    assert values.isnan().tolist() == expected.isnan().tolist() == [False, True, False, False]
    assert torch.equal(squares.isnan(), rows.isnan().any(1))


def masked_twice(p, x, y):
    q = heads(p, x)
    return F.scaled_dot_product_attention(q, q, q, MASK, is_causal=True)


def one_value_in_each_group(p, x, y):
    return F.group_norm(linear(p, x[:1], y), 4)


@pytest.mark.parametrize(
    ("f", "words"), [(masked_twice, "should not be set"), (one_value_in_each_group, "more than 1")]
)
def test_what_torch_refuses_of_one_example_is_refused(f, words):
    with pytest.raises((RuntimeError, ValueError), match=words):
        squared_norms_fn(per_example(lambda p, x, y: f(p, x, y).sum()))(PARAMS, *batch())
