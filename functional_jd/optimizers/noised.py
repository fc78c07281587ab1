"""Noise for differential privacy, as an optimizer around another."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_jd.core.arguments import POSITIVE, check_number
from functional_jd.core.rows import at_least_float32
from functional_jd.core.sharding import is_sharded, positions, shard_of, sharded_as
from functional_jd.core.tree import any_sharded, floating_leaves
from functional_jd.core.types import Direction, Params, Tree
from functional_jd.optimizers.base import Optimizer, check_inner, check_settings, in_dtype_of
from functional_jd.random import normal, split
from functional_jd.random.keys import check_key, draw_at, draw_normals


class NoisedState(NamedTuple):
    """The state of `noised`.

    Attributes:
        key: int64 `[2]`: the key of the next step.
        inner: the state of the optimizer inside.
    """

    key: Tensor
    inner: Tree


def noised(
    optimizer: Optimizer, key: Tensor, multiplier: float | Tensor, max_norm: float | Tensor, batch_size: float | Tensor
) -> Optimizer:
    """Add Gaussian noise to a sum of clipped gradients, and divide by the size of the batch: private training (DP-SGD).

    `(direction + multiplier max_norm z) / batch_size`, z standard normal, goes to the optimizer inside.

    Args:
        optimizer: the optimizer that receives the noisy mean.
        key: int64 `[2]`, from `functional_jd.random.key`; do not use it again.
        multiplier: the standard deviation of the noise in units of `max_norm`; not negative. A number or a tensor
            `[]`, as are the next two.
        max_norm: the largest norm of a row in the direction, as for `clipped`; 1 for `auto_clipped`; not negative. For
            `grouped` clipping, the root of the sum of the squares.
        batch_size: the expected number of examples in a batch, not that of this batch, which a private sampler draws at
            random; positive.

    Returns:
        An `Optimizer` with the state `NoisedState(key, inner)`. Noise and mean are at least float32.

    Raises:
        ValueError: in `train_state` outside `vmap`, losses that are not those of `per_example`, or a rule that does not
            bound every row by `max_norm`, as the noise would protect no example. `private` builds what fits.

    Guarantees:
        The optimizer inside receives noise of standard deviation `multiplier max_norm / batch_size` in every entry,
        independent of others. The same key gives the same noise on every device, under every transform and on any
        number of ranks that hold shards. With multiplier 0, the optimizer inside with the direction divided by
        `batch_size`. For a grid of bounds c by `vmap`, take `private(max_norm=c)`: another bound of the rule goes
        unnoticed there.

    Source:
        Abadi et al., Deep learning with differential privacy, CCS 2016, arXiv 1607.00133, algorithm 1.

    Differences:
        From Opacus: the key makes runs repeatable, and is not a secure generator of random numbers. Nothing is
        accounted for: give multiplier, sampling rate and number of calls, those of skipped steps too, to Opacus's
        accountants or `dp_accounting`. Whether a step is skipped depends on the examples.
    """
    check_noise(optimizer, key, batch_size, multiplier=multiplier, max_norm=max_norm)

    def init(params: Params) -> NoisedState:
        leaves, _ = floating_leaves(params)
        return NoisedState(key.to(leaves[0].device), optimizer.init(params))

    def noisy_mean(direction: Direction, key: Tensor) -> Direction:
        leaves, structure = floating_leaves(direction)
        keys, dtypes = split(key, len(leaves)), [torch.promote_types(leaf.dtype, torch.float32) for leaf in leaves]
        if any_sharded(leaves) or len(set(dtypes)) > 1:
            noises = map(_noise, keys, leaves, dtypes)
        else:
            noises = draw_normals(keys, [leaf.numel() for leaf in leaves], dtypes[0])
        return structure.unflatten(list(map(mean, leaves, noises)))

    def mean(leaf: Tensor, noise: Tensor) -> Tensor:
        x = at_least_float32(shard_of(leaf))
        noise = noise.to(x.device).view(x.shape)
        return sharded_as((x + in_dtype_of(multiplier * max_norm, x) * noise) / in_dtype_of(batch_size, x), leaf)

    def update(direction: Direction, state: NoisedState, params: Params) -> tuple[Params, NoisedState]:
        now, later = split(state.key)
        params, inner = optimizer.update(noisy_mean(direction, now), state.inner, params)
        return params, NoisedState(later, inner)

    return Optimizer(init, update, sensitivity=max_norm)


def _noise(key: Tensor, leaf: Tensor, dtype: torch.dtype) -> Tensor:
    if is_sharded(leaf):
        return draw_at(key, positions(leaf), "normal", dtype)
    return normal(key, leaf.shape, dtype=dtype)


def check_noise(optimizer: Any, key: Any, batch_size: Any, **others: Any) -> None:
    """Refuse other things than an optimizer, a key and settings, in the name of the function that the user called."""
    check_inner(optimizer, cure="sgd(0.1).")
    check_settings(tensors=tuple(others), **others)
    check_number("batch_size", batch_size, POSITIVE, "It counts examples.", tensors=True)
    check_key(key)
