"""The weighted engine: for rules that need no gradients, one backward pass with the weights as cotangent."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from functional_jd.core.arguments import check_flag
from functional_jd.core.types import Direction, LossFunction
from functional_jd.engines.evaluate import Options, any_requires_grad, check_losses, select_arguments
from functional_jd.engines.kinds import kind_of, of_arguments
from functional_jd.precision.loss_scale import multiplier
from functional_jd.precision.scale_state import ScaleState
from functional_jd.torch_compat.torch_internals import under_transform

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
        ValueError: no objectives, a scale that does not fit m, weights that are not `[m]`, reentrant checkpoints.
        RuntimeError: from the pullback, where losses of examples draw random numbers and would have to be evaluated
            again, as vmap refuses their backward pass: the direction would be that of other losses.

    Laws:
        Equal to `combine(unscale(jacobian), weights)` to rounding, where every row is finite; linear in the weights.
        Composes with vmap, grad, jvp and compile; the result is detached unless an input or the weights require grad.
        Weights that are not finite give a direction that is not finite. Weight 0 does not hide a row that overflows.

    Example:
        >>> losses = lambda params: {"a": params.square().sum(), "b": params[0]}
        >>> values, pullback = weighted_fn(losses)(torch.tensor([1.0, 2.0]))
        >>> pullback(torch.tensor([0.5, 1.0]))
        (tensor([2., 2.]), tensor(True))
    """
    check_losses("weighted_fn", losses, 0, has_aux)
    return weighted_for("weighted_fn", losses, has_aux=has_aux, scale=scale)


def weighted_for(
    where: str, losses: LossFunction, *, has_aux: bool = False, scale: ScaleState | Tensor | None = None
) -> Callable[..., tuple[Any, Pullback]]:
    """`weighted_fn`, whose errors and warnings name the function that the user called."""
    factor = None if scale is None else multiplier(scale, where)

    def losses_and_pullback(*args: Any) -> tuple[Any, Any]:
        given, _ = select_arguments(0, args, where)  # a mistake is named before anything is evaluated
        differentiable = any_requires_grad((args, factor)) or under_transform()
        options = Options(where, has_aux, factor, differentiable)
        objectives = of_arguments(losses, given)
        values, aux, unchecked = kind_of(objectives).weighted(objectives, args, options)

        def pullback(weights: Tensor, *, last: bool = False) -> tuple[Direction, Tensor]:
            check_flag(where, "last", last)
            return unchecked(weights, last=last)

        return (values, aux) if has_aux else values, pullback

    return losses_and_pullback
