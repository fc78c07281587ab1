"""Checks before training, and before weights are asked for: whether losses reach the parameters, and noise protects."""

import warnings
from typing import Any

import torch
from torch import Tensor

from functional_jd.aggregation.aggregate import Aggregator
from functional_jd.core.arguments import described
from functional_jd.core.names import objective_names
from functional_jd.core.tree import tree_flatten, tree_leaves, tree_names, tree_unflatten
from functional_jd.core.types import PLAIN_TENSORS, Losses, LossFunction, Params, Tree
from functional_jd.engines.evaluate import Options, evaluate_losses
from functional_jd.engines.kinds import kind_of
from functional_jd.engines.plan import Plan
from functional_jd.objectives.gathering import Gathers
from functional_jd.objectives.over_shards import mesh_of
from functional_jd.optimizers.base import Optimizer
from functional_jd.precision.scale_state import is_scaled
from functional_jd.random.keyed_function import noting_keys
from functional_jd.torch_compat.assignments import noting_assignments
from functional_jd.torch_compat.autograd_graph import nodes_from, passes_float16
from functional_jd.torch_compat.moved_buffers import noting_moved_buffers
from functional_jd.torch_compat.own_parameters import Noted, noting_parameters
from functional_jd.torch_compat.slow_path import random_state, random_state_outside_torch, set_random_state, user_level
from functional_jd.torch_compat.torch_internals import has_values
from functional_jd.torch_compat.watching import StateJournal
from functional_jd.training.first_values import warn_of_residuals
from functional_jd.training.lost_state import warn_of_lost_state
from functional_jd.training.private import warn_of_moved_buffers
from functional_jd.training.signatures import blame_batch

# Of norms that should be equal, such as the root of a sum of squares, by whatever dtype.
_ROUNDING = 1e-6


def check_batch(where: str, batch: tuple[Any, ...]) -> None:
    """Refuse a batch without a single element."""
    tensors = [x for x in tree_leaves(batch) if isinstance(x, Tensor)]
    if tensors and not any(x.numel() for x in tensors):
        shapes = ", ".join(str(list(x.shape)) for x in tensors[:3])
        raise ValueError(
            f"{where}: expected a batch with elements, found tensors of shape {shapes}. "
            "Pass one example at least: any will do, where others follow."
        )


def refuse_8_bits(where: str, what: str, tree: Tree) -> None:
    """Refuse float8, in which torch neither adds nor compares."""
    for index, leaf in enumerate(tree_leaves(tree)):
        if leaf.dtype.itemsize < 2:
            name = tree_names(tree)[index]
            raise TypeError(
                f"{where}: expected {what} of 16 bits or more, found {leaf.dtype} in {name!r}, which torch cannot add. "
                "Keep them in bfloat16 or float32, and convert inside the losses: x.to(torch.float8_e4m3fn)."
            )


def check_noise(
    where: str, losses: LossFunction, rule: Aggregator, optimizer: Optimizer, *, reading: bool = True
) -> None:
    """Refuse noise that protects nobody: where a row is not that of one example, or not bounded by the norm that the
    noise is for. Of bounds that are tensors, only `reading` looks at the values.
    """
    norm, bound = optimizer.sensitivity, rule.sensitivity
    if norm is None:
        return
    cure = "Take private(loss, ...), which builds losses, rule and optimizer that fit."
    if not kind_of(losses).rows_are_examples:
        raise ValueError(
            f"{where}: noised adds noise for single examples, expected losses made by per_example, found others: "
            f"the noise protects nobody. {cure}"
        )
    if kind_of(losses).several_sets:
        raise ValueError(
            f"{where}: noised adds noise for single examples, expected one set of them, found several, and somebody "
            "may have a row in each: the noise is too small. Let the loss of one example return the sum of its terms."
        )
    if bound is None:
        raise ValueError(
            f"{where}: noised adds noise for rows of bounded norm, expected a rule that bounds every row, such as "
            f"clipped(max_norm), found one that does not: the noise protects nobody. {cure}"
        )
    if all(not isinstance(x, Tensor) or (reading and has_values(x)) for x in (norm, bound)):
        norm, bound = float(norm), float(bound)
        if abs(norm - bound) > _ROUNDING * bound:
            raise ValueError(
                f"{where}: noised adds noise for rows of norm {norm:g}, expected a rule with this bound, found one "
                f"with {bound:g}: the noise is not what the multiplier says. {cure}"
            )


