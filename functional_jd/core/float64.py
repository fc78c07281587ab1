"""Float64 where a device has it, and on the host where it has none, as MPS."""

import torch
from torch import Tensor


def has_float64(device: torch.device) -> bool:
    """Whether tensors of float64 may stand on a device."""
    if device.type in ("cpu", "cuda", "meta"):
        return True
    try:
        torch.empty((), dtype=torch.float64, device=device)
    except (TypeError, RuntimeError):
        return False
    return True


def widest(device: torch.device) -> torch.dtype:
    """The floating dtype of small numbers on a device: float64, or float32 where it has none."""
    return torch.float64 if has_float64(device) else torch.float32


def on_wide_device(x: Tensor) -> Tensor:
    """A tensor where it can be float64: on the host, if not where it is."""
    return x if x.is_cpu or has_float64(x.device) else x.cpu()
