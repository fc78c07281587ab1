"""Ranks that are about to do different things are told so, all of them, before anything of another size is sent."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import CellType, FunctionType
from typing import Any, cast

import torch
from torch import Tensor

from functional_jd.core.float64 import widest
from functional_jd.core.sharding import is_sharded, over_dimension, positions, shard_dims, shard_of
from functional_jd.torch_compat.callers import here

_DEEPEST, _SHOWN = 12, 1000

_FIRST = 1000
"""So many values travel beside the digests: 8 kB take as long as 200 bytes."""


def check_alike(parts: Mapping[str, Any], mean: Callable[[Tensor], Tensor], device: Any, cure: str) -> None:
    """Raise ValueError, on all ranks, unless each part has the same description on all: one exchange of digests.

    `parts` are named by the thing that must be alike, their number is the same on all ranks; `mean` finds the mean over
    the ranks; `device` is where their collectives take tensors.
    """
    means_if_alike([torch.zeros(0, device=device)], parts, mean, cure, waits=True)


def means_if_alike(
    values: Sequence[Tensor], parts: Mapping[str, Any], mean: Callable[[Tensor], Tensor], cure: str, waits: bool = False
) -> list[Tensor]:
    """The means over the ranks of values, if some parts are alike on all: their digests travel with the values.

    The first message has one size and one dtype, whatever the values are: with other numbers of them, ranks could not
    compare. More than 1000 values take a second message. `parts` are as for `check_alike`. If they differ, all ranks
    raise ValueError; on an accelerator, without `waits`, the means are NaN.
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
    """A digest whose mean over ranks is itself only where all have the same: small enough for rounding to show less.

    Made on the device, from a number: a copy from the host would wait for it.
    """
    dtype = widest(device)
    number = int.from_bytes(hashlib.blake2b(repr(part).encode(), digest_size=5).digest(), "big")
    return torch.full((), number % int(2.0**-10 / torch.finfo(dtype).eps), dtype=dtype, device=device)


def _shown(part: Any) -> str:
    items: list[Any] = part if isinstance(part, list) else [part]
    return ", ".join(str(item)[:_SHOWN] for item in items[:5]) + f" and {len(items) - 5} others" * (len(items) > 5)


def description(value: Any, keys: bool = True, waiting: bool = True, depth: int = 0) -> Any:
    """The common parts of ranks that build a value alike: names of functions, classes and modules, numbers, tensors.

    The package's own functions count by the values they capture too. `keys`: int64 tensors `[2]` count by their values;
    `waiting`: so do those on an accelerator, which waits for it.
    """
    if depth > _DEEPEST or value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return value if depth <= _DEEPEST else "..."
    if isinstance(value, Tensor):
        is_key = value.dtype == torch.int64 and value.shape == (2,)
        plain = not is_sharded(value) and (keys or not is_key) and (waiting or value.is_cpu)
        return [str(value.dtype), list(value.shape), int(checksums([value])[0]) if plain else ""]
    inner = partial(description, keys=keys, waiting=waiting, depth=depth + 1)
    parts = list(map(inner, _parts(value)))
    if isinstance(value, Mapping):
        return [list(map(str, cast("Mapping[Any, Any]", value))), *parts]
    if isinstance(value, list | tuple | partial):
        names = list(cast(Any, value).keywords) if isinstance(value, partial) else []
        return [type(cast(Any, value)).__name__, *names, *parts]
    if not isinstance(value, FunctionType):
        kind: Any = cast(Any, value) if isinstance(value, type) else type(value)
        return f"{kind.__module__}.{kind.__qualname__} {getattr(value, '__name__', '')}"
    name = f"{value.__module__}.{value.__qualname__}:{value.__code__.co_firstlineno}"
    return [name, *parts, *map(inner, value.__defaults__ or ())] if _is_own(value) else name


