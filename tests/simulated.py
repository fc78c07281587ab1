"""A simulated accelerator with real values, on any machine: the device "sim".

    with simulated() as device:
        x = device.put(tree)  # leaf by leaf the same as .to("sim")
        device.reset()
        y = f(x)
    print(device.launches, device.synchronisations, device.get(y))

Tensors of the device outlive the `with`: what happens to them then is not counted. A process that has differentiated
before has to have called `announce` before that: `conftest.py` does.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree
from torch.utils.backend_registration import _DummyDeviceGuard


@dataclass
class Device:
    """What happened on the device since `reset`, and what it refuses.

    Views and allocations are not launches. Copies to and from the host are counted apart from launches; each is a
    synchronisation too, but for those from the host with `non_blocking`.
    """

    float64: bool = True
    capturing: bool = False
    limit: int | None = None
    current: int = 0
    launches: int = 0
    synchronisations: int = 0
    copies_to_host: int = 0
    copies_from_host: int = 0
    bytes_to_host: int = 0
    bytes_from_host: int = 0
    bytes: int = 0
    peak: int = 0
    by_name: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)

    def reset(self) -> None:
        """Count from zero again; the peak of memory, from what is alive."""
        self.launches = self.synchronisations = self.copies_to_host = self.copies_from_host = 0
        self.bytes_to_host = self.bytes_from_host = 0
        self.peak = self.bytes
        self.by_name.clear()
        self.waits.clear()

    def put(self, tree: Any) -> Any:
        """Return a pytree with its tensors on the device, detached; a leaf that asks for gradients still does."""
        put = lambda x: x.detach().to("sim").requires_grad_(x.requires_grad)
        return _pytree.tree_map_only(Tensor, put, tree)

    def get(self, tree: Any) -> Any:
        """Return a pytree with its tensors on the host, detached and not counted, also while capturing."""
        get = lambda x: _backend().twin(x.detach()).clone() if x.device.type == "sim" else x
        return _pytree.tree_map_only(Tensor, get, tree)

    def launch(self, name: str, times: int = 1) -> None:
        """Count launches."""
        if times:
            self.launches += times
            self.by_name[name] += times
        if self.limit is not None and self.launches > self.limit:
            raise TooManyLaunchesError(f"more than {self.limit}, most often {self.by_name.most_common(5)}")

    def wait(self, name: str) -> None:
        """Count a synchronisation, or refuse it."""
        if self.capturing:
            raise RuntimeError(f"{name}: operation not permitted when stream is capturing")
        self.synchronisations += 1
        self.waits[name] += 1

    def allocate(self, size: int) -> None:
        """Count bytes."""
        self.bytes += size
        self.peak = max(self.peak, self.bytes)

    def check(self, dtype: torch.dtype) -> None:
        """Refuse what the device has not."""
        if not self.float64 and dtype in (torch.float64, torch.complex128):
            raise TypeError(f"Cannot convert a tensor of sim to {dtype}: the device does not support it.")


class TooManyLaunchesError(AssertionError):
    """More launches than a test allows."""


@contextmanager
def simulated(float64: bool = True, capturing: bool = False, limit: int | None = None) -> Iterator[Device]:
    """The device, counted from zero; outside of it torch finds no accelerator.

    Args:
        float64: whether the device has it. MPS has not, and refuses such tensors.
        capturing: whether a graph of launches is being captured: whatever waits for the device is an error. May be set
            later: `device.capturing = True`. So may be `device.current`: the current device is 1, tensors stay on 0.
        limit: of launches since `reset`, beyond which there is an error.
    """
    backend = _backend()
    before, device = backend.device, Device(float64, capturing, limit)
    device.bytes = device.peak = backend.alive()
    backend.device = device
    try:
        yield device
    finally:
        backend.device = before


@cache
def announce() -> None:
    """Tell torch that there may be another device: it counts them once, when it first differentiates."""
    torch._C._acc.register_python_privateuseone_device_guard(_DummyDeviceGuard())


@cache
def _backend() -> Any:
    """Set up once in a process, when first used: torch cannot take a name back."""
    from simulated_kernels import Backend

    return Backend()
