"""The training step: the composition, in the order of the picture."""

from typing import Any

from functional_jd.aggregation.aggregate import Aggregator
from functional_jd.core.torch_internals import under_transform
from functional_jd.core.types import LossFunction
from functional_jd.optimizers.base import Optimizer
from functional_jd.precision.loss_scale import select, update_scale
from functional_jd.training.engines import EngineResult, engine_of
from functional_jd.training.state import StepInfo, TrainState, check_method


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
        engine: `"jacobian"` computes all rows; `"gramian"`, for rules whose view is `gramian`, computes their inner
            products without forming `[m, n]` where layers allow; `"weighted"`, for rules whose view is `no_gradients`
            or `losses`, takes one backward pass with the weights as cotangent. `"auto"` takes the engine that
            `chosen_engine` returns.

    Returns:
        `(TrainState, StepInfo(losses, weights, finite))`.

    Raises:
        TypeError, ValueError: what `jacobian_fn` and `aggregate` raise; an engine that is unknown, or does not give the
            rule what it needs. Never because of values.

    Laws:
        Pure. A step is skipped unless every row and the direction are finite (a rule may refuse losses by weights that
        are NaN); a skipped step changes nothing but the scale. Each row's scale follows its own flag. With
        `engine="weighted"` and one scale per objective, the backward pass runs at the largest scale that serves all,
        and all flags are equal. The engines agree to rounding. Composes with vmap over replicas, grad, jvp and compile.
        Does not synchronize with the device, unless the rule does: its docstring says so.
    """
    check_method("step", aggregator, optimizer)
    differentiate = engine_of(engine, state, batch, losses, aggregator)
    return finish_step(state, optimizer, differentiate(state, batch, losses, aggregator))


def finish_step(state: TrainState, optimizer: Optimizer, found: EngineResult) -> tuple[TrainState, StepInfo]:
    """Take the step, or skip it: what remains when the direction is known."""
    direction, weights, memory, values, finite, direction_finite = found
    rows_finite = finite.all()
    moving = rows_finite & direction_finite
    guarded = None if under_transform() else optimizer.guarded_update  # torch.compile fuses `select` by itself
    # One after the other, and the direction gone: each is as large as the parameters.
    del found
    if guarded is not None:
        params, moments = guarded(moving, direction, state.optimizer, state.params)
    else:
        params, moments = optimizer.update(direction, state.optimizer, state.params)
        del direction
        params = select(moving, params, state.params)
        moments = select(moving, moments, state.optimizer)
    memory = select(moving, memory, state.aggregator)
    new = TrainState(params, moments, memory, update_scale(state.scale, finite))
    # The flags show that the step was skipped, also where the direction alone is not finite.
    return new, StepInfo(values, weights, finite & (direction_finite | ~rows_finite))
