"""Replicas: the step of several processes, each with its own batch, as one process would do with all of it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from functional_jd.aggregation.aggregate import Aggregator, aggregate, combine, weigh
from functional_jd.aggregation.views import gramian, needs_no_rows
from functional_jd.core.multitask import direction_of_rows, direction_with_heads, split_heads
from functional_jd.core.tree import all_finite, floating_leaves, tree_map
from functional_jd.core.types import Jacobian, Losses, LossFunction, Params, Tree
from functional_jd.distributed.collectives import (
    Group,
    collective,
    gather_columns,
    known_group,
    mean_over_group,
    shard_columns,
    sum_over_group,
)
from functional_jd.engines.choose import choose_replica_engine
from functional_jd.engines.jacobian import jacobian_fn
from functional_jd.engines.kinds import kind_of
from functional_jd.engines.weighted import weighted_fn
from functional_jd.optimizers.base import Optimizer
from functional_jd.precision.loss_scale import ScaleState, unscale
from functional_jd.training.engines import EngineResult, loss_rows
from functional_jd.training.start import detach_parameters
from functional_jd.training.start import train_state as start_alone
from functional_jd.training.state import StepInfo, TrainState, check_method
from functional_jd.training.step import finish_step


def mean_jacobian(jacobian: Jacobian, group: Group = None) -> Jacobian:
    """The mean over the replicas, on all of them: of a Jacobian, or of any pytree of floating-point tensors.

    `mean = sum_r J_r / R`, one all-reduce per leaf.

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
        raise TypeError(f"agree: finite must be a bool tensor, found {found}. Hand over what unscale returned.")
    return collective("least", finite.int(), group).bool()


def replicate(tree: Tree, group: Group = None) -> Tree:
    """The first replica's pytree of tensors, of any dtype, on all replicas; for what must be the same everywhere.

    Args:
        tree: pytree of tensors, with the same structure, shapes and dtypes on all replicas.
        group: the replicas, as for `mean_jacobian`.

    Returns:
        A pytree like `tree`, the same bits on every replica.

    Raises:
        ValueError, RuntimeError: as `mean_jacobian` says.
    """
    return tree_map(lambda leaf: collective("first", leaf, group), tree)


def train_state(
    params: Params,
    *batch: Any,
    losses: LossFunction,
    aggregator: Aggregator,
    optimizer: Optimizer,
    scale: ScaleState | None = None,
    group: Group = None,
) -> TrainState:
    """Start training on several replicas: `functional_jd.train_state`, the same on all of them.

    Args:
        params: pytree of floating-point tensors, of which the first replica's count. The values of an `nn.Parameter`
            are taken and its graph is left behind; other tensors keep theirs.
        batch: this replica's own. The rule starts with what it sees in the mean over the replicas.
        losses: as for `functional_jd.train_state`; so are `aggregator`, `optimizer` and `scale`.
        group: the replicas, as for `mean_jacobian`.

    Returns:
        `TrainState(params, optimizer, aggregator, scale)`, the same bits on every replica.

    Raises:
        TypeError, ValueError, RuntimeError: as `functional_jd.train_state` and `step` say.
    """
    check_method("train_state", aggregator, optimizer)
    # A broadcast keeps the graph of what it is given: the state would hold that of every step to come.
    params = replicate(detach_parameters(params), group)

    def init(values: Tensor) -> Tree:
        return aggregator.init(_pooled(losses, values, group))

    def view(jacobian: Jacobian, *others: Jacobian, **values: Losses) -> Any:
        seen = [_pooled(losses, rows, group) for rows in (jacobian, *others)]
        return aggregator.view(*seen, losses=_pooled(losses, values["losses"], group))

    # Rules that need no gradients start with the losses, which are pooled afterwards: no rows are needed.
    together = aggregator._replace(init=init) if needs_no_rows(aggregator) else aggregator._replace(view=view)
    state = start_alone(params, *batch, losses=losses, aggregator=together, optimizer=optimizer, scale=scale)
    return replicate(state, group)


