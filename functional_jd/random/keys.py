"""Explicit keys: random numbers as a pure function of a key, the same bits under every transform.

A key is int64 `[2]`. Use every key once: `split` it, draw with one of the new keys, and keep the others.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from functional_jd.core.arguments import check_device, is_size, refuse
from functional_jd.random.stream import ROOT, UNIFORM_BITS, draw, signed


def key(seed: int, *, device: torch.device | str | None = None) -> Tensor:
    """Create a key from an integer seed.

    Args:
        seed: from -2^63 to 2^64 - 1; negative seeds are taken modulo 2^64, as in `torch.manual_seed`.
        device: the device of the key and of all numbers drawn with it; `None` is torch's default device.

    Returns:
        int64 `[2]`.

    Laws:
        Different seeds (modulo 2^64) give different keys. The same bits on every device.

    Source:
        Steele, Lea, Flood, Fast splittable pseudorandom number generators, OOPSLA 2014 (the stride and the idea). The
        mixing constants are Stafford's variant 13, the second round is the 64-bit finaliser of MurmurHash3.
    """
    check_device("key", device)
    if isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**64:
        cure = "Convert it with int(...), or take it modulo 2**64."
        refuse("key", "seed", "a Python integer of at most 64 bits", seed, cure, ValueError)
    root = torch.tensor([seed - 2**64 if seed >= 2**63 else seed, ROOT], dtype=torch.int64, device=device)
    return draw(root, 2, "key", torch.int64)


def split(key: Tensor, n: int = 2) -> Tensor:
    """Split a key into n independent keys.

    Args:
        key: int64 `[2]`; do not use it again.
        n: the number of keys.

    Returns:
        int64 `[n, 2]`: one key per row.

    Laws:
        `split(key, n)[:k]` equals `split(key, k)`. The 2n words of one split are all different.
    """
    check_key(key, "split")
    _check_size(n, "split")
    return draw(key, 2 * n, "split", torch.int64).reshape(n, 2)


def fold_in(key: Tensor, number: int | Tensor) -> Tensor:
    """The key of a number, such as a rank or the place of an example in the whole batch.

    Args:
        key: int64 `[2]`. Do not draw with it, nor split it: fold other numbers into it.
        number: an integer from -2^63 to 2^63 - 1, or an int64 tensor `[]`.

    Returns:
        int64 `[2]`: a key that is independent of those of other numbers, and of those that `split` gives.

    Laws:
        Different numbers (modulo 2^64) give different keys. Composes with vmap, over the number too.
    """
    check_key(key, "fold_in")
    is_one = number.dtype == torch.int64 and not number.ndim if isinstance(number, Tensor) else is_size(number)
    if not is_one:
        refuse("fold_in", "number", "an integer of 64 bits, or an int64 tensor []", number, "Pass for instance a rank.")
    first, second = draw(key, 2, "fold", torch.int64).unbind()
    moved = number * ROOT if isinstance(number, Tensor) else signed(number * ROOT)
    return draw(torch.stack([first + moved, second]), 2, "key", torch.int64)


def uniform(key: Tensor, shape: Sequence[int] = (), *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw numbers from the uniform distribution on [0, 1).

    `k / 2^b`, with k a uniform integer of b bits: 53 for float64, 24 for float32, 11 for float16, 8 for bfloat16.

    Args:
        key: int64 `[2]`.
        shape: the shape of the result; may be empty.
        dtype: one of these four.

    Returns:
        `[*shape]`, on the key's device. Zero occurs with probability 2^-b, one never: for logarithms use
        `1 - uniform(...)`.

    Laws:
        In row-major order, the first n numbers do not depend on how many follow. The result has no derivative.
    """
    return _drawn("uniform", key, shape, dtype)


def normal(key: Tensor, shape: Sequence[int] = (), *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw numbers from the standard normal distribution.

    `+-sqrt(-2 log u) (cos t, sin t)`, with u uniform in (0, 1) and t in [-pi/2, pi/2), in float64, then rounded.

    Args:
        key: int64 `[2]`.
        shape: the shape of the result; may be empty.
        dtype: float64, float32, float16 or bfloat16.

    Returns:
        `[*shape]`, on the key's device; always finite, at most 8.6 in absolute value, which a normal variable exceeds
        with probability 1e-17.

    Laws:
        In row-major order, the first n numbers do not depend on how many follow. The result has no derivative. On other
        devices, the same to rounding.

    Source:
        Box and Muller, A note on the generation of random normal deviates, 1958, equation 1.
    """
    return _drawn("normal", key, shape, dtype)


def permutation(key: Tensor, n: int) -> Tensor:
    """Draw a random permutation of 0, ..., n - 1; all n! permutations are equally likely.

    Args:
        key: int64 `[2]`.
        n: the length; may be zero.

    Returns:
        int64 `[n]`, on the key's device.

    Laws:
        The permutation sorts n random words that are all different, so there are no ties.
    """
    check_key(key, "permutation")
    _check_size(n, "permutation")
    return torch.argsort(draw(key, n, "permutation", torch.int64), stable=True)


def check_key(key: Tensor, where: str) -> None:
    """Raise an error that names the function that the user called, unless this is one key."""
    if not isinstance(key, Tensor) or key.dtype != torch.int64 or tuple(key.shape) != (2,):
        kind = ValueError if isinstance(key, Tensor) and key.dtype == torch.int64 else TypeError
        cure = "Make it with functional_jd.random.key(0); for many keys use torch.vmap."
        refuse(where, "key", "an int64 key [2]", key, cure, kind)


def _check_size(n: Any, where: str) -> None:
    if not is_size(n) or n < 0:
        refuse(where, "n", "a size of at least 0", n, "Pass for instance 3.", ValueError)


def _drawn(what: str, key: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    check_key(key, what)
    if not isinstance(dtype, torch.dtype) or dtype not in UNIFORM_BITS:
        expected = ", ".join(map(str, UNIFORM_BITS))
        raise TypeError(f"{what}: dtype must be one of {expected}, found {dtype!r}. Draw in one, then convert.")
    if not isinstance(shape, list | tuple) or not all(is_size(size) and size >= 0 for size in shape):
        raise ValueError(f"{what}: shape must be sizes of at least 0, found {shape!r}. Pass for instance (3,).")
    return draw(key, math.prod(shape), what, dtype).reshape(tuple(shape))
