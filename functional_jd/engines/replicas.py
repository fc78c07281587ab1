"""Replicas: several processes, each with its own batch, do what one would do with all of it."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from functional_jd.aggregation.combine import combine
from functional_jd.aggregation.observation import Observation
from functional_jd.core import agreement
from functional_jd.core.agreement import description, means_if_alike
from functional_jd.core.arguments import check_option, here, refuse
from functional_jd.core.rows import at_least_float32, neighbours, of_distinct
from functional_jd.core.sharding import collective as collective_of
from functional_jd.core.sharding import is_sharded, meshes_of
from functional_jd.core.tree import all_finite, described_leaves, floating_leaves, tree_flatten, tree_leaves, tree_map
from functional_jd.core.types import Direction, Jacobian, Losses, Params, Tree, Weights
from functional_jd.engines.by_name import ENGINES, checked, rows_of_plan
from functional_jd.engines.plan import Engine, Plan
from functional_jd.objectives.over_shards import mesh_of
from functional_jd.precision.autocast import autocast_disabled
from functional_jd.torch_compat.torch_internals import is_concrete, under_transform

Group = Any
"""A `torch.distributed.ProcessGroup`; `None` is all processes."""

_BUCKET = 1 << 22
"""Elements that travel together, at most: a collective costs a round trip, and what is larger pays for its own."""


def mean_jacobian(jacobian: Jacobian, group: Group = None) -> Jacobian:
    """Average a Jacobian, or any pytree of floating-point tensors, over the replicas.

    `mean = sum_r J_r / R`, in at least float32, small leaves of one dtype in one all-reduce.

    Args:
        jacobian: pytree of floating-point tensors, alike on all R replicas. Row i is the same objective everywhere.
        group: the replicas; `None` is all processes. The `timeout` of `init_process_group` limits the wait.

    Returns:
        A pytree like `jacobian`, in its dtypes, the same bits on every replica.

    Raises:
        TypeError: a leaf is not a floating-point tensor.
        ValueError: no leaves, no process group, or a group that this process is not in.
        RuntimeError: a replica stopped, or did not answer in time.

    Guarantees:
        Linear. A value that is not finite on one replica is so on all; a mean of finite values is finite. Composes with
        vmap, grad, jvp and compile, if all replicas do the same.

    Differences: from torch's functional collectives, whose jvp is zero, and which torch.func.grad does not take.
    """
    floating_leaves(jacobian)
    return mean_over_group(jacobian, group)


def group_of_ranks(group: Any, losses: Any, params: Params) -> Any:
    """The group whose ranks have a part of the batch each; None if this rank has it, or if all ranks have shards."""
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    sharded = mesh_of(losses) is not None
    whole = sharded or any(mesh.size() == ranks for mesh in meshes_of(tree_leaves(params)))
    if group is False or (group is None and (whole or ranks == 1)):
        return None
    if not isinstance(group, dist.ProcessGroup):
        cure = "Pass group=torch.distributed.group.WORLD for the whole batch, or group=False for this rank's part."
        refuse("group", f"a ProcessGroup of this process, as there are {ranks} ranks", group, cure, ValueError)
    if sharded:
        refuse("group", "None for losses of sharded(losses, mesh)", group, "Leave it out.", ValueError)
    return group


def agree(finite: Tensor, group: Group = None) -> Tensor:
    """Tell which rows are finite on every replica: the logical and.

    Args:
        finite: bool, `[]` or `[m]`, as `unscale` returns it.
        group: the replicas, as for `mean_jacobian`.

    Returns:
        bool of that shape, the same on every replica.

    Raises:
        TypeError: `finite` is not a bool tensor; further what `mean_jacobian` raises.
    """
    if not isinstance(finite, Tensor) or finite.dtype != torch.bool:
        found = finite.dtype if isinstance(finite, Tensor) else type(finite).__name__
        raise TypeError(f"agree: finite must be a bool tensor, found {found}. Pass what unscale returned.")
    return collective("least", finite.int(), group).bool()


def replicate(tree: Tree, group: Group = None) -> Tree:
    """Give all replicas the first one's pytree of tensors, of any dtype.

    Args:
        tree: pytree of tensors, with the same structure, shapes and dtypes on all replicas.
        group: the replicas, as for `mean_jacobian`.

    Returns:
        A pytree like `tree`, the same bits on every replica.

    Raises:
        TypeError: a leaf is not a dense tensor; further what `mean_jacobian` raises.
    """
    check_dense(tree)
    return tree_map(lambda leaf: collective("first", leaf, group), tree)


def replicated(engine: str = "auto", group: Group = None) -> Engine:
    """Make the engine of several replicas, each with its own batch: the mean of their Jacobians counts.

    Pass it to `train_state` and to `step` on all replicas. The parameters, and the state that `train_state` returns,
    are the first replica's.

    Args:
        engine: `"jacobian"`: the mean of all rows on every replica. `"weighted"`: one backward pass, or one for each
            group of parameters whose weights differ, for rules that need no gradients. `"auto"`: `"weighted"` if it
            serves the rule, else `"jacobian"`.
        group: the replicas, as for `mean_jacobian`.

    Returns:
        An `Engine`.
        Row i is the mean of the replicas' rows i. Means over examples need equally many on each replica, or
        `weighted_by_examples`.
        The rows of `per_example` losses are the examples of all replicas, the first one's first: R m rows, with equally
        many on each. Scale i of `[m]` serves the rows i of all replicas.
        The losses in `StepInfo` are the mean, or those of all replicas' examples; aux is the replica's own.
        Floating-point buffers are averaged, others are the first replica's. Keys in them (see `step`) give each example
        of `per_example` losses the numbers that one process with all examples would draw. Other losses draw each
        replica's own: `random.fold_in(key, rank)`.

    Raises:
        ValueError: an unknown engine, or one that does not give the rule what it needs; no process group. In
            `train_state`: replicas that differ in names, shapes or dtypes of parameters, states or losses, or in rules
            or optimizers. In `step`: other losses or rules (off the CPU, the step is skipped); another number of
            `per_example` losses (on a CPU).
        RuntimeError: in `step` and `train_state`, a replica stopped, or did not answer in time.

    Guarantees:
        The replicas stay equal, bit for bit, on equal machines. A step equals, to rounding, one on the whole batch. One
        replica's overflow skips the step on all. Compiles in a full graph.
    """
    check_option("engine", engine, ("auto", *_OBSERVE), "'auto' takes the cheapest that the rule allows.")

    def observe(plan: Plan) -> Observation:
        by_weights = plan.view.products == "none"
        return _OBSERVE[engine if engine != "auto" else "weighted" if by_weights else "jacobian"](plan, group)

    def replicate_state(tree: Tree) -> Tree:
        check_alike(tree, group, "parameters and states")
        return replicate(tree, group)

    def place() -> tuple[int, int]:
        _, replicas, rank = known_group(group)
        return rank, replicas

    return Engine(observe, partial(_check, engine), replicate_state, place)


def _check(engine: str, plan: Plan) -> None:
    view = plan.view
    if plan.kind.several_sets:
        raise ValueError(
            f"{here()}: replicated() orders rows by replica, and needs per_example losses of one kind, found losses by "
            "name. Return the mean over each set of examples."
        )
    if engine == "weighted" and view.products != "none":
        raise ValueError(
            f"{here()}: replicated('weighted') serves rules that need no gradients, found a rule that needs "
            f"{view.needs}. Use replicated()."
        )


def _by_weights(plan: Plan, group: Group) -> Observation:
    mine = ENGINES["weighted"].observe(plan)
    _check_rows(plan, mine.losses, group)
    add = sum_over_group if plan.kind.rows_are_examples else mean_over_group

    def pullback(weights: Weights) -> tuple[Direction, Tensor]:
        own = weights
        if plan.kind.rows_are_examples:
            _, replicas, rank = known_group(group)
            own = of_distinct(lambda each: each.reshape(replicas, -1)[rank], weights)
        direction, finite = mine.pullback(own)
        finite = all_finite(direction) if finite is None else finite
        direction = add(direction, group)
        finite = agree(finite, group)
        return direction, torch.where(finite.all(), all_finite(direction), finite)

    return _pooled(plan, mine, group)._replace(pullback=pullback)


def _by_jacobian(plan: Plan, group: Group) -> Observation:
    jacobian, values, carried = rows_of_plan(plan)
    _check_rows(plan, values, group)
    jacobian, finite = checked(plan, jacobian)
    seen = _pooled(plan, Observation(values, carried=carried), group)  # first: it tells losses that differ
    rows: Any = _pooled_rows(plan, jacobian, group)
    if finite is not None and not plan.starting:  # where training starts, scales may still differ
        finite = agree(finite, group) if plan.guarded else None

    def pullback(weights: Weights) -> tuple[Direction, None]:
        return combine(rows, weights), None

    return seen._replace(rows=rows, pullback=pullback, finite=finite)


_OBSERVE: dict[str, Callable[[Plan, Group], Observation]] = {"jacobian": _by_jacobian, "weighted": _by_weights}


def _check_rows(plan: Plan, values: Losses, group: Group) -> None:
    """Refuse losses and rules that differ between the replicas, where training starts or asking does not wait."""
    examples = plan.kind.rows_are_examples and all(leaf.device.type == "cpu" for leaf in tree_leaves(values))
    if examples or plan.starting:
        method = {"rule": plan.rule} | ({} if plan.optimizer is None else {"optimizer": plan.optimizer})
        check_alike(values, group, "losses", method)


def _pooled(plan: Plan, mine: Observation, group: Group) -> Observation:
    """The losses of all replicas, and the buffers that they carry; aux is the replica's own."""
    buffers, aux = mine.carried
    pooled = _pooled_rows if plan.kind.rows_are_examples else _mean_losses
    return mine._replace(losses=pooled(plan, mine.losses, group), carried=(pooled_buffers(buffers, group), aux))


