"""Activation checkpoints: what a backward pass runs again runs as its forward pass did, under the same modes and with
the same tensors in the modules.
"""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from functional_jd.torch_compat.checkpoints import calling_modules, checkpoint_frames, recompute, saved_tensors_hook
from functional_jd.torch_compat.torch_internals import module_tensors


class RecomputedMode(TorchFunctionMode):
    """A mode under which `torch.utils.checkpoint(..., use_reentrant=False)` runs again what ran under it.

    The handler of a subclass calls `note_checkpoints` first. torch.compile, which traces checkpoints with the modes
    around them, needs none of this.
    """

    def __init__(self) -> None:
        super().__init__()
        # A checkpoint around this mode enters it again by itself.
        self.around = self.seen = None if torch.compiler.is_compiling() else saved_tensors_hook()

    def note_checkpoints(self) -> None:
        """Make the checkpoints that run inside this mode run again under a mode of this class."""
        # Where no checkpoint begins or ends, this is the whole price, about a tenth of that of a small op.
        if torch.compiler.is_compiling():
            return
        hook = saved_tensors_hook()
        if hook is not self.seen:
            self.seen = hook
            self.note_frames()

    def note_frames(self) -> None:
        """The same, where a checkpoint began or ended since the last op."""
        for frame in checkpoint_frames(self.around):
            contexts = recomputation_of(frame).contexts
            if id(self) not in contexts:
                contexts[id(self)] = self.again()

    def again(self) -> Callable[[], TorchFunctionMode]:
        """What makes the mode of a checkpoint that begins now, when it runs again. It must not hold this mode, which
        may keep the graph alive.
        """
        return type(self)


class _Slot(NamedTuple):
    """A place of a module for a tensor.

    Attributes:
        home: the module's parameters or buffers by name.
        name: the name in `home`.
        tensor: what stood there in the forward pass.
    """

    home: dict[str, Any]
    name: str
    tensor: Tensor | None


class Recomputation:
    """The function of a checkpoint, as torch runs it again.

    Args:
        run: what torch would run without us.
        callers: the modules whose calls surround the checkpoint. `torch.func.functional_call` puts tensors into a
            module for the time of the call only, so that it holds others when the function runs again.
    """

    def __init__(self, run: Callable[..., None], callers: list[nn.Module]):
        self.run = run
        modules = {id(module): module for caller in callers for module in caller.modules()}.values()
        homes = [home for module in modules for home in module_tensors(module)]
        self.slots = [_Slot(home, name, tensor) for home in homes for name, tensor in home.items()]
        self.contexts: dict[Any, Callable[[], AbstractContextManager[Any]]] = {}

    def __call__(self, *args: Any) -> None:
        with ExitStack() as stack:
            stack.enter_context(_filled(self.slots))
            # An inner mode sees an op before an outer one does, and came first.
            for context in reversed(self.contexts.values()):
                stack.enter_context(context())
            self.run(*args)


def recomputation_of(checkpoint_frame: Any) -> Recomputation:
    """What a checkpoint runs again, with the tensors that the modules around it hold at the first call."""
    if not isinstance(recompute(checkpoint_frame), Recomputation):
        modules = calling_modules(checkpoint_frame)
        checkpoint_frame.recompute_fn = Recomputation(recompute(checkpoint_frame), modules)
    return checkpoint_frame.recompute_fn


@contextmanager
def _filled(slots: list[_Slot]) -> Generator[None]:
    """Give modules the tensors of the forward pass; afterwards they have those that they had before."""
    others = [slot for slot in slots if slot.home.get(slot.name, slot.tensor) is not slot.tensor]
    before = [slot._replace(tensor=slot.home[slot.name]) for slot in others]
    try:
        for home, name, tensor in others:
            home[name] = tensor
        yield
    finally:
        for home, name, tensor in before:
            home[name] = tensor
