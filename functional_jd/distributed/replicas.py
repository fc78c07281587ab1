"""Replicas: the engine of several processes, each with its own batch, as one process would do with all of it."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from functional_jd.aggregation.aggregate import combine, view_name, weigh
from functional_jd.aggregation.views import gramian, gramian_in, needs_no_rows
from functional_jd.core.arguments import check_option
from functional_jd.core.heads import direction_of_rows, direction_with_heads, split_heads
from functional_jd.core.tree import all_finite, floating_leaves, tree_leaves, tree_map
from functional_jd.core.types import Jacobian, Losses, LossFunction, Tree
from functional_jd.distributed.group import (
    Group,
    check_alike,
    check_dense,
    collective,
    gather_columns,
    known_group,
    mean_over_group,
    shard_columns,
    sum_over_group,
)
from functional_jd.engines.choose import choose_replica_engine
from functional_jd.engines.jacobian import jacobian_for
from functional_jd.engines.kinds import kind_of
from functional_jd.engines.weighted import weighted_for
from functional_jd.objectives import ExampleSets
from functional_jd.objectives.buffers import Carried
from functional_jd.precision.loss_scale import unscale
from functional_jd.training.engines import ENGINES, Engine, EngineResult, Problem, loss_rows, start_without_rows


def mean_jacobian(jacobian: Jacobian, group: Group = None) -> Jacobian:
    """The mean over the replicas, on all of them: of a Jacobian, or of any pytree of floating-point tensors.

    `mean = sum_r J_r / R`, small leaves of one dtype in one all-reduce.

    Args:
        jacobian: pytree of floating-point tensors, a `MultitaskJacobian` too (its heads are gradients: their mean is
            meant); the same structure, shapes and dtypes on all R replicas. Row i is the same objective everywhere.
        group: the replicas; `None` is all processes. One that does not answer is waited for as long as the `timeout` of
            `init_process_group` says: 30 minutes with gloo, 10 with nccl, unless you say less.

    Returns:
        A pytree like `jacobian`, in its dtypes, the same bits on every replica. Added up in at least float32.

    Raises:
        TypeError: a leaf is no floating-point tensor.
        ValueError: no leaves, no process group, or a group that this process is not in.
        RuntimeError: a replica stopped, or did not answer in time.

    Laws:
        Linear; what is not finite on one replica is so on all, but a mean of finite values is finite. Composes with
        vmap, grad, jvp and compile: all replicas must then do the same. Its derivative is that of the mean over the
        replicas of what each computes: the mean of their cotangents.

    Differs: from `torch.distributed._functional_collectives`, whose jvp is zero, and which torch.func.grad refuses.
    """
    floating_leaves(jacobian, "mean_jacobian")
    return mean_over_group(jacobian, group)


def agree(finite: Tensor, group: Group = None) -> Tensor:
    """What is finite on every replica: the logical and.

    Args:
        finite: bool, `[]` or `[m]`, as `unscale` returns it.
        group: the replicas, as for `mean_jacobian`.

    Returns:
        bool of the same shape, the same on every replica.

    Raises:
        TypeError: `finite` is no bool tensor.
        ValueError, RuntimeError: as `mean_jacobian` says.
    """
    if not isinstance(finite, Tensor) or finite.dtype != torch.bool:
        found = finite.dtype if isinstance(finite, Tensor) else type(finite).__name__
        raise TypeError(f"agree: finite must be a bool tensor, found {found}. Pass what unscale returned.")
    return collective("least", finite.int(), group).bool()


def replicate(tree: Tree, group: Group = None) -> Tree:
    """The first replica's pytree of tensors, of any dtype, on all replicas; for what must be the same everywhere.

    Args:
        tree: pytree of tensors, with the same structure, shapes and dtypes on all replicas.
        group: the replicas, as for `mean_jacobian`.

    Returns:
        A pytree like `tree`, the same bits on every replica.

    Raises:
        TypeError: a leaf is not a dense tensor.
        ValueError, RuntimeError: as `mean_jacobian` says.
    """
    check_dense("replicate", tree)
    return tree_map(lambda leaf: collective("first", leaf, group), tree)


def replicated(engine: str = "auto", group: Group = None) -> Engine:
    """The engine of several replicas, each with its own batch: the mean Jacobian over them in the place of the
    Jacobian.

    Pass it to `train_state` and to `step` on all replicas. The parameters, and the state that `train_state` returns,
    are the first replica's.

    Args:
        engine: `"jacobian"`: the mean of all rows on every replica. `"columns"`: each of R replicas keeps 1/R of the
            mean Jacobian's columns: the rows are reduced and scattered `[m, n / R]`, the Gramians of these shares added
            up `[m, m]`, their directions gathered `[n]`; `(m + 1) / 2m` of the traffic, 1/R of the mean's memory and of
            the Gramian's work, for rules whose view is `gramian`, `losses` or `no_gradients`. `"weighted"`: one
            backward pass, for rules whose view is `losses` or `no_gradients`, with one scale for all objectives.
            `"auto"`: `"weighted"` where it serves the rule, else `"jacobian"`.
        group: the replicas, as for `mean_jacobian`.

    Returns:
        An `Engine`. Row i is the same objective on all replicas, and its mean is meant: losses that are means over
        examples need equally many on each, or `weighted_by_examples`. The rows of `per_example` losses are the examples
        of all replicas, the first one's first: R m rows, with equally many on each; scale i of `[m]` serves the rows i
        of all replicas. The losses in `StepInfo` are the mean, or those of all replicas' examples; aux is the replica's
        own. Of buffers, floating-point tensors are averaged, and others are the first replica's.

    Raises:
        ValueError: an unknown engine; in `train_state`, parameters, states or losses that differ in names, shapes or
            dtypes between the replicas; in `step`, `per_example` losses that are more on one replica than on another
            (on a CPU: to ask another device would be to wait for it); in `step` and `train_state`, one that does not
            give the rule what it needs, `"columns"` with `per_example` losses, no process group, or a group that this
            process is not in.
        RuntimeError: in `step` and `train_state`, a replica stopped, or did not answer in time: see `mean_jacobian`.

    Laws:
        The replicas stay equal, bit for bit, on equal machines. Equal, to rounding, to a step on the whole batch. One
        replica's overflow skips the step on all, and each row's scale follows what all say of that row. Compiles in a
        full graph.

    Differs:
        From DistributedDataParallel, whose replicas must never see that one of them skipped: here they agree. Losses
        that draw random numbers without a key draw each replica's own.
    """
    check_option("replicated", "engine", engine, ("auto", *_WAYS), "'auto' takes the cheapest that the rule allows.")

    def differentiate(problem: Problem) -> EngineResult:
        way = choose_replica_engine(problem.aggregator, problem.scale.scale, engine).engine
        return _WAYS[way](problem, group)

    def replicate_state(tree: Tree) -> Tree:
        check_alike("train_state", tree, group, "parameters and states")
        return replicate(tree, group)

    return Engine(partial(_check, engine), partial(_start, group), differentiate, replicate_state)


def _check(engine: str, where: str, problem: Problem) -> None:
    if isinstance(problem.losses, ExampleSets):
        raise ValueError(
            f"{where}: replicated() orders rows by replica, and needs per_example losses of one kind, found losses by "
            "name. Return the mean over each set of examples."
        )
    blind = needs_no_rows(problem.aggregator)
    if engine == "weighted" and (not blind or problem.scale.scale.ndim):
        raise ValueError(
            f"{where}: replicated('weighted') serves rules that need no gradients, with one scale, found one that "
            f"needs {view_name(problem.aggregator)} and a scale {list(problem.scale.scale.shape)}. Use replicated()."
        )
    if engine == "columns" and not blind and problem.aggregator.view is not gramian:
        raise ValueError(
            f"{where}: replicated('columns') serves rules that need no gradients, the losses or the Gramian, found one "
            f"that needs {view_name(problem.aggregator)}. Use replicated()."
        )
    if engine == "columns" and kind_of(problem.losses).rows_are_examples:
        raise ValueError(
            f"{where}: replicated('columns') needs rows that are the same objectives on all replicas, found "
            "per_example losses, whose rows are each replica's own examples. Use replicated()."
        )


def _start(group: Group, problem: Problem) -> Tree:
    """The rule starts with what it sees in the mean over the replicas."""
    rule = problem.aggregator

    def init(values: Tensor) -> Tree:
        check_alike("train_state", values, group, "losses")
        return rule.init(_pooled(problem.losses, values, group))

    if needs_no_rows(rule):  # it starts with the losses, which are pooled afterwards: no rows are needed
        return start_without_rows(problem._replace(aggregator=rule._replace(init=init)))

    def view(jacobian: Jacobian, *, losses: Losses) -> Tree:
        check_alike("train_state", losses, group, "losses")
        return rule.view(_pooled(problem.losses, jacobian, group), losses=_pooled(problem.losses, losses, group))

    return ENGINES["jacobian"].start(problem._replace(aggregator=rule._replace(view=view)))


def _by_weights(problem: Problem, group: Group) -> EngineResult:
    (values, carried), pullback = weighted_for(problem.where, problem.losses, has_aux=True, scale=problem.scale)(
        *problem.args
    )
    _check_rows(problem, values, group)
    values = _pooled(problem.losses, values, group)
    weights, memory, _ = weigh(
        problem.aggregator, loss_rows(values), problem.memory, losses=values, where=problem.where
    )
    add, mine = mean_over_group, weights
    if kind_of(problem.losses).rows_are_examples:
        _, replicas, rank = known_group(group)
        add, mine = sum_over_group, weights.reshape(replicas, -1)[rank]
    # Weights that are not finite are the rule's doing, not an overflow: the scale must not back off for them.
    weights_finite = all_finite(weights)
    direction, finite = pullback(torch.where(weights_finite, mine, 0), last=True)
    direction, finite = add(direction, group), agree(finite, group)
    carried = _pooled_buffers(carried, group)
    return EngineResult(direction, weights, memory, values, finite, weights_finite & all_finite(direction), carried)


def _by_jacobian(problem: Problem, group: Group) -> EngineResult:
    jacobian, (values, carried) = jacobian_for(problem.where, problem.losses, has_aux=True, scale=problem.scale)(
        *problem.args
    )
    _check_rows(problem, values, group)
    jacobian, finite = unscale(problem.scale, jacobian)
    jacobian, values = (_pooled(problem.losses, tree, group) for tree in (jacobian, values))
    weights, memory, view = weigh(problem.aggregator, jacobian, problem.memory, losses=values, where=problem.where)
    direction = combine(jacobian, weights)
    direction_finite = all_finite(direction_of_rows(direction, split_heads(jacobian)[1]))
    seen = gramian_in(problem.aggregator, view)
    carried = _pooled_buffers(carried, group)
    return EngineResult(direction, weights, memory, values, agree(finite, group), direction_finite, carried, seen)


def _by_columns(problem: Problem, group: Group) -> EngineResult:
    jacobian, (values, carried) = jacobian_for(problem.where, problem.losses, has_aux=True, scale=problem.scale)(
        *problem.args
    )
    jacobian, finite = unscale(problem.scale, jacobian)
    values = mean_over_group(values, group)

    rows, heads = split_heads(jacobian)
    like = direction_of_rows(problem.args[0], heads)
    shard = tree_map(lambda leaf: shard_columns(leaf, group), rows)
    rule = problem.aggregator
    if rule.view is gramian:
        rule = rule._replace(view=lambda *seen, losses: sum_over_group(gramian(*seen), group))  # noqa: ARG005
    weights, memory, view = weigh(rule, shard, problem.memory, losses=values, where=problem.where)
    direction = tree_map(lambda p, part: gather_columns(part, p, group), like, combine(shard, weights))
    direction_finite = all_finite(direction)
    direction = direction_with_heads(direction, mean_over_group(heads, group))
    seen = gramian_in(problem.aggregator, view)
    carried = _pooled_buffers(carried, group)
    return EngineResult(direction, weights, memory, values, agree(finite, group), direction_finite, carried, seen)


_WAYS: dict[str, Callable[[Problem, Group], EngineResult]] = {
    "jacobian": _by_jacobian,
    "columns": _by_columns,
    "weighted": _by_weights,
}


def _check_rows(problem: Problem, values: Losses, group: Group) -> None:
    """Refuse rows of examples that are more on one replica than on another, where asking does not wait for a device."""
    if kind_of(problem.losses).rows_are_examples and all(leaf.device.type == "cpu" for leaf in tree_leaves(values)):
        check_alike(problem.where, values, group, "losses")


def _pooled_buffers(carried: Carried, group: Group) -> Carried:
    """Means of floating-point buffers, the first replica's of others; aux is the replica's own."""
    buffers, aux = carried
    pool = lambda x: mean_over_group(x, group) if x.is_floating_point() else collective("first", x, group)
    return tree_map(pool, buffers), aux


def _pooled(losses: LossFunction, tree: Tree, group: Group) -> Tree:
    """Rows or values of all replicas: their mean; for rows of examples, one replica's after the other's."""
    if not kind_of(losses).rows_are_examples:
        return mean_over_group(tree, group)
    return tree_map(lambda leaf: collective("gather", leaf, group).flatten(0, 1), tree)
