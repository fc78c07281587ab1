"""Checks at the start, most of them from one evaluation of the losses with a graph."""

from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from functional_jd.core.agreement import check_alike, checksums, description
from functional_jd.core.arguments import here, refuse
from functional_jd.core.names import objective_names
from functional_jd.core.sharding import is_sharded, meshes_of, over_mesh
from functional_jd.core.tree import described_leaves, floating_leaves, tree_leaves, tree_map, tree_names
from functional_jd.core.types import PLAIN_TENSORS, Losses, LossFunction, Params, Tree
from functional_jd.engines.evaluate import element_count, evaluate_losses, row_scales
from functional_jd.engines.plan import Plan
from functional_jd.engines.row_vjps import are_linear
from functional_jd.engines.vjp import check_mode, vjp
from functional_jd.objectives.buffers import is_key
from functional_jd.objectives.functional import noting_calls
from functional_jd.objectives.over_shards import mesh_of
from functional_jd.precision.autocast import autocast_disabled
from functional_jd.torch_compat.autograd_graph import graph_nodes, leaves_behind, refuse_reentrant
from functional_jd.torch_compat.slow_path import random_state, random_state_outside_torch, set_random_state
from functional_jd.torch_compat.torch_internals import innermost, under_transform
from functional_jd.torch_compat.watching import StateJournal
from functional_jd.training.state import few, warn

_CURE = "Call functional(model)(params, ...), not model(...)"


@contextmanager
def undone(journal: StateJournal, *, again: bool = False) -> Generator[None]:
    """Put back afterwards generators and the values in the journal; `again`: the journal keeps it for another time."""
    draws, put_back = random_state(), random_state_outside_torch()
    try:
        yield
    finally:
        journal.undo(again=again)
        set_random_state(draws)
        put_back()


def check_learning(
    plan: Plan,
    buffers: Tree = (),
    constant: Collection[str] = (),
    *,
    journal: StateJournal | None = None,
    training: bool = True,
) -> list[tuple[int, ...]]:
    """Evaluate the losses, or those of some examples, by plain autograd; raise and warn as `train_state` does. Changes
    are put back; a `journal` keeps them. Without `training`, losses without a gradient warn. Returns, for each leaf of
    the rows, the losses that reach it; nothing for examples and shards, and under transforms.
    """
    if under_transform():
        return []
    check_mode()
    kind, before, journal = plan.kind, tree_map(torch.clone, buffers), journal or StateJournal()
    params = tree_map(lambda x: x.detach().requires_grad_(), plan.args[0])
    named = dict(zip(tree_names(params), points := tree_leaves(params), strict=True))
    plain = Plan(True, None, differentiable=False, journal=journal, examples=kind.rows_are_examples)
    with undone(journal, again=True):
        with torch.enable_grad(), noting_calls() as calls:
            sample, args = kind.sample(plan.losses, (params, *plan.args[1:]))
            _, (values, (returned, _)) = evaluate_losses(sample, args, plain)
        _check_written(journal, [*named.items(), *(own for call in calls for own in call.params.items())], buffers)
        if training:
            _warn_of_lost_buffers(journal, calls, returned)
        if getattr(plan.optimizer, "sensitivity", None) is not None:
            _warn_of_buffers_without_noise(before, returned)
    found = leaves_behind(nodes := nodes_of(values))
    _warn_of_float16(plan, named, nodes, training)
    unlearned = [name for name, x in named.items() if id(x) not in found]
    if (mesh := mesh_of(plan.losses)) is not None and training:
        without = f"uses all leaves but {', '.join(map(repr, unlearned)) or 'none'}"
        cast("Any", plan.losses).gathers(starting=True).announce(without, mesh.device_type)
    own, first = {_place(found[key]) for key in found.keys() - set(map(id, points))} - {None}, dict[Any, Tensor]()
    for (name, x), leaf in zip(named.items(), tree_leaves(plan.args[0]), strict=True):
        if (place := _place(x)) is not None and first.setdefault(place, leaf) is not leaf:  # but one may start two
            raise ValueError(f"{here()}: params must hold tied weights once, found {name!r} again. Pass one, or clone.")
        if id(x) in found and place in own:
            raise ValueError(
                f"{here()}: expected losses that use the parameters that they receive, found that they also use the "
                f"tensor that {name!r} starts from, which never moves. Read it from the module each time, or detach it."
            )
    trunk = tree_leaves(kind.row_params(plan.losses, params))
    unreached, reached = _check_reached(values, points, trunk, constant, training)
    refuse_reentrant(nodes)
    if unlearned and (not unreached if training else len(trunk) == len(points)):  # else weights are the trunk's
        warn(
            f"{here()}: no loss reaches {few(unlearned)} on this batch, so they have no gradient. {_CURE}, or leave "
            "out constant parameters by partition."
        )
    # Rules by groups alone need them; other ranks and examples may have other graphs.
    known = trunk if plan.groups is not None and mesh is None and not kind.rows_are_examples else []
    return [tuple(i for i, leaves in enumerate(reached) if not leaves or id(x) in leaves) for x in known]


