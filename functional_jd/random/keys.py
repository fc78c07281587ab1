"""Explicit keys: random numbers as a pure function of a key, the same bits under every transform.

A key is int64 `[2]`. Use every key once: `split` it, draw with one of the new keys, and keep the others. Its stream is
SplitMix64 seeded with the first word, xor-ed with the second word, and mixed once more.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from functional_jd.core.arguments import is_size, refuse
from functional_jd.core.float64 import has_float64
from functional_jd.torch_compat.torch_internals import dispatch_modes, torch_function_disabled, under_transform

# Each function has its own range of counters, 2^60 apart: with one key, no two of them read the same word.
_RANGES = {"key": 0, "split": 1, "uniform": 2, "normal": 3, "permutation": 4, "exponential": 5, "fold": 7}
_FIRST = {what: (place << 60) + 1 for what, place in _RANGES.items()}

UNIFORM_BITS = {
    torch.float64: (torch.int64, 53),
    torch.float32: (torch.int32, 24),
    torch.float16: (torch.int16, 11),
    torch.bfloat16: (torch.int16, 8),
}
"""For each dtype, the integer dtype of its width and the number of leading bits that its significand holds exactly."""

# The number of elements drawn at once: on a CPU they fit in the cache; on other devices every kernel launch costs time.
_CPU_CHUNK, _CHUNK = 1 << 16, 1 << 22


def signed(word: int) -> int:
    return (word + 2**63) % 2**64 - 2**63


_STRIDE = signed(0x9E3779B97F4A7C15)
_SPLITMIX64 = (30, signed(0xBF58476D1CE4E5B9), 27, signed(0x94D049BB133111EB), 31)
_FMIX64 = (33, signed(0xFF51AFD7ED558CCD), 33, signed(0xC4CEB9FE1A85EC53), 33)
ROOT = signed(0x243F6A8885A308D3)  # the first bits of pi, a "nothing-up-my-sleeve" number


def key(seed: int, *, device: torch.device | str | None = None) -> Tensor:
    """Create a key from an integer seed.

    Args:
        seed: from -2^63 to 2^64 - 1; negative seeds are taken modulo 2^64, as in `torch.manual_seed`.
        device: the device of the key and of all numbers drawn with it; `None` is torch's default device.

    Returns:
        int64 `[2]`.

    Guarantees:
        Different seeds (modulo 2^64) give different keys. The same bits on every device.

    Source:
        Steele, Lea, Flood, Fast splittable pseudorandom number generators, OOPSLA 2014 (the stride and the idea). The
        mixing constants are Stafford's variant 13, the second round is the 64-bit finaliser of MurmurHash3.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**64:
        cure = "Convert it with int(...), or take it modulo 2**64."
        refuse("seed", "a Python integer of at most 64 bits", seed, cure, ValueError)
    root = torch.tensor([seed - 2**64 if seed >= 2**63 else seed, ROOT], dtype=torch.int64, device=device)
    return draw(root, 2, "key", torch.int64)


def split(key: Tensor, n: int = 2) -> Tensor:
    """Split a key into n independent keys.

    Args:
        key: int64 `[2]`; do not use it again.
        n: the number of keys.

    Returns:
        int64 `[n, 2]`: one key per row.

    Guarantees:
        `split(key, n)[:k]` equals `split(key, k)`. The 2n words of one split are all different.
    """
    check_key(key)
    _check_size(n)
    return draw(key, 2 * n, "split", torch.int64).reshape(n, 2)


def fold_in(key: Tensor, number: int | Tensor) -> Tensor:
    """The key of a number, such as a rank or the place of an example in the whole batch.

    Args:
        key: int64 `[2]`. Do not draw with it or split it: fold other numbers into it.
        number: an integer from -2^63 to 2^63 - 1, or an int64 tensor `[]`.

    Returns:
        int64 `[2]`: a key that is independent of others, and of those that `split` gives.

    Guarantees:
        Different numbers (modulo 2^64) give different keys. Composes with vmap, over the number too.
    """
    check_key(key)
    is_one = number.dtype == torch.int64 and not number.ndim if isinstance(number, Tensor) else is_size(number)
    if not is_one:
        refuse("number", "an integer of 64 bits, or an int64 tensor []", number, "Pass for instance a rank.")
    first, second = draw(key, 2, "fold", torch.int64).unbind()
    moved = number * ROOT if isinstance(number, Tensor) else signed(int(number) * ROOT)  # NumPy's integers overflow
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

    Guarantees:
        In row-major order, the first n numbers do not depend on how many follow. The result has no derivative.
    """
    return _shaped("uniform", key, shape, dtype)


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

    Guarantees:
        In row-major order, the first n numbers do not depend on how many follow. The result has no derivative. On other
        devices, the same to rounding.

    Source:
        Box and Muller, A note on the generation of random normal deviates, 1958, equation 1.
    """
    return _shaped("normal", key, shape, dtype)