def function_names(value: Any, of_users: bool = True, depth: int = 0) -> list[str]:
    """The names of the functions and classes that a rule or an optimizer is made of, whatever its hyper-parameters.
    `of_users`: functions that are not the package's own have names too, as schedules of a rate need not.
    """
    if depth > _DEEPEST:
        return []
    names: list[str] = []
    if isinstance(value, FunctionType):
        name = value.__qualname__.partition(".<locals>")[0]
        if _is_own(value):
            names = [value.__module__.rpartition(".")[2] if name == "<lambda>" else name]
        elif of_users and not value.__qualname__.endswith("<lambda>"):
            names = [name]
    elif not isinstance(value, Mapping | list | tuple | partial):  # classes, and functions of torch
        names = [getattr(value, "__name__", "")]
    found = [*names, *(name for part in _parts(value) for name in function_names(part, of_users, depth + 1))]
    return list(dict.fromkeys(filter(None, found)))


def _parts(value: Any) -> list[Any]:
    """The parts of a rule, an optimizer or a part of one: entries, arguments, and captures of own functions."""
    if isinstance(value, Mapping):
        return list(cast("Mapping[Any, Any]", value).values())
    if isinstance(value, list | tuple):
        return list(cast("list[Any]", value))
    if isinstance(value, partial):
        bound: Any = value
        return [bound.func, *bound.args, *bound.keywords.values()]
    if isinstance(value, FunctionType) and _is_own(value):
        return [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]  # an empty one has none
    return []


def _is_own(function: FunctionType) -> bool:
    return (function.__module__ or "").startswith("functional_jd.")  # none, if exec made it


_CHUNK = 1 << 16

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_ODD = 0x1E3779B97F4A7C15
"""A factor with bits everywhere, so that neither signs nor places of many entries cancel."""


def checksums(leaves: Sequence[Any], mixed: bool = True) -> list[Tensor]:
    """A checksum of each tensor, int64 `[]`: `sum_k fold((2 k + 1) ODD fold(bits_k))` modulo 2^64, with the bits of
    entry k, and with `fold(x) = x ^ (x >> 32)`; without `mixed`, `sum_k (2 k + 1) bits_k`, which version 1 wrote.

    Each step is a bijection, so that one changed entry always changes it. That of a `DTensor` is that of the whole
    tensor: the ranks add up their parts, at the same time, one message for all leaves on the same dimensions of a mesh.
    """
    found = [_of_shard(leaf, mixed) for leaf in leaves]
    meshes: dict[Any, list[int]] = {}
    for index, leaf in enumerate(leaves):
        for key in shard_dims(leaf):
            meshes.setdefault(key, []).append(index)
    for (mesh, dim), members in meshes.items():
        total = over_dimension("sum", torch.stack([found[index] for index in members]), mesh, dim)
        for index, value in zip(members, total.unbind(), strict=True):
            found[index] = value
    return found


def _of_shard(leaf: Any, mixed: bool) -> Tensor:
    shard: Tensor = shard_of(leaf).detach().resolve_conj().resolve_neg()
    values = (torch.view_as_real(shard) if shard.is_complex() else shard).contiguous().reshape(-1)
    words = values.view(_WORDS[values.element_size()])
    parts = len(words) // max(1, shard.numel())  # of an entry: the second is the imaginary part
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    places = positions(leaf).reshape(-1) if is_sharded(leaf) else None
    step = _CHUNK * max(1, parts)
    odd, fold = (_ODD, _folded) if mixed else (1, Tensor.long)
    for start in range(0, len(words), step):
        some = words[start : start + step]
        at = torch.arange(start, start + len(some), device=words.device)
        if places is not None:
            at = places[torch.div(at, parts, rounding_mode="floor")] * parts + at % parts
        total = total + fold(at.mul_(2 * odd).add_(odd).mul_(fold(some))).sum()
    return total


def _folded(words: Tensor) -> Tensor:
    """Words of 64 bits, with the upper half xor-ed into the lower one."""
    words = words.long()
    return (words >> 32).bitwise_and_(0xFFFFFFFF).bitwise_xor_(words)