def check_linear(plan: Plan) -> None:
    """Warn of losses whose gradient does not halve with them. The half of a scale does not overflow."""
    losses, args = plan.kind.sample(plan.losses, plan.args)
    leaves, structure = floating_leaves(args[0])
    plan = plan._replace(differentiable=False, examples=plan.kind.rows_are_examples)
    point = vjp(lambda at: evaluate_losses(losses, (structure.unflatten(at), *args[1:]), plan), leaves, plan)
    once = row_scales(plan, element_count(point.outputs), point.outputs[0])
    with autocast_disabled():
        linear = are_linear(point, once)
    if lost := [repr(name) for name, yes in zip(objective_names(point.extra[0]), linear, strict=True) if not yes]:
        warn(
            f"{here()}: gradients must be linear in the factor of their loss, found others of {', '.join(lost)}. Leave "
            "out functions whose backward normalises, clips or rounds: weights and loss scales get lost."
        )


def _warn_of_float16(plan: Plan, named: dict[str, Tensor], nodes: list[Any], training: bool) -> None:
    if training and (half := [name for name, x in named.items() if x.dtype == torch.float16]):
        warn(
            f"{here()}: parameters must be in float32 to be trained, found float16 in {few(half)}, where steps "
            "below 5e-4 of a weight are lost. Keep them in float32, and take autocast(losses)."
        )
    gradients = (x for node in graph_nodes(nodes) for x in getattr(node, "_input_metadata", ()))
    if plan.scale is None and any(x.dtype == torch.float16 for x in gradients):
        warn(
            f"{here()}: gradients pass through float16 without a scale, which loses those below 6e-8, and digits "
            "of those below 6e-5. Pass scale=scale_state(), or take bfloat16: autocast(losses, torch.bfloat16)."
        )


def _check_written(journal: StateJournal, named: list[tuple[str, Tensor]], buffers: Tree) -> None:
    """Raise for losses that change buffers or parameters in place, also by `.data`, and tensors given to modules."""
    written = {_memory(x) for x, _, old in journal.before.values() if old is not None} - {None}  # with any values
    for name, x in [*named, *zip(tree_names(buffers), tree_leaves(buffers), strict=True)]:
        if _memory(innermost(x)) in written:
            raise ValueError(
                f"{here()}: expected losses that leave parameters and buffers, found that they change {name!r} in "
                "place. Compute with another tensor, and return it as a buffer, as functional(module) does."
            )


def _check_reached(values: Losses, points: list[Tensor], trunk: list[Tensor], constant: Any, training: bool) -> Any:
    """The losses without a gradient, and the leaves of each. Raise if one must not be constant, or none has a row."""
    names, nodes, points_of_rows = objective_names(values), nodes_of(values), {id(x) for x in trunk}
    given: list[Any] = list(constant) if isinstance(constant, list | tuple | set) else [constant]
    for x in [x for x in given if not isinstance(x, str) or x not in names]:
        refuse("constant", f"names of losses, {few(names)}", x, "See objective_names(losses).", ValueError)
    sizes = [{x.ndim for x in tree_leaves(own)} for own in values] if type(values) is tuple and training else []
    if len(sizes) == 2 and sizes[0] == {0} and max(sizes[1], default=0) > 1:
        warn(f"{here()}: losses must return losses alone, found a number and a matrix. Pass has_aux=True for others.")
    behind = {node: {*map(id, points)} & leaves_behind([node]).keys() for node in {*nodes}}
    reached = [behind[node] for node in nodes]
    if not set(names) <= set(given) and not any(points_of_rows & x for x in reached):
        shared = "" if len(trunk) == len(points) else " params['shared'] of"
        raise ValueError(
            f"{here()}: the losses must depend on{shared} the parameters, found no loss that does. {_CURE}, and do not "
            "detach the losses."
        )
    unreached = [name for name, leaves in zip(names, reached, strict=True) if not leaves]
    needed = [name for name in unreached if name not in given]
    text = f"{here()}: all losses must depend on the parameters, found {few(needed)} without a gradient. {_CURE}"
    if needed and not training:
        warn(f"{text}: their weights mean nothing.")
    elif needed:
        raise ValueError(f"{text}. Return others as aux (has_aux=True); for a task without labels, constant=[name].")
    return unreached, reached


def _warn_of_lost_buffers(journal: StateJournal, calls: list[Any], returned: Tree) -> None:
    """Warn of running statistics that normalization moved, and of other buffers, that the losses do not return."""
    used = returned, [call.buffers for call in calls if call.moved()]  # by a later call, too
    kept = [x for x in tree_leaves(used) if isinstance(x, Tensor) and x.layout is torch.strided]  # pyright: ignore[reportUnnecessaryIsInstance]
    memory = set(map(_memory, kept)) - {None}  # a row of a returned buffer comes back with it

    def is_lost(x: Tensor) -> bool:
        return _memory(x) not in memory and not any(x.shape == y.shape and torch.equal(x, y) for y in kept)

    moved = {name: x for call in calls for name, x in call.moved().items()}
    pairs = [(x, cast(Tensor, journal.before[id(x)][2])) for x in journal.averages if _memory(x)]
    averages = [x for x, old in pairs if not torch.equal(x, old)]
    lost = ["the running statistics that normalization moves"] * any(map(is_lost, averages))
    lost += [f"the buffer {name!r}, which its module moves" for name, x in moved.items() if is_lost(x)]
    if lost:
        warn(
            f"{here()}: the losses must return {lost[0]}, found that they do not. Take output, buffers = "
            "functional(module)(params, buffers, ...), return (losses, buffers), and pass "
            "buffers=dict(module.named_buffers()); or call module.eval()."
        )


