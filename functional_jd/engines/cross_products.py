"""Inner products of the rows of two batches, such as the influence of training examples on test examples."""

from collections.abc import Callable
from functools import reduce
from typing import Any, cast

import torch
from torch import Tensor

from functional_jd.core.arguments import check_function
from functional_jd.core.tree import any_sharded, tree_leaves
from functional_jd.core.types import LossFunction, Params
from functional_jd.engines.choose import gramian_mode
from functional_jd.engines.evaluate import is_differentiable, objective_count
from functional_jd.engines.gramian.crossed_leaves import crossed_leaf
from functional_jd.engines.gramian.factors import Factors
from functional_jd.engines.kinds import kind_of
from functional_jd.engines.plan import Plan
from functional_jd.precision.autocast import autocast_disabled
from functional_jd.precision.loss_scale import multiplier
from functional_jd.precision.scale_state import ScaleState

_WHERE = "cross_gramian_fn"

Parts = list[list[Factors | Tensor]]
"""For each leaf, factors and rows that add up to its rows."""


def cross_gramian_fn(losses: LossFunction, *, scale: ScaleState | Tensor | None = None) -> Callable[..., Tensor]:
    """Turn losses into a function that returns the inner products of their gradients on two batches.

    `C_ij = <d losses_i(a) / d params, d losses_j(b) / d params>`: how far a small step against the gradient of example
    i lowers the loss of example j. Rows are not formed where inner products of their factors cost less.

    Args:
        losses: `losses(params, *args)`, as for `gramian_fn`: mostly made by `per_example`.
        scale: a `ScaleState` or tensor, `[]`: the backward passes run at that scale, the products come out unscaled.

    Returns:
        `f(params, batch_a, batch_b) -> C`, float64 `[m_a, m_b]`. Each batch is the tuple of what the losses take after
        the parameters. For `multitask` losses the rows are those of the trunk.

    Raises:
        TypeError: a batch that is not a tuple; what `gramian_fn` raises.
        ValueError: a scale that is not `[]`; what `gramian_fn` raises.

    Laws:
        The upper right block of the Gramian on both batches together, and with the batches exchanged the transpose. A
        row that overflowed is a row or column that is not finite. Composes with vmap, grad, jvp and compile. Memory
        grows with both batches: for large data sets call it block by block.

    Source:
        Pruthi, Liu, Sundararajan & Kale, Estimating training data influence by tracing gradient descent, NeurIPS 2020,
        arXiv 2002.08484: TracIn is the sum over checkpoints, times their learning rates.

    Example:
        >>> losses = per_example(lambda params, x, y: (x @ params["w"] - y).square())
        >>> train, test = (torch.eye(3), torch.ones(3)), (torch.ones(2, 3), torch.zeros(2))
        >>> influence = cross_gramian_fn(losses)({"w": torch.zeros(3)}, train, test)  # [3, 2]
    """
    check_function(_WHERE, "losses", losses, "Pass losses(params, ...).")
    factor = None if scale is None else multiplier(scale, _WHERE)
    if factor is not None and factor.ndim:
        raise ValueError(
            f"{_WHERE}: the scale must be of shape [], found {list(factor.shape)}. Pass one number for both batches."
        )

    def crossed_rows(params: Params, batch_a: tuple[Any, ...], batch_b: tuple[Any, ...]) -> Tensor:
        differentiable = is_differentiable((params, batch_a, batch_b, factor))
        plan = Plan(_WHERE, False, factor, differentiable, gramian_mode(), products="factors")
        (first, m), (second, k) = (_parts_of(losses, params, batch, plan) for batch in (batch_a, batch_b))
        leaves = tree_leaves(kind_of(losses).row_params(losses, params))
        with autocast_disabled():
            pairs = zip(first, second, leaves, strict=True)
            return reduce(torch.add, [crossed_leaf(a, b, leaf, m, k) for a, b, leaf in pairs])

    return crossed_rows


def _parts_of(losses: LossFunction, params: Params, batch: tuple[Any, ...], plan: Plan) -> tuple[Parts, int]:
    """What the rows on a batch are made of, and their number."""
    if not isinstance(batch, tuple):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"{_WHERE}: each batch must be a tuple of what the losses take after the parameters, found "
            f"{type(batch).__name__}. Write (x,) for a single tensor."
        )
    if any_sharded(tree_leaves(params)):
        raise ValueError(f"{_WHERE}: expected no sharded parameters. Use jacobian_fn and cross_gramian.")
    parts, values, *_ = kind_of(losses).gramian(losses, (params, *batch), plan)
    return cast(Parts, parts), objective_count(values)
