"""Checks at the start, from one evaluation of the losses with a graph: a loss reaches each parameter, modules use the
parameters that are passed, noise protects, and no running statistics are lost.
"""

import warnings
from collections.abc import Collection, Generator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from functional_jd.aggregation.aggregate import Aggregator
from functional_jd.core.arguments import described
from functional_jd.core.names import objective_names
from functional_jd.core.tree import tree_flatten, tree_leaves, tree_map, tree_names, tree_unflatten
from functional_jd.core.types import PLAIN_TENSORS, Losses, LossFunction, Params, Tree
from functional_jd.engines.evaluate import evaluate_losses
from functional_jd.engines.kinds import kind_of
from functional_jd.engines.plan import Plan
from functional_jd.objectives.buffers import is_key
from functional_jd.objectives.calls import noting_calls
from functional_jd.objectives.gathering import Gathers
from functional_jd.objectives.over_shards import mesh_of
from functional_jd.optimizers.base import Optimizer
from functional_jd.precision.scale_state import is_scaled
from functional_jd.torch_compat.autograd_graph import nodes_from, passes_float16
from functional_jd.torch_compat.slow_path import random_state, random_state_outside_torch, set_random_state, user_level
from functional_jd.torch_compat.torch_internals import has_values
from functional_jd.torch_compat.vmap_levels import innermost
from functional_jd.torch_compat.watching import StateJournal

# Of norms that should be equal, such as the root of a sum of squares, by whatever dtype.
_ROUNDING = 1e-6


def check_noise(
    where: str, losses: LossFunction, rule: Aggregator, optimizer: Optimizer, *, reading: bool = True
) -> None:
    """Raise for noise that protects too little: a row that is not that of one example, or that is not bounded by the
    norm of the noise. Only `reading` reads bounds that are tensors.
    """
    norm, bound = optimizer.sensitivity, rule.sensitivity
    if norm is None:
        return
    found, kind = "", kind_of(losses)
    if not kind.rows_are_examples:
        found = "the losses must be made by per_example, found others: the noise protects nobody"
    elif kind.several_sets:
        found = "the losses must have one set of examples, found several: one example may have several rows"
    elif bound is None:
        found = "the rule must bound every row, as clipped(max_norm) does, found none: the noise protects nobody"
    elif all(not isinstance(x, Tensor) or (reading and has_values(x)) for x in (norm, bound)):
        norm, bound = float(norm), float(bound)
        if abs(norm - bound) > _ROUNDING * bound:
            found = f"the rule must bound rows by {norm:g}, the norm of the noise, found {bound:g}"
    if found:
        raise ValueError(
            f"{where}: with noised, {found}. Take private(loss, ...), whose losses, rule and optimizer fit."
        )


class _Look(NamedTuple):
    """What one evaluation of the losses shows.

    Attributes:
        values: the losses, with a graph.
        buffers: those that they returned.
        params: the parameters, leaves of the graph.
        names: the names of these leaves.
        moved: by name, the buffers that modules returned with new values.
        given: the parameters that modules were given, each with its name.
    """

    values: Losses
    buffers: Tree
    params: Params
    names: list[str]
    moved: dict[str, Tensor]
    given: list[tuple[str, Tensor]]


def check_learning(
    plan: Plan, journal: StateJournal, optimizer: Optimizer, buffers: Tree, constant: Collection[str] = ()
) -> None:
    """Check how training starts: raise for losses that cannot train, and warn of those that probably cannot.

    Args:
        plan: its losses are evaluated once.
        journal: notes what they change, and keeps it for the next evaluation.
        optimizer: what takes the rule's directions.
        buffers: what the losses take after the parameters.
        constant: the names of the losses that may have no gradient on this batch.
    """
    where, before = plan.where, tree_map(torch.clone, buffers)
    with _evaluated(plan, journal) as look:
        _check_written(where, look, journal)
        _warn_of_lost_buffers(where, journal, look)
        if optimizer.sensitivity is not None:
            _warn_of_buffers_without_noise(where, before, look.buffers)
    unlearned = _unlearned(look)
    mesh = mesh_of(plan.losses)
    if mesh is not None:
        without = f"uses all leaves but {', '.join(map(repr, unlearned)) or 'none'}"
        Gathers(where, mesh, True).announce(without, mesh.device_type)
    _warn_of_outputs(where, look.values)
    constant = _checked_names(where, look.values, constant)
    unreached = _unreached(where, look, constant)
    if needed := [name for name in unreached if name not in constant]:
        raise ValueError(
            f"{where}: all losses must depend on the parameters, found {_few(needed)} without a gradient. Call "
            "functional(model)(params, ...), not model(...). Return other values as aux, with has_aux=True; of a task "
            "without labels in this batch, pass constant=[name]."
        )
    if unlearned and not unreached:
        trunk = set(map(id, tree_leaves(plan.kind.row_params(plan.losses, look.params))))
        names = [name for name, x in zip(look.names, tree_leaves(look.params), strict=True) if id(x) in trunk]
        if names and set(names) <= set(unlearned):
            raise ValueError(
                f"{where}: features must depend on params['shared'], found that no loss reaches it. Call "
                "functional(trunk)(shared, ...), not trunk(...), and do not detach the features."
            )
        _warn_of_unlearned(where, unlearned, "so they do not learn from it")
    _check_own(where, look)
    _warn_of_float16(plan, look.values)