def check_learning(
    plan: Plan,
    journal: StateJournal,
    losses: LossFunction,
    batch: tuple[Any, ...],
    optimizer: Optimizer,
    constant: Any = (),
) -> None:
    """Refuse losses that do not reach the parameters, and warn of what is likely to be wrong.

    The losses are evaluated once, as if they had not been: what they change is noted in the journal, and put back.

    Args:
        plan: its losses are evaluated.
        journal: what else is evaluated before it is undone once more is noted there, too.
        losses: as the user gave them.
        batch: what follows the parameters, and the buffers if there are any.
        optimizer: what takes the rule's directions.
        constant: the names of the losses that may have no gradient on this batch.
    """
    draws, where = random_state(), plan.where
    points, params = _as_points(plan)
    drawn: list[Tensor] = []
    try:
        with noting_keys(drawn.append), noting_moved_buffers() as moved:
            values, buffers, noted = _evaluated(plan, params, journal)
        _refuse_written(plan, points, noted, journal)
        warn_of_lost_state(plan, journal, moved, drawn, buffers)
        if optimizer.sensitivity is not None:
            warn_of_moved_buffers(plan, journal, drawn, buffers)
    except Exception as error:
        blame_batch(where, losses, len(plan.args) > 1 + len(batch), batch, error)
        raise
    finally:
        journal.undo(again=True)
        set_random_state(draws)
    unlearned = _unlearned(values, params)
    mesh = mesh_of(plan.losses)
    if mesh is not None:
        without = f"uses all leaves but {', '.join(unlearned) or 'none'}"
        Gathers(where, mesh, True).announce(without, mesh.device_type)
    _warn_of_outputs(where, values)
    refuse_8_bits(where, "losses", values)
    if _refuse_unreached(where, values, points, constant):
        _report_unlearned(plan, unlearned, params)
    _refuse_own(plan, values, points, noted.own)
    warn_of_residuals(plan, optimizer, values)
    _warn_of_float16(plan, values)


def check_reached(plan: Plan) -> None:
    """Refuse losses none of which reaches the parameters, or whose modules use others, and warn of those that reach
    none: their weights say nothing.

    The losses are evaluated once, as if they had not been.
    """
    journal, draws, put_back = StateJournal(), random_state(), random_state_outside_torch()
    points, params = _as_points(plan)
    try:
        values, _, noted = _evaluated(plan, params, journal)
    finally:
        journal.undo()
        set_random_state(draws)
        put_back()
    _warn_of_float16(plan, values)
    if noted.own:
        raise _uses_others(plan.where, noted.own[0])
    reached = _which_reach(plan.where, values, points)
    unreached = [repr(name) for name, yes in zip(objective_names(values), reached, strict=True) if not yes]
    if unreached:
        warnings.warn(
            f"{plan.where}: expected losses that all depend on the parameters, found {', '.join(unreached[:3])} "
            f"{'and others ' * (len(unreached) > 3)}without a gradient, whose weights say nothing. Use the parameters "
            "that the losses receive, functional(model)(params, ...) and not model(...).",
            UserWarning,
            stacklevel=user_level(),
        )
    unlearned = _unlearned(values, params)
    heads_apart = plan.kind.row_params(plan.losses, params) is not params  # then weights are the trunk's
    if unlearned and not heads_apart:
        _warn_of_unlearned(plan.where, unlearned, "so their gradients do not count in the weights")


def _as_points(plan: Plan) -> tuple[list[Tensor], Params]:
    """The parameters as leaves of a graph of plain autograd, alone and in their tree."""
    leaves, structure = tree_flatten(plan.args[0])
    points = [x.detach().requires_grad_() for x in leaves]
    return points, tree_unflatten(structure, points)


def _evaluated(plan: Plan, params: Params, journal: StateJournal) -> tuple[Losses, Tree, Noted]:
    """The losses, or those of some examples, the buffers that they return, and what is noted of modules in them."""
    kind = plan.kind
    options = Options(plan.where, True, None, differentiable=False, journal=journal, examples=kind.rows_are_examples)
    with torch.enable_grad(), noting_assignments(journal.note_attribute), noting_parameters() as noted:
        sample, args = kind.sample(plan.losses, (params, *plan.args[1:]), plan.where)
        _, (values, (buffers, _)) = evaluate_losses(sample, args, options)
    return values, buffers, noted


