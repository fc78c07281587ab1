"""A mode that sees every op, and a journal of changes in place, which undoes them."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from functional_jd.torch_compat.repaired_ops import BATCH_NORMS, REPAIRED, refuse_statistics_of_one
from functional_jd.torch_compat.torch_internals import (
    GRAPH_ATTRIBUTES,
    function_name,
    graph_attribute,
    is_wrapped,
    traceable,
    transform_level,
    under_transform,
)


def targets_of(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that an op changes."""
    if func in _CHOOSING:
        names, default, targets = _CHOOSING[func]
        given = dict(zip(names.split(), args, strict=False)) | kwargs
        choice = given.get(names.split()[-1], default)
        return [] if choice is None or choice is False else [given.get(name) for name in targets.split()]
    flagged = func in _WITH_FLAG and (kwargs.get("inplace") is True or (len(args) > 1 and args[-1] is True))
    several = (*args[: flagged or func in _IN_PLACE], kwargs.get("out"))
    return [x for given in several for x in (given if isinstance(given, tuple | list) else [given])]


_F = nn.functional
_AVERAGES = "running_mean running_var"
# Ops whose last argument chooses whether they change others: the first arguments, its default, and what they change.
_CHOOSING: dict[Any, tuple[str, Any, str]] = {
    **dict.fromkeys(BATCH_NORMS, (f"input weight bias {_AVERAGES} training", False, _AVERAGES)),
    _F.batch_norm: (f"input {_AVERAGES} weight bias training", False, _AVERAGES),
    torch.instance_norm: (f"input weight bias {_AVERAGES} use_input_stats", True, _AVERAGES),
    _F.instance_norm: (f"input {_AVERAGES} weight bias use_input_stats", True, _AVERAGES),
    _F.embedding: ("input weight padding_idx max_norm", None, "weight"),
    _F.embedding_bag: ("input weight offsets max_norm", None, "weight"),
}
_WITH_FLAG = {f for f in vars(_F).values() if "inplace" in getattr(getattr(f, "__code__", None), "co_varnames", ())}
_METHODS = [name for name in dir(Tensor) if name.endswith("_") and name[0] != "_" and name != "requires_grad_"]
_OPERATORS = [name for name in dir(Tensor) if name.startswith("__i") and hasattr(Tensor, f"__{name[3:]}")]
IN_PLACE_NAMES = frozenset([*_METHODS, *_OPERATORS, "__setitem__"])
"""The names of methods that change the values of their tensor."""
_IN_PLACE = {
    *(getattr(Tensor, name) for name in IN_PLACE_NAMES),
    *(f for home in (torch, _F, nn.init) for name, f in vars(home).items() if name[-1] == "_" != name[-2:-1]),
}


@dataclass(eq=False)
class StateJournal:
    """Keeps what losses change in place, to undo it. `averages` are the statistics that normalization moves."""

    # What is changed, which lives on so that its id is its own; what puts it back; and the values of a tensor.
    before: dict[Any, tuple[Any, Callable[[], Any], Tensor | None]] = field(default_factory=dict)
    averages: list[Tensor] = field(default_factory=list)

    def note(self, func: Any, args: Any, kwargs: Any, examples: bool = False) -> None:
        """Keep what this op is about to change; with `examples` the whole batch, where vmap shows one."""
        drawn = kwargs.get("generator")
        if drawn is not None and id(drawn) not in self.before:
            self.before[id(drawn)] = drawn, partial(drawn.set_state, drawn.get_state()), None
        if func == _SET_DATA and not is_wrapped(args[0]):
            old = args[0].data
            self.before.setdefault((id(args[0]), "data"), (args[0], partial(func, args[0], old), old))
        elif func in _SET_REQUIRES_GRAD and not is_wrapped(args[0]) and args[0].is_leaf:
            put = args[0], partial(Tensor.requires_grad_, args[0], args[0].requires_grad), None
            self.before.setdefault((id(args[0]), "requires_grad"), put)
        for x in targets_of(func, args, kwargs):
            if examples and isinstance(x, Tensor):
                x = torch.func.debug_unwrap(x, recurse=False)
            # What has a history in the graph was made by the losses themselves.
            state = isinstance(x, Tensor) and not is_wrapped(x) and x.grad_fn is None
            if state and id(x) not in self.before:
                old = x.detach().clone()
                self.before[id(x)] = x, partial(x.copy_, old), old
                if func in _CHOOSING and _CHOOSING[func][2] == _AVERAGES:
                    self.averages.append(x)

    def undo(self, *, again: bool = False) -> None:
        """Put everything back; `again`: it may have to be put back once more."""
        with torch.no_grad():
            for _, put, _ in reversed(self.before.values()):
                put()
        if not again:
            self.before.clear()


