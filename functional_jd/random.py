"""Explicit keys: random numbers as a pure function of a key, bit-identical under every transform and on every device.

A key is int64 `[2]`. Its stream is SplitMix64 seeded with the first word, xor-ed with the second word, and mixed once
more. Use every key once: `split` it, draw with one of the new keys, and keep the others.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# Each function has its own range of counters, 2^60 apart: with one key, no two of them read the same word.
_RANGES = {"key": 0, "split": 1, "uniform": 2, "normal": 3, "permutation": 4}

# For each dtype, the integer dtype of its width and the number of leading bits that its significand holds exactly.
_UNIFORM_BITS = {
    torch.float64: (torch.int64, 53),
    torch.float32: (torch.int32, 24),
    torch.float16: (torch.int16, 11),
    torch.bfloat16: (torch.int16, 8),
}

# The number of elements drawn at once: on a CPU they fit in the cache; on other devices every kernel launch costs time.
_CPU_CHUNK, _CHUNK = 1 << 16, 1 << 22


def _signed(word: int) -> int:
    return (word + 2**63) % 2**64 - 2**63


_STRIDE = _signed(0x9E3779B97F4A7C15)
_SPLITMIX64 = (30, _signed(0xBF58476D1CE4E5B9), 27, _signed(0x94D049BB133111EB), 31)
_FMIX64 = (33, _signed(0xFF51AFD7ED558CCD), 33, _signed(0xC4CEB9FE1A85EC53), 33)
_ROOT = _signed(0x243F6A8885A308D3)  # the first bits of pi, a "nothing-up-my-sleeve" number

# Taylor coefficients of sin(x)/x in x^2 for |x| <= pi/4, and of artanh(z)/z in z^2 for |z| <= 0.172. The truncation
# error is below 2^-53.
_SINE = [(-1.0) ** k / math.factorial(2 * k + 1) for k in range(9)]
_ARTANH = [1 / (2 * k + 1) for k in range(11)]


def key(seed: int, *, device: torch.device | str | None = None) -> Tensor:
    """Create a key from an integer seed.

    Args:
        seed: from -2^63 to 2^64 - 1; negative seeds are taken modulo 2^64, as in `torch.manual_seed`.
        device: the device of the key and of all numbers drawn with it; `None` is torch's default device.

    Returns:
        int64 `[2]`.

    Raises:
        TypeError: `seed` is not a Python integer.
        ValueError: `seed` has more than 64 bits.

    Laws:
        Different seeds (modulo 2^64) give different keys. The same bits on every device.

    Source:
        Steele, Lea, Flood, Fast splittable pseudorandom number generators, OOPSLA 2014 (the stride and the idea). The
        mixing constants are Stafford's variant 13, the second round is the 64-bit finaliser of MurmurHash3.
    """
    if not isinstance(seed, int):
        raise TypeError(f"key: expected a Python integer, found {type(seed).__name__}. Convert it with int(...) first.")
    if seed < -(2**63) or seed >= 2**64:
        raise ValueError(f"key: expected at most 64 bits, found {seed}. Take it modulo 2**64, or hash it first.")
    root = torch.tensor([seed - 2**64 if seed >= 2**63 else seed, _ROOT], dtype=torch.int64, device=device)
    return _draw(root, 2, "key", torch.int64)


def split(key: Tensor, n: int = 2) -> Tensor:
    """Split a key into n independent keys.

    Args:
        key: int64 `[2]`; do not use it again.
        n: the number of keys.

    Returns:
        int64 `[n, 2]`: one key per row.

    Raises:
        TypeError, ValueError: `key` is not a key, or `n` is negative.

    Laws:
        `split(key, n)[:k]` equals `split(key, k)`. The 2n words of one split are all different.
    """
    _check_key(key, "split")
    _check_size(n, "split")
    return _draw(key, 2 * n, "split", torch.int64).reshape(n, 2)


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

    Raises:
        TypeError, ValueError: `key` is not a key, `dtype` is not one of the four, or a size is negative.

    Laws:
        In row-major order, the first n numbers do not depend on how many follow. The result has no derivative.
    """
    _check_key(key, "uniform")
    return _draw(key, _count(shape, dtype, "uniform"), "uniform", dtype).reshape(tuple(shape))


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

    Raises:
        TypeError, ValueError: `key` is not a key, `dtype` is not one of the four, or a size is negative.

    Laws:
        In row-major order, the first n numbers do not depend on how many follow. The result has no derivative. The same
        bits on every device, since only sums, products and quotients are used, which are rounded identically.

    Source:
        Box and Muller, A note on the generation of random normal deviates, 1958, equation 1.
    """
    _check_key(key, "normal")
    return _draw(key, _count(shape, dtype, "normal"), "normal", dtype).reshape(tuple(shape))


def permutation(key: Tensor, n: int) -> Tensor:
    """Draw a random permutation of 0, ..., n - 1; all n! permutations are equally likely.

    Args:
        key: int64 `[2]`.
        n: the length; may be zero.

    Returns:
        int64 `[n]`, on the key's device.

    Raises:
        TypeError, ValueError: `key` is not a key, or `n` is negative.

    Laws:
        The permutation sorts n random words that are all different, so there are no ties.
    """
    _check_key(key, "permutation")
    _check_size(n, "permutation")
    return torch.argsort(_draw(key, n, "permutation", torch.int64), stable=True)


# A custom op, because a compiler may fuse floating-point operations and does not guarantee how integers overflow.
@torch.library.custom_op("functional_jd::draw", mutates_args=())
def _draw(keys: Tensor, n: int, what: str, dtype: torch.dtype) -> Tensor:
    """Draw the first n words (int64) or numbers of the streams of keys `[*, 2]`: `[*, n]`."""
    out = keys.new_empty((*keys.shape[:-1], n), dtype=dtype)
    chunk = _CPU_CHUNK if keys.device.type == "cpu" else _CHUNK
    width = max(1, min(n, chunk))
    per_word = 8 // _UNIFORM_BITS[dtype][0].itemsize if what == "uniform" else 1
    steps = torch.arange(width + 1, device=keys.device).mul_(_STRIDE)
    rows, height = out.shape[:-1].numel(), chunk // width
    blocks = zip(keys.reshape(rows, 2).split(height), out.view(rows, n).split(height), strict=True)
    for some_keys, some_rows in blocks:
        start = (_RANGES[what] << 60) + 1
        for piece in some_rows.split(width, dim=1):
            count = 2 * -(-piece.shape[1] // (2 * per_word))  # even, as normal numbers are made in pairs
            words = _words(some_keys, start, steps[:count])
            piece.copy_(_numbers(words, what, dtype)[:, : piece.shape[1]])
            start += count
    return out


@_draw.register_fake
def _(keys: Tensor, n: int, what: str, dtype: torch.dtype) -> Tensor:  # noqa: ARG001
    return keys.new_empty((*keys.shape[:-1], n), dtype=dtype)


@_draw.register_vmap
def _(_info: Any, in_dims: tuple[int, ...], keys: Tensor, n: int, what: str, dtype: torch.dtype) -> tuple[Tensor, int]:
    return _draw(keys.movedim(in_dims[0], 0), n, what, dtype), 0


def _words(keys: Tensor, start: int, steps: Tensor) -> Tensor:
    words = (keys[:, :1] + _signed(start * _STRIDE)) + steps
    scratch = torch.empty_like(words)
    _mix(words, scratch, *_SPLITMIX64)
    words.bitwise_xor_(keys[:, 1:])
    _mix(words, scratch, *_FMIX64)
    return words


def _mix(words: Tensor, scratch: Tensor, first: int, left: int, second: int, right: int, third: int) -> None:
    """Mix the words in place; a bijection of 64-bit words."""
    _xor_shifted(words, scratch, first).mul_(left)
    _xor_shifted(words, scratch, second).mul_(right)
    _xor_shifted(words, scratch, third)


def _xor_shifted(words: Tensor, scratch: Tensor, shift: int) -> Tensor:
    torch.bitwise_right_shift(words, shift, out=scratch)
    scratch.bitwise_and_((1 << (64 - shift)) - 1)  # torch shifts in copies of the sign bit; the mixers need zeros
    return words.bitwise_xor_(scratch)


def _numbers(words: Tensor, what: str, dtype: torch.dtype) -> Tensor:
    if what == "uniform":
        return _uniform(words, dtype)
    return _normal(words) if what == "normal" else words


def _uniform(words: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert the leading bits of signed integers, shifted from [-1/2, 1/2) to [0, 1); every step is exact."""
    integer, bits = _UNIFORM_BITS[dtype]
    signed = words.view(integer).bitwise_right_shift_(8 * integer.itemsize - bits)
    return signed.to(dtype).mul_(2.0**-bits).add_(0.5)