def _refuse_written(plan: Plan, points: list[Tensor], noted: Noted, journal: StateJournal) -> None:
    """Refuse losses that change parameters in place, also by `.data`: only an optimizer may, and frozen ones stay."""
    changed = [
        (x, old) for x, _, old in journal.before.values() if old is not None and type(x) in PLAIN_TENSORS and x.numel()
    ]
    # An op that may change what it is given is noted where it does not, too.
    written = [x for x, old in changed if not torch.equal(x.detach().nan_to_num(), old.nan_to_num())]
    memory = {x.untyped_storage().data_ptr() for x in written}
    if not memory:
        return
    for name, x in [*zip(tree_names(plan.args[0]), points, strict=True), *noted.given]:
        if type(x) in PLAIN_TENSORS and x.numel() and x.untyped_storage().data_ptr() in memory:
            raise ValueError(
                f"{plan.where}: expected losses that leave the parameters, found that they change {name!r} in place. "
                "Let them compute with another tensor, or carry it as a buffer."
            )


def _refuse_own(plan: Plan, values: Losses, points: list[Tensor], own: list[str]) -> None:
    """Refuse losses that compute with the very tensors that the parameters start from, beside the parameters, and
    modules that use parameters of their own, beside those that they are given.
    """
    nodes = nodes_from([y.grad_fn for y in tree_leaves(values) if y.grad_fn is not None])
    found: dict[int, Any] = {id(x): x for node in nodes if type(x := getattr(node, "variable", None)) in PLAIN_TENSORS}
    reached = {id(x) for x in points} & found.keys()
    others = {x.data_ptr(): x for key, x in found.items() if key not in reached and x.numel()}
    for index, point in enumerate(points):
        other = others.get(point.data_ptr()) if id(point) in reached else None
        if other is not None and other.shape == point.shape:
            raise _uses_others(plan.where, tree_names(plan.args[0])[index])
    if own:
        raise _uses_others(plan.where, own[0])


def _uses_others(where: str, name: str) -> ValueError:
    return ValueError(
        f"{where}: expected losses that use the parameters that they receive, found that they also use the tensor that "
        f"{name!r} starts from, which never moves: a module, or a function that it calls, keeps it elsewhere than in "
        "its parameters. Let it look it up whenever it runs, or detach it."
    )


def _warn_of_outputs(where: str, values: Losses) -> None:
    """Warn of a tuple of a loss and something larger: it looks like `(loss, logits)` without `has_aux`."""
    leaves = tree_leaves(values)
    large = [index for index, leaf in enumerate(leaves) if leaf.ndim]
    if type(values) not in (Tensor, dict, list) and 0 < len(large) < len(leaves):
        m, names = sum(leaf.numel() for leaf in leaves), tree_names(values)
        shown = [f"{names[index]!r} {list(leaves[index].shape)}" for index in large[:3]]
        warnings.warn(
            f"{where}: every element of what the losses return is an objective, {m} in all, found single losses in one "
            f"{type(values).__name__} with {', '.join(shown)}. If that is an output, return (losses, aux) with "
            "has_aux=True; if these are losses, return a dict or a list.",
            UserWarning,
            stacklevel=user_level(),
        )


def _refuse_unreached(where: str, values: Losses, points: list[Tensor], constant: Any) -> bool:
    """Refuse losses without a gradient, but for those that may be constant, and return whether all have one."""
    names = objective_names(values)
    given: list[Any] = list(constant) if isinstance(constant, list | tuple | set) else [constant]
    if unknown := [x for x in given if not isinstance(x, str) or x not in names]:
        raise ValueError(
            f"{where}: constant must hold names of losses, {', '.join(map(repr, names[:5]))}"
            f"{' and others' * (len(names) > 5)}, found {described(unknown[0])}. objective_names(losses) returns them."
        )
    reached = _which_reach(where, values, points, none_may=not set(names) - set(given))
    needed = [yes for name, yes in zip(names, reached, strict=True) if name not in given]
    if not all(needed):
        unreached = [name for name, yes in zip(names, reached, strict=True) if not yes and name not in given]
        raise ValueError(
            f"{where}: expected losses that all depend on the parameters, found {', '.join(map(repr, unreached[:3]))} "
            f"{'and others ' * (len(unreached) > 3)}without a gradient. If a module is called directly, take "
            "functional(model)(params, ...). Return other values as aux: (losses, aux), with has_aux=True. Of a task "
            "without labels on this batch: constant=[name]. For derivatives inside losses, take torch.func.grad, or "
            "create_graph=True."
        )
    return all(reached)


