"""Replicas: the engine of several processes, each with its own batch, as one process would do with all of it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from functional_jd.aggregation.combine import combine
from functional_jd.aggregation.observation import Observation
from functional_jd.core.agreement import description, means_if_alike
from functional_jd.core.arguments import check_option
from functional_jd.core.rows import of_distinct
from functional_jd.core.tree import (
    all_finite,
    described_leaves,
    floating_leaves,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
)
from functional_jd.core.types import Direction, Jacobian, Losses, Tree, Weights
from functional_jd.engines.by_name import ENGINES
from functional_jd.engines.choose import choose_replica_engine
from functional_jd.engines.group import (
    Group,
    check_alike,
    check_dense,
    collective,
    known_group,
    mean_over_group,
    sum_over_group,
)
from functional_jd.engines.jacobian import rows_of_plan
from functional_jd.engines.observed import checked
from functional_jd.engines.plan import Engine, Plan
from functional_jd.torch_compat.torch_internals import is_concrete, under_transform


def mean_jacobian(jacobian: Jacobian, group: Group = None) -> Jacobian:
    """Average a Jacobian, or any pytree of floating-point tensors, over the replicas.

    `mean = sum_r J_r / R`, small leaves of one dtype in one all-reduce.

    Args:
        jacobian: pytree of floating-point tensors, a `MultitaskJacobian` too, with the same structure, shapes and
            dtypes on all R replicas. Row i is the same objective everywhere.
        group: the replicas; `None` is all processes. One that does not answer is waited for as long as the `timeout` of
            `init_process_group`: 30 minutes with gloo, 10 with nccl, by default.

    Returns:
        A pytree like `jacobian`, in its dtypes, the same bits on every replica. Added up in at least float32.

    Raises:
        TypeError: a leaf is not a floating-point tensor.
        ValueError: no leaves, no process group, or a group that this process is not in.
        RuntimeError: a replica stopped, or did not answer in time.

    Laws:
        Linear. A value that is not finite on one replica is so on all; a mean of finite values is finite. Composes with
        vmap, grad, jvp and compile, if all replicas do the same. Its cotangent is the mean of the replicas' cotangents.

    Differs: from torch's functional collectives, whose jvp is zero, and which torch.func.grad refuses.
    """
    floating_leaves(jacobian, "mean_jacobian")
    return mean_over_group(jacobian, group)


def agree(finite: Tensor, group: Group = None) -> Tensor:
    """Tell which rows are finite on every replica: the logical and.

    Args:
        finite: bool, `[]` or `[m]`, as `unscale` returns it.
        group: the replicas, as for `mean_jacobian`.

    Returns:
        bool of the same shape, the same on every replica.

    Raises:
        TypeError: `finite` is not a bool tensor.
        ValueError, RuntimeError: see `mean_jacobian`.
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
        TypeError: a leaf is not a dense tensor.
        ValueError, RuntimeError: see `mean_jacobian`.
    """
    check_dense("replicate", tree)
    return tree_map(lambda leaf: collective("first", leaf, group), tree)


def replicated(engine: str = "auto", group: Group = None) -> Engine:
    """Make the engine of several replicas, each with its own batch: the mean of their Jacobians counts.

    Pass it to `train_state` and to `step` on all replicas. The parameters, and the state that `train_state` returns,
    are the first replica's.

    Args:
        engine: `"jacobian"`: the mean of all rows on every replica. `"weighted"`: one backward pass, or one for each
            group of parameters whose weights differ, for rules that need no gradients, with one scale for all
            objectives. `"auto"`: `"weighted"` if it serves the rule, else `"jacobian"`.
        group: the replicas, as for `mean_jacobian`.

    Returns:
        An `Engine`.
        Row i is the mean of the replicas' rows i, which are the same objective on all. Means over examples need equally
        many on each replica, or `weighted_by_examples`.
        The rows of `per_example` losses are the examples of all replicas, the first one's first: R m rows, with equally
        many on each. Scale i of `[m]` serves the rows i of all replicas.
        The losses in `StepInfo` are the mean, or those of all replicas' examples; aux is the replica's own.
        Floating-point buffers are averaged, others are the first replica's. Keys in them (see `step`) give each example
        of `per_example` losses the numbers that one process with all examples would draw. Other losses draw each
        replica's own: `random.fold_in(key, rank)`.

    Raises:
        ValueError: an unknown engine, or one that does not give the rule what it needs; no process group, or one that
            this process is not in. In `train_state`: parameters, states or losses that differ in names, shapes or
            dtypes between the replicas, and rules or optimizers that differ. In `step`: losses with other names, and
            other rules (off the CPU, the step is skipped); more losses, `per_example` ones too, on one replica than on
            another (on a CPU, as the check waits for the device).
        RuntimeError: in `step` and `train_state`, a replica stopped, or did not answer in time: see `mean_jacobian`.

    Laws:
        The replicas stay equal, bit for bit, on equal machines. A step equals, to rounding, one on the whole batch. One
        replica's overflow skips the step on all. Each row's scale follows that row on all replicas. Compiles in a full
        graph.

    Differs:
        From DistributedDataParallel, whose replicas must never see that one of them skipped: here they agree. Losses
        that draw random numbers without a key draw each replica's own.
    """
    check_option("replicated", "engine", engine, ("auto", *_OBSERVE), "'auto' takes the cheapest that the rule allows.")

    def observe(plan: Plan) -> Observation:
        chosen = choose_replica_engine(plan.view, plan.scale_state.scale).engine if engine == "auto" else engine
        return _OBSERVE[chosen](plan, group)

    def replicate_state(tree: Tree) -> Tree:
        check_alike("train_state", tree, group, "parameters and states")
        return replicate(tree, group)

    def place() -> tuple[int, int]:
        _, replicas, rank = known_group(group)
        return rank, replicas

    return Engine(observe, partial(_check, engine), replicate_state, place)


def _check(engine: str, plan: Plan) -> None:
    where, view = plan.where, plan.view
    if plan.kind.several_sets:
        raise ValueError(
            f"{where}: replicated() orders rows by replica, and needs per_example losses of one kind, found losses by "
            "name. Return the mean over each set of examples."
        )
    if engine == "weighted" and (view.products != "none" or plan.scale_state.scale.ndim):
        raise ValueError(
            f"{where}: replicated('weighted') serves rules that need no gradients, with one scale, found one that "
            f"needs {view.needs} and a scale {list(plan.scale_state.scale.shape)}. Use replicated()."
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
        return direction, agree(finite, group) & all_finite(direction)

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


_OBSERVE: dict[str, Callable[[Plan, Group], Observation]] = {
    "jacobian": _by_jacobian,
    "weighted": _by_weights,
}


def _check_rows(plan: Plan, values: Losses, group: Group) -> None:
    """Refuse losses and rules that differ between the replicas where training starts; later, those of examples, where
    asking does not wait for a device.
    """
    examples = plan.kind.rows_are_examples and all(leaf.device.type == "cpu" for leaf in tree_leaves(values))
    if examples or plan.starting:
        method = {"rule": plan.rule} | ({} if plan.optimizer is None else {"optimizer": plan.optimizer})
        check_alike(plan.where, values, group, "losses", method)


def _pooled(plan: Plan, mine: Observation, group: Group) -> Observation:
    """The losses of all replicas, and what they carry: means of floating-point buffers, the first replica's of others;
    aux is the replica's own.
    """
    buffers, aux = mine.carried
    pool = lambda x: mean_over_group(x, group) if x.is_floating_point() else collective("first", x, group)
    pooled = _pooled_rows if plan.kind.rows_are_examples else _mean_losses
    return mine._replace(losses=pooled(plan, mine.losses, group), carried=(tree_map(pool, buffers), aux))


def _mean_losses(plan: Plan, values: Losses, group: Group) -> Losses:
    """The mean of losses that have the same names and rule on all replicas, as digests tell that travel with them."""
    last = tree_leaves(values)[-1]
    if under_transform() or not is_concrete(last):
        return mean_over_group(values, group)
    leaves, structure = tree_flatten(values)
    parts = {
        "losses with the same names, shapes and dtypes": ", ".join(described_leaves(values)),
        "the same rule": repr(description(plan.rule, keys=False, waiting=False)),
    }
    mean = partial(mean_over_group, group=group)
    return tree_unflatten(structure, means_if_alike(plan.where, leaves, parts, mean, known_group(group)[1], _CURE))


_CURE = (
    "Return all losses everywhere, of a task that a batch does not have 0.0 * features.sum(), and weigh them by the "
    "same rule."
)


def _pooled_rows(plan: Plan, tree: Tree, group: Group) -> Tree:
    """Rows or values of all replicas: their mean; for rows of examples, one replica's after the other's."""
    if not plan.kind.rows_are_examples:
        return mean_over_group(tree, group)
    return tree_map(lambda leaf: collective("gather", leaf, group).flatten(0, 1), tree)
