"""CR-MOGM: a moving average of another rule's weights."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_jd.aggregation import Aggregator, Tree, Weights, check_rule
from functional_jd.core.arguments import BELOW_1, Number, number
from functional_jd.core.tree import tree_leaves, tree_map


class CrMogmState(NamedTuple):
    """The state of CR-MOGM."""

    weights: Weights  # like the inner rule's: float64 `[m]`, or a pytree like the Jacobian
    inner: Tree  # the inner rule's state
    started: Tensor  # bool `[]`: whether `weights` holds those of an earlier call


def cr_mogm(rule: Aggregator, momentum: Number = 0.9) -> Aggregator:
    """Average a rule's weights over the steps, to reduce the noise of single batches.

    `w <- momentum w + (1 - momentum) v`, with v the weights of the rule; in the first call `w = v`.

    Args:
        rule: any rule, `grouped(...)` and stateful ones included.
        momentum: weight of the previous average, in [0, 1).

    Returns:
        A rule with the view and the cost of `rule`, and weights in their shape and dtype.

    Guarantees:
        With momentum 0, with constant weights, and in the first call, equal to the rule, bit for bit. The weights lie
        in every convex set that the rule's lie in. They may conflict with the new rows, also if the rule never does.

    Source:
        Zhou et al., NeurIPS 2022: the composite weights of CR-MOGM, whose momentum grows towards 1.
    """
    check_rule(rule)
    keep = number("momentum", momentum, BELOW_1, "The default is 0.9.")

    def init(view: Any) -> CrMogmState:
        inner = rule.init(view)
        weights, _ = rule.update(view, inner)  # only the rule knows the shape of its weights
        started = torch.zeros((), dtype=torch.bool, device=tree_leaves(weights)[0].device)
        return CrMogmState(tree_map(torch.zeros_like, weights), inner, started)

    def update(view: Any, state: CrMogmState) -> tuple[Weights, CrMogmState]:
        new, inner = rule.update(view, state.inner)

        # Exact where old and new agree, which momentum * old + (1 - momentum) * new is not.
        def average(old: Tensor, new: Tensor) -> Tensor:
            weight = keep.to(new) if isinstance(keep, Tensor) else keep
            return torch.where(state.started, torch.lerp(new, old, weight), new)

        weights = tree_map(average, state.weights, new)
        return weights, CrMogmState(weights, inner, torch.ones_like(state.started))

    on_host = (not isinstance(keep, Tensor) or keep.is_cpu) and rule.on_host
    return Aggregator(rule.view, init, update, on_host, takes=rule.takes)
