"""The tensors that a module holds: for one thread at a time, again in the backward pass, and which it computes with."""

import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Condition, Lock, RLock, _DummyThread, get_ident  # pyright: ignore[reportPrivateUsage]
from threading import enumerate as enumerate_threads
from typing import Any
from weakref import WeakKeyDictionary, WeakMethod, ref

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from functional_jd.torch_compat.autograd_graph import leaves_behind
from functional_jd.torch_compat.module_parts import Place
from functional_jd.torch_compat.torch_internals import innermost, private, torch_function_disabled

# Its `queue_callback` calls a function when the backward pass that runs has ended.
_engine: Any = private("autograd.Variable._execution_engine", "backward passes of modules")


class Holder:
    """The shared part of functions of a module, for one thread at a time; autograd's take it for the one that waits."""

    def __init__(self) -> None:
        self.lock, self.owner, self.calls = RLock(), 0, set[object]()  # the calls of the owner that last
        self.changed = Condition(self.lock)
        self.seen = set[str]()  # the parameters whose place others took in a call that was seen to use no own ones

    def take(self, call: object, thread: int) -> None:
        """Let a call of the thread with this number have the module, once no other thread has it."""
        with self.lock:
            while self.calls and self.owner != thread:
                self.changed.wait(1)  # not for ever: Ctrl-C may end a call before it tells
            self.owner = thread
            self.calls.add(call)

    def give(self, call: object) -> None:
        """End a call, whether it has the module or not: Ctrl-C may arrive anywhere."""
        self.calls.discard(call)
        with self.lock:
            self.changed.notify()


def holder_of(module: nn.Module) -> Holder:
    """The shared part of all functions of this module."""
    with _LOCK:
        return _HOLDERS.get(module) or _HOLDERS.setdefault(module, Holder())


def nodes_of(tensors: Sequence[Tensor]) -> set[Any]:
    """The nodes of these tensors, and of those that they are views of, which stay if views are changed in place."""
    with torch_function_disabled():
        return {x.grad_fn for x in (*tensors, *(x._base for x in tensors)) if x is not None and x.grad_fn is not None}


@dataclass(eq=False)
class Held:
    """The tensors of a call of a module. It holds them again while a backward pass may run parts of the call again."""

    holder: Holder
    places: list[Place]  # where they stand
    params: dict[str, Tensor]
    buffers: dict[str, Tensor]  # as they were before the call; a second run gets copies
    inputs: list[Tensor]  # those that require grad among what the module was called with
    clone: Callable[[list[Tensor]], list[Tensor]]
    thread: int = field(default_factory=get_ident)
    span: ref[Generator[None]] | None = None  # the newest, while it lasts

    def watch(self, new: set[Any], known: set[Any]) -> None:
        """Let backward passes hold the tensors from the new nodes to those known before the call."""
        for node in new:
            if node.metadata.setdefault(self.holder, self) is self:  # nodes of earlier calls keep their own
                node.register_prehook(lambda _: self._hold(gradients=False))
        end = WeakMethod(self._end)  # these nodes may be those of the inputs, which are held here
        for node in known:
            node.register_prehook(lambda gradients: (own := end()) and own(gradients))

    def _hold(self, *, gradients: bool) -> None:
        """Let the module hold the tensors until the backward pass ends; `gradients`: it is one through gradients."""
        last = self._last()
        if last is None or last.held is not self:
            span = self._span(gradients)
            next(span)
            self.span = ref(span)
            # If the pass fails, autograd drops what it was to call, and Python closes the generator.
            _engine.queue_callback(span.close)

    def _end(self, _: Any) -> None:
        if self.span is not None and (span := self.span()) is not None:
            span.close()

    def _last(self) -> "_Before | None":
        return next((span for span in reversed(_SPANS) if span.held.holder is self.holder), None) if _SPANS else None

    def _span(self, gradients: bool) -> Generator[None]:
        """A time while the module holds the tensors."""
        thread = get_ident()
        if thread not in {x.ident for x in enumerate_threads() if not isinstance(x, _DummyThread)}:  # autograd's
            last, thread = self._last(), self.thread
            if last is not None and last.held.thread != thread:
                found = "functional: threads that share a module must run backward passes in turn on accelerators"
                raise ValueError(f"{found}, found two at one time. Call copies of the module.")
        tensors, handles = self.params, list[Any]()
        if self.buffers:
            with torch_function_disabled():  # new copies each time: what runs again may change `.data`
                tensors = tensors | dict(zip(self.buffers, self.clone([*self.buffers.values()]), strict=True))
        before = _Before(self, gradients)
        try:
            self.holder.take(before, thread)
            last = self._last()
            two = last is not None and (gradients or last.gradients)  # it cannot be told which
            before.read()
            for place in self.places:
                place.home[place.name] = _EitherOfTwo() if two else tensors[place.key]
            if torch.is_grad_enabled():  # passes through the gradients that this pass computes hold the tensors, too
                leaves = [x for x in (*self.params.values(), *self.inputs) if x.requires_grad]
                handles += [x.register_hook(self._watch_gradient) for x in leaves]
            yield
        finally:
            try:
                self._last()  # Ctrl-C during the pass arrives with the first call of Python
            finally:
                try:
                    before.put_back()
                finally:  # again, if Ctrl-C arrived meanwhile
                    before.put_back()
                    for handle in handles:
                        handle.remove()
                    self.holder.give(before)

    def _watch_gradient(self, gradient: Tensor) -> None:
        if gradient.grad_fn is not None:
            gradient.grad_fn.register_prehook(lambda _: self._hold(gradients=True))


