"""Conversion of scale states to and from the dicts of `torch.amp.GradScaler.state_dict()`."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from functional_jd.core.arguments import check_device, check_mapping, check_type, described
from functional_jd.precision.scale_state import ScaleState, is_scaled, range_of, scale_state

# The keys of GradScaler.state_dict(), in its order, with the field of ScaleState and its dtype.
_ENTRIES = {
    "scale": ("scale", torch.float32),
    "growth_factor": ("growth_factor", torch.float64),
    "backoff_factor": ("backoff_factor", torch.float64),
    "growth_interval": ("growth_interval", torch.int32),
    "_growth_tracker": ("growth_tracker", torch.int32),
}


def scale_state_to_dict(state: ScaleState) -> dict[str, Any]:
    """Convert a state to the dict of `torch.amp.GradScaler.state_dict()`: plain numbers, or lists of m.

    Args:
        state: the state; its values are copied from the device.

    Returns:
        A dict with the keys of `GradScaler.state_dict()`, in its order; it can be saved as JSON. `no_scale()` gives
        a scale of 1 whose factors are 1.

    Raises:
        TypeError: no `ScaleState`.

    Laws:
        `scale_state_from_dict(scale_state_to_dict(state))` equals the state, bit for bit, but for `no_scale()`.
    """
    check_type("scale_state_to_dict", "state", state, ScaleState, "Create one with scale_state().")
    if not is_scaled(state):
        state = scale_state(1.0, 1.0, 1.0, 1)
    return {key: getattr(state, field).tolist() for key, (field, _) in _ENTRIES.items()}


def scale_state_from_dict(entries: Mapping[str, Any], *, device: torch.device | str | None = None) -> ScaleState:
    """Convert the dict of `torch.amp.GradScaler.state_dict()` or `scale_state_to_dict` to a state.

    Args:
        entries: `scale`, `growth_factor`, `backoff_factor`, `growth_interval` and `_growth_tracker`; each a number, or
            a list of m numbers for one scale per objective. If some are lists, a number applies to all m.
        device: the device of the five tensors.

    Returns:
        `ScaleState` with tensors `[]`, or `[m]` if there are lists.

    Raises:
        TypeError: `entries` is no dict, or `device` no device.
        ValueError: a missing or unknown key, a value that is not a number, lists of different lengths, a scale that is
            zero, negative, infinite or NaN, or factors that `scale_state` would refuse.

    Differs: from `GradScaler.load_state_dict`, which may load some entries before it finds that one is missing.
    """
    check_mapping("scale_state_from_dict", "entries", entries, "Pass GradScaler.state_dict() unchanged.")
    check_device("scale_state_from_dict", device)
    if not entries:
        raise ValueError(
            f"scale_state_from_dict: expected the keys {list(_ENTRIES)}, found an empty dict, as of a disabled "
            "GradScaler. Use no_scale() instead."
        )
    if wrong_keys := sorted(map(str, entries.keys() ^ _ENTRIES.keys())):
        raise ValueError(
            f"scale_state_from_dict: expected the keys {list(_ENTRIES)}, found missing or unknown {wrong_keys}. "
            "Pass GradScaler.state_dict() unchanged."
        )
    lengths = {len(entry) for entry in entries.values() if isinstance(entry, list)}
    if len(lengths) > 1 or 0 in lengths:
        raise ValueError(
            f"scale_state_from_dict: every list needs m numbers, one per objective, found {dict(entries)}. "
            "Pass m numbers in each list."
        )
    tensors: dict[str, Tensor] = {}
    for key, (field, dtype) in _ENTRIES.items():
        _require_numbers(key, entries[key], dtype)
        tensors[field] = torch.tensor(entries[key], dtype=dtype, device=device).expand(tuple(lengths)).contiguous()
    return ScaleState(**tensors)


def _require_numbers(key: str, entry: Any, dtype: torch.dtype) -> None:
    for number in entry if isinstance(entry, list) else [entry]:
        whole = isinstance(number, int) and not isinstance(number, bool) and abs(number) < 2**31
        if not (whole or (dtype.is_floating_point and isinstance(number, float))):
            expected = "a float" if dtype.is_floating_point else "an integer that fits int32"
            raise ValueError(
                f"scale_state_from_dict: {key!r} must be {expected}, found {described(number)}. "
                "Pass plain Python numbers, as in GradScaler.state_dict()."
            )
        holds, expected = range_of(_ENTRIES[key][0], number)
        if not holds:
            raise ValueError(
                f"scale_state_from_dict: {key!r} must be {expected}, found {described(number)}. "
                "Nothing trains from here on with such a state: start anew with scale_state()."
            )
