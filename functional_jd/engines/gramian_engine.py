"""The Gramian engine: inner products of rows without the rows, and the pullback of weights."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

from torch import Tensor

from functional_jd.aggregation.observation import Observation
from functional_jd.core.types import Direction, Gramian, LossFunction
from functional_jd.engines.choose import gramian_mode
from functional_jd.engines.evaluate import check_losses, check_weights, is_differentiable
from functional_jd.engines.kinds import found_kind
from functional_jd.engines.observed import finite_rows, of_products
from functional_jd.engines.plan import Engine, Plan, require
from functional_jd.precision.autocast import autocast_disabled
from functional_jd.precision.loss_scale import multiplier
from functional_jd.precision.scale_state import ScaleState

Pullback: TypeAlias = Callable[[Tensor], tuple[Direction, Tensor]]
"""`pullback(weights) -> (direction, finite)`."""

# A name, since torch.compile evaluates what annotates a function inside a function.
FoundProducts: TypeAlias = tuple[Tensor, Any, Pullback]


def gramian_fn(
    losses: LossFunction,
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    scale: ScaleState | Tensor | None = None,
) -> Callable[..., tuple[Gramian, Any, Pullback]]:
    """Turn losses into a function that returns their Gramian, their values, and the pullback of weights.

    `G = J J'` and `pullback(w) = w' J`, with `J_i = d losses_i / d params`. J is not formed where inner products of its
    factors cost less.

    Args:
        losses: `losses(params, *args)`, as for `jacobian_fn`: plain, or made by `per_example` or `multitask`.
        argnums: the argument to differentiate, or several; with several, the direction is a tuple. Other than 0, the
            structure of `per_example` and `multitask` is not used.
        has_aux: whether `losses` returns `(losses, aux)`, with aux a pytree of tensors.
        scale: a `ScaleState` or tensor, `[]` or `[m]`: the backward pass runs at that scale, Gramian and pullback come
            out unscaled.

    Returns:
        `f(*args) -> (gramian, losses, pullback)`, with `has_aux` `(gramian, (losses, aux), pullback)`. Gramian float64
        `[m, m]`; losses as the function gave them. `pullback(weights [m]) -> (direction, finite)`: a pytree like params
        in their dtypes, with `scale` in at least float32; and which rows did not overflow, bool of the scale's shape,
        `[]` without one. With `multitask` losses, Gramian and weights are those of the trunk, and `direction["heads"]`
        is the gradient of the plain sum.
        A row that overflowed is a row and a column of the Gramian that are not finite. With one scale, an overflow in
        the heads' sum cannot be assigned to a row: then no row is finite.

    Raises:
        TypeError, ValueError: what `jacobian_fn` raises.

    Laws:
        The Gramian is that of `jacobian_fn`'s rows, and the pullback theirs, for every model: weights may be shared,
        transposed or used several times. Parameters that reach no known layer get ordinary rows.
        Linear in the weights. Composes with vmap, grad, jvp and compile; derivatives of the Gramian are right. Losses
        that contain `torch.autograd.grad`, and losses that a transform refuses, are evaluated again by rows, with a
        `SlowPathWarning`; buffers and random numbers are those of one evaluation.

    Source:
        Goodfellow, "Efficient per-example gradient computations" (2015); Rochette et al. (2019) for convolutions; Bu et
        al., "Differentially private optimization on large model at small cost" (2023), for the choice layer by layer.

    Differs:
        These put hooks on modules. Here a layer is recognised by the parameter that it receives.

    Example:
        >>> losses = lambda params: {"a": params.square().sum(), "b": params[0]}
        >>> gramian, values, pullback = gramian_fn(losses)(torch.tensor([1.0, 2.0]))
        >>> gramian
        tensor([[20.,  2.],
                [ 2.,  1.]], dtype=torch.float64)
        >>> pullback(torch.tensor([0.5, 1.0]))
        (tensor([2., 2.]), tensor(True))
    """
    check_losses("gramian_fn", losses, argnums, has_aux)
    return _products_fn("gramian_fn", losses, argnums, has_aux, scale, "gramian")


def squared_norms_fn(
    losses: LossFunction,
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    scale: ScaleState | Tensor | None = None,
) -> Callable[..., FoundProducts]:
    """Turn losses into a function that returns the squared norms of their gradients, their values, and the pullback of
    weights: the diagonal of `gramian_fn`, without the m^2 inner products of different rows.

    Args:
        losses: as for `gramian_fn`, as are all arguments.
        argnums: the argument to differentiate, or several.
        has_aux: whether `losses` returns `(losses, aux)`.
        scale: the loss scale.

    Returns:
        `f(*args) -> (squared_norms, losses, pullback)`, with `has_aux` `(squared_norms, (losses, aux), pullback)`.
        Squared norms float64 `[m]`, never negative; losses and pullback as for `gramian_fn`. A row that overflowed has
        a squared norm that is not finite.

    Raises:
        TypeError, ValueError: what `jacobian_fn` raises.

    Laws:
        The diagonal of `gramian_fn`'s Gramian, to rounding: where terms cancel, that of float64 in the sum of their
        absolute values. Composes with vmap, grad, jvp and compile.

    Source:
        Goodfellow, "Efficient per-example gradient computations" (2015), for one position; Li et al., "Large language
        models can be strong differentially private learners" (2022), arXiv 2110.05679, section 4 ("ghost clipping"),
        for several; Bu et al. (2023), arXiv 2210.00038, for the choice layer by layer.

    Example:
        >>> loss = lambda params, x, y: (x @ params["w"] - y).square()
        >>> params, x, y = {"w": torch.ones(2)}, torch.eye(2), torch.zeros(2)
        >>> squares, values, pullback = squared_norms_fn(per_example(loss))(params, x, y)
        >>> clipped_sum, finite = pullback(1 / squares.sqrt().clamp(min=1.0))
    """
    check_losses("squared_norms_fn", losses, argnums, has_aux)
    return _products_fn("squared_norms_fn", losses, argnums, has_aux, scale, "norms")


def _products_fn(
    where: str,
    losses: LossFunction,
    argnums: int | Sequence[int],
    has_aux: bool,
    scale: ScaleState | Tensor | None,
    needed: Literal["gramian", "norms"],
) -> Callable[..., FoundProducts]:
    """`gramian_fn` or `squared_norms_fn`, whose errors and warnings name the function that the user called."""
    factor = None if scale is None else multiplier(scale, where)

    def products_and_losses(*args: Any) -> FoundProducts:
        objectives, kind = found_kind(losses, argnums, args, where)
        differentiable = is_differentiable((args, factor))
        mode = gramian_mode()
        plan = Plan(where, has_aux, factor, differentiable, mode, products=needed, argnums=argnums)
        products, values, aux, unchecked = kind.gramian(objectives, args, plan)
        finite = finite_rows(products, 0 if factor is None else factor.ndim)

        def pullback(weights: Tensor) -> tuple[Direction, Tensor]:
            check_weights(where, weights, len(products))
            with autocast_disabled():
                return unchecked(weights), finite

        return products, (values, aux) if has_aux else values, pullback

    return products_and_losses


def gramian_engine() -> Engine:
    """Inner products of the rows, without rows where layers allow, for rules that need these or the rows' norms, and no
    more but the losses.

    Returns:
        An `Engine`, for `step` and `train_state`: see `gramian_fn`, and `squared_norms_fn` for rules that need norms.

    Raises:
        ValueError: from `step` and `train_state`, for a rule with another view.

    Laws:
        Weights and direction are those of `jacobian_engine`, up to the order of sums.
    """

    def observe(plan: Plan) -> Observation:
        plan = plan._replace(mode=gramian_mode())
        return of_products(*plan.kind.gramian(plan.losses, plan.args, plan))

    def check(plan: Plan) -> None:
        require(plan, "gramian", serves=plan.view.inner_products_suffice, rules="inner products of rows")

    return Engine(observe, check)