class Watch(TorchFunctionMode):
    """A mode that sees every op. The journal notes changes in place. With `examples`, it watches the loss of one: the
    innermost `torch.vmap`, if there is one, stands for a loop over examples, and BatchNorm of one example raises.
    """

    def __init__(self, journal: StateJournal | None, *, examples: bool = False):
        super().__init__()
        self.journal, self.examples = journal, examples
        self.level = transform_level() if examples and not torch.compiler.is_compiling() else None
        self.whole = examples or not under_transform()  # whether it sees the whole batch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():  # which cannot look these up
            func = traceable(func)
        elif func not in SEEN and kwargs.keys().isdisjoint(SEEN_WITH):
            return func(*args, **kwargs)
        if self.level is not None and func in GRAPH_ATTRIBUTES and transform_level() == self.level:
            return graph_attribute(func, *args)
        if self.examples and func in BATCH_NORMS:
            refuse_statistics_of_one(args, kwargs)
        if self.journal is not None:
            self.journal.note(func, args, kwargs, self.whole)
        return REPAIRED.get(func, func)(*args, **kwargs)


class UnchangedParameters(TorchFunctionMode):
    """A mode, for torch.compile, that raises where an op changes one of these parameters in place."""

    def __init__(self, params: dict[str, Tensor]):
        super().__init__()
        self.params = params

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = traceable(func)
        for name, x in self.params.items():  # first: torch.compile cannot read the name of a checkpoint
            if args and args[0] is x and function_name(func) in IN_PLACE_NAMES:
                raise changed_parameter(name)
        return func(*args, **(kwargs or {}))


def changed_parameter(name: str) -> ValueError:
    found = f"functional: forward must leave its parameters, found that it has changed {name!r} in place"
    return ValueError(f"{found}. Make it a buffer, which comes back as a result, or compute with another tensor.")


def watched(
    f: Callable[..., Any], journal: StateJournal | None = None, *, examples: bool = False, recorder: Any = None
) -> Callable[..., Any]:
    """A function under the modes that must receive its ops, mostly none. `journal` notes changes in place; `examples`:
    `f` is the loss of one example; the `recorder` receives the ops first, and calls its `watch`.
    """

    def run(*args: Any) -> Any:
        watches, traced = journal is not None or examples or under_transform(), torch.compiler.is_compiling()
        watch: Any = Watch(journal, examples=examples) if watches else None
        if recorder is None:
            with watch or nullcontext():
                return f(*args)
        token: Any = _TRACED.append(recorder) if traced else _RECORDER.set(recorder)
        if not traced:  # a second mode costs as much as a small op for every op
            recorder.watch, watch = watch, None
        try:
            with watch or nullcontext(), recorder:
                return f(*args)
        finally:
            _TRACED.pop() if traced else _RECORDER.reset(token)

    return run


def recorder_of_ops() -> AbstractContextManager[Any]:
    """The recorder, if there is one. A mode that changes ops enters it again inside, so that it sees them first."""
    if torch.compiler.is_compiling():
        return _TRACED[-1] if _TRACED else nullcontext()
    return _RECORDER.get() or nullcontext()


_RECORDER: ContextVar[TorchFunctionMode | None] = ContextVar("RECORDER", default=None)
_TRACED: list[TorchFunctionMode] = []  # the same for torch.compile, which sets no context variables
_SET_DATA: Any = Tensor.data.__set__  # pyright: ignore
_SET_REQUIRES_GRAD: Any = {Tensor.requires_grad_, Tensor.requires_grad.__set__}  # pyright: ignore
SEEN = {_SET_DATA, *_SET_REQUIRES_GRAD, *GRAPH_ATTRIBUTES, *_CHOOSING, *_IN_PLACE, *_WITH_FLAG, *REPAIRED}
SEEN_WITH = {"out", "generator"}
"""The ops with which a `Watch` may have something to do, and the arguments by which others concern it."""