def _normal(words: Tensor) -> Tensor:
    """Apply the Box-Muller transform; with half of the angle, at most pi/4, a single sine is enough."""
    u = (words[:, 0::2] >> 12).double().mul_(2.0**-52).add_(0.5 + 2.0**-53)
    angle = words[:, 1::2]
    radius = _sqrt(-2 * _log(u)) * (1 - 2 * (angle & 1))
    half = (angle >> 11).double().mul_(math.pi / 4 * 2.0**-52)
    sine = half * _series(half * half, _SINE)
    square = sine * sine  # cos 2x = 1 - 2 sin^2 x, sin 2x = 2 sin x cos x
    return torch.stack([radius * (1 - 2 * square), radius * 2 * sine * _sqrt(1 - square)], dim=-1).flatten(1)


def _log(u: Tensor) -> Tensor:
    """`log(2^e f) = e log 2 + 2 artanh z`, `z = (f - 1) / (f + 1)`, f in [sqrt(1/2), sqrt 2): below 0 for u < 1."""
    fraction, exponent = torch.frexp(u)
    below = (fraction < math.sqrt(0.5)).double()
    fraction = fraction * (1 + below)
    z = (fraction - 1) / (fraction + 1)
    return (exponent - below) * math.log(2) + 2 * z * _series(z * z, _ARTANH)


