"""Modules as pure functions of their parameters and buffers."""

import gc
import sys
from collections.abc import Callable, Mapping
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from functional_jd.core.tree import tree_leaves
from functional_jd.core.types import PLAIN_TENSORS
from functional_jd.torch_compat.module_tree import Filled, ModuleTree
from functional_jd.torch_compat.moved_buffers import note_moved_buffers
from functional_jd.torch_compat.own_parameters import are_noted, note_parameters
from functional_jd.torch_compat.torch_internals import change_count, is_wrapped, torch_function_disabled, unwrapped
from functional_jd.torch_compat.traced_modules import run_traced

State = dict[str, Tensor]
"""Parameters or buffers by dotted name, as `named_parameters()` and `named_buffers()` name them."""


def functional(module: nn.Module) -> Callable[..., tuple[Any, State]]:
    """Turn a module into a pure function of its parameters and buffers.

    `output, buffers = apply(params, buffers, *args, **kwargs)`

    Args:
        module: the module. Its parts are read when `functional` is called, its mode and its hooks when `apply` is, and
            it is afterwards what it was. Shared parameters and buffers have one name, the first.

    Returns:
        `apply(params, buffers, *args, **kwargs) -> (output, buffers)`. `params` and `buffers`: dicts of tensors like
        `dict(module.named_parameters())` and `dict(module.named_buffers())`; any shapes and dtypes that the module
        takes. The buffers that come back are new tensors: those of a normalisation layer have moved, others are copies.
        A deep copy of `apply`, also within a copy of the module that keeps it, is that of the copied module; so is a
        pickle.

    Raises:
        TypeError: `module` is not an `nn.Module`; `params` or `buffers` is not a dict of tensors.
        ValueError: names are missing or unknown; the module has other parts than when it was read; it has parameters
            without a shape, or is one of `fully_shard`; its forward changes or replaces a parameter, gives a buffer its
            first value, or returns what would compute later.
        RuntimeError: `functional` itself, not `apply`, is called inside a function that is compiled in a full graph.

    Laws:
        Pure: afterwards neither the module nor `params` and `buffers` have changed, also where forward raises: neither
        tensors nor hooks, attributes, and what its lists, dicts and sets hold. Right however a layer is reached
        (lambdas, other objects, compiled and scripted parts, graphs of torch.fx), and where something runs the module
        again in the backward pass (`torch.utils.checkpoint`, custom functions such as adjoints). Composes with vmap,
        grad, jvp and compile, as far as the module does.

    Differs:
        From `torch.func.functional_call`, which also puts tensors into the module for the time of the call: what runs
        again in the backward pass finds the module's own parameters there, gradients are silently wrong, and what the
        module sets on itself stays. Conversions (`to`, `float`) and the rows that an embedding with `max_norm` shortens
        leave the parameters here. Threads that call one `apply` wait for one another; those that call several of one
        module, or the module itself meanwhile, must not share it. A forward that writes a parameter is refused once it
        has: only `train_state`, which alone sees `.data.copy_` and its like, of frozen parameters too, puts the values
        back. Compiled, a write by way of `detach()` is not noticed either: call it once eagerly. A
        tensor that a function of the module keeps for itself is not replaced; `train_state` and `weights_fn` refuse it
        where a gradient reaches it. Hooks of tensors that call the module in the backward pass find its own parameters.

    Example:
        >>> net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        >>> params, buffers = dict(net.named_parameters()), dict(net.named_buffers())
        >>> output, moved = functional(net)(params, buffers, torch.ones(5, 3))
        >>> int(moved["1.num_batches_tracked"]), int(net[1].num_batches_tracked)
        (1, 0)
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"functional: expected an nn.Module, found {type(module).__name__}. Pass the module itself.")
    applied = _Applied(module)
    applied.read()
    return applied


class _Applied:
    """What `functional` returns. A deep copy, alone or within what holds the module, is that of the copied module."""

    def __init__(self, module: nn.Module):
        self.module = module
        self.tree: ModuleTree | None = None  # in a copy, read at the first call: its module may be half copied
        self.param_names: list[str] = []
        self.buffer_names: list[str] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return _Applied, (self.module,)

    def read(self) -> ModuleTree:
        """Read the parts of the module."""
        module = self.module
        if torch.compiler.is_compiling():  # a graph break, where those are allowed
            raise RuntimeError(
                "functional: expected a call outside of what torch.compile traces, as it reads all parts of the "
                "module, found one inside. Write apply = functional(module) before, and compile what calls apply."
            )
        lazy = [name for name, p in module.named_parameters() if is_lazy(p)]
        if lazy:
            raise ValueError(
                f"functional: expected parameters with shapes, found that {lazy[0]!r} gets its own when the module "
                "first runs. Call the module once before."
            )
        _refuse_fully_sharded(module)
        self.tree = ModuleTree(module)
        self.param_names = [name for name, _ in module.named_parameters()]
        self.buffer_names = [name for name, _ in module.named_buffers()]
        return self.tree

    def __call__(self, params: State, buffers: State, *args: Any, **kwargs: Any) -> tuple[Any, State]:
        tree = self.read() if self.tree is None else self.tree
        given = _named("params", params, self.param_names, "named_parameters")
        for name, x in _named("buffers", buffers, self.buffer_names, "named_buffers").items():
            given[name] = x.detach().clone()  # losses may change buffers in place
        for embedding, name in tree.embeddings:
            if embedding.max_norm is not None:
                given[name] = params[name].clone()  # rows are shortened in place
        if torch.compiler.is_compiling():
            (output, replaced, moved), runs_again = run_traced(self.module, tree, given, args, kwargs), True
        else:
            output, replaced, moved, runs_again = _called(self.module, tree, given, params, args, kwargs)
        if replaced is not None:
            raise ValueError(
                f"functional: expected a forward that leaves its parameters, found that it replaces {replaced!r}. Make "
                "it a buffer, which comes back as a result."
            )
        # What runs again in a backward pass changes its buffers once more.
        returned = {name: x.detach().clone() if runs_again else x.detach() for name, x in moved.items()}
        note_moved_buffers(buffers, returned)
        return output, returned


def _refuse_fully_sharded(module: nn.Module) -> None:
    """Refuse a module whose hooks gather parameters of its own, whatever it is given."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # without it there are none, and it takes long to import
    if fsdp is None:
        return
    for part in module.modules():
        if isinstance(part, (fsdp.FSDPModule, fsdp.FullyShardedDataParallel)):
            raise ValueError(
                f"functional: expected a module without the hooks of fully_shard, found {type(part).__name__}, which "
                "gathers parameters of its own, not those that it is given. Call functional before fully_shard, with a "
                "copy: apply = functional(copy.deepcopy(module))."
            )