def check_reached(plan: Plan) -> None:
    """Check losses whose weights are asked for: raise if none reaches the parameters, or if modules use others, and
    warn of the single ones that reach none.
    """
    put_back = random_state_outside_torch()
    journal = StateJournal()
    try:
        with _evaluated(plan, journal) as look:
            pass
    finally:
        journal.undo()
        put_back()
    _warn_of_float16(plan, look.values)
    _check_own(plan.where, look)
    if unreached := _unreached(plan.where, look):
        _warn(
            f"{plan.where}: all losses should depend on the parameters, found {_few(unreached)} without a gradient: "
            "their weights mean nothing. Call functional(model)(params, ...), not model(...)."
        )
    unlearned = _unlearned(look)
    if unlearned and plan.kind.row_params(plan.losses, look.params) is look.params:  # else weights are the trunk's
        _warn_of_unlearned(plan.where, unlearned, "so their gradients do not count in the weights")


@contextmanager
def _evaluated(plan: Plan, journal: StateJournal) -> Generator[_Look]:
    """The losses, or those of some examples, evaluated by plain autograd. Afterwards their changes are undone."""
    kind, draws = plan.kind, random_state()
    leaves, structure = tree_flatten(plan.args[0])
    params = tree_unflatten(structure, [x.detach().requires_grad_() for x in leaves])
    plain = Plan(plan.where, True, None, differentiable=False, journal=journal, examples=kind.rows_are_examples)
    try:
        with torch.enable_grad(), noting_calls() as calls:
            sample, args = kind.sample(plan.losses, (params, *plan.args[1:]), plan.where)
            _, (values, (buffers, _)) = evaluate_losses(sample, args, plain)
        moved = {name: x for call in calls for name, x in call.moved().items()}
        given = [(name, innermost(x)) for call in calls for name, x in call.params.items()]
        yield _Look(values, buffers, params, tree_names(params), moved, given)
    finally:
        journal.undo(again=True)
        set_random_state(draws)


def _check_written(where: str, look: _Look, journal: StateJournal) -> None:
    """Raise for losses that change parameters in place, also by `.data`, and frozen ones that a module is given."""
    noted = [(x, old) for x, _, old in journal.before.values() if old is not None and _memory(x) is not None]
    written = {_memory(x) for x, old in noted if not torch.equal(x.detach().nan_to_num(), old.nan_to_num())}
    for name, x in [*zip(look.names, tree_leaves(look.params), strict=True), *look.given]:
        if _memory(x) in written:
            raise ValueError(
                f"{where}: expected losses that leave the parameters, found that they change {name!r} in place. "
                "Compute with another tensor, or carry it as a buffer."
            )


def _memory(x: Tensor) -> int | None:
    return x.untyped_storage().data_ptr() if type(x) in PLAIN_TENSORS and x.numel() else None


def _warn_of_lost_buffers(where: str, journal: StateJournal, look: _Look) -> None:
    """Warn of running statistics that normalization moved, and of other buffers, that the losses do not return."""
    returned = [x for x in tree_leaves(look.buffers) if isinstance(x, Tensor)]  # pyright: ignore[reportUnnecessaryIsInstance]
    memory = {_memory(x) for x in returned} - {None}  # a row of a returned buffer comes back with it

    def is_lost(x: Tensor) -> bool:
        return _memory(x) not in memory and not any(x.shape == y.shape and torch.equal(x, y) for y in returned)

    averages = [x for x in journal.averages if not torch.equal(x, cast(Tensor, journal.before[id(x)][2]))]
    lost = ["the running statistics that normalization moves"] * any(map(is_lost, averages))
    lost += [f"the buffer {name!r}, which its module moves" for name, x in look.moved.items() if is_lost(x)]
    if lost:
        _warn(
            f"{where}: the losses must return {lost[0]}, found that they do not. Take output, buffers = "
            "functional(module)(params, buffers, ...), return (losses, buffers), and pass "
            "buffers=dict(module.named_buffers()); or call module.eval()."
        )


def _warn_of_buffers_without_noise(where: str, before: Tree, after: Tree) -> None:
    """Warn of buffers that the losses of an example move, except for keys: they get no noise."""
    for name, x, y in zip(tree_names(after), tree_leaves(before), tree_leaves(after), strict=False):
        if not is_key(name, x, before) and not torch.equal(x.nan_to_num(), y.nan_to_num()):
            _warn(
                f"{where}: the losses of noised training move the buffer {name!r}, which gets no noise. Keep no buffer "
                "that follows the examples, as a running mean does. Pass a count of the steps in the batch."
            )
            return


