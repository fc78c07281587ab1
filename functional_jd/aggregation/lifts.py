"""Lifts: rules from plain functions."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from functional_jd.aggregation.aggregate import Aggregator, no_memory
from functional_jd.aggregation.views import View, losses
from functional_jd.core.arguments import NOT_NEGATIVE, Number, check_flag, check_function, refuse
from functional_jd.core.safe import nan_unless
from functional_jd.core.types import Weights
from functional_jd.torch_compat.slow_path import refuse_export


def stateless(view: View | Callable[..., Any], weigh: Callable[[Any], Weights], *, on_host: bool = False) -> Aggregator:
    """A stateless rule: `weigh(view) -> weights`.

    Args:
        view: the input of `weigh`: `no_gradients`, `losses`, `norms`, `gramian`, `cross_gramian`, `full_jacobian`, or
            one of these that is mapped: `gramian.map(f)` gives `f(G)`, at the cost of `gramian`.
        weigh: `weigh(view) -> weights`, pure: `[m]`, or a pytree like the Jacobian for entrywise weights.
        on_host: whether `weigh` is to run on the host, as in `Aggregator`.

    Returns:
        An `Aggregator` whose state is `()`.

    Example:
        >>> def shy(temperature=1.0):
        ...     return stateless(views.gramian, lambda G: torch.softmax(-G.diagonal() / temperature, dim=0))
    """
    check_function("view", view, "Pass gramian, losses or another view, uncalled.")
    check_function("weigh", weigh, "Pass weigh(view) -> weights.")
    check_flag("on_host", on_host)
    if isinstance(weigh, View):
        refuse("weigh", "a function", weigh, f"Pass stateless({weigh.__name__}, weigh).")
    return Aggregator(view, no_memory, lambda view, _: (weigh(view), ()), on_host)


def scalarized(s: Callable[[Tensor], Tensor]) -> Aggregator:
    """A rule that minimises a differentiable scalarization of the losses.

    `weights_i = ds / dlosses_i`, so `direction = d s(losses(params)) / d params`; for `multitask` losses, that of the
    trunk.

    Args:
        s: `s(losses [m]) -> scalar`, pure and differentiable. It receives the losses in float64.

    Returns:
        A stateless rule that needs the losses only. If `s` is not differentiable, the direction may be infinite or
        NaN. If `s` returns no scalar, it raises ValueError when called.

    Example:
        >>> def worst():
        ...     return scalarized(torch.amax)
    """
    check_function("s", s, "Pass s(losses) itself.")
    return scalarized_with(s)


def scalarized_with(s: Callable[..., Tensor], *given: Callable[[Tensor], Tensor]) -> Aggregator:
    """`scalarized` of `s(losses, *numbers)`, with numbers `f(losses)` for each f, outside of the gradient."""

    def scalar(values: Tensor, *numbers: Tensor) -> Tensor:
        number = s(values, *numbers)
        if not isinstance(number, Tensor) or number.ndim:
            found = f"shape {list(number.shape)}" if isinstance(number, Tensor) else type(number).__name__
            raise ValueError(
                f"scalarized: s must return one scalar tensor, found {found}. Reduce it, for instance with .sum()."
            )
        return number

    def gradient(values: Tensor, *numbers: Tensor) -> Tensor:
        if torch.compiler.is_exporting():
            refuse_export()
        return torch.func.grad(scalar)(values, *numbers)

    return stateless(losses, lambda values: gradient(values, *(f(values) for f in given)))


def learned_with(
    where: str, s: Callable[[Tensor, Tensor], Tensor], record: Callable[[Tensor], Any], rate: Number
) -> Aggregator:
    """A rule that minimises `s(losses, v)` in both: v, from 0, takes a gradient step a call; NaN for losses below 0."""

    def update(values: Tensor, state: Any) -> tuple[Tensor, Any]:
        weights, slope = torch.func.grad(s, argnums=(0, 1))(values, state[0])
        return nan_unless(values >= 0, weights), record(state[0] - rate * slope)

    return Aggregator(losses, lambda values: record(torch.zeros_like(values)), update, takes=(where, NOT_NEGATIVE))