def _sqrt(x: Tensor) -> Tensor:
    """Heron's method for normal x, started at half of the exponent; devices differ in the last bit of `torch.sqrt`."""
    root = ((x.view(torch.int64) >> 1) + (1023 << 51)).view(torch.float64)
    for _ in range(4):
        root = (x / root).add_(root).mul_(0.5)
    return root


def _series(x: Tensor, coefficients: list[float]) -> Tensor:
    """`sum_k c_k x^k`; products and sums are separate in-place operations, so that no device fuses their rounding."""
    total = torch.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total.mul_(x).add_(coefficient)
    return total


def _check_key(key: Tensor, where: str) -> None:
    if not isinstance(key, Tensor) or key.dtype != torch.int64:
        found = str(key.dtype) if isinstance(key, Tensor) else type(key).__name__
        raise TypeError(f"{where}: expected an int64 key, found {found}. Make one with functional_jd.random.key(0).")
    if tuple(key.shape) != (2,):
        raise ValueError(
            f"{where}: expected one key of shape [2], found {list(key.shape)}. Make one with "
            "functional_jd.random.key(0); for many keys at once use torch.vmap."
        )


def _check_size(n: int, where: str) -> None:
    if n < 0:
        raise ValueError(f"{where}: expected n of at least 0, found {n}. Pass a non-negative integer.")


def _count(shape: Sequence[int], dtype: torch.dtype, where: str) -> int:
    """Return the number of elements of a shape, after checking the shape and the dtype."""
    if dtype not in _UNIFORM_BITS:
        expected = ", ".join(str(dtype) for dtype in _UNIFORM_BITS)
        raise TypeError(f"{where}: expected one of {expected}, found {dtype}. Draw in one of these, then convert.")
    if isinstance(shape, int):
        raise TypeError(f"{where}: expected a sequence of sizes, found the integer {shape}. Write ({shape},) instead.")
    if any(size < 0 for size in shape):
        raise ValueError(f"{where}: expected sizes of at least 0, found {list(shape)}. A size of -1 is not inferred.")
    return math.prod(shape)
