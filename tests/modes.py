"""Modes that count what is called, by name."""

from collections import Counter

from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class Called(TorchDispatchMode):
    """The operators that run."""

    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))

    @property
    def reads(self):
        """The values that a host has waited for."""
        return self.names["_local_scalar_dense"] + self.names["is_nonzero"]


class Heard(TorchFunctionMode):
    """The functions that Python calls, as torch itself names them."""

    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names[func.__name__] += 1
        return func(*args, **(kwargs or {}))