def pooled_buffers(buffers: Tree, group: Group) -> Tree:
    """The mean over the group of floating-point buffers, the first replica's of others."""
    mean = partial(mean_over_group, group=group)
    return tree_map(lambda x: mean(x) if x.is_floating_point() else collective("first", x, group), buffers)


def _mean_losses(plan: Plan, values: Losses, group: Group) -> Losses:
    """The mean of losses that have the same names and rule on all replicas, as digests tell that travel with them."""
    last = tree_leaves(values)[-1]
    if under_transform() or not is_concrete(last):
        return mean_over_group(values, group)
    leaves, structure = tree_flatten(values)
    parts = {
        "losses with the same names, shapes and dtypes": described_leaves(values),
        "the same rule": [description(plan.rule, keys=False, waiting=False)],
    }
    return structure.unflatten(means_if_alike(leaves, parts, partial(mean_over_group, group=group), _CURE))


_CURE = "Return all losses everywhere, of a task without data 0.0 * features.sum(), and weigh them by the same rule."


def _pooled_rows(plan: Plan, tree: Tree, group: Group) -> Tree:
    """Rows or values of all replicas: their mean; for rows of examples, one replica's after the other's."""
    if not plan.kind.rows_are_examples:
        return mean_over_group(tree, group)
    return tree_map(lambda leaf: collective("gather", leaf, group).flatten(0, 1), tree)


