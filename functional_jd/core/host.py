"""Small dense problems on the host: in one copy they go there, and in one copy what is found comes back."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from functional_jd.core.float64 import has_float64
from functional_jd.core.tree import tree_flatten


def run_on_host(
    function: Callable[..., Any], *inputs: Any, device: torch.device | None = None, apart: bool = False
) -> Any:
    """`function(*inputs)`, computed on the host, with results on the accelerator of the inputs, or on the `device`.

    There, what launches thousands of small kernels takes less than a millisecond, and may look at values. It costs one
    synchronization and about three launches. Without float64 on the accelerator, floating tensors are float64 on the
    host, and come back in float32. `function` is not differentiated, but its results may require a gradient. `apart`:
    every result has memory of its own, which takes a launch each, as `torch.save` needs it.
    """
    leaves, structure = tree_flatten(inputs)
    away = [x for x in leaves if not x.is_cpu]
    device = away[0].device if device is None else device
    narrow = not has_float64(device)
    arrived = copied(away, torch.device("cpu"))
    arrived = [x.double() if narrow and x.is_floating_point() else x for x in arrived]
    rest = iter(arrived)
    there = structure.unflatten([x if x.is_cpu else next(rest) for x in leaves])
    found, found_structure = tree_flatten(function(*there))
    # What is returned as it was given stays where it was; what is returned twice stays one tensor.
    known = {id(x): original for x, original in zip(arrived, away, strict=True)}
    new = list({id(x): x for x in found if id(x) not in known}.values())
    back = copied([x.float() if narrow and x.dtype == torch.float64 else x for x in new], device, apart)
    known.update({id(x): y for x, y in zip(new, back, strict=True)})
    return found_structure.unflatten([known[id(x)] for x in found])


def copied(tensors: list[Tensor], device: torch.device, apart: bool = False) -> list[Tensor]:
    """The tensors on another device, by one copy of all their bytes; by one of each if one requires a gradient."""
    # A copy from the host, out of memory that is not pinned, is read before this returns: no need to wait for its end.
    how: Any = {"device": device, "non_blocking": device.type == "cuda"}
    if len(tensors) < 2 or any(x.requires_grad for x in tensors):
        return [x.to(**how) for x in tensors]
    # The largest items first: so each tensor starts at a multiple of its item's size.
    order = sorted(range(len(tensors)), key=lambda index: -tensors[index].dtype.itemsize)
    flat = [tensors[index].contiguous().as_strided((tensors[index].numel(),), (1,)) for index in order]
    parts = [x.view(torch.uint8) for x in flat]
    arrived = torch.cat(parts).to(**how).split([len(part) for part in parts])
    found = list(tensors)
    for index, part in zip(order, arrived, strict=True):
        found[index] = (part.clone() if apart else part).view(tensors[index].dtype).view(tensors[index].shape)
    return found


def is_capturing(x: Tensor) -> bool:
    """Whether a graph of launches, such as a CUDA graph, is recorded: meanwhile nothing may wait for the device."""
    ask = getattr(torch.get_device_module(x.device), "is_current_stream_capturing", None)
    return ask is not None and ask()