def _which_reach(where: str, values: Losses, points: list[Tensor], none_may: bool = False) -> list[bool]:
    """Which losses have a gradient; an error if none has."""
    reached = [found for y in tree_leaves(values) for found in _reached(y, {id(x) for x in points})]
    if reached and not any(reached) and not none_may:
        raise ValueError(
            f"{where}: expected losses that depend on the parameters, found none that does. Use the parameters that "
            "the losses receive, functional(model)(params, ...) and not model(...), and do not detach the losses."
        )
    return reached


def _unlearned(values: Losses, params: Params) -> list[str]:
    """The names of the parameters that no loss reaches."""
    nodes = nodes_from([y.grad_fn for y in tree_leaves(values) if y.grad_fn is not None])
    found = {id(getattr(node, "variable", None)) for node in nodes} | {id(y) for y in tree_leaves(values)}
    leaves = tree_leaves(params)
    if all(id(x) in found for x in leaves):
        return []
    return [repr(name) for name, x in zip(tree_names(params), leaves, strict=True) if id(x) not in found]


def _report_unlearned(plan: Plan, unlearned: list[str], params: Params) -> None:
    """Refuse a trunk that no loss reaches, and warn of other parameters that none does."""
    if not unlearned:
        return
    trunk = plan.kind.row_params(plan.losses, params)
    names = {id(x): repr(name) for name, x in zip(tree_names(params), tree_leaves(params), strict=True)}
    if tree_leaves(trunk) and all(names[id(x)] in unlearned for x in tree_leaves(trunk)):  # engines say what is empty
        raise ValueError(
            f"{plan.where}: expected features that depend on params['shared'], found that no loss reaches one of them, "
            "so the trunk cannot learn. Use the parameters that features receives, functional(trunk)(shared, ...) and "
            "not trunk(...), and do not detach the features."
        )
    _warn_of_unlearned(plan.where, unlearned, "so they do not learn from it")


def _warn_of_unlearned(where: str, unlearned: list[str], what: str) -> None:
    warnings.warn(
        f"{where}: no loss reaches {', '.join(unlearned[:3])}{' and others' * (len(unlearned) > 3)} "
        f"on this batch, {what}. Use the parameters that the losses receive, "
        "functional(model)(params, ...) and not model(...), or leave out what is constant by partition.",
        UserWarning,
        stacklevel=user_level(),
    )


def _reached(loss: Tensor, points: set[int]) -> list[bool]:
    """By element, whether its graph reaches one of the points. Losses that were stacked are looked at one by one."""
    node: Any = loss.grad_fn
    parts = () if node is None else node.next_functions
    if node is not None and node.name() == "StackBackward0" and loss.ndim == 1 and len(parts) == loss.numel():
        return [part is not None and _nodes_reach([part], points) for part, _ in parts]
    found = id(loss) in points or (node is not None and _nodes_reach([node], points))
    return [found] * loss.numel()


def _nodes_reach(nodes: list[Any], points: set[int]) -> bool:
    return any(id(getattr(node, "variable", None)) in points for node in nodes_from(nodes))


def _warn_of_float16(plan: Plan, values: Losses) -> None:
    """Warn of gradients that pass through float16 without a scale."""
    nodes = nodes_from([y.grad_fn for y in tree_leaves(values) if y.grad_fn is not None])
    if not is_scaled(plan.scale) and passes_float16(nodes):
        warnings.warn(
            f"{plan.where}: gradients pass through float16 without a scale, which loses those below 6e-8, and digits "
            "of those below 6e-5. Pass scale=scale_state(), or take bfloat16: autocast(losses, torch.bfloat16).",
            UserWarning,
            stacklevel=user_level(),
        )
