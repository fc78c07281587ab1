"""Fallbacks: where a transform raises, undo what was changed in place, do the same in a slower way, and warn."""

import random
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from traceback import walk_tb
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from functional_jd.torch_compat.assignments import put_back
from functional_jd.torch_compat.batch_statistics import BATCH_NORMS, refuse_statistics_of_one
from functional_jd.torch_compat.checkpoints import ends_recomputation
from functional_jd.torch_compat.recurrent import RECURRENT, batched_form
from functional_jd.torch_compat.repaired_ops import REPAIRED
from functional_jd.torch_compat.torch_internals import (
    GRAPH_ATTRIBUTES,
    graph_attribute,
    is_wrapped,
    transform_level,
    untraced,
)

Result = TypeVar("Result")

_OURS = str(Path(__file__).parents[1])
_TORCH = str(Path(torch.__file__).parent)


class SlowPathWarning(UserWarning):
    """An engine gave up its fast way: the numbers are the same, the price is not."""


class StateJournal:
    """Keeps what losses change in place as it was, so that an evaluation that failed can be undone.

    `Watch` sees the ops and hands them to `note`. `averages` are the statistics that normalization moves, `numbers`
    those that modules assign to: the module, the name, where it stands, and the number before.
    """

    def __init__(self) -> None:
        # What is changed, which lives on so that its id is its own; what puts it back; and the values of a tensor.
        self.before: dict[Any, tuple[Any, Callable[[], Any], Tensor | None]] = {}
        self.averages: list[Tensor] = []
        self.numbers: list[tuple[nn.Module, str, dict[str, Any], float]] = []

    def note(self, func: Any, args: Any, kwargs: Any) -> None:
        """Keep what this op is about to change."""
        drawn = kwargs.get("generator")
        if drawn is not None and id(drawn) not in self.before:
            self.before[id(drawn)] = drawn, partial(drawn.set_state, drawn.get_state()), None
        if func == _SET_DATA and not is_wrapped(args[0]):
            old = args[0].data
            self.before.setdefault((id(args[0]), "data"), (args[0], partial(func, args[0], old), old))
        elif func in _SET_REQUIRES_GRAD and not is_wrapped(args[0]) and args[0].is_leaf:
            put = partial(Tensor.requires_grad_, args[0], args[0].requires_grad)
            self.before.setdefault((id(args[0]), "requires_grad"), (args[0], put, None))
        elif changes_in_place(func, args, kwargs):
            for x in _targets(func, args, kwargs):
                # What has a history in the graph was made by the losses themselves.
                state = isinstance(x, Tensor) and not is_wrapped(x) and x.grad_fn is None
                if state and id(x) not in self.before:
                    old = x.detach().clone()
                    self.before[id(x)] = x, partial(x.copy_, old), old
                    if func in _WITH_STATISTICS:
                        self.averages.append(x)

    def note_attribute(self, module: nn.Module, name: str) -> None:
        """Keep what a module is about to lose."""
        if (id(module), name) not in self.before:
            self.before[id(module), name] = module, put_back(module, name), None
            old = vars(module).get(name)
            if isinstance(old, int | float) and not isinstance(old, bool):
                self.numbers.append((module, name, vars(module), old))

    def undo(self, *, again: bool = False) -> None:
        """Put everything back to what it was; `again`: it may have to be put back once more."""
        with torch.no_grad():
            for _, put, _ in reversed(self.before.values()):
                put()
        if not again:
            self.before.clear()

    def watch(self, *, examples: bool = False) -> TorchFunctionMode:
        """A mode that notes every op, and for the loss of one example does what `Watch` says."""
        return Watch(self, transform_level() if examples else None)