def sum_over_group(tree: Tree, group: Group) -> Tree:
    """Add up over the group, small leaves of one dtype together."""
    leaves, structure = tree_flatten(tree)
    sums: list[Tensor] = []
    kinds = [((type(leaf), leaf.dtype, leaf.device), leaf.numel()) for leaf in leaves]
    for bucket in ([leaves[k] for k in places] for places in neighbours(kinds, _BUCKET)):
        if len(bucket) == 1:
            sums.append(collective("sum", bucket[0], group))
            continue
        total = collective("sum", torch.cat([leaf.reshape(-1) for leaf in bucket]), group)
        parts = total.split([leaf.numel() for leaf in bucket])
        sums.extend(part.reshape(leaf.shape) for part, leaf in zip(parts, bucket, strict=True))
    return structure.unflatten(sums)


def mean_over_group(tree: Tree, group: Group) -> Tree:
    """Average over the group. Divides before summing, so that finite values do not overflow."""
    replicas = known_group(group)[1]
    sums = sum_over_group(tree_map(lambda leaf: at_least_float32(leaf) / replicas, tree), group)
    return tree_map(lambda leaf, total: total.to(leaf.dtype), tree, sums)


def known_group(group: Group) -> tuple[str, int, int]:
    """Return the name of the group, its number of replicas, and the rank of this process."""
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            "distributed: expected a process group, found none. Call torch.distributed.init_process_group('gloo') "
            "(or 'nccl') first, and start the program with torchrun."
        )
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        refuse("group", "a process group that this process is in", group, "Call this on its members only.", ValueError)
    return group.group_name, group.size(), group.rank()


def collective(kind: str, value: Tensor, group: Group) -> Tensor:
    if is_sharded(value):
        cure = "For sharded parameters use sharded(losses, mesh), without replicated()."
        refuse("tensors", "whole on every replica", value, cure, ValueError)
    with autocast_disabled():
        return collective_of(kind, value, *known_group(group)[:2])


def check_dense(tree: Tree) -> None:
    """Refuse leaves that are not dense tensors."""
    for leaf in tree_leaves(tree):
        if not isinstance(leaf, Tensor) or leaf.layout != torch.strided:  # pyright: ignore[reportUnnecessaryIsInstance]
            refuse("tree", "a pytree of dense tensors", leaf, "Make numbers tensors, torch.as_tensor(...).")


def check_alike(tree: Tree, group: Group, what: str, method: Mapping[str, Any] = {}) -> None:
    """Raise ValueError unless all replicas hold pytrees with the same names, shapes and dtypes, and methods, by name,
    that are alike except for keys: one exchange of a digest. Collectives of different sizes would end the process.
    """
    leaves = tree_leaves(tree)
    if under_transform() or not leaves or not is_concrete(leaves[0]):  # `compiled` writes down shapes, not values
        return
    parts = {f"{what} with the same names, shapes and dtypes": described_leaves(tree)}
    parts |= {f"the same {name}": [description(record, keys=False)] for name, record in method.items()}
    mean = partial(mean_over_group, group=group)
    agreement.check_alike(parts, mean, leaves[0].device, "Build them alike everywhere.")