def _warn_of_buffers_without_noise(before: Tree, after: Tree) -> None:
    """Warn of buffers that the losses of an example move, except for keys: they get no noise."""
    pairs = zip(tree_names(after), tree_leaves(before), tree_leaves(after), strict=False)
    pairs = [(n, x, y) for n, x, y in pairs if _memory(x) and not is_key(n, x, before)]
    moved = [n for n, x, y in pairs if not torch.equal(x.nan_to_num(), y.nan_to_num())]
    if moved:
        warn(
            f"{here()}: the losses of noised training move the buffer {moved[0]!r}, which gets no noise. Keep no "
            "buffer that follows the examples, as a running mean does. Pass a count of the steps in the batch."
        )


def _memory(x: Tensor) -> int | None:
    plain = type(x) in PLAIN_TENSORS and x.layout is torch.strided and x.numel()
    return x.untyped_storage().data_ptr() if plain else None


def _place(x: Tensor) -> Any:
    return (at, x.shape) if type(x) in PLAIN_TENSORS and (at := x.data_ptr()) else None  # 0: empty, or on meta


def nodes_of(losses: Losses) -> list[Any]:
    """The node of the graph of each loss, None without one. Stacked losses have one each, others one for a leaf."""
    found: list[Any] = []
    for y in tree_leaves(losses):
        node = get_gradient_edge(y).node if y.requires_grad else None
        parts = node.next_functions if node is not None and node.name() == "StackBackward0" and y.ndim == 1 else ()
        found += [part for part, _ in parts] or [node] * y.numel()
    return found


def detach_parameters(params: Params) -> Params:
    """The values of each `nn.Parameter` instead of it; other tensors keep their graph. Raise for leaves that are not
    floating-point tensors, and for a frozen `nn.Parameter`, which would be trained. Warn of hooks, which get no rows.
    """
    leaves, _ = floating_leaves(params)
    for index, p in enumerate(leaves):
        if isinstance(p, nn.Parameter) and getattr(p, "_backward_hooks", None):
            text = f"parameters must have no hooks, found one of {tree_names(params)[index]!r}, which gets no gradient"
            warn(f"{here()}: {text}. Change gradients inside the losses, as by a mask of the parameter.")
        if isinstance(p, nn.Parameter) and not p.requires_grad:
            raise ValueError(
                f"{here()}: all parameters must require grad, found frozen {tree_names(params)[index]!r}. Keep it "
                "apart: trained, constant = objectives.partition(params, lambda name, p: p.requires_grad), and in the "
                "losses objectives.merge(trained, constant)."
            )
    return tree_map(lambda p: p.detach() if isinstance(p, nn.Parameter) else p, params)


def check_ranks(
    losses: LossFunction, params: Params, values: Mapping[str, Tree], method: Mapping[str, Any] = {}
) -> None:
    """Raise for shards of different trainings: by name, tensors that are equal on all ranks, or shards, and records."""
    meshes = [mesh for mesh in dict.fromkeys([mesh_of(losses), *meshes_of(tree_leaves(params))]) if mesh is not None]
    if not meshes or under_transform():
        return
    parts: dict[str, Any] = {f"the same {name}": [description(record)] for name, record in method.items()}
    for name, tree in values.items():
        found: list[Any] = tree_leaves(tree)
        held = [x.placements if is_sharded(x) else f"{int(checksums([x])[0]):x}" for x in found]
        parts[f"the same {name}"] = [f"{x} {y}" for x, y in zip(described_leaves(tree), held, strict=True)]
    for mesh in meshes:
        check_alike(parts, partial(over_mesh, "mean", mesh=mesh), mesh.device_type, "Build them alike everywhere.")


def keys_of(state: Tree) -> list[Tensor]:
    """The keys in a rule's state; those of a user's own rule cannot be seen before."""
    return [x for x in tree_leaves(state) if isinstance(x, Tensor) and x.dtype == torch.int64 and not is_sharded(x)]  # pyright: ignore[reportUnnecessaryIsInstance]


def check_buffers(buffers: Tree) -> None:
    """Raise for buffers that are None, or with a leaf that is not a dense tensor."""
    if buffers is None or not all(isinstance(x, Tensor) and x.layout is torch.strided for x in tree_leaves(buffers)):  # pyright: ignore[reportUnnecessaryIsInstance]
        refuse("buffers", "a pytree of dense tensors", buffers, "Pass sparse ones in the batch, and () for none.")
