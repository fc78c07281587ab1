"""Lifts: rules from plain functions, and two from one: the second repeats the weights of the first."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_jd.aggregation.aggregate import Aggregator, check_rule, no_memory, row_weights
from functional_jd.aggregation.views import View, losses, no_gradients
from functional_jd.core.arguments import NOT_NEGATIVE, Number, check_flag, check_function, described, refuse
from functional_jd.core.safe import nan_unless
from functional_jd.core.types import Tree, Weights
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
            raise ValueError(f"scalarized: s must return one scalar, found {described(number)}. Take its .sum().")
        return number

    def gradient(values: Tensor) -> Tensor:
        if torch.compiler.is_exporting():
            refuse_export()
        return torch.func.grad(scalar)(values, *(f(values) for f in given))

    return stateless(losses, gradient)


def learned_with(where: str, name: str, s: Callable[[Tensor, Tensor], Tensor], rate: Number) -> Aggregator:
    """A rule that minimises `s(losses, v)` in both: v, from 0, takes a gradient step a call; NaN for losses below 0."""

    def update(values: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        weights, slope = torch.func.grad(s, argnums=(0, 1))(values, v)
        return nan_unless(values >= 0, weights), v - rate * slope

    return remembering(name, losses, torch.zeros_like, update)._replace(takes=(where, NOT_NEGATIVE))


def remembering(name: str, view: View, init: Callable[..., Tensor], update: Any, *more: Any) -> Aggregator:
    """A rule whose memory is a tensor, `{name: tensor}`, so that no other rule takes it for its own."""

    def named(received: Any, memory: dict[str, Tensor]) -> tuple[Weights, Tree]:
        weights, new = update(received, memory[name])
        return weights, {name: new}

    return Aggregator(view, lambda received: {name: init(received)}, named, *more)


class HeldState(NamedTuple):
    """The state of both rules of `held`."""

    weights: Tensor  # float64 `[m]`: the last weights of the rule
    inner: Tree  # the rule's state


def held(rule: Aggregator) -> tuple[Aggregator, Aggregator]:
    """A rule, and a rule that repeats its last weights: every k-th step with the rule costs a k-th of it.

    Args:
        rule: any rule with weights `[m]`.

    Returns:
        `(fresh, repeated)`, two rules with one state `HeldState`. `fresh` is `rule`, bit for bit. `repeated` needs no
        gradients, has the weights of the last call of `fresh` (of an absent objective, of the last call with it), and
        returns the state unchanged: a step with it costs one weighted backward pass. Start with `fresh`: before its
        first call, `repeated` has the weights of the batch that the state was started with.

    Source:
        Navon et al., ICML 2022, arXiv 2202.01017, where the weights are updated every few steps.
    """
    check_rule(rule)

    def weigh(view: Any, inner: Tree) -> tuple[Tensor, Tree]:
        weights, inner = rule.update(view, inner)
        return row_weights(weights), inner

    def init(view: Any) -> HeldState:
        inner = rule.init(view)
        return HeldState(weigh(view, inner)[0], inner)

    def update(view: Any, state: HeldState) -> tuple[Weights, HeldState]:
        weights, inner = weigh(view, state.inner)
        return weights, HeldState(weights, inner)

    fresh = Aggregator(rule.view, init, update, rule.on_host, takes=rule.takes)
    return fresh, Aggregator(no_gradients, _cannot_start, _repeat)


def _cannot_start(view: Any) -> Tree:  # noqa: ARG001
    raise ValueError("held: the second rule of a pair cannot start. Give the first one to train_state or aggregate.")


def _repeat(view: Tensor, state: HeldState) -> tuple[Weights, HeldState]:
    if not isinstance(state, HeldState) or state.weights.shape != view.shape:  # pyright: ignore[reportUnnecessaryIsInstance]
        cure = "Start it again with train_state and the first rule."
        found: Any = getattr(state, "weights", state)
        refuse("state", f"one of the first rule of the pair, with {len(view)} weights", found, cure, ValueError)
    return state.weights, state
