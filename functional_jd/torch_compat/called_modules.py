"""Which modules are called while a function runs."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook


@contextmanager
def noting_modules(called: dict[int, nn.Module]) -> Generator[None]:
    """A context in which all modules that are called are kept, by their ids; but not those in a body of torch's control
    flow, which is compiled.
    """

    def note(module: nn.Module, _: Any) -> None:
        if not torch.compiler.is_compiling():
            called[id(module)] = module

    handle = register_module_forward_pre_hook(note)
    try:
        yield
    finally:
        handle.remove()