class Watch(TorchFunctionMode):
    """A mode that sees every op, for what cannot be known without.

    Args:
        journal: notes what is changed in place.
        level: where it watches the loss of one example, `transform_level()`; else None. The innermost `torch.vmap`, if
            there is one, then stands for a loop over examples, and batch normalization of a batch of one is refused.
        repaired: whether ops that torch differentiates wrongly under a transform take their repaired forms.
        where: the function in whose name batch normalization is refused.
    """

    def __init__(
        self, journal: StateJournal | None, level: Any = None, *, repaired: bool = False, where: str = "per_example"
    ):
        super().__init__()
        self.journal, self.where, self.level = journal, where, level
        self.forms: dict[Any, Any] = REPAIRED if repaired else {}

    @untraced
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in SEEN and kwargs.keys().isdisjoint(SEEN_WITH):
            return func(*args, **kwargs)
        return self.call(func, *args, **kwargs)

    def call(self, func: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call an op of `SEEN`, or one with an argument of `SEEN_WITH`."""
        if func in GRAPH_ATTRIBUTES and transform_level() == self.level:
            return graph_attribute(func, *args)
        if self.level is not None and func in BATCH_NORMS and changes_in_place(func, args, kwargs):
            refuse_statistics_of_one(args, kwargs, self.where)
        if self.journal is not None:
            self.journal.note(func, args, kwargs)
        func = self.forms.get(func, func)
        form = None if self.level is None or kwargs else batched_form(func, args)
        return (form or func)(*args, **kwargs)


class WatchingMode(TorchFunctionMode):
    """A mode that stands in for the `Watch` directly around it, by calling its `call`: a second mode costs as much as a
    small op for every op.
    """

    watch: Watch | None = None


def changes_in_place(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an op may change a tensor that it receives."""
    if func in _WITH_CHOICE:
        position, name, default = _WITH_CHOICE[func]
        choice = args[position] if len(args) > position else kwargs.get(name, default)
        return choice is not None and choice is not False
    if func in _IN_PLACE or "out" in kwargs:
        return True
    return func in _WITH_FLAG and (kwargs.get("inplace") is True or (len(args) > 1 and args[-1] is True))


def attempt(
    fast: Callable[[], Result],
    slow: Callable[[], Result],
    *,
    where: str,
    instead: str,
    journal: StateJournal | None = None,
) -> Result:
    """`fast()`; where that raises, `slow()`, with a `SlowPathWarning` that says why and at what price.

    Args:
        fast: evaluates the losses, or differentiates what was evaluated.
        slow: does the same in another way. An error of the losses themselves comes back from here.
        where: the function that the user called.
        instead: what `slow` does and costs, for the warning.
        journal: what `fast` noted its changes in. With it, buffers are put back to what they were and random numbers
            are drawn again, so that both are those of one evaluation. `None` where no losses are evaluated.

    Raises:
        torch.OutOfMemoryError: from `fast` too, and what else a CPU raises: the slow way takes no less. And
            that by which torch.utils.checkpoint ends a second run.
    """
    draws = random_state() if journal is not None else None
    try:
        return fast()
    except Exception as error:
        if is_out_of_memory(error) or ends_recomputation(error):
            raise
        reason = _reason(error)
    if journal is not None:
        journal.undo()
        set_random_state(draws)
    result = slow()
    warnings.warn(f"{where}: {instead}, because {reason}", SlowPathWarning, stacklevel=user_level())
    return result


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory was missing, on a CPU too, where torch has no class for it."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def refuse_export(where: str) -> NoReturn:
    """Refuse to be traced by torch.export, to which what torch.func returns is a constant."""
    raise ValueError(
        f"{where}: expected a tracer that knows derivatives, found torch.export, which takes what torch.func returns "
        "for constants. Export what torch.fx.experimental.proxy_tensor.make_fx(f)(*args) returns."
    )


def random_state() -> list[Tensor]:
    """The state of torch's default generators: of the CPU, and of all devices of the accelerator if there is one. While
    a graph of launches is captured only that of the CPU, as nothing may be read from a device.
    """
    states = [torch.get_rng_state()]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return states
    module = torch.get_device_module(accelerator)
    if getattr(module, "is_current_stream_capturing", bool)():
        return states
    return states + [module.get_rng_state(index) for index in range(torch.accelerator.device_count())]


def set_random_state(states: Any) -> None:
    """Put the generators back to what `random_state` returned."""
    torch.set_rng_state(states[0])
    for index, state in enumerate(states[1:]):
        torch.get_device_module(torch.accelerator.current_accelerator()).set_rng_state(state, index)


def random_state_outside_torch() -> Callable[[], None]:
    """A function that puts the generators of Python's `random` and of `numpy.random` back to what they are now."""
    own: Any = random.getstate()
    numpy = sys.modules.get("numpy.random")
    other = None if numpy is None else numpy.get_state()

    def put_back_both() -> None:
        random.setstate(own)
        if numpy is not None:
            numpy.set_state(other)

    return put_back_both


def _reason(error: BaseException) -> str:
    """The line of the user's code that failed, and the first line of the message, in which torch names the op."""
    frames = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
    own = [(file, line) for file, line in frames if not file.startswith((_OURS, _TORCH, "<"))]
    message = (str(error).strip().splitlines() or [type(error).__name__])[0]
    place = f"{Path(own[-1][0]).name}:{own[-1][1]}: " if own else ""
    return f"{place}{type(error).__name__}: {message}"


def user_level() -> int:
    """The `stacklevel` of the nearest caller outside this package and torch."""
    frame, level = sys._getframe(1), 1  # pyright: ignore[reportPrivateUsage]
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_OURS, _TORCH)):
        frame, level = frame.f_back, level + 1
    return level


