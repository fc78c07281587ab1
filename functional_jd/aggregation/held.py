"""A rule every few steps: a pair of rules with one state, of which the second repeats the weights of the first."""

from typing import Any, NamedTuple

from torch import Tensor

from functional_jd.aggregation.aggregate import Aggregator, CannotStartError, check_rule
from functional_jd.aggregation.views import no_gradients
from functional_jd.core.types import Tree, Weights


class HeldState(NamedTuple):
    """The state of both rules of `held`.

    Attributes:
        weights: float64 `[m]`: the last weights of the rule.
        inner: the rule's state.
    """

    weights: Tensor
    inner: Tree


def held(rule: Aggregator) -> tuple[Aggregator, Aggregator]:
    """A rule, and a rule that repeats its last weights.

    The second needs no gradients: a step with it costs one weighted backward pass, whatever m. A rule that is taken
    every k steps so costs a k-th of itself.

    Args:
        rule: any rule with weights `[m]`.

    Returns:
        `(fresh, repeated)`, two rules with one state `HeldState`: `fresh` has the view and the weights of `rule`,
        `repeated` the view `no_gradients` and the weights of the last call of `fresh`. Start with `fresh`: before its
        first call, `repeated` has the weights of the batch that the state was started with.

    Raises:
        TypeError, ValueError: `rule` is no rule with weights `[m]`; `repeated` without a state of `fresh`.

    Guarantees:
        `fresh` is `rule`, bit for bit. `repeated` returns the state unchanged. Derivatives of the weights pass through
        the state.

    Source:
        Navon et al., ICML 2022, arXiv 2202.01017, where the weights are updated every few steps.

    Example:
        >>> params, x = {"w": torch.ones(3)}, torch.tensor([[1.0, 2.0, 0.0], [-1.0, 1.0, 1.0]])
        >>> losses = lambda params, x: (x @ params["w"] - 1).square()
        >>> fresh, repeated = held(upgrad())
        >>> method = {"losses": losses, "optimizer": sgd(0.1)}
        >>> state = train_state(params, x, aggregator=fresh, **method)
        >>> for i in range(16):
        ...     state, info = step(state, x, aggregator=repeated if i % 8 else fresh, **method)
    """
    check_rule(rule)

    def weigh(view: Any, inner: Tree) -> tuple[Tensor, Tree]:
        weights, inner = rule.update(view, inner)
        if not (isinstance(weights, Tensor) and weights.ndim == 1):
            raise ValueError(
                "held: expected a rule with one weight per row, found one that weighs entry by entry, or by group. The "
                "weights of single entries are as large as the rows; of groups, hold the rule of each: "
                "grouped({name: held(rule)[0], ...}), then grouped({name: held(rule)[1], ...})."
            )
        return weights, inner

    def init(view: Any) -> HeldState:
        inner = rule.init(view)
        return HeldState(weigh(view, inner)[0], inner)

    def update(view: Any, state: HeldState) -> tuple[Weights, HeldState]:
        weights, inner = weigh(view, state.inner)
        return weights, HeldState(weights, inner)

    fresh = Aggregator(rule.view, init, update, rule.on_host, takes=rule.takes)
    return fresh, Aggregator(no_gradients, _cannot_start, _repeat)


def _cannot_start(view: Any) -> Tree:  # noqa: ARG001
    raise CannotStartError(
        "held: the second rule of the pair repeats the weights of the first, and cannot start. Give the first one to "
        "train_state, or to aggregate without a state."
    )


def _repeat(view: Tensor, state: HeldState) -> tuple[Weights, HeldState]:
    if not isinstance(state, HeldState) or state.weights.shape != view.shape:  # pyright: ignore[reportUnnecessaryIsInstance]
        found = f"weights {list(state.weights.shape)}" if isinstance(state, HeldState) else type(state).__name__
        raise ValueError(
            f"held: the state must be one of the first rule of the pair, with {len(view)} weights, found {found}. "
            "Start it anew with train_state and the first rule."
        )
    return state.weights, state
