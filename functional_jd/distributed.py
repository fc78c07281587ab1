"""Replicas: the step of several processes, each with its own batch, as one process would do with all of it."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from functional_jd.aggregation import Aggregator, aggregate, combine, gramian, weigh
from functional_jd.aggregation import losses as look_at_losses
from functional_jd.jacobian import jacobian_fn
from functional_jd.objectives import PerExample
from functional_jd.optimizers import Optimizer
from functional_jd.precision import full_precision
from functional_jd.rows import as_matrix, wide
from functional_jd.scaling import ScaleState, unscale
from functional_jd.step import Descent, StepInfo, TrainState, check, finish, is_blind, weighed
from functional_jd.step import train_state as start_alone
from functional_jd.tree import all_finite, floating_leaves, tree_map
from functional_jd.types import Direction, Jacobian, Losses, LossFunction, MultitaskJacobian, Params, Tree
from functional_jd.weighted import weighted_fn

Group = Any
"""A `torch.distributed.ProcessGroup`; `None` is all processes."""


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
    return _mean(jacobian, group)


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
    return _collective("least", finite.int(), group).bool()


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
    return tree_map(lambda leaf: _collective("first", leaf, group), tree)


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
        params: pytree of floating-point tensors, of which the first replica's count.
        batch: this replica's own. The rule starts with what it sees in the mean over the replicas.
        losses: as for `functional_jd.train_state`; so are `aggregator`, `optimizer` and `scale`.
        group: the replicas, as for `mean_jacobian`.

    Returns:
        `TrainState(params, optimizer, aggregator, scale)`, the same bits on every replica.

    Raises:
        TypeError, ValueError, RuntimeError: as `functional_jd.train_state` and `step` say.
    """
    check("train_state", aggregator, optimizer)
    params = replicate(params, group)

    def init(values: Tensor) -> Tree:
        return aggregator.init(_pooled(losses, values, group))

    def view(jacobian: Jacobian, *others: Jacobian, **values: Losses) -> Any:
        seen = [_pooled(losses, rows, group) for rows in (jacobian, *others)]
        return aggregator.view(*seen, losses=_pooled(losses, values["losses"], group))

    # What blind rules look at is as easily pooled when it was looked at: no rows are needed.
    together = aggregator._replace(init=init) if is_blind(aggregator) else aggregator._replace(view=view)
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
    check("step", aggregator, optimizer)
    differentiate = _engine(losses, aggregator, state.scale, sharded)
    return finish(state, optimizer, differentiate(state, batch, losses, aggregator, group))


def _engine(losses: LossFunction, aggregator: Aggregator, scale: ScaleState, sharded: bool) -> Callable[..., Descent]:
    blind = is_blind(aggregator)
    if blind and not scale.scale.ndim:
        return _by_weights
    if sharded and not blind and aggregator.view is not gramian:
        raise ValueError(
            "step: sharded=True serves rules that look at nothing, at the losses or at the Gramian, found one that "
            f"looks at {getattr(aggregator.view, '__name__', aggregator.view)!r}. Use sharded=False."
        )
    if sharded and isinstance(losses, PerExample):
        raise ValueError(
            "step: sharded=True needs rows that are the same objectives on all replicas, found per_example losses, "
            "whose rows are each replica's own examples. Use sharded=False."
        )
    return _by_shards if sharded else _by_jacobian


def _by_weights(
    state: TrainState, batch: tuple[Any, ...], losses: LossFunction, aggregator: Aggregator, group: Group
) -> Descent:
    values, pullback = weighted_fn(losses, scale=state.scale)(state.params, *batch)
    values = _pooled(losses, values, group)
    rows = look_at_losses(None, losses=values)
    weights, memory = weigh(aggregator, rows, state.aggregator, losses=values)
    add, mine = _mean, weights
    if isinstance(losses, PerExample):
        _, replicas, rank = _known(group)
        add, mine = _sum, weights.reshape(replicas, -1)[rank]
    # Weights that are not finite are the rule's word, not an overflow: the scale must not back off for them.
    sound = all_finite(weights)
    direction, finite = pullback(torch.where(sound, mine, 0), last=True)
    direction = add(direction, group)
    return Descent(direction, weights, memory, values, agree(finite, group), sound & all_finite(direction))


def _by_jacobian(
    state: TrainState, batch: tuple[Any, ...], losses: LossFunction, aggregator: Aggregator, group: Group
) -> Descent:
    jacobian, values = jacobian_fn(losses, scale=state.scale)(state.params, *batch)
    jacobian, finite = unscale(state.scale, jacobian)
    jacobian, values = _pooled(losses, jacobian, group), _pooled(losses, values, group)
    direction, weights, memory = aggregate(aggregator, jacobian, state.aggregator, losses=values)
    sound = all_finite(weighed(direction, jacobian))
    return Descent(direction, weights, memory, values, agree(finite, group), sound)


