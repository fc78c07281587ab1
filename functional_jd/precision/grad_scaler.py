"""Scale states as dicts, to and from what `torch.amp.GradScaler.state_dict()` writes."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from functional_jd.precision.loss_scale import ScaleState

# The entries of GradScaler.state_dict(), in its order: our name and dtype for each.
_ENTRIES = {
    "scale": ("scale", torch.float32),
    "growth_factor": ("growth_factor", torch.float64),
    "backoff_factor": ("backoff_factor", torch.float64),
    "growth_interval": ("growth_interval", torch.int32),
    "_growth_tracker": ("growth_tracker", torch.int32),
}


def scale_state_to_dict(state: ScaleState) -> dict[str, Any]:
    """The state as `torch.amp.GradScaler.state_dict()` gives it: plain numbers, or lists of m.

    Args:
        state: the state; its values are fetched from the device.

    Returns:
        A dict with the keys of `GradScaler.state_dict()`, in its order, to write as JSON for instance.

    Laws:
        `scale_state_from_dict(scale_state_to_dict(state))` is the state, to the bit.
    """
    return {key: getattr(state, field).tolist() for key, (field, _) in _ENTRIES.items()}


def scale_state_from_dict(entries: Mapping[str, Any], *, device: torch.device | str | None = None) -> ScaleState:
    """The state that `torch.amp.GradScaler.state_dict()` or `scale_state_to_dict` wrote.

    Args:
        entries: `scale`, `growth_factor`, `backoff_factor`, `growth_interval` and `_growth_tracker`; each a number, or
            a list of m numbers for one scale per objective. A number beside lists serves all m.
        device: where the five tensors lie.

    Returns:
        `ScaleState`, its tensors `[]`, or `[m]` if there were lists.

    Raises:
        ValueError: a missing or unknown key, something that is no number, or lists of different lengths.

    Differs: from `GradScaler.load_state_dict`, which has loaded half of the entries when it finds one missing.
    """
    if not entries:
        raise ValueError(
            "scale_state_from_dict: found an empty dict, as a disabled GradScaler writes it. Use no_scale() instead."
        )
    if odd := sorted(map(str, entries.keys() ^ _ENTRIES.keys())):
        raise ValueError(
            f"scale_state_from_dict: expected the keys {list(_ENTRIES)}, found missing or unknown {odd}. "
            "Hand over GradScaler.state_dict() as it is."
        )
    lengths = {len(entry) for entry in entries.values() if isinstance(entry, list)}
    if len(lengths) > 1 or 0 in lengths:
        raise ValueError(
            f"scale_state_from_dict: every list needs m numbers, one per objective, found {dict(entries)}. Add them."
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
                f"scale_state_from_dict: {key!r} must be {expected}, found {number!r}. "
                "Write plain Python numbers, as GradScaler.state_dict() does."
            )