def _called(module: nn.Module, tree: ModuleTree, given: State, params: State, args: Any, kwargs: Any) -> Any:
    """The output, the name of a parameter that was replaced, the buffers, and whether something will run again."""
    _refuse_fully_sharded(module)
    before = _marks(params.values())
    with Filled(tree, tree.holding(given)) as filled:
        try:
            output = module(*args, **kwargs)
        except RuntimeError as error:
            if "were not batched" in str(error) and "running_mean" in str(error):
                error.add_note(_UNMAPPED_STATISTICS)
            raise
        replaced, moved = tree.after(filled.contents, given)
    if are_noted():
        note_parameters(tree_leaves(output), tree.replaced(given), params)
    if before != (marks := _marks(params.values())):
        for name, old, new in zip(params, before, marks, strict=True):
            if old != new and name not in tree.recurrent:  # whose weights cuDNN moves together
                raise ValueError(
                    f"functional: expected a forward that leaves its parameters, found that it has changed {name!r} in "
                    "place. Make it a buffer, which comes back as a result, or compute with another tensor."
                )
    if output.__class__ is not Tensor:
        _refuse_parts(output, tree)
    return output, replaced, moved, filled.runs_again


_UNMAPPED_STATISTICS = (
    "functional: the buffers that were passed are not mapped by vmap, but what the layer computes is. Give each of the "
    "S members its own statistics, as a mapped argument: buffers = {n: b.expand(S, *b.shape) for n, b in "
    "module.named_buffers()} and torch.vmap(f, in_dims=(0, 0, None))(params, buffers, x), where f calls apply(params, "
    "buffers, x). track_running_stats need not be False."
)


def _marks(tensors: Any) -> list[Any]:
    """What differs once a tensor was changed in place or was given other data."""
    with torch_function_disabled():
        try:
            return [(change_count(x), x.data_ptr() if x.__class__ in PLAIN_TENSORS else 0) for x in tensors]
        except RuntimeError:  # hidden by a transform, or made in inference mode
            return [_mark(x) for x in tensors]


def _mark(x: Tensor) -> Any:
    counts: list[int] = []
    while not x.is_inference():
        counts.append(change_count(x))
        if not is_wrapped(x):
            break
        x = unwrapped(x)
    return counts


def _refuse_parts(output: Any, tree: ModuleTree) -> None:
    """What is returned must not call the module later, when it has its own parameters again."""
    known, waiting = set[int](), [output]
    while waiting:
        x = waiting.pop()
        if id(x) in tree.ids:
            raise ValueError(
                f"functional: expected an output of tensors, found {type(output).__name__} that holds a part of the "
                f"module ({type(x).__name__}), which has its own parameters again. Let forward return what it computes."
            )
        if id(x) in known or isinstance(x, _ENDS):
            continue
        known.add(id(x))
        cells = (x.__closure__, x.__defaults__, x.__dict__) if isinstance(x, FunctionType) else None
        waiting += gc.get_referents(x if cells is None else cells)


_ENDS = (Tensor, nn.Module, type, ModuleType, str, int, float, torch.dtype, torch.device)


def _named(what: str, given: Any, names: list[str], method: str) -> State:
    """The tensors by name, in the order of the module."""
    tensors = [x for x in given.values() if isinstance(x, Tensor)] if isinstance(given, Mapping) else None
    if tensors is None or len(tensors) != len(given):
        found = type(given).__name__ if not isinstance(given, Mapping) else "a dict with other values"
        raise TypeError(
            f"functional: {what} must be a dict of tensors by name, found {found}. Start with dict(module.{method}())."
        )
    if len(given) != len(names) or not all(map(given.__contains__, names)):
        missing, unknown = sorted(set(names) - set(given)), sorted(set(given) - set(names))
        raise ValueError(
            f"functional: {what} must have the names of module.{method}(), found {missing[:5]} missing and "
            f"{unknown[:5]} unknown. If some parameters are constants, pass merge(trained, constant)."
        )
    return {name: given[name] for name in names}
