"""The training step: the composition, in the order of the picture."""

from typing import Any, NamedTuple

from torch import Tensor, nn

from functional_jd.aggregation import Aggregator, aggregate, start
from functional_jd.jacobian import jacobian_fn
from functional_jd.optimizers import Optimizer
from functional_jd.scaling import ScaleState, no_scale, select, unscale, update_scale
from functional_jd.tree import floating_leaves, tree_map
from functional_jd.types import Losses, LossFunction, Params, Tree, Weights

ENGINES = ("auto", "jacobian")


class TrainState(NamedTuple):
    """All that training carries from step to step: a pytree of tensors.

    Attributes:
        params: the parameters.
        optimizer: what the optimizer remembers.
        aggregator: what the rule remembers.
        scale: the loss scale, one for all or one per objective.
    """

    params: Params
    optimizer: Tree
    aggregator: Tree
    scale: ScaleState


class StepInfo(NamedTuple):
    """What people look at after a step.

    Attributes:
        losses: the values before the step, unscaled, in the structure that the losses gave them.
        weights: how much each row counted: float64 `[m]`, or a pytree like the Jacobian.
        finite: bool with the scale's shape: which rows were finite. The step was skipped unless all are.
    """

    losses: Losses
    weights: Weights
    finite: Tensor


def train_state(
    params: Params,
    *batch: Any,
    losses: LossFunction,
    aggregator: Aggregator,
    optimizer: Optimizer,
    scale: ScaleState | None = None,
) -> TrainState:
    """Start training: the state that the first `step` takes.

    Args:
        params: pytree of floating-point tensors, `dict(model.named_parameters())` for instance. The values of an
            `nn.Parameter` are taken and its graph is left behind; other tensors keep theirs.
        batch: one batch, to learn what the rule looks at. Its Jacobian is computed once.
        losses: `losses(params, *batch)`, as for `jacobian_fn`.
        aggregator: the rule.
        optimizer: a pair `(init, update)`.
        scale: from `scale_state()`, or `scale_state(shape=(m,))` for one scale per objective; `None` is no scaling.

    Returns:
        `TrainState(params, optimizer, aggregator, scale)`.

    Raises:
        TypeError, ValueError: parameters or losses that are none, as `jacobian_fn` says; a scale that does not fit m.
    """
    leaves, _ = floating_leaves(params, "train_state")
    params = tree_map(lambda p: p.detach() if isinstance(p, nn.Parameter) else p, params)
    scale = no_scale(device=leaves[0].device) if scale is None else scale
    jacobian, values = jacobian_fn(losses, scale=scale)(params, *batch)
    jacobian, _ = unscale(scale, jacobian)
    memory = start(aggregator, jacobian, losses=values)
    return TrainState(params, optimizer.init(params), memory, scale)


def step(
    state: TrainState,
    *batch: Any,
    losses: LossFunction,
    aggregator: Aggregator,
    optimizer: Optimizer,
    engine: str = "auto",
) -> tuple[TrainState, StepInfo]:
    """One step of Jacobian descent, in mixed precision if the losses are.

    Args:
        state: from `train_state` or from the last step.
        batch: what the losses take after the parameters.
        losses: `losses(params, *batch)`, as for `jacobian_fn`.
        aggregator: the rule, the same in every step.
        optimizer: the optimizer, the same in every step.
        engine: `"auto"` or `"jacobian"`.

    Returns:
        `(TrainState, StepInfo(losses, weights, finite))`.

    Raises:
        TypeError, ValueError: what `jacobian_fn` and `aggregate` raise, and an unknown engine. Never because of values.

    Laws:
        Pure. A step is skipped unless every row is finite; a skipped step changes nothing but the scale. Each row's
        scale follows its own flag. Composes with vmap over replicas, grad, jvp and compile, and never waits for the
        device.
    """
    if engine not in ENGINES:
        raise ValueError(f"step: engine must be one of {', '.join(ENGINES)}, found {engine!r}.")
    jacobian, values = jacobian_fn(losses, scale=state.scale)(state.params, *batch)
    jacobian, finite = unscale(state.scale, jacobian)
    direction, weights, memory = aggregate(aggregator, jacobian, state.aggregator, losses=values)
    params, moments = optimizer.update(direction, state.optimizer, state.params)
    scale = update_scale(state.scale, finite)
    new = TrainState(params, moments, memory, scale)
    old = TrainState(state.params, state.optimizer, state.aggregator, scale)
    return select(finite, new, old), StepInfo(values, weights, finite)
