"""Ranks that are about to do different things are told so, all of them, before anything of another size is sent."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from numbers import Number
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor

from functional_jd.core.float64 import widest
from functional_jd.core.sharding import by_shards, is_sharded, over_dimensions, positions, shard_of
from functional_jd.torch_compat.callers import here

# So many values travel beside the digests: 8 kB take as long as 200 bytes.
_FIRST = 1000


def check_alike(parts: Mapping[str, Any], mean: Callable[[Tensor], Tensor], device: Any, cure: str) -> None:
    """Raise ValueError, on all ranks, unless each part is the same on all; `device` is that of collectives."""
    means_if_alike([torch.zeros(0, device=device)], parts, mean, cure, waits=True)


def means_if_alike(
    values: Sequence[Tensor], parts: Mapping[str, Any], mean: Callable[[Tensor], Tensor], cure: str, waits: bool = False
) -> list[Tensor]:
    """The means over the ranks of values, if each named part is the same on all. If not, all ranks raise ValueError; on
    an accelerator, without `waits`, the means are NaN.
    Digests of the parts travel with the values. The first message has one size and one dtype, whatever the values are:
    with other numbers of them, ranks could not compare. More than 1000 values take a second message.
    """
    sent = torch.cat([value.reshape(-1).to(values[0].device) for value in values])
    first, rest = sent[:_FIRST], sent[_FIRST:]
    own = torch.stack([_digest(part, sent.device) for part in parts.values()])
    found = mean(torch.cat([first, own.new_zeros(_FIRST - len(first)), own]))
    alike = (found[_FIRST:].detach() - own).abs() < 0.25
    if waits := waits or alike.is_cpu:
        other = [name for name, same in zip(parts, alike.tolist(), strict=True) if not same]
        if other:
            raise ValueError(
                f"{here()}: expected {' and '.join(other)} on all ranks, found different ones; on this rank: "
                f"{'; '.join(_shown(parts[name]) for name in other)}. {cure}"
            )
    means = torch.cat([found[: len(first)], mean(rest)]) if len(rest) else found[: len(first)]
    if not waits:  # the step is skipped
        means = torch.where(alike.all(), means, torch.nan)
    split = means.split([value.numel() for value in values])
    return [part.reshape(value.shape).to(value) for part, value in zip(split, values, strict=True)]


def _digest(part: Any, device: torch.device) -> Tensor:
    """A number whose mean over ranks is itself only if all have the same: small enough for rounding to show less."""
    dtype = widest(device)
    number = int.from_bytes(hashlib.blake2b(repr(part).encode(), digest_size=5).digest(), "big")
    # No tensor of the host is copied to the device: the copy would wait for it.
    return torch.full((), number % int(2.0**-10 / torch.finfo(dtype).eps), dtype=dtype, device=device)


def _shown(part: Any) -> str:
    items: list[Any] = part if isinstance(part, list) else [part]
    return ", ".join(map(str, items))[:1000]


def description(value: Any, keys: bool = True, waiting: bool = True) -> list[Any]:
    """The common parts of ranks that build a rule or an optimizer alike: names of functions and classes, numbers.
    `keys`: int64 tensors `[2]` count by their values; `waiting`: so do tensors on an accelerator, which waits for it.
    """
    return [_described(part, keys, waiting) for part in _parts(value)]


def _described(part: Any, keys: bool, waiting: bool) -> Any:
    if part is None or isinstance(part, Number | str | bytes):
        return part
    if isinstance(part, Tensor):
        is_key = part.dtype == torch.int64 and part.shape == (2,)
        plain = not is_sharded(part) and (keys or not is_key) and (waiting or part.is_cpu)
        return [str(part.dtype), list(part.shape), int(checksums([part])[0]) if plain else ""]
    if isinstance(part, Mapping):
        return [type(part).__name__, *map(str, part)]
    if isinstance(part, partial):
        return ["partial", len(part.args), *part.keywords]
    if isinstance(part, list | tuple):
        return f"{type(part).__name__} of {len(part)}"
    if isinstance(part, FunctionType):
        return f"{part.__module__}.{part.__qualname__}:{part.__code__.co_firstlineno}"
    kind: Any = part if isinstance(part, type) else type(part)
    return f"{kind.__module__}.{kind.__qualname__} {getattr(part, '__name__', '')}"


def function_names(value: Any, of_users: bool = True) -> list[str]:
    """The names of the functions and classes that a rule or an optimizer is made of, whatever its hyper-parameters.
    `of_users`: functions that are not the package's own have names too, as schedules of a rate need not.
    """
    names: list[str] = []
    for part in _parts(value):
        if isinstance(part, FunctionType):
            name = part.__qualname__.partition(".<locals>")[0]
            if _is_own(part):
                names.append(part.__module__.rpartition(".")[2] if name == "<lambda>" else name)
            elif of_users and not part.__qualname__.endswith("<lambda>"):
                names.append(name)
        elif not isinstance(part, Mapping | list | tuple | partial):  # classes, and functions of torch
            names.append(getattr(part, "__name__", ""))
    return list(dict.fromkeys(filter(None, names)))


def _parts(value: Any, depth: int = 12) -> Iterator[Any]:
    """A rule or an optimizer, and all its parts: entries, arguments, and captures of own functions."""
    yield value
    parts: Any = ()
    if isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, list | tuple):
        parts = value
    elif isinstance(value, partial):
        parts = [value.func, *value.args, *value.keywords.values()]
    elif _is_own(value):
        cells = [cell for cell in value.__closure__ or () if cell != CellType()]  # an empty one has no contents
        parts = [*(cell.cell_contents for cell in cells), *(value.__defaults__ or ())]
    for part in parts if depth else ():
        yield from _parts(part, depth - 1)


def _is_own(value: Any) -> bool:
    module = value.__module__ if isinstance(value, FunctionType) else None  # None also of a function that exec made
    return (module or "").startswith("functional_jd.")


_CHUNK = 1 << 16
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# A factor with bits everywhere, so that neither signs nor places of many entries cancel.
_ODD = 0x1E3779B97F4A7C15


def checksums(leaves: Sequence[Any], mixed: bool = True) -> list[Tensor]:
    """A checksum of each tensor, int64 `[]`: `sum_k fold((2 k + 1) ODD fold(bits_k))` modulo 2^64, with the bits of
    entry k, and with `fold(x) = x ^ (x >> 32)`; without `mixed`, `sum_k (2 k + 1) bits_k`, which version 1 wrote.
    Each step is a bijection, so that one changed entry always changes it. That of a `DTensor` is that of the whole
    tensor: the ranks add up their parts, at the same time, one message for all leaves on the same dimensions of a mesh.
    """
    found = [_of_shard(leaf, mixed) for leaf in leaves]
    for dims, own in by_shards(leaves).items():
        if dims:
            total = over_dimensions("sum", torch.stack([found[index] for index in own]), dims)
            for index, value in zip(own, total.unbind(), strict=True):
                found[index] = value
    return found


def _of_shard(leaf: Any, mixed: bool) -> Tensor:
    shard: Tensor = shard_of(leaf).detach().resolve_conj().resolve_neg()
    places = positions(leaf) if is_sharded(leaf) else None
    if shard.is_complex():  # two entries
        shard = torch.view_as_real(shard)
        places = None if places is None else torch.stack([2 * places, 2 * places + 1], -1)
    words = shard.contiguous().reshape(-1).view(_WORDS[shard.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    odd, fold = (_ODD, _folded) if mixed else (1, Tensor.long)
    for start in range(0, len(words), _CHUNK):
        some = words[start : start + _CHUNK]
        at = torch.arange(start, start + len(some), device=words.device)
        if places is not None:
            at = places.reshape(-1)[at]
        total = total + fold(at.mul_(2 * odd).add_(odd).mul_(fold(some))).sum()
    return total


def _folded(words: Tensor) -> Tensor:
    """Words of 64 bits, with the upper half xor-ed into the lower one."""
    words = words.long()
    return (words >> 32).bitwise_and_(0xFFFFFFFF).bitwise_xor_(words)
