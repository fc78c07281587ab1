"""A rule every few steps: a pair of rules with one state. The second repeats the weights of the first."""

from typing import Any, NamedTuple

from torch import Tensor

from functional_jd.aggregation.aggregate import Aggregator, CannotStartError, check_rule, row_weights
from functional_jd.aggregation.views import no_gradients
from functional_jd.core.arguments import refuse
from functional_jd.core.types import Tree, Weights


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
        gradients, has the weights of the last call of `fresh`, and returns the state unchanged: a step with it costs
        one weighted backward pass. Start with `fresh`: before its first call, `repeated` has the weights of the batch
        that the state was started with.

    Raises:
        TypeError, ValueError: `rule` is not a rule with weights `[m]`; `repeated` without a state of `fresh`.

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
    raise CannotStartError(
        "held: the second rule of the pair repeats the weights of the first, and cannot start. Give the first one to "
        "train_state, or to aggregate without a state."
    )


def _repeat(view: Tensor, state: HeldState) -> tuple[Weights, HeldState]:
    if not isinstance(state, HeldState) or state.weights.shape != view.shape:  # pyright: ignore[reportUnnecessaryIsInstance]
        cure = "Start it again with train_state and the first rule."
        found: Any = getattr(state, "weights", state)
        refuse("state", f"one of the first rule of the pair, with {len(view)} weights", found, cure, ValueError)
    return state.weights, state