def permutation(key: Tensor, n: int) -> Tensor:
    """Draw a random permutation of 0, ..., n - 1; all n! permutations are equally likely.

    Args:
        key: int64 `[2]`.
        n: the length; may be zero.

    Returns:
        int64 `[n]`, on the key's device.

    Guarantees:
        The permutation sorts n random words that are all different, so none tie.
    """
    check_key(key)
    _check_size(n)
    return torch.argsort(draw(key, n, "permutation", torch.int64), stable=True)


def check_key(key: Tensor) -> None:
    """Raise an error that names the function that the user called, unless this is one key."""
    if not isinstance(key, Tensor) or key.dtype != torch.int64 or tuple(key.shape) != (2,):
        kind = ValueError if isinstance(key, Tensor) and key.dtype == torch.int64 else TypeError
        cure = "Make it with functional_jd.random.key(0); for many keys use torch.vmap."
        refuse("key", "an int64 key [2]", key, cure, kind)


def _check_size(n: Any) -> None:
    if not is_size(n) or n < 0:
        refuse("n", "a size of at least 0", n, "Pass for instance 3.", ValueError)


def _shaped(what: str, key: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    check_key(key)
    if not isinstance(dtype, torch.dtype) or dtype not in UNIFORM_BITS:
        expected = ", ".join(map(str, UNIFORM_BITS))
        raise TypeError(f"{what}: dtype must be one of {expected}, found {dtype!r}. Draw in one, then convert.")
    if not isinstance(shape, list | tuple) or not all(is_size(size) and size >= 0 for size in shape):
        raise ValueError(f"{what}: shape must be sizes of at least 0, found {shape!r}. Pass for instance (3,).")
    return draw(key, math.prod(shape), what, dtype).reshape(tuple(shape))


def draw(keys: Tensor, n: int, what: str, dtype: torch.dtype) -> Tensor:
    """Draw the first n words (int64) or numbers of the streams of keys `[*, 2]`: `[*, n]`."""
    if under_transform() or keys.is_meta or dispatch_modes():  # one operator, also for a graph that a compiler may get
        return draw_op(keys, n, what, dtype)
    if not (keys.is_cpu or has_float64(keys.device)):
        return draw(keys.cpu(), n, what, dtype).to(keys.device)
    with torch_function_disabled():  # calling the op takes longer than drawing a few numbers
        return _drawn(keys, n, what, dtype)


def draw_normals(keys: Tensor, counts: list[int], dtype: torch.dtype) -> Iterator[Tensor]:
    """Normal numbers, so many for each key `[k, 2]`; off the CPU, the short draws in the launches of one."""
    short = [i for i, n in enumerate(counts) if n <= _CPU_CHUNK and not keys.is_cpu]
    together: dict[int, Tensor] = {}
    if len(short) > 1:
        some = torch.stack([keys[i] for i in short])
        together = dict(zip(short, draw(some, max(counts[i] for i in short), "normal", dtype), strict=True))
    for i, n in enumerate(counts):
        yield together[i][:n] if i in together else draw(keys[i], n, "normal", dtype)


def draw_at(key: Tensor, positions: Tensor, what: str, dtype: torch.dtype) -> Tensor:
    """The numbers of `draw` for a key at some positions, which are int64: shaped like `positions`.

    For ranks that need a part of the numbers, not in one piece.
    """
    pair = 2 * (8 // UNIFORM_BITS[dtype][0].itemsize if what == "uniform" else 1)  # the numbers of two words
    found = [positions.new_empty(0, dtype=dtype)]
    for some in positions.reshape(-1).split(_CPU_CHUNK if positions.is_cpu else _CHUNK):
        first = 2 * torch.div(some, pair, rounding_mode="floor")
        counters = torch.stack([first, first + 1], dim=-1).flatten() + _FIRST[what]
        words = _words(key.to(some.device).reshape(1, 2), counters)
        numbers = _numbers(words, what, dtype).reshape(len(some), pair)
        found.append(numbers.gather(1, some.remainder(pair)[:, None]).flatten().to(dtype))
    return torch.cat(found).reshape(positions.shape)


# A custom op, because a compiler may fuse floating-point operations and does not guarantee how integers overflow.
@torch.library.custom_op("functional_jd::draw", mutates_args=())
def draw_op(keys: Tensor, n: int, what: str, dtype: torch.dtype) -> Tensor:
    """`draw` as one op for transforms."""
    return _drawn(keys, n, what, dtype)


def _drawn(keys: Tensor, n: int, what: str, dtype: torch.dtype) -> Tensor:
    per_word = 8 // UNIFORM_BITS[dtype][0].itemsize if what == "uniform" else 1
    shape = torch.Size((*keys.shape[:-1], n))
    chunk = _CPU_CHUNK if keys.device.type == "cpu" else _CHUNK
    width, rows = max(1, min(n, chunk)), shape[:-1].numel()

    def piece(some_keys: Tensor, start: int, columns: int) -> Tensor:
        counters = torch.arange(start, start + _words_for(columns, per_word), device=keys.device)
        return _numbers(_words(some_keys, counters), what, dtype)[:, :columns]

    if 0 < rows * n <= chunk:
        return piece(keys.reshape(rows, 2), _FIRST[what], n).to(dtype).contiguous().view(shape)
    out = keys.new_empty(shape, dtype=dtype)
    blocks = zip(keys.reshape(rows, 2).split(chunk // width), out.view(rows, n).split(chunk // width), strict=True)
    for some_keys, some_rows in blocks:
        start = _FIRST[what]
        for some in some_rows.split(width, dim=1):
            some.copy_(piece(some_keys, start, some.shape[1]))
            start += _words_for(some.shape[1], per_word)
    return out


def _words_for(n: int, per_word: int) -> int:
    """How many words n numbers need: an even number, as normal numbers are made in pairs."""
    return 2 * -(-n // (2 * per_word))


@draw_op.register_fake
def _(keys: Tensor, n: int, what: str, dtype: torch.dtype) -> Tensor:  # noqa: ARG001
    return keys.new_empty((*keys.shape[:-1], n), dtype=dtype)


@draw_op.register_vmap
def _(_info: Any, in_dims: tuple[int, ...], keys: Tensor, n: int, what: str, dtype: torch.dtype) -> tuple[Tensor, int]:
    return draw_op(keys.movedim(in_dims[0], 0), n, what, dtype), 0


def _words(keys: Tensor, counters: Tensor) -> Tensor:
    words = torch.add(keys[:, :1], counters, alpha=_STRIDE)
    return _mixed(_mixed(words, *_SPLITMIX64).bitwise_xor_(keys[:, 1:]), *_FMIX64)


def _mixed(words: Tensor, first: int, left: int, second: int, right: int, third: int) -> Tensor:
    """Mix the words in place; a bijection of 64-bit words."""
    _xor_shifted(words, first).mul_(left)
    _xor_shifted(words, second).mul_(right)
    return _xor_shifted(words, third)


def _xor_shifted(words: Tensor, shift: int) -> Tensor:
    # torch shifts in copies of the sign bit; the mixers need zeros
    return words.bitwise_xor_((words >> shift).bitwise_and_((1 << (64 - shift)) - 1))


def _numbers(words: Tensor, what: str, dtype: torch.dtype) -> Tensor:
    if what == "uniform":
        return _uniform(words, dtype)
    if what == "exponential":
        return -_open_uniform(words).log()
    return _normal(words) if what == "normal" else words


def _uniform(words: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert the leading bits of signed integers, shifted from [-1/2, 1/2) to [0, 1); every step is exact."""
    integer, bits = UNIFORM_BITS[dtype]
    signed = words.view(integer).bitwise_right_shift_(8 * integer.itemsize - bits)
    return signed.to(dtype).mul_(2.0**-bits).add_(0.5)


def _open_uniform(words: Tensor) -> Tensor:
    """Convert the leading 52 bits to the middle of their interval: float64, never 0 and never 1."""
    return (words >> 12).double().mul_(2.0**-52).add_(0.5 + 2.0**-53)


def _normal(words: Tensor) -> Tensor:
    """Apply the Box-Muller transform: a radius with a sign, and an angle in [-pi/2, pi/2)."""
    word, angle = words[:, 0::2], words[:, 1::2]
    radius = (-2 * _open_uniform(word).log()).sqrt_() * (1 - 2 * (angle & 1))
    angle = (angle >> 11).double().mul_(math.pi / 2 * 2.0**-52)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=-1).flatten(1)