def _by_shards(
    state: TrainState, batch: tuple[Any, ...], losses: LossFunction, aggregator: Aggregator, group: Group
) -> Descent:
    jacobian, values = jacobian_fn(losses, scale=state.scale)(state.params, *batch)
    jacobian, finite = unscale(state.scale, jacobian)
    values = _mean(values, group)

    split = isinstance(jacobian, MultitaskJacobian)
    rows, like = (jacobian.shared, state.params["shared"]) if split else (jacobian, state.params)
    shard = tree_map(lambda leaf: _shard(leaf, group), rows)
    if aggregator.view is gramian:
        aggregator = aggregator._replace(view=lambda *seen, losses: _sum(gramian(*seen), group))  # noqa: ARG005
    weights, memory = weigh(aggregator, shard, state.aggregator, losses=values)
    direction = tree_map(lambda p, part: _gathered(part, p, group), like, combine(shard, weights))
    sound = all_finite(direction)
    if split:
        direction = {"shared": direction, "heads": _mean(jacobian.heads, group)}
    return Descent(direction, weights, memory, values, agree(finite, group), sound)


def _pooled(losses: LossFunction, tree: Tree, group: Group) -> Tree:
    """Rows or values of all replicas: their mean; for rows of examples, one replica's after the other's."""
    if not isinstance(losses, PerExample):
        return _mean(tree, group)
    return tree_map(lambda leaf: _collective("gather", leaf, group).flatten(0, 1), tree)


def _sum(tree: Tree, group: Group) -> Tree:
    return tree_map(lambda leaf: _collective("sum", leaf, group), tree)


def _mean(tree: Tree, group: Group) -> Tree:
    """Divided before it is added up, so that no sum of finite values overflows."""
    replicas = _known(group)[1]
    return tree_map(lambda leaf: _sum(wide(leaf) / replicas, group).to(leaf.dtype), tree)


def _shard(leaf: Tensor, group: Group) -> Tensor:
    """One share of the columns of the mean, `[m, k]`, per replica: a leaf `[m, *p]` in R parts, padded at the end."""
    replicas = _known(group)[1]
    matrix = as_matrix(wide(leaf)) / replicas
    if matrix.shape[1] % replicas:  # padding copies, with nothing to pad too
        matrix = torch.nn.functional.pad(matrix, (0, -matrix.shape[1] % replicas))
    parts = matrix.reshape(len(matrix), replicas, matrix.shape[1] // replicas).transpose(0, 1)
    return _collective("scatter", parts, group).to(leaf.dtype)


def _gathered(part: Tensor, like: Tensor, group: Group) -> Direction:
    """The whole direction `[*p]`, from each replica's part `[k]`."""
    return _collective("gather", part, group).reshape(-1)[: like.numel()].reshape(like.shape)


def _known(group: Group) -> tuple[str, int, int]:
    """The group's name, its number of replicas, and which of them this is."""
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            "distributed: expected a process group, found none. Call torch.distributed.init_process_group('gloo') "
            "(or 'nccl') first, and start the program with torchrun."
        )
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            f"distributed: expected a process group that this process is in, found {group!r}. "
            "Call this on members of the group only."
        )
    return group.group_name, group.size(), group.rank()


def _collective(kind: str, value: Tensor, group: Group) -> Tensor:
    with full_precision(value):
        result: Any = _Collective.apply(value, kind, *_known(group)[:2])
    return result


_ADJOINT = {"sum": "sum", "scatter": "gather", "gather": "scatter"}


class _Collective(Function):
    """A functional collective with the derivatives and the vmap rule of the linear map that it is.

    `"sum"`, `"least"` and `"first"` keep the shape; `"scatter"` takes `[R, ...]` to `[...]`, `"gather"` back.
    """

    @staticmethod
    def forward(value: Tensor, kind: str, name: str, replicas: int) -> Tensor:
        value = value.contiguous()
        ops = torch.ops._c10d_functional
        try:
            if kind == "sum" or kind == "least":
                result = ops.all_reduce(value, "sum" if kind == "sum" else "min", name)
            elif kind == "first":
                result = ops.broadcast(value, 0, name)
            elif kind == "scatter":
                result = ops.reduce_scatter_tensor(value, "sum", replicas, name).squeeze(0)
            else:
                result = ops.all_gather_into_tensor(value.unsqueeze(0), replicas, name)
            return ops.wait_tensor(result)
        except RuntimeError as error:
            found = str(error).partition("\n")[0]
            raise RuntimeError(
                f"distributed: expected an answer of all {replicas} replicas, found {found!r}. "
                "A replica stopped, fell out of step or hangs: see the first error of all processes, and start again "
                "from the last checkpoint."
            ) from error

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004
        _, *ctx.how = inputs

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        kind, *where = ctx.how
        return _Collective.apply(cotangents[0], _ADJOINT[kind], *where), None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return _Collective.apply(tangents[0], *ctx.how)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:  # noqa: ARG004
        value, *how = args
        return _Collective.apply(value.movedim(in_dims[0], -1), *how), -1
