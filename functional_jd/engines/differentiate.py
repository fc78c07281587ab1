"""Rows, their inner products and their weighted sums, as functions of losses."""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from functional_jd.core.arguments import check_flag, check_function, refuse
from functional_jd.core.tree import all_finite, any_sharded, tree_leaves
from functional_jd.core.types import Direction, LossFunction, Params
from functional_jd.engines.by_name import rows_at_once
from functional_jd.engines.evaluate import check_losses, check_weights, is_differentiable, objective_count
from functional_jd.engines.gramian.products import crossed_leaf
from functional_jd.engines.kinds import found_kind, kind_of
from functional_jd.engines.kinds.kind import finite_rows
from functional_jd.engines.plan import Plan
from functional_jd.precision.autocast import autocast_disabled
from functional_jd.precision.loss_scale import multiplier, unscale, zeros_unless
from functional_jd.precision.scale_state import ScaleState

# A name, since torch.compile evaluates what annotates a function inside a function.
FoundProducts: TypeAlias = tuple[Tensor, Any, Callable[[Tensor], tuple[Direction, Tensor]]]
"""Products, losses, and `pullback(weights) -> (direction, finite)`."""


def jacobian_fn(
    losses: LossFunction,
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    scale: ScaleState | Tensor | None = None,
    mode: str = "auto",
    chunk_size: int | None = None,
) -> Callable[..., Any]:
    """Turn losses into a function that returns their Jacobian and their values.

    `J_i = scale_i * d losses_i / d params`

    Args:
        losses: `losses(params, *args)`: a tensor, or a pytree of tensors, with m elements in leaf order; plain, or made
            by `per_example` or `multitask`.
        argnums: the argument to differentiate, or several; with several, the Jacobian is a tuple. Other than 0, the
            structure of `per_example` and `multitask` is not used.
        has_aux: whether `losses` returns `(losses, aux)`, with aux a pytree of tensors.
        scale: a `ScaleState` or tensor, `[]` or `[m]`: the backward pass of row i runs at that scale, the rows come out
            unscaled, with flags of those that did not overflow.
        mode: `"vmap"` differentiates rows together; `"loop"` one after the other, without vmap; `"auto"` chooses by
            shapes. If m is far above the number of parameters, take `torch.func.jacfwd`.
        chunk_size: rows differentiated at once; 1 is the loop.

    Returns:
        `f(*args) -> (jacobian, losses)`, with `has_aux` `(jacobian, (losses, aux))`. With `scale`, a third value
        `finite`, bool of the scale's shape: rows that overflowed are zeros, all of them if one scale serves all.
        Jacobian: pytree like params with leaves `[m, *p]` in the parameters' dtypes, with `scale` in at least float32;
        for `multitask` losses `MultitaskJacobian(shared, heads)`. With one scale per objective, a row that overflowed
        in the heads is left out of the sum `heads`. If rows are differentiated together, an infinite derivative of one
        objective can make other rows NaN, as 0 x inf. Examples stay apart, and in the loop separate tensors.

    Raises:
        TypeError: losses or parameters that are not floating-point tensors, `losses` not callable.
        ValueError: no objectives, an unknown mode, a chunk size below 1, a scale that does not fit m; a module's own
            parameters that run again in the backward pass.

    Guarantees:
        Equal to a loop of plain autograd in every mode. Composes with vmap, grad, jvp and compile; a derivative of the
        Jacobian is right. Without a transform and without an input that requires grad, the result is detached.
        If vmap raises for rows of `"auto"`, the loop serves, with a `SlowPathWarning`.

    Differences:
        From `torch.func.jacrev`: native autocast works with every layer, and the backward pass is never autocast;
        custom functions without a vmap rule, buffers changed in place and checkpoints (`use_reentrant=False`) work.

    Example:
        >>> losses = lambda params: {"a": params.square().sum(), "b": params[0]}
        >>> jacobian, values = jacobian_fn(losses)(torch.tensor([1.0, 2.0]))
        >>> jacobian
        tensor([[2., 4.],
                [1., 0.]])
    """
    check_losses(losses, argnums, has_aux)
    how = rows_at_once(mode, chunk_size)
    factor = None if scale is None else multiplier(scale)

    def jacobian_and_losses(*args: Any) -> Any:
        objectives, kind = found_kind(losses, argnums, args)
        plan = Plan(has_aux, factor, is_differentiable((args, factor)), *how, argnums=argnums)
        jacobian, values, aux = kind.jacobian(objectives, args, plan)
        found = (values, aux) if has_aux else values
        if factor is None:
            return jacobian, found
        jacobian, finite = unscale(torch.ones_like(factor), jacobian)
        return jacobian, found, finite

    return jacobian_and_losses


