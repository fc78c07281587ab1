"""Ranks that are about to do different things are told so, all of them, before anything of another size is sent."""

import hashlib
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor

from functional_jd.core.checksum import checksums
from functional_jd.core.sharding import is_sharded

_DEEPEST, _SHOWN = 12, 160


def check_alike(
    where: str, parts: Mapping[str, Any], least: Callable[[Tensor], Tensor], device: Any, cure: str
) -> None:
    """Raise ValueError, on all ranks, unless each part has the same description on all: one exchange of digests.

    Args:
        where: the function that the user called.
        parts: by what it is called, what must be alike; the same number of parts on all ranks.
        least: the smallest values over the ranks.
        device: where the ranks' collectives take tensors.
        cure: what to do.
    """
    digests = [_digest(repr(part)) for part in parts.values()]
    found = least(torch.tensor([*digests, *(-digest for digest in digests)], device=device)).tolist()
    other = [name for k, name in enumerate(parts) if found[k] != -found[k + len(digests)]]
    if other:
        here = "; ".join(_shown(parts[name]) for name in other)
        raise ValueError(
            f"{where}: expected {' and '.join(other)} on all ranks, found different ones; on this rank: {here}. {cure}"
        )


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


def _shown(part: Any) -> str:
    items: list[Any] = part if isinstance(part, list) else [part]
    return ", ".join(str(item)[:_SHOWN] for item in items[:5]) + f" and {len(items) - 5} others" * (len(items) > 5)


def bits_of(text: str, device: torch.device) -> Tensor:
    """A digest as 24 zeros and ones, whose means over ranks are zeros and ones only where all ranks have the same.

    Made on the device, from a number: a copy of a list would wait for it.
    """
    return (zlib.crc32(text.encode()) >> torch.arange(24, device=device)) & 1


def description(value: Any, keys: bool = True, depth: int = 0) -> Any:
    """What ranks that build a value alike have in common: names of functions, classes and modules, numbers, tensors.

    Args:
        value: a rule, an optimizer, or what such a record of functions is made of: the package's own functions by what
            they capture too, others by where they were written.
        keys: whether int64 tensors `[2]` count by their values.
        depth: how deep this value stands in another.
    """
    if depth > _DEEPEST or value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return value if depth <= _DEEPEST else "..."
    inner = partial(description, keys=keys, depth=depth + 1)
    if isinstance(value, Tensor):
        is_key = value.dtype == torch.int64 and value.shape == (2,)
        plain = not is_sharded(value) and (keys or not is_key)
        return [str(value.dtype), list(value.shape), int(checksums([value])[0]) if plain else ""]
    if isinstance(value, Mapping):
        return [[str(key), inner(item)] for key, item in cast("Mapping[Any, Any]", value).items()]
    if isinstance(value, list | tuple):
        return [type(cast(Any, value)).__name__, *map(inner, cast("list[Any]", value))]
    if isinstance(value, partial):
        return ["partial", inner(cast(Any, value).func), inner(value.args), inner(value.keywords)]
    if not isinstance(value, FunctionType):
        kind: Any = cast(Any, value) if isinstance(value, type) else type(value)
        return f"{kind.__module__}.{kind.__qualname__} {getattr(value, '__name__', '')}"
    module = value.__module__ or ""  # none, if exec made it
    name = f"{module}.{value.__qualname__}:{value.__code__.co_firstlineno}"
    if not module.startswith("functional_jd."):
        return name
    filled = [cell for cell in value.__closure__ or () if _is_filled(cell)]
    return [name, *(inner(cell.cell_contents) for cell in filled), *map(inner, value.__defaults__ or ())]


def function_names(value: Any, of_users: bool = True, depth: int = 0) -> list[str]:
    """The names of the functions and classes that a rule or an optimizer is made of, whatever its hyper-parameters.

    Args:
        value: the rule or the optimizer, or a part of it.
        of_users: whether functions that are not the package's own have names, as schedules of a rate need not.
        depth: how deep this value stands in another.
    """
    if depth > _DEEPEST:
        return []
    parts: list[Any] = []
    names: list[str] = []
    if isinstance(value, Mapping):
        parts = list(cast("Mapping[Any, Any]", value).values())
    elif isinstance(value, list | tuple):
        parts = list(cast("list[Any]", value))
    elif isinstance(value, partial):
        parts = [cast(Any, value).func, *value.args, *value.keywords.values()]
    elif not isinstance(value, FunctionType):  # classes, and functions of torch
        names = [getattr(value, "__name__", "")]
    else:
        own = (value.__module__ or "").startswith("functional_jd.")
        name = value.__qualname__.partition(".<locals>")[0]
        if own:
            names = [(value.__module__ or "").rpartition(".")[2] if name == "<lambda>" else name]
        elif of_users and not value.__qualname__.endswith("<lambda>"):
            names = [name]
        parts = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)] if own else []
    found = [*names, *(name for part in parts for name in function_names(part, of_users, depth + 1))]
    return list(dict.fromkeys(filter(None, found)))


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False