def step(
    state: TrainState,
    *batch: Any,
    losses: LossFunction,
    aggregator: Aggregator,
    optimizer: Optimizer,
    group: Group = None,
    sharded: bool = False,
) -> tuple[TrainState, StepInfo]:
    """One step of Jacobian descent on several replicas, each with its own batch.

    `functional_jd.step` with the mean Jacobian over the replicas in the place of the Jacobian.

    Args:
        state: from `train_state` or from the last step, the same on all replicas.
        batch: this replica's own.
        losses: as for `functional_jd.step`. Row i is the same objective on all replicas, and its mean is meant: losses
            that are means over examples need equally many on each. The rows of `per_example` losses are the examples of
            all replicas, the first one's first: R m rows, again with equally many on each; scale i of `[m]` serves the
            rows i of all replicas.
        aggregator: the rule, the same on all replicas and in every step; so is `optimizer`.
        group: the replicas, as for `mean_jacobian`.
        sharded: whether each of R replicas keeps 1/R of the mean Jacobian's columns: the rows are reduced and scattered
            `[m, n / R]`, the Gramians of the shards added up `[m, m]`, the directions of the shards gathered `[n]`.
            `(m + 1) / 2m` of the traffic, 1/R of the mean's memory and of the Gramian's work. For rules whose view is
            `gramian`, `losses` or `blank`; with one scale, the latter two exchange directions anyway, not rows.

    Returns:
        `(TrainState, StepInfo(losses, weights, finite))`: the same on all replicas; the losses are the mean, or all
        replicas' examples'.

    Raises:
        TypeError: what `functional_jd.step` raises.
        ValueError: likewise; `sharded` with `per_example` losses or a rule that looks at more than the Gramian.
        RuntimeError: a replica stopped, or did not answer in time: see `mean_jacobian`.

    Laws:
        The replicas stay equal, bit for bit, on equal machines. Equal, to rounding, to `functional_jd.step` on the
        whole batch. One replica's overflow skips the step on all, and each row's scale follows what all say of that
        row. Compiles in a full graph.

    Differs:
        From DistributedDataParallel, whose replicas must never see that one of them skipped: here they agree. Losses
        that draw random numbers draw each replica's own.
    """
    check_method("step", aggregator, optimizer)
    differentiate = _engine(losses, aggregator, state.scale, sharded)
    return finish_step(state, optimizer, differentiate(state, batch, losses, aggregator, group))


def _engine(
    losses: LossFunction, aggregator: Aggregator, scale: ScaleState, sharded: bool
) -> Callable[..., EngineResult]:
    choice = choose_replica_engine(aggregator, scale.scale, sharded).engine
    if choice == "shards" and not needs_no_rows(aggregator) and aggregator.view is not gramian:
        raise ValueError(
            "step: sharded=True serves rules that need no gradients, the losses or the Gramian, found one that needs "
            f"{getattr(aggregator.view, '__name__', aggregator.view)!r}. Use sharded=False."
        )
    if choice == "shards" and kind_of(losses).rows_are_examples:
        raise ValueError(
            "step: sharded=True needs rows that are the same objectives on all replicas, found per_example losses, "
            "whose rows are each replica's own examples. Use sharded=False."
        )
    return {"weighted": _by_weights, "shards": _by_shards, "jacobian": _by_jacobian}[choice]


def _by_weights(
    state: TrainState, batch: tuple[Any, ...], losses: LossFunction, aggregator: Aggregator, group: Group
) -> EngineResult:
    values, pullback = weighted_fn(losses, scale=state.scale)(state.params, *batch)
    values = _pooled(losses, values, group)
    weights, memory = weigh(aggregator, loss_rows(values), state.aggregator, losses=values)
    add, mine = mean_over_group, weights
    if kind_of(losses).rows_are_examples:
        _, replicas, rank = known_group(group)
        add, mine = sum_over_group, weights.reshape(replicas, -1)[rank]
    # Weights that are not finite are the rule's doing, not an overflow: the scale must not back off for them.
    direction_finite = all_finite(weights)
    direction, finite = pullback(torch.where(direction_finite, mine, 0), last=True)
    direction = add(direction, group)
    return EngineResult(
        direction, weights, memory, values, agree(finite, group), direction_finite & all_finite(direction)
    )


def _by_jacobian(
    state: TrainState, batch: tuple[Any, ...], losses: LossFunction, aggregator: Aggregator, group: Group
) -> EngineResult:
    jacobian, values = jacobian_fn(losses, scale=state.scale)(state.params, *batch)
    jacobian, finite = unscale(state.scale, jacobian)
    jacobian, values = _pooled(losses, jacobian, group), _pooled(losses, values, group)
    direction, weights, memory = aggregate(aggregator, jacobian, state.aggregator, losses=values)
    direction_finite = all_finite(direction_of_rows(direction, split_heads(jacobian)[1]))
    return EngineResult(direction, weights, memory, values, agree(finite, group), direction_finite)


def _by_shards(
    state: TrainState, batch: tuple[Any, ...], losses: LossFunction, aggregator: Aggregator, group: Group
) -> EngineResult:
    jacobian, values = jacobian_fn(losses, scale=state.scale)(state.params, *batch)
    jacobian, finite = unscale(state.scale, jacobian)
    values = mean_over_group(values, group)

    rows, heads = split_heads(jacobian)
    like = direction_of_rows(state.params, heads)
    shard = tree_map(lambda leaf: shard_columns(leaf, group), rows)
    if aggregator.view is gramian:
        aggregator = aggregator._replace(view=lambda *seen, losses: sum_over_group(gramian(*seen), group))  # noqa: ARG005
    weights, memory = weigh(aggregator, shard, state.aggregator, losses=values)
    direction = tree_map(lambda p, part: gather_columns(part, p, group), like, combine(shard, weights))
    direction_finite = all_finite(direction)
    direction = direction_with_heads(direction, mean_over_group(heads, group))
    return EngineResult(direction, weights, memory, values, agree(finite, group), direction_finite)


def _pooled(losses: LossFunction, tree: Tree, group: Group) -> Tree:
    """Rows or values of all replicas: their mean; for rows of examples, one replica's after the other's."""
    if not kind_of(losses).rows_are_examples:
        return mean_over_group(tree, group)
    return tree_map(lambda leaf: collective("gather", leaf, group).flatten(0, 1), tree)