def gramian_fn(
    losses: LossFunction,
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    scale: ScaleState | Tensor | None = None,
) -> Callable[..., FoundProducts]:
    """Turn losses into a function that returns their Gramian, their values, and the pullback of weights.

    `G = J J'` and `pullback(w) = w' J`, with `J_i = d losses_i / d params`. J is not formed where inner products of its
    factors cost less.

    Args:
        losses, argnums, has_aux: as for `jacobian_fn`.
        scale: a `ScaleState` or tensor, `[]` or `[m]`: the backward pass runs at that scale, Gramian and pullback come
            out unscaled.

    Returns:
        `f(*args) -> (gramian, losses, pullback)`, with `has_aux` `(gramian, (losses, aux), pullback)`. Gramian float64
        `[m, m]`. `pullback(weights [m]) -> (direction, finite)`: a pytree like params, in at least float32; and which
        rows did not overflow, bool of the scale's shape, `[]` without one. With `multitask` losses, Gramian and weights
        are those of the trunk, and `direction["heads"]` is the gradient of the plain sum.
        A row that overflowed is a row and a column of the Gramian that are not finite. With one scale, an overflow in
        the heads' sum cannot be assigned to a row: then no row is finite.

    Raises:
        TypeError, ValueError: what `jacobian_fn` raises.

    Guarantees:
        The Gramian and the pullback are those of `jacobian_fn`'s rows, for every model: weights may be shared,
        transposed or used several times. Linear in the weights. Composes with vmap, grad, jvp and compile; derivatives
        of the Gramian are right. Losses that contain `torch.autograd.grad` or that vmap cannot take are evaluated again
        by rows, with a `SlowPathWarning`; buffers and random numbers are those of one evaluation.

    Source:
        Goodfellow, "Efficient per-example gradient computations" (2015); Rochette et al. (2019) for convolutions; Bu et
        al. (2023), arXiv 2210.00038, for the choice layer by layer.

    Example:
        >>> losses = lambda params: {"a": params.square().sum(), "b": params[0]}
        >>> gramian, values, pullback = gramian_fn(losses)(torch.tensor([1.0, 2.0]))
        >>> gramian
        tensor([[20.,  2.],
                [ 2.,  1.]], dtype=torch.float64)
        >>> pullback(torch.tensor([0.5, 1.0]))
        (tensor([2., 2.]), tensor(True))
    """
    return _products_fn("gramian", losses, argnums, has_aux, scale, lambda f: lambda *args: f(*args))


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
        losses, argnums, has_aux, scale: as for `gramian_fn`.

    Returns:
        `f(*args) -> (squared_norms, losses, pullback)`, with `has_aux` `(squared_norms, (losses, aux), pullback)`.
        Squared norms float64 `[m]`, not finite for a row that overflowed; losses and pullback as for `gramian_fn`.

    Raises:
        TypeError, ValueError: what `jacobian_fn` raises.

    Guarantees:
        The diagonal of `gramian_fn`'s Gramian, to rounding: where terms cancel, that of float64 in the sum of their
        absolute values. Composes with vmap, grad, jvp and compile.

    Source:
        As for `gramian_fn`; Li et al., "Large language models can be strong differentially private learners" (2022),
        arXiv 2110.05679, section 4 ("ghost clipping"), for several positions.

    Example:
        >>> loss = lambda params, x, y: (x @ params["w"] - y).square()
        >>> params, x, y = {"w": torch.ones(2)}, torch.eye(2), torch.zeros(2)
        >>> squares, values, pullback = squared_norms_fn(per_example(loss))(params, x, y)
        >>> clipped_sum, finite = pullback(1 / squares.sqrt().clamp(min=1.0))
    """
    return _products_fn("norms", losses, argnums, has_aux, scale, lambda f: lambda *args: f(*args))


def _products_fn(
    needed: Literal["gramian", "norms"],
    losses: LossFunction,
    argnums: int | Sequence[int],
    has_aux: bool,
    scale: ScaleState | Tensor | None,
    named: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> Callable[..., FoundProducts]:
    """A function that returns inner products, losses, and the pullback, both `named` as the public function."""
    check_losses(losses, argnums, has_aux)
    factor = None if scale is None else multiplier(scale)

    def products_and_losses(*args: Any) -> FoundProducts:
        objectives, kind = found_kind(losses, argnums, args)
        plan = Plan(has_aux, factor, is_differentiable((args, factor)), products=needed, argnums=argnums)
        products, values, aux, pull = kind.gramian(objectives, args, plan)
        finite = finite_rows(products, 0 if factor is None else factor.ndim)

        def pulled(weights: Tensor) -> tuple[Direction, Tensor]:
            check_weights(weights, len(products))
            with autocast_disabled():
                return pull(weights), finite

        return products, (values, aux) if has_aux else values, named(pulled)

    return named(products_and_losses)


def weighted_fn(
    losses: LossFunction, *, has_aux: bool = False, scale: ScaleState | Tensor | None = None
) -> Callable[..., tuple[Any, Callable[..., tuple[Direction, Tensor]]]]:
    """Turn losses into a function that returns their values, and the pullback of weights.

    `direction = sum_i weights_i d losses_i / d params`, in one backward pass, whatever m.

    Args:
        losses, has_aux: as for `jacobian_fn`.
        scale: a `ScaleState` or tensor, `[]` or `[m]`: the backward pass runs at that scale, the direction comes out
            unscaled. With `[m]` it is the largest power of two S with `|weights_i| S <= scale_i` for all i.

    Returns:
        `f(*args) -> (losses, pullback)`, with `has_aux` `((losses, aux), pullback)`.
        `pullback(weights, *, last=False) -> (direction, finite)`: weights `[m]`; direction a pytree like params, at
        least float32, with a scale zeros where it is not finite; finite bool of the scale's shape. One backward pass
        cannot assign an overflow to an objective: all m flags are equal, except that `multitask` losses take their own
        scales, and have their own flags, as far as the features. `last=True` frees the graph.
        For `multitask` losses the trunk gets the weighted direction, and the heads the gradient of the plain sum.

    Raises:
        TypeError, ValueError: what `jacobian_fn` raises; weights that are not `[m]`.
        RuntimeError: from the pullback, if losses of examples draw random numbers and vmap cannot take their backward
            pass: the direction would be that of other losses.

    Guarantees:
        Equal to `combine(unscale(jacobian), weights)` to rounding, where every row is finite; linear in the weights.
        Composes with vmap, grad, jvp and compile; the result is detached unless an input or the weights require grad.
        Weights that are not finite are not `finite`. Weight 0 does not hide a row that overflows.
        A weight is rounded to the dtype of its loss, at least float32.

    Example:
        >>> losses = lambda params: {"a": params.square().sum(), "b": params[0]}
        >>> values, pullback = weighted_fn(losses)(torch.tensor([1.0, 2.0]))
        >>> pullback(torch.tensor([0.5, 1.0]))
        (tensor([2., 2.]), tensor(True))
    """
    check_losses(losses, 0, has_aux)
    factor = None if scale is None else multiplier(scale)

    def losses_and_pullback(*args: Any) -> tuple[Any, Any]:
        objectives, kind = found_kind(losses, 0, args)
        plan = Plan(has_aux, factor, is_differentiable((args, factor)))
        values, aux, unchecked = kind.weighted(objectives, args, plan)

        def pullback(weights: Tensor, *, last: bool = False) -> tuple[Direction, Tensor]:
            check_flag("last", last)
            direction, finite = unchecked(weights, last=last)
            if finite is None:
                return direction, all_finite((direction, weights))
            return zeros_unless(finite, direction), finite

        return (values, aux) if has_aux else values, pullback

    return losses_and_pullback


def cross_gramian_fn(losses: LossFunction, *, scale: ScaleState | Tensor | None = None) -> Callable[..., Tensor]:
    """Turn losses into a function that returns the inner products of their gradients on two batches.

    `C_ij = <d losses_i(a) / d params, d losses_j(b) / d params>`: how far a small step against the gradient of example
    i lowers the loss of example j. Rows are not formed where inner products of their factors cost less.

    Args:
        losses: as for `gramian_fn`, mostly made by `per_example`.
        scale: a `ScaleState` or tensor, `[]`: the backward passes run at that scale, the products come out unscaled.

    Returns:
        `f(params, batch_a, batch_b) -> C`, float64 `[m_a, m_b]`. Each batch is the tuple of arguments after the
        parameters. For `multitask` losses the rows are those of the trunk.

    Raises:
        TypeError: a batch that is not a tuple; what `gramian_fn` raises.
        ValueError: a scale that is not `[]`; what `gramian_fn` raises.

    Guarantees:
        The upper right block of the Gramian on both batches together. A row that overflowed is a row or column that is
        not finite. Composes with vmap, grad, jvp and compile. For large data sets call it block by block.

    Source:
        Pruthi, Liu, Sundararajan & Kale, Estimating training data influence by tracing gradient descent, NeurIPS 2020,
        arXiv 2002.08484: TracIn is the sum over checkpoints, times their learning rates.

    Example:
        >>> losses = per_example(lambda params, x, y: (x @ params["w"] - y).square())
        >>> train, test = (torch.eye(3), torch.ones(3)), (torch.ones(2, 3), torch.zeros(2))
        >>> influence = cross_gramian_fn(losses)({"w": torch.zeros(3)}, train, test)  # [3, 2]
    """
    check_function("losses", losses, "Pass losses(params, ...).")
    factor = None if scale is None else multiplier(scale)
    if factor is not None and factor.ndim:
        refuse("scale", "of shape []", factor, "Pass one for both batches.", ValueError)

    def crossed_rows(params: Params, batch_a: tuple[Any, ...], batch_b: tuple[Any, ...]) -> Tensor:
        plan = Plan(False, factor, is_differentiable((params, batch_a, batch_b, factor)), products="factors")
        (first, m), (second, k) = (_parts_of(losses, params, batch, plan) for batch in (batch_a, batch_b))
        leaves = tree_leaves(kind_of(losses).row_params(losses, params))
        with autocast_disabled():
            pairs = zip(first, second, leaves, strict=True)
            return reduce(torch.add, [crossed_leaf(a, b, leaf, m, k) for a, b, leaf in pairs])

    return crossed_rows


def _parts_of(losses: LossFunction, params: Params, batch: tuple[Any, ...], plan: Plan) -> tuple[list[Any], int]:
    """The parts of the rows on a batch, and the number of rows."""
    if not isinstance(batch, tuple):  # pyright: ignore[reportUnnecessaryIsInstance]
        refuse("each batch", "a tuple of the arguments after the parameters", batch, "Write (x,) for a single tensor.")
    if any_sharded(tree_leaves(params)):
        raise ValueError("cross_gramian_fn: expected no sharded parameters. Use jacobian_fn and cross_gramian.")
    parts, values, *_ = kind_of(losses).gramian(losses, (params, *batch), plan)
    return parts, objective_count(values)
