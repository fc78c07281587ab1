"""The loss scale as a record: how it starts, what it may hold, and the dicts of `torch.amp.GradScaler`."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_jd.core.arguments import (
    ABOVE_0_TO_1,
    Domain,
    check_integer,
    check_mapping,
    check_number,
    check_type,
    is_size,
    refuse,
)
from functional_jd.core.float64 import widest
from functional_jd.core.record_display import displayed_as, outline
from functional_jd.torch_compat.callers import here

_SCALES = Domain(lambda x: 2.0**-149 <= x <= torch.finfo(torch.float32).max, "positive and finite in float32")
_DOMAINS = {
    "init_scale": _SCALES,
    "scale": _SCALES,
    "growth_factor": Domain(lambda x: 1.0 <= x < float("inf"), "finite and at least 1"),
    "backoff_factor": ABOVE_0_TO_1,
}
_DEFAULTS = "The defaults of GradScaler are 2.0**16, 2.0, 0.5 and 2000."
# The keys of GradScaler.state_dict(), in its order, with the dtypes of the fields of ScaleState.
_ENTRIES = {
    "scale": torch.float32,
    "growth_factor": torch.float64,
    "backoff_factor": torch.float64,
    "growth_interval": torch.int32,
    "_growth_tracker": torch.int32,
}


@displayed_as(outline)
class ScaleState(NamedTuple):
    """The five entries of `GradScaler.state_dict()`, each a tensor `[]`, or `[m]` for one scale per objective.

    In `no_scale()` the last three are `()`: a scale that nothing changes.

    Attributes:
        scale: float32; the factor of the losses.
        growth_tracker: int32; the number of finite steps since the scale last changed.
        growth_factor: float64, or float32 on a device without; the scale is multiplied by it after `growth_interval`
            finite steps in a row.
        backoff_factor: as `growth_factor`; the scale is multiplied by it after a non-finite step.
        growth_interval: int32; if 0 or negative, the scale never grows.
    """

    scale: Tensor
    growth_tracker: Tensor
    growth_factor: Tensor | tuple[()]
    backoff_factor: Tensor | tuple[()]
    growth_interval: Tensor | tuple[()]


def scale_state(
    init_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    *,
    shape: int | tuple[int, ...] = (),
    device: torch.device | str | None = None,
) -> ScaleState:
    """Create a loss scale.

    Args:
        init_scale: the initial scale, positive and finite in float32. Below 2**-14, it never backs off.
        growth_factor: finite and at least 1.
        backoff_factor: in (0, 1].
        growth_interval: the number of finite steps until the scale grows; if 0 or negative, it never grows.
        shape: `()` for one scale, `(m,)` or `m` for one per objective.
        device: the device of the five tensors.

    Returns:
        `ScaleState` with five tensors of the given shape.

    Differences: from GradScaler, in that factors of 1 are allowed: the scale then does not grow, or does not back off.

    Example:
        >>> scale_state(2.0**10, shape=(2,)).scale
        tensor([1024., 1024.])
    """
    sizes = _sizes(shape)
    given = {"init_scale": init_scale, "growth_factor": growth_factor, "backoff_factor": backoff_factor}
    for name, value in (given | {"growth_interval": growth_interval}).items():
        _check(name, value, _DEFAULTS)
    wide = torch.float64 if device is None else widest(torch.device(device))
    return ScaleState(
        scale=torch.full(sizes, init_scale, dtype=torch.float32, device=device),
        growth_tracker=torch.zeros(sizes, dtype=torch.int32, device=device),
        growth_factor=torch.full(sizes, growth_factor, dtype=wide, device=device),
        backoff_factor=torch.full(sizes, backoff_factor, dtype=wide, device=device),
        growth_interval=torch.full(sizes, growth_interval, dtype=torch.int32, device=device),
    )


def _sizes(shape: Any) -> tuple[int, ...]:
    sizes: Any = (shape,) if is_size(shape) else shape
    if not (isinstance(sizes, list | tuple) and len(sizes) < 2 and all(is_size(m) and m > 0 for m in sizes)):
        cure = "For several models use vmap over states."
        refuse("shape", "() for one scale, (m,) for one per objective", shape, cure, ValueError)
    return tuple(sizes)


def _check(name: str, value: Any, cure: str) -> None:
    """Raise for a number that a field of `ScaleState` may not have."""
    if name in _DOMAINS:
        check_number(name, value, _DOMAINS[name], cure)
    else:
        check_integer(name, value, -(2**31), cure)


def no_scale(*, device: torch.device | str | None = None) -> ScaleState:
    """Create a scale of 1 that `update_scale` never changes, for steps without loss scaling.

    Args:
        device: the device of the two tensors.

    Returns:
        `ScaleState` with two tensors `[]`, and `()` for what says how a scale changes.
    """
    one = torch.ones((), dtype=torch.float32, device=device)
    return ScaleState(one, torch.zeros((), dtype=torch.int32, device=device), (), (), ())


def is_scaled(state: ScaleState) -> bool:
    """Return whether a state is another than `no_scale()`, by its structure."""
    return isinstance(state.growth_interval, Tensor)


def scale_state_to_dict(state: ScaleState) -> dict[str, Any]:
    """Convert a state to the dict of `torch.amp.GradScaler.state_dict()`: plain numbers, or lists of m.

    Args:
        state: the state; its values are copied from the device.

    Returns:
        A dict with the keys of `GradScaler.state_dict()`, in its order; it can be saved as JSON. `no_scale()` gives
        a scale of 1 whose factors are 1.

    Guarantees:
        `scale_state_from_dict` reverses it, bit for bit, except for `no_scale()`.
    """
    check_type("state", state, ScaleState, "Create one with scale_state().")
    if not is_scaled(state):
        state = scale_state(1.0, 1.0, 1.0, 1)
    return {key: getattr(state, key.removeprefix("_")).tolist() for key in _ENTRIES}


def scale_state_from_dict(
    entries: Mapping[str, Any], *, shape: int | tuple[int, ...] = (), device: torch.device | str | None = None
) -> ScaleState:
    """Convert the dict of `torch.amp.GradScaler.state_dict()` or `scale_state_to_dict` to a state.

    Args:
        entries: `scale`, `growth_factor`, `backoff_factor`, `growth_interval` and `_growth_tracker`; each a number, or
            a list of m numbers for one scale per objective. If some are lists, a number applies to all m.
        shape: `(m,)` or `m` to give each of m objectives the one scale of a `GradScaler`; `()`: the shape in `entries`.
        device: the device of the five tensors.

    Returns:
        `ScaleState` with tensors `[]`, or `[m]` if there are lists.
    """
    cure = "Pass GradScaler.state_dict() unchanged, or start again with scale_state()."
    check_mapping("entries", entries, cure)
    if wrong := sorted(map(str, entries.keys() ^ _ENTRIES.keys())):
        raise ValueError(
            f"{here()}: entries must have the keys {list(_ENTRIES)}, found missing or unknown {wrong}. {cure} A "
            "disabled GradScaler has none: take no_scale()."
        )
    lengths = {len(entry) for entry in entries.values() if isinstance(entry, list)}
    sizes = _sizes(shape) or tuple(lengths)
    if 0 in lengths or lengths - set(sizes[:1]):
        raise ValueError(
            f"{here()}: shape must be that of the lists, and every list must have m numbers, found {sizes} and "
            f"{dict(entries)}. {cure}"
        )
    tensors: dict[str, Tensor] = {}
    for key, dtype in _ENTRIES.items():
        for value in entries[key] if isinstance(entries[key], list) else [entries[key]]:
            _check(key, value, cure)
        tensor = torch.tensor(entries[key], dtype=dtype, device=device)
        tensors[key.removeprefix("_")] = tensor.expand(sizes).contiguous()
    return ScaleState(**tensors)
