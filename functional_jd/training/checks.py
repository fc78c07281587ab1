"""What `train_state` checks: that there is something to learn, and something to learn it from."""

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from functional_jd.core.names import objective_names
from functional_jd.core.tree import tree_flatten, tree_leaves, tree_names, tree_unflatten
from functional_jd.core.types import Losses, Params
from functional_jd.engines.evaluate import Options, evaluate_losses
from functional_jd.engines.plan import Plan
from functional_jd.objectives import Sharded
from functional_jd.objectives.gathering import Gathers
from functional_jd.torch_compat.assignments import noting_assignments
from functional_jd.torch_compat.autograd_graph import nodes_from
from functional_jd.torch_compat.slow_path import StateJournal, random_state, set_random_state, user_level


def check_batch(where: str, batch: tuple[Any, ...]) -> None:
    """Refuse a batch without a single element."""
    tensors = [x for x in tree_leaves(batch) if isinstance(x, Tensor)]
    if tensors and not any(x.numel() for x in tensors):
        shapes = ", ".join(str(list(x.shape)) for x in tensors[:3])
        raise ValueError(f"{where}: expected a batch with elements, found tensors of shape {shapes}. Is it empty?")


def check_learning(plan: Plan, journal: StateJournal) -> None:
    """Refuse losses that do not reach the parameters, and warn of losses that are not finite.

    The losses are evaluated once, as if they had not been: what they change is noted in the journal, and put back.
    """
    draws = random_state()
    where, losses, kind = plan.where, plan.losses, plan.kind
    leaves, structure = tree_flatten(plan.args[0])
    points = [x.detach().requires_grad_() for x in leaves]
    options = Options(where, True, None, differentiable=False, journal=journal, examples=kind.rows_are_examples)
    try:
        with torch.enable_grad(), noting_assignments(journal.note_attribute):
            args = (tree_unflatten(structure, points), *plan.args[1:])
            _, (values, _) = evaluate_losses(*kind.sample(losses, args), options)
        _refuse_written(plan, points, journal)
    finally:
        journal.undo(again=True)
        set_random_state(draws)
    unlearned = _unlearned(values, args[0])
    if isinstance(losses, Sharded) and losses.mesh is not None:
        without = f"uses all leaves but {', '.join(unlearned) or 'none'}"
        Gathers(where, losses.mesh, True).announce(without, losses.mesh.device_type)
    _refuse_unreached(where, values, points)
    _report_unlearned(plan, unlearned, args[0])
    _refuse_own(plan, values, points)
    _warn_unless_finite(where, values)


def _refuse_written(plan: Plan, points: list[Tensor], journal: StateJournal) -> None:
    """Refuse losses that change parameters in place, also by `.data`: only an optimizer may."""
    noted = [(x, old) for x, _, old in journal.before.values() if old is not None and type(x) in _PLAIN and x.numel()]
    # An op that may change what it is given is noted where it does not, too.
    written = [x for x, old in noted if not torch.equal(x.detach().nan_to_num(), old.nan_to_num())]
    memory = {x.untyped_storage().data_ptr() for x in written}
    for name, x in zip(tree_names(plan.args[0]), points, strict=True):
        if memory and type(x) is Tensor and x.numel() and x.untyped_storage().data_ptr() in memory:
            raise ValueError(
                f"{plan.where}: expected losses that leave the parameters, found that they change {name!r} in place. "
                "Let them compute with another tensor, or carry it as a buffer."
            )


def _refuse_own(plan: Plan, values: Losses, points: list[Tensor]) -> None:
    """Refuse losses that compute with the very tensors that the parameters start from, beside the parameters."""
    nodes = nodes_from([y.grad_fn for y in tree_leaves(values) if y.grad_fn is not None])
    found: dict[int, Any] = {id(x): x for node in nodes if type(x := getattr(node, "variable", None)) in _PLAIN}
    reached = {id(x) for x in points} & found.keys()
    others = {x.data_ptr(): x for key, x in found.items() if key not in reached and x.numel()}
    for name, point in zip(tree_names(plan.args[0]), points, strict=True):
        other = others.get(point.data_ptr()) if id(point) in reached else None
        if other is not None and other.shape == point.shape:
            raise ValueError(
                f"{plan.where}: expected losses that use the parameters that they receive, found that they also use "
                f"the tensor that {name!r} starts from, which never moves: a module, or a function that it calls, "
                "keeps it elsewhere than in its parameters. Let it look it up whenever it runs, or detach it."
            )


_PLAIN = (Tensor, Parameter)


def _refuse_unreached(where: str, values: Losses, points: list[Tensor]) -> None:
    names = objective_names(values)
    reached = [found for y in tree_leaves(values) for found in _reached(y, {id(x) for x in points})]
    if not any(reached):
        raise ValueError(
            f"{where}: expected losses that depend on the parameters, found none that does. Use the parameters that "
            "the losses receive, functional(model)(params, ...) and not model(...), and do not detach the losses."
        )
    if not all(reached):
        unreached = [name for name, yes in zip(names, reached, strict=True) if not yes]
        raise ValueError(
            f"{where}: expected losses that all depend on the parameters, found {', '.join(map(repr, unreached[:3]))} "
            f"{'and others ' * (len(unreached) > 3)}without a gradient. Return such values as aux: (losses, aux), with "
            "has_aux=True. For derivatives inside the losses, take torch.func.grad, or create_graph=True."
        )


def _unlearned(values: Losses, params: Params) -> list[str]:
    """The names of the parameters that no loss reaches."""
    nodes = nodes_from([y.grad_fn for y in tree_leaves(values) if y.grad_fn is not None])
    found = {id(getattr(node, "variable", None)) for node in nodes} | {id(y) for y in tree_leaves(values)}
    pairs = zip(tree_names(params), tree_leaves(params), strict=True)
    return [repr(name) for name, x in pairs if id(x) not in found]


def _report_unlearned(plan: Plan, unlearned: list[str], params: Params) -> None:
    """Refuse a trunk that no loss reaches, and warn of other parameters that none does."""
    trunk = plan.kind.row_params(plan.losses, params)
    names = {id(x): repr(name) for name, x in zip(tree_names(params), tree_leaves(params), strict=True)}
    if tree_leaves(trunk) and all(names[id(x)] in unlearned for x in tree_leaves(trunk)):  # engines say what is empty
        raise ValueError(
            f"{plan.where}: expected features that depend on params['shared'], found that no loss reaches one of them, "
            "so the trunk cannot learn. Use the parameters that features receives, functional(trunk)(shared, ...) and "
            "not trunk(...), and do not detach the features."
        )
    if unlearned:
        warnings.warn(
            f"{plan.where}: no loss reaches {', '.join(unlearned[:3])}{' and others' * (len(unlearned) > 3)} "
            "on this batch, so they do not learn from it. Use the parameters that the losses receive, "
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


def _warn_unless_finite(where: str, values: Losses) -> None:
    flags = torch.cat([leaf.detach().reshape(-1).isfinite() for leaf in tree_leaves(values)]).tolist()
    lost = [name for name, finite in zip(objective_names(values), flags, strict=True) if not finite]
    if lost:
        warnings.warn(
            f"{where}: the losses start with values that are not finite, in {', '.join(map(repr, lost[:3]))}"
            f"{' and others' * (len(lost) > 3)}: every step on such a batch is skipped. Look at the batch and at the "
            "first parameters.",
            UserWarning,
            stacklevel=user_level(),
        )