def _check_own(where: str, look: _Look) -> None:
    """Raise for losses that use, as well as the parameters, the very tensors that these start from."""
    found = _leaves_behind(_nodes(tree_leaves(look.values)))
    points = tree_leaves(look.params)
    reached = {id(x) for x in points} & found.keys()
    others = {_place(x) for key, x in found.items() if key not in reached and x.numel()} - {None}
    own = [name for name, x in zip(look.names, points, strict=True) if id(x) in reached and _place(x) in others]
    if own:
        raise ValueError(
            f"{where}: expected losses that use the parameters that they receive, found that they also use the tensor "
            f"that {own[0]!r} starts from, which never moves. Look it up in the module whenever it is used, or detach "
            "it."
        )


def _place(x: Tensor) -> Any:
    return (x.data_ptr(), x.shape) if type(x) in PLAIN_TENSORS else None


def _warn_of_outputs(where: str, values: Losses) -> None:
    """Warn of a tuple of a loss and something larger: it looks like `(loss, logits)` without `has_aux`."""
    leaves = tree_leaves(values)
    large = [index for index, leaf in enumerate(leaves) if leaf.ndim]
    if type(values) not in (Tensor, dict, list) and 0 < len(large) < len(leaves):
        names = tree_names(values)
        shown = [f"{names[index]!r} {list(leaves[index].shape)}" for index in large[:3]]
        _warn(
            f"{where}: every element of the losses is an objective, {sum(leaf.numel() for leaf in leaves)} in all, "
            f"found single losses in one {type(values).__name__} with {', '.join(shown)}. If that is an output, return "
            "(losses, aux) with has_aux=True; if these are losses, return a dict or a list."
        )


def _checked_names(where: str, values: Losses, constant: Any) -> list[str]:
    names = objective_names(values)
    given: list[Any] = list(constant) if isinstance(constant, list | tuple | set) else [constant]
    if unknown := [x for x in given if not isinstance(x, str) or x not in names]:
        raise ValueError(
            f"{where}: constant must hold names of losses, {_few(names)}, found {described(unknown[0])}. "
            "objective_names(losses) returns them."
        )
    return given


def _unreached(where: str, look: _Look, constant: Collection[str] = ()) -> list[str]:
    """The names of the losses without a gradient; an error if none has one, unless all may be constant."""
    points = {id(x) for x in tree_leaves(look.params)}
    parts = [part for y in tree_leaves(look.values) for part in _parts(y)]
    names = objective_names(look.values)
    unreached = [name for name, part in zip(names, parts, strict=True) if points.isdisjoint(_leaves_behind([part]))]
    if len(unreached) == len(names) and not set(names) <= set(constant):
        raise ValueError(
            f"{where}: the losses must depend on the parameters, found none that does. Call functional(model)(params, "
            "...), not model(...), and do not detach the losses."
        )
    return unreached


def _unlearned(look: _Look) -> list[str]:
    """The names of the parameters that no loss reaches."""
    found = _leaves_behind(_nodes(tree_leaves(look.values)))
    return [name for name, x in zip(look.names, tree_leaves(look.params), strict=True) if id(x) not in found]


def _warn_of_unlearned(where: str, unlearned: list[str], what: str) -> None:
    _warn(
        f"{where}: no loss reaches {_few(unlearned)} on this batch, {what}. Call functional(model)(params, ...), not "
        "model(...), or leave out constant parameters by partition."
    )


def _warn_of_float16(plan: Plan, values: Losses) -> None:
    """Warn of gradients that pass through float16 without a scale."""
    if not is_scaled(plan.scale_state) and passes_float16(nodes_from(_nodes(tree_leaves(values)))):
        _warn(
            f"{plan.where}: gradients pass through float16 without a scale, which loses those below 6e-8, and digits "
            "of those below 6e-5. Pass scale=scale_state(), or take bfloat16: autocast(losses, torch.bfloat16)."
        )


def _nodes(values: list[Tensor]) -> list[Any]:
    return [get_gradient_edge(y).node for y in values if y.requires_grad]


def _parts(loss: Tensor) -> list[Any]:
    """By element, the node that computes it. Losses that were stacked have one each."""
    node = next(iter(_nodes([loss])), None)
    parts = () if node is None else node.next_functions
    if node is not None and node.name() == "StackBackward0" and loss.ndim == 1 and len(parts) == loss.numel():
        return [part for part, _ in parts]
    return [node] * loss.numel()


def _leaves_behind(nodes: list[Any]) -> dict[int, Tensor]:
    """The leaf tensors of plain autograd behind some nodes, by id."""
    leaves = [getattr(node, "variable", None) for node in nodes_from([x for x in nodes if x is not None])]
    return {id(x): x for x in leaves if x is not None}


def _warn(text: str) -> None:
    warnings.warn(text, UserWarning, stacklevel=user_level())


def _few(names: list[str]) -> str:
    return ", ".join(map(repr, names[:3])) + " and others" * (len(names) > 3)
