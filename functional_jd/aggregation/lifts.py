"""Lifts: rules from plain functions."""

from collections.abc import Callable

import torch
from torch import Tensor

from functional_jd.aggregation.aggregate import Aggregator
from functional_jd.aggregation.views import View, losses
from functional_jd.core.types import (
    Weights,
)


def stateless(view: Callable[..., View], weigh: Callable[[View], Weights]) -> Aggregator:
    """A rule that remembers nothing: `weigh(view) -> weights`.

    Args:
        view: what it looks at: `no_gradients`, `losses`, `gramian`, `cross_gramian` or `full_jacobian`.
        weigh: `weigh(view) -> weights`, pure: `[m]`, or a pytree like the Jacobian to count entry by entry.

    Returns:
        An `Aggregator` whose state is `()`.

    Example:
        >>> def shy(temperature=1.0):
        ...     return stateless(gramian, lambda G: torch.softmax(-G.diagonal() / temperature, dim=0))
    """
    return Aggregator(view, lambda _: (), lambda seen, state: (weigh(seen), state))


def scalarized(s: Callable[[Tensor], Tensor]) -> Aggregator:
    """The rule that descends one number made of the losses: any differentiable scalarization.

    `weights_i = ds / dlosses_i`, so `direction = d s(losses(params)) / d params`

    Args:
        s: `s(losses [m]) -> scalar`, pure and differentiable. It sees the losses in float64.

    Returns:
        A rule that looks at the losses and remembers nothing.

    Raises:
        TypeError: `s` is not callable.
        ValueError: when called, `s` gives no scalar.

    Laws:
        The direction is the gradient of `s` after the losses; for `multitask` losses on the trunk. Where `s` is not
        differentiable or not defined, so is the direction: infinite or NaN, never an exception.

    Example:
        >>> def worst():
        ...     return scalarized(torch.amax)
    """
    if not callable(s):
        raise TypeError(f"scalarized: s must be a function, found {type(s).__name__}. Pass s(losses) itself.")

    def scalar(values: Tensor) -> Tensor:
        number = s(values)
        if not isinstance(number, Tensor) or number.ndim:
            found = f"shape {list(number.shape)}" if isinstance(number, Tensor) else type(number).__name__
            raise ValueError(
                f"scalarized: s must give one scalar tensor, found {found}. Reduce it, for instance with .sum()."
            )
        return number

    return stateless(losses, torch.func.grad(scalar))
