"""Float64 where a device has it, and on the host where it has none, as MPS."""

import warnings

import torch
from torch import Tensor

from functional_jd.torch_compat.callers import SlowPathWarning, here, user_level


def has_float64(device: torch.device) -> bool:
    """Whether tensors of float64 may stand on a device."""
    if device.type in ("cpu", "cuda", "mps", "meta"):
        return device.type != "mps"
    try:
        torch.empty((), dtype=torch.float64, device=device)
    except (TypeError, RuntimeError):
        return False
    return True


def widest(device: torch.device) -> torch.dtype:
    """The floating dtype of small numbers on a device: float64, or float32 where it has none."""
    return torch.float64 if has_float64(device) else torch.float32


def on_wide_device(matrix: Tensor) -> Tensor:
    """A matrix where its inner products can be computed in float64: on the host, with a warning, if not where it is."""
    if matrix.is_cpu or has_float64(matrix.device):
        return matrix
    warn_of_rows(matrix.device)
    return matrix.cpu()


def warn_of_rows(device: torch.device) -> None:
    """Say that rows go to the host."""
    warnings.warn(
        f"{here()}: the device {device.type!r} has no float64: the rule works on the host, to which all "
        "rows are copied in every step. Rules that need no gradients, such as mean, copy none.",
        SlowPathWarning,
        stacklevel=user_level(),
    )
