"""The features engine: for multitask losses, inner products of the rows with respect to the features."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from functional_jd.core.types import Direction, Gramian, Losses
from functional_jd.engines.evaluate import Options, any_requires_grad
from functional_jd.engines.kinds.multitask import features
from functional_jd.objectives import Multitask
from functional_jd.precision.loss_scale import multiplier
from functional_jd.precision.scale_state import ScaleState
from functional_jd.torch_compat.torch_internals import under_transform


def features_gramian(
    where: str, losses: Multitask, args: tuple[Any, ...], scale: ScaleState | None
) -> tuple[Gramian, Losses, Any, Callable[[Tensor], tuple[Direction, Tensor]]]:
    """The Gramian `Z Z'` of the rows by feature, with losses and aux, and the pullback of weights.

    Args:
        where: the function that the user called, for errors and warnings.
        losses: made by `multitask`; they return `(losses, aux)`.
        args: the parameters and the batch.
        scale: the scale of the backward passes, or None.

    Returns:
        `(gramian, losses, aux, pullback)`, unscaled. Gramian float64 `[m, m]`; `pullback(weights) -> (direction,
        finite)`, one pass through the trunk: weights `[m]`, direction a pytree like params, finite bool `[]`.
    """
    factor = None if scale is None else multiplier(scale, where)
    differentiable = under_transform() or any_requires_grad((args, factor))
    return features(losses, args, Options(where, True, factor, differentiable))
