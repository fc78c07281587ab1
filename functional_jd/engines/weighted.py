"""The weighted engine: for rules that need no gradients, one backward pass with the weights as cotangent."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from functional_jd.aggregation.groups import check_groups
from functional_jd.aggregation.observation import Observation
from functional_jd.core.arguments import check_flag
from functional_jd.core.tree import all_finite
from functional_jd.core.types import Direction, LossFunction
from functional_jd.engines.evaluate import check_losses, check_weights, is_differentiable, objective_count
from functional_jd.engines.kinds import found_kind
from functional_jd.engines.plan import Engine, Plan, require
from functional_jd.precision.loss_scale import multiplier, zeros_unless
from functional_jd.precision.scale_state import ScaleState

Pullback = Callable[..., tuple[Direction, Tensor]]
"""`pullback(weights, *, last=False) -> (direction, finite)`."""


def weighted_fn(
    losses: LossFunction, *, has_aux: bool = False, scale: ScaleState | Tensor | None = None
) -> Callable[..., tuple[Any, Pullback]]:
    """Turn losses into a function that returns their values, and the pullback of weights.

    `direction = sum_i weights_i d losses_i / d params`, in one backward pass, whatever m.

    Args:
        losses: `losses(params, *args)`, as for `jacobian_fn`: plain, or made by `per_example` or `multitask`.
        has_aux: whether `losses` returns `(losses, aux)`, with aux a pytree of tensors.
        scale: a `ScaleState` or tensor, `[]` or `[m]`: the backward pass runs at that scale, the direction comes out
            unscaled. One pass has one scale: of `[m]` it is the largest power of two S with
            `|weights_i| S <= scale_i` for all i.

    Returns:
        `f(*args) -> (losses, pullback)`, with `has_aux` `((losses, aux), pullback)`. The losses are not scaled.
        `pullback(weights, *, last=False) -> (direction, finite)`: weights `[m]`; direction a pytree like params, at
        least float32, with a scale zeros where it is not finite; finite bool of the scale's shape. One backward pass
        cannot assign an overflow to an objective: all m flags are equal. `last=True` frees the graph.
        For `multitask` losses the trunk gets the weighted direction, and the heads the gradient of the plain sum.

    Raises:
        TypeError: losses or parameters that are not floating-point tensors, `losses` not callable.
        ValueError: no objectives, a scale that does not fit m, weights that are not `[m]`.
        RuntimeError: from the pullback, where losses of examples draw random numbers and would have to be evaluated
            again, as vmap refuses their backward pass: the direction would be that of other losses.

    Laws:
        Equal to `combine(unscale(jacobian), weights)` to rounding, where every row is finite; linear in the weights.
        Composes with vmap, grad, jvp and compile; the result is detached unless an input or the weights require grad.
        Weights that are not finite are not `finite` (the direction may be, as of a loss that `torch.where` cuts off).
        Weight 0 does not hide a row that overflows.
        The cotangent of a loss has the loss's dtype, at least float32: its weight is rounded to that. float64 weights
        of float32 losses count to 6e-8 of their size.

    Example:
        >>> losses = lambda params: {"a": params.square().sum(), "b": params[0]}
        >>> values, pullback = weighted_fn(losses)(torch.tensor([1.0, 2.0]))
        >>> pullback(torch.tensor([0.5, 1.0]))
        (tensor([2., 2.]), tensor(True))
    """
    check_losses("weighted_fn", losses, 0, has_aux)
    factor = None if scale is None else multiplier(scale, "weighted_fn")

    def losses_and_pullback(*args: Any) -> tuple[Any, Any]:
        objectives, kind = found_kind(losses, 0, args, "weighted_fn")
        plan = Plan("weighted_fn", has_aux, factor, is_differentiable((args, factor)))
        values, aux, unchecked = kind.weighted(objectives, args, plan)

        def pullback(weights: Tensor, *, last: bool = False) -> tuple[Direction, Tensor]:
            check_flag("weighted_fn", "last", last)
            check_weights("weighted_fn", weights, objective_count(values))
            direction, finite = unchecked(weights, last=last)
            if finite is None:
                return direction, all_finite((direction, weights))
            return zeros_unless(finite, direction), finite

        return (values, aux) if has_aux else values, pullback

    return losses_and_pullback


def weighted_engine() -> Engine:
    """One backward pass with the weights as cotangent, for rules that need no gradients: `view.products` is `"none"`.

    Returns:
        An `Engine`, for `step` and `train_state`. With one scale per objective, the backward pass runs at the largest
        scale that serves all, and all flags are equal. Groups of parameters whose rules differ take one pass each.

    Raises:
        ValueError: from `step` and `train_state`, for a rule that needs more.

    Laws:
        The direction is that of `jacobian_engine`, up to the order of sums.
    """

    def observe(plan: Plan) -> Observation:
        if plan.view.groups is not None:
            check_groups(plan.kind.row_params(plan.losses, plan.args[0]), plan.view.groups)
        values, carried, pull = plan.kind.weighted(plan.losses, plan.args, plan)

        def pullback(weights: Any) -> tuple[Direction, Tensor | None]:
            if plan.view.groups is None:
                check_weights(plan.where, weights, objective_count(values))
            return pull(weights, last=True)

        return Observation(values, pullback=pullback, carried=carried)

    def check(plan: Plan) -> None:
        require(plan, "weighted", serves=plan.view.products == "none", rules="no gradients")

    return Engine(observe, check)
