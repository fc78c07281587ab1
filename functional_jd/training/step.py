"""The training step: the composition, in the order of the picture."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from functional_jd.aggregation.aggregate import Aggregator
from functional_jd.core.tree import any_sharded, own_containers, tree_leaves
from functional_jd.core.types import Losses, LossFunction, Params
from functional_jd.engines.plan import Engine, Plan
from functional_jd.optimizers.base import Optimizer
from functional_jd.precision.loss_scale import select, zeros_unless
from functional_jd.torch_compat.torch_internals import under_functional_transform
from functional_jd.torch_compat.watching import watched
from functional_jd.training.checks import check_noise
from functional_jd.training.driver import Directed, directed
from functional_jd.training.prepare import prepare
from functional_jd.training.signatures import note_losses
from functional_jd.training.state import StepInfo, TrainState, check_method, check_state, refuse_other_optimizer
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
    """One step of Jacobian descent, in mixed precision if the losses are.

    Args:
        state: from `train_state` or from the last step.
        batch: what the losses take after the parameters, and after the buffers if there are any.
        losses: `losses(params, *batch) -> losses`, as for `jacobian_fn`. With buffers in the state,
            `losses(params, buffers, *batch) -> (losses, buffers)`: the buffers that come back are those of the next
            step. `multitask` passes them on: `features(shared, buffers, *batch) -> (features, buffers)`, then
            `heads(own, features, buffers, *batch) -> (losses, buffers)`. Under `per_example` every example receives the
            same buffers; the next ones are the mean over the examples, of integers the first example's. A key (int64
            `[2]`, with a name that ends in `key`) is split: every example receives its own, and the next step another.
        aggregator: the rule, the same in every step.
        optimizer: the optimizer, the same in every step.
        engine: `"jacobian"` computes all rows; `"gramian"`, for rules that need their inner products or norms, computes
            these without forming `[m, n]` where layers allow; `"weighted"`, for rules that need no gradients, takes one
           backward pass with the weights as cotangent. `"auto"` takes the engine that `chosen_engine`
            returns. Or an `Engine`: `jacobian_engine(chunk_size=8)`.
        has_aux: whether the losses return further values, last: `(losses, aux)`, with buffers `(losses, buffers, aux)`.

    Returns:
        `(TrainState, StepInfo(losses, weights, finite, moved, gramian, aux))`.

    Raises:
        TypeError, ValueError: what `jacobian_fn` and `aggregate` raise; losses that do not take this batch, or
            do not return what `has_aux` and the buffers ask for; an engine that is unknown, or does not give the rule
            what it needs; a state of another rule, optimizer or model, or with numbers for other
            objectives; noise that protects nobody (`noised`). Never because of values.

    Laws:
        Pure. A step is skipped unless every loss, every row and the direction are finite (a rule may refuse losses by
        weights that are NaN); a skipped step changes nothing but the scale. Each row's scale follows its own flag, but
        stays as it is where the loss itself is not finite, which no scale would mend. With `engine="weighted"` and one
        scale per objective, the backward pass runs at the largest scale that serves all, and all flags are equal. The
        engines agree to rounding. Composes with vmap over replicas, grad, jvp and compile. Does not synchronize with
        the device, unless the rule does: its docstring says so.
        A skipped step is the identity to derivatives of every order by state and batch, and constant to those by rates;
        in what torch.compile traces they are NaN. What it reports has derivatives of its own; those of a sum of these
        and the later state are NaN: take `torch.where(info.moved, loss, 0)`. In forward mode the tangents of float16
        rows carry the scale: second derivatives above 65504 / scale make them infinite, and derivatives NaN. Start
        with a smaller scale, such as 2**10, or take reverse mode.

    Example:
        >>> params, x = {"w": torch.zeros(2)}, torch.tensor([[1.0, 2.0], [3.0, -1.0]])
        >>> def losses(params, x):
        ...     return {"fit": (x @ params["w"] - 1).square().sum(), "near": (params["w"] - 1).square().sum()}
        >>> method = {"losses": losses, "aggregator": upgrad(), "optimizer": sgd(lr=0.05)}
        >>> state = train_state(params, x, **method)
        >>> for _ in range(20):
        ...     state, info = step(state, x, **method)
        >>> bool(info.moved), sorted(info.losses)
        (True, ['fit', 'near'])
    """
    check_state("step", state)
    check_method("step", losses, aggregator, optimizer, has_aux)
    if optimizer.sensitivity is not None:
        check_noise("step", losses, aggregator, optimizer, reading=False)
    plan, chosen = prepare(
        "step",
        losses,
        state.params,
        batch,
        aggregator,
        scale=state.scale,
        buffers=state.buffers,
        has_aux=has_aux,
        engine=engine,
    )
    token, used = None, state
    if plan.differentiable:
        token, plan, used = _opened(plan, state)
    if optimizer.search is not None:
        optimizer = _with_losses(optimizer.search, optimizer, plan, chosen)
    try:
        # Nobody else holds the direction.
        return _finished(plan, state, optimizer, directed(plan, chosen, used.aggregator), token, used)
    except TypeError as error:
        note_losses("step", losses, len(plan.args) > 1 + len(batch), batch, error)
        raise


def _with_losses(search: Callable[..., Any], optimizer: Optimizer, plan: Plan, engine: Engine) -> Optimizer:
    """An optimizer whose `update` is this search, with the losses of this step."""
    if engine.is_replicated:
        raise ValueError(
            "step: expected an optimizer that needs no losses, since replicas have different batches and would move "
            "apart, found one that compares losses (line_search). Pass the optimizer inside it."
        )
    if any_sharded(tree_leaves(plan.args[0])):
        raise ValueError(
            "step: expected an optimizer that needs no losses, for sharded parameters, found one that compares losses "
            "(line_search). Pass the optimizer inside it."
        )

    evaluate = watched(plan.losses)

    def losses_at(params: Params) -> Losses:
        return evaluate(params, *map(own_containers, plan.args[1:]))[0]

    return Optimizer(optimizer.init, partial(search, losses_at))


def _opened(plan: Plan, state: TrainState) -> tuple[Tensor | None, Plan, TrainState]:
    """The plan and the state of a step whose inputs receive no derivatives where it is skipped."""
    inputs = plan.args, plan.scale, state.optimizer, state.aggregator
    token, (args, factor, moments, rule_state) = opened(inputs)
    plan = plan._replace(args=args, scale=factor)
    return token, plan, state._replace(params=args[0], optimizer=moments, aggregator=rule_state)


def _finished(
    plan: Plan, state: TrainState, optimizer: Optimizer, found: Directed, token: Tensor | None, used: TrainState
) -> tuple[TrainState, StepInfo]:
    """Take the step, or skip it: what remains when the direction is known."""
    direction, weights, rule_state, values, finite, moved, scale, (own, aux), gramian = found
    buffers = plan.next_buffers(own)
    plain = token is None and not (plan.differentiable and under_functional_transform())
    guarded_update = optimizer.guarded_update if plain else None
    update = optimizer.update if guarded_update is None else partial(guarded_update, moved)
    # One after the other, and the direction gone: each is as large as the parameters.
    del found
    try:
        direction = direction if token is None else zeros_unless(moved, direction)
        params, moments = update(direction, used.optimizer, used.params)
        for leaf in tree_leaves(params) if plain and torch.is_grad_enabled() else ():
            if leaf.requires_grad:  # as a rate does, whose derivative is infinite times zero where this is skipped
                params, moments = update(zeros_unless(moved, direction), used.optimizer, used.params)
                break
        del direction
        if token is not None:
            params, moments, buffers, rule_state = closed(token, moved, (params, moments, buffers, rule_state))
    except Exception as error:
        refuse_other_optimizer("step", state, optimizer, error)
        raise
    try:
        if guarded_update is None:
            params = select(moved, params, state.params)
            moments = select(moved, moments, state.optimizer)
    except (TypeError, ValueError) as error:
        refuse_other_optimizer("step", state, optimizer, error)
        raise _unlike(error, "the optimizer's update parameters and a memory like those that it receives") from error
    # Most rules and losses keep `()`, which `select` would only walk through.
    no_memory, no_buffers = type(rule_state) is tuple and not rule_state, type(buffers) is tuple and not buffers
    try:
        memory = state.aggregator if no_memory else select(moved, rule_state, state.aggregator)
    except (TypeError, ValueError) as error:
        views = "(views are float64, but rows, mostly float32: start from zeros_like(x, dtype=torch.float64))"
        raise _unlike(error, "the rule's update a memory like that of its init", f" {views}") from error
    buffers = state.buffers if no_buffers else select(moved, buffers, state.buffers)
    new = TrainState(params, buffers, moments, memory, scale)
    if token is not None:  # what is reported is differentiated whether the step was taken or not
        values, weights, gramian, aux = closed(token, moved, (values, weights, gramian, aux))
    return new, StepInfo(values, weights, finite, moved, gramian, aux)


def _unlike(error: TypeError | ValueError, expected: str, hint: str = "") -> TypeError | ValueError:
    """The error of `select`, in the words of the step."""
    return type(error)(f"step: expected of {expected}, with the same shapes and dtypes{hint}. {error}")
