"""What operators write into while a function runs."""

from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from functional_jd.torch_compat.graphs import written_by
from functional_jd.torch_compat.private_names import private

_Mode: Any = private("utils._python_dispatch.TorchDispatchMode", "testing.pure", otherwise=AbstractContextManager)


class WrittenTensors(_Mode):
    """A context that keeps what operators write into, by the address of its memory, which nothing else gets meanwhile.

    A torch without dispatch modes tells nothing.
    """

    def __init__(self):
        super().__init__()
        self.by_memory: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for given in written_by(func, args, kwargs or {}):
            for each in given if isinstance(given, list | tuple) else [given]:
                if isinstance(each, Tensor) and each.numel():
                    self.by_memory[each.untyped_storage().data_ptr()] = each
        return func(*args, **kwargs or {})

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