class _Before:
    """The former tensors of the places of a call."""

    def __init__(self, held: Held, gradients: bool):
        self.held, self.gradients, self.tensors = held, gradients, dict[Any, Any]()

    def read(self) -> None:
        """Note the tensors."""
        self.tensors = {place.slot: place.home[place.name] for place in self.held.places}
        _SPANS.append(self)

    def put_back(self) -> None:
        """Give each place what it held before. With several calls in one pass, the first one ends first."""
        if self not in _SPANS:
            return
        later = _SPANS[_SPANS.index(self) + 1 :]
        for place, x in zip(self.held.places, self.tensors.values(), strict=True):
            others = [span for span in later if place.slot in span.tensors] if later else None
            to: Any = (others[0].tensors, place.slot) if others else (place.home, place.name)
            to[0][to[1]] = x
        _SPANS.remove(self)


class _EitherOfTwo:
    """Stands where one of two tensors belongs. Whatever computes with it raises."""

    @classmethod
    def __torch_function__(cls, *_: Any) -> Any:
        found = "functional: what runs again must find one set of parameters, found two in a pass through gradients"
        raise ValueError(f"{found}. Take the checkpoint out, or call copies of the module.")


class UsedParameters(TorchFunctionMode):
    """A mode that sees which `own` parameters a module computes with, frozen ones too. `start`: what it is given."""

    def __init__(self, own: dict[str, Tensor], start: Iterable[Tensor]):
        super().__init__()
        inside = [innermost(x) for x in start]
        given = set(map(id, inside))
        self.names = {id(x): name for name, x in own.items() if id(x) not in given}
        self.ends = {x.grad_fn for x in inside}
        self.used: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func not in _CONSTANTS and isinstance(result, Tensor | tuple | list):
            several = (x if isinstance(x, tuple | list) else (x,) for x in (*args, *kwargs.values()))
            self.used += [self.names[id(x)] for some in several for x in some if id(x) in self.names]
        return result

    def found(self, outputs: Iterable[Tensor]) -> list[str]:
        """The names of those that were used, or that the graph of these outputs reaches, as in scripted layers."""
        leaves = leaves_behind(map(innermost, outputs), self.ends)
        return self.used + [self.names[x] for x in leaves if x in self.names]


@contextmanager
def eagerly() -> Generator[None]:
    """A time without compiled code, in which a mode sees nothing. Torch has one stance for all threads: the first to
    enter sets it, and the last to leave puts it back. Before the slow import of the compiler there is none.
    """
    with _LOCK:
        needed = "torch._dynamo" in sys.modules and not any(_STANCES)
        _STANCES.append(torch.compiler.set_stance("force_eager") if needed else None)
    try:
        yield
    finally:
        with _LOCK:
            if (stance := _STANCES.pop()) is not None:
                stance.__exit__(None, None, None)


_HOLDERS: WeakKeyDictionary[nn.Module, Holder] = WeakKeyDictionary()
_LOCK, _STANCES = Lock(), list[Any]()
_SPANS: list[_Before] = []  # those that last, in the order in which they began
# A parameter that is detached is meant as a constant.
_CONSTANTS: set[Any] = {Tensor.detach, Tensor.data.__get__, Tensor.grad.__get__}  # pyright: ignore
