"""The training step: the composition, in the order of the picture."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from functional_jd.aggregation.aggregate import Aggregator
from functional_jd.core.tree import all_finite, any_sharded, own_containers, tree_difference, tree_leaves
from functional_jd.core.types import Losses, LossFunction, Params
from functional_jd.engines.plan import Engine, Plan
from functional_jd.optimizers.base import Optimizer
from functional_jd.precision.autocast import autocast_disabled
from functional_jd.precision.loss_scale import select, zeros_unless
from functional_jd.torch_compat.slow_path import is_out_of_memory
from functional_jd.torch_compat.torch_internals import NO_TRANSFORM, transform_level
from functional_jd.torch_compat.watching import watched
from functional_jd.training.driver import check_method, observe, prepare, pulled, weighed
from functional_jd.training.state import StepInfo, TrainState
from functional_jd.training.through_skips import closed, opened


def step(
    state: TrainState,
    *batch: Any,
    losses: LossFunction,
    aggregator: Aggregator,
    optimizer: Optimizer,
    engine: str | Engine = "auto",
    has_aux: bool = False,
) -> tuple[TrainState, StepInfo]:
    """Take one step of Jacobian descent, in mixed precision if the losses are.

    Args:
        state: from `train_state` or from the last step.
        batch: what the losses take after the parameters, and after the buffers if there are any.
        losses: `losses(params, *batch) -> losses`, as for `jacobian_fn`; with buffers in the state
            `losses(params, buffers, *batch) -> (losses, buffers)`, which returns those of the next step. `multitask`:
            `features(shared, buffers, *batch) -> (features, buffers)` and
            `heads(own, features, buffers, *batch) -> (losses, buffers)`. `per_example`: every example receives the same
            buffers; the next ones are the mean over the examples, of integers the first example's. A key (int64 `[2]`,
            with a name that ends in `key`) is split: every example receives its own, and the next step another.
        aggregator: the rule, the same in every step.
        optimizer: the optimizer, the same in every step.
        engine: `"jacobian"`, `"gramian"`, `"weighted"`, or `"auto"`: the one that `chosen_engine` returns. Or an
            `Engine`: `jacobian_engine(chunk_size=8)`.
        has_aux: whether the losses return further values, last: `(losses, aux)`, with buffers `(losses, buffers, aux)`.

    Returns:
        `(TrainState, StepInfo(losses, weights, finite, moved, gramian, aux))`.

    Raises:
        TypeError, ValueError: errors of `jacobian_fn` and `aggregate`; losses that do not return what `has_aux` and the
            buffers need; an engine that does not serve the rule; a state of another rule, optimizer or model; noise
            without effect (`noised`). Never because of values.

    Guarantees:
        Pure. A step is skipped unless every loss, every row and the direction are finite, if a weight is NaN, and if
        parameters in float16 would overflow. A skipped step changes nothing but the scale.
        Each row's scale follows its own flag. A loss that is not finite flags itself alone, and no scale moves. One
        backward pass for all rows, as `weighted_engine` takes it, has one flag for all.
        The engines agree to rounding. Composes with vmap over replicas, grad, jvp and compile. Does not wait for the
        device, unless the docstring of the rule tells otherwise. To derivatives of every order, a skipped step is the
        identity by state and batch, and constant by rates; under torch.compile they are NaN.

    Limits:
        To differentiate a sum of the report of a skipped step and the later state, take `torch.where(info.moved, loss,
        0)`: else derivatives are NaN. In forward mode the tangents of float16 rows carry the scale: start at 2**10.
        A state without a memory of the rule and with one scale takes any number of losses, each time; `fit` and `steps`
        raise. For an objective that a batch does not have, return `0 * another loss`.

    Example:
        >>> params, x = {"w": torch.zeros(2)}, torch.tensor([[1.0, 2.0], [3.0, -1.0]])
        >>> def losses(params, x):
        ...     return {"fit": (x @ params["w"] - 1).square().sum(), "near": (params["w"] - 1).square().sum()}
        >>> method = {"losses": losses, "aggregator": upgrad(), "optimizer": sgd(lr=0.05)}
        >>> state = train_state(params, x, **method)
        >>> state, info = step(state, x, **method)
        >>> bool(info.moved), sorted(info.losses)
        (True, ['fit', 'near'])
    """
    check_method(losses, aggregator, optimizer, has_aux, state)
    how: Any = {"scale": state.scale, "buffers": state.buffers, "has_aux": has_aux, "engine": engine}
    plan, chosen, _ = prepare(losses, state.params, batch, aggregator, **how)
    token, plan, used = _opened(plan, state) if plan.differentiable else (None, plan, state)
    plain = token is None and not (plan.differentiable and transform_level() != NO_TRANSFORM)
    narrow = False  # a loop, as a generator takes a call for each leaf
    for leaf in plan.leaves:
        narrow = narrow or leaf.dtype == torch.float16
    guarded = optimizer.guarded_update if plain and not narrow else None  # leaves the state as it was if it is skipped
    try:
        seen = observe(plan, chosen)
        with autocast_disabled():
            found = weighed(plan, seen, used.aggregator)
            direction, (finite, moved, scale) = pulled(plan, seen, found)
        (own, aux), (weights, memory, products, *_) = seen.carried, found
        info, buffers = StepInfo(seen.losses, weights, finite, moved, products, aux), state.buffers
        if type(buffers) is not tuple or buffers:
            buffers = plan.next_buffers(own)
        del seen, found  # rows and direction go as soon as they can: each is as large as the parameters
        update = optimizer.update if guarded is None else partial(guarded, moved)
        update = update if optimizer.search is None else partial(optimizer.search, _losses_at(plan, chosen))
        direction = direction if token is None else zeros_unless(moved, direction)
        params, moments = update(direction, used.optimizer, used.params)
        if narrow:  # a finite direction may be infinite in float16
            info = info._replace(moved=(moved := moved & (all_finite(params) | ~all_finite(used.params))))
        for leaf in tree_leaves(params) if plain and torch.is_grad_enabled() else ():
            if leaf.requires_grad:  # as a rate does, whose derivative is infinite times zero if this is skipped
                params, moments = update(zeros_unless(moved, direction), used.optimizer, used.params)
                break
        del direction
        new = TrainState(params, buffers, moments, memory, ())  # pyright: ignore[reportArgumentType]
        if token is not None:  # what is reported is differentiated whether the step was taken or not
            new, info = closed(token, moved, new), closed(token, moved, info)
        if guarded is None:
            params, buffers, moments, memory, _ = select(moved, new, state._replace(scale=new.scale))
        elif not (type(memory) is type(buffers) is tuple and not memory and not buffers):
            buffers, memory = select(moved, (buffers, memory), (state.buffers, state.aggregator))
        return TrainState(params, buffers, moments, memory, scale), info
    except Exception as error:
        _note_another(optimizer, state, error)
        raise


def _note_another(optimizer: Optimizer, state: TrainState, error: Exception) -> None:
    """Note in an error that the state is one of another optimizer, if it is."""
    is_known = torch.compiler.is_compiling() or is_out_of_memory(error)
    if not is_known and (found := tree_difference(optimizer.init(state.params), state.optimizer)):
        error.add_note(
            f"step: the state must be one of this optimizer for these parameters: {found} in state.optimizer. "
            "Start again with train_state, or with state._replace(optimizer=optimizer.init(params))."
        )


def _opened(plan: Plan, state: TrainState) -> tuple[Any, Plan, TrainState]:
    """The plan and the state of a step whose inputs receive no derivatives where it is skipped."""
    token, (args, factor, moments, memory) = opened((plan.args, plan.scale, state.optimizer, state.aggregator))
    used = state._replace(params=args[0], optimizer=moments, aggregator=memory)
    return token, plan._replace(args=args, scale=factor), used


def _losses_at(plan: Plan, engine: Engine) -> Callable[[Params], Losses]:
    """The losses of this step, for an optimizer that compares them."""
    found = "replicas have different batches and would move apart" if engine.is_replicated else ""
    if found or any_sharded(tree_leaves(plan.args[0])):
        raise ValueError(
            f"step: the optimizer must not compare losses (line_search), since {found or 'parameters are sharded'}. "
            "Pass the optimizer inside it."
        )
    return lambda params: watched(plan.losses)(params, *map(own_containers, plan.args[1:]))[0]