def called_function() -> str:
    """The name of the function of this package that the nearest caller outside of it and torch called."""
    frame, name = sys._getframe(1), ""  # pyright: ignore[reportPrivateUsage]
    while frame.f_back is not None and (code := frame.f_code).co_filename.startswith((_OURS, _TORCH)):
        if code.co_filename.startswith(_OURS):
            name = code.co_qualname.split(".")[0]  # of what `jacobian_fn` returned, "jacobian_fn"
            if name.startswith("_"):  # what several public functions share is told by `where` which of them it is
                name = frame.f_locals.get("where", name)
        frame = frame.f_back
    return name


def _targets(func: Any, args: Any, kwargs: Any) -> list[Any]:
    if func in _WITH_STATISTICS:
        inputs = (
            "input running_mean running_var" if func in _PYTHON_NORMS else "input weight bias running_mean running_var"
        )
        given = dict(zip(inputs.split(), args, strict=False)) | kwargs
        return [given.get("running_mean"), given.get("running_var")]
    if func in _EMBEDDINGS:  # they shorten rows of their weight
        return [args[1] if len(args) > 1 else kwargs.get("weight")]
    out = kwargs.get("out")
    return [x for given in (*args[:1], out) for x in (given if isinstance(given, tuple | list) else [given])]


_PYTHON_NORMS = {nn.functional.batch_norm, nn.functional.instance_norm}
_EMBEDDINGS = {nn.functional.embedding, nn.functional.embedding_bag}
_WITH_STATISTICS = {*BATCH_NORMS, *_PYTHON_NORMS, torch.instance_norm}
# Whether these change what they receive, a weight or statistics, is an argument: its position, name and default.
_WITH_CHOICE: dict[Any, tuple[int, str, Any]] = {
    **dict.fromkeys((*BATCH_NORMS, nn.functional.batch_norm), (5, "training", False)),
    **dict.fromkeys((torch.instance_norm, nn.functional.instance_norm), (5, "use_input_stats", True)),
    **dict.fromkeys(_EMBEDDINGS, (3, "max_norm", None)),
}
_WITH_FLAG = {
    f for f in vars(nn.functional).values() if "inplace" in getattr(getattr(f, "__code__", None), "co_varnames", ())
}
_OPERATORS = ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor", "setitem")
_METHODS = [name for name in dir(Tensor) if name.endswith("_") and name[0] != "_"]
IN_PLACE_NAMES = frozenset([*_METHODS, *(f"__{name}__" for name in _OPERATORS if hasattr(Tensor, f"__{name}__"))])
"""The names of methods that change their tensor."""
_IN_PLACE = (
    {getattr(Tensor, name) for name in IN_PLACE_NAMES if name != "requires_grad_"}
    | {f for home in (torch, nn.functional, nn.init) for name, f in vars(home).items() if name[-1] == "_" != name[0]}
    | {f for name, f in vars(torch).items() if name.startswith("_foreach_") and name[-1] == "_"}
    | _WITH_STATISTICS
    | _EMBEDDINGS
)

_SET_DATA: Any = Tensor.data.__set__  # pyright: ignore
_SET_REQUIRES_GRAD: Any = {Tensor.requires_grad_, Tensor.requires_grad.__set__}  # pyright: ignore
SEEN = {_SET_DATA, *_SET_REQUIRES_GRAD, *GRAPH_ATTRIBUTES, *_IN_PLACE, *_WITH_FLAG, *RECURRENT, *REPAIRED}
SEEN_WITH = {"out", "generator"}
"""The ops with which a `Watch` may have something to do, and the arguments by which others concern it."""
