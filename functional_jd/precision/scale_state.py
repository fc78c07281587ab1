"""The loss scale as a record: how it starts, and what it may hold."""

from collections.abc import Callable
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_jd.core.arguments import check_device, described, is_size, is_too_large
from functional_jd.core.float64 import widest
from functional_jd.core.record_display import displayed_as, one_line

_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "scale": (lambda x: 2.0**-149 <= x <= torch.finfo(torch.float32).max, "positive and finite in float32"),
    "growth_factor": (lambda x: 1.0 <= x < float("inf"), "finite and at least 1"),
    "backoff_factor": (lambda x: 0.0 < x <= 1.0, "in (0, 1]"),
}


@displayed_as(one_line)
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

    Raises:
        TypeError: `device` is no device.
        ValueError: an argument out of its range, or a shape other than `()` and `(m,)`.

    Differs: from GradScaler, in that factors of 1 are allowed: the scale then does not grow, or does not back off.

    Example:
        >>> scale_state(2.0**10, shape=(2,)).scale
        tensor([1024., 1024.])
    """
    sizes: Any = (shape,) if is_size(shape) else shape
    are_sizes = isinstance(sizes, list | tuple) and len(sizes) < 2 and all(is_size(m) and m > 0 for m in sizes)
    whole = isinstance(growth_interval, int) and not isinstance(growth_interval, bool)
    checks = (
        ("init_scale", init_scale, *range_of("scale", init_scale)),
        ("growth_factor", growth_factor, *range_of("growth_factor", growth_factor)),
        ("backoff_factor", backoff_factor, *range_of("backoff_factor", backoff_factor)),
        ("growth_interval", growth_interval, whole and abs(growth_interval) < 2**31, "an integer that fits int32"),
        ("shape", shape, are_sizes, "() for one scale, (m,) for one per objective"),
    )
    for name, found, holds, expected in checks:
        if not holds:
            raise ValueError(
                f"scale_state: {name} must be {expected}, found {described(found)}. "
                "The defaults of GradScaler are 2.0**16, 2.0, 0.5 and 2000; for several models use vmap over states."
            )
    check_device("scale_state", device)
    wide = torch.float64 if device is None else widest(torch.device(device))
    return ScaleState(
        scale=torch.full(sizes, init_scale, dtype=torch.float32, device=device),
        growth_tracker=torch.zeros(sizes, dtype=torch.int32, device=device),
        growth_factor=torch.full(sizes, growth_factor, dtype=wide, device=device),
        backoff_factor=torch.full(sizes, backoff_factor, dtype=wide, device=device),
        growth_interval=torch.full(sizes, growth_interval, dtype=torch.int32, device=device),
    )


def range_of(field: str, number: float) -> tuple[bool, str]:
    """Return whether a field of `ScaleState` may have this value, and what it must be, in words."""
    holds, expected = _RANGES.get(field, (lambda _: True, "a number"))
    is_number = isinstance(number, Real) and not isinstance(number, bool) and not is_too_large(number)
    return is_number and holds(number), expected


def no_scale(*, device: torch.device | str | None = None) -> ScaleState:
    """Create a scale of 1 that `update_scale` never changes, nor its tracker, for steps without loss scaling.

    Args:
        device: the device of the two tensors.

    Returns:
        `ScaleState` with two tensors `[]`, and `()` for what says how a scale changes: `step` knows by it, without a
        look at values, that nothing is to be scaled.
    """
    check_device("no_scale", device)
    one = torch.ones((), dtype=torch.float32, device=device)
    return ScaleState(one, torch.zeros((), dtype=torch.int32, device=device), (), (), ())


def is_scaled(state: ScaleState) -> bool:
    """Return whether a state is another than `no_scale()`, by its structure."""
    return isinstance(state.growth_interval, Tensor)
