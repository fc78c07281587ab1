"""Grouped: one rule per top-level group of parameters (partial Jacobian descent)."""

from collections.abc import Mapping
from typing import Any

from functional_jd.aggregation.aggregate import Aggregator
from functional_jd.aggregation.groups import view_of_groups
from functional_jd.aggregation.views import as_view
from functional_jd.core.arguments import check_mapping
from functional_jd.core.tree import tree_leaves
from functional_jd.core.types import Tree, Weights


def grouped(rules: Mapping[str, Aggregator]) -> Aggregator:
    """Give every top-level group of parameters a rule of its own, which receives that group only.

    `direction[key] = aggregate(rules[key], jacobian[key]).direction`

    Args:
        rules: one rule for every key of params: `grouped({"backbone": upgrad(), "decoder": mean()})`. Of a
            `MultitaskJacobian`, the groups are those of `shared`.

    Returns:
        A rule that receives, for every group, what the group's rule does, and costs what these cost together: one
        backward pass for groups whose rules need no gradients and are one rule, inner products by group, or rows, which
        groups inside a group have always. Its
        weights are a dict of the groups' weights, `[m]` or entrywise. Its state is the dict of the groups' states.

    Raises:
        TypeError: a value of `rules` is not an `Aggregator`; when called, params that are not a dict.
        ValueError: no rules; when called, a group without a rule or a rule without a group.

    Laws:
        The direction of one group does not depend on the others' rows. With one group it is the group's rule. The laws
        of the rules (non-conflicting, scale-equivariant) hold group by group. `cr_mogm(grouped(...))` averages all
        weights, `grouped({key: cr_mogm(...)})` those of one group.

    Source:
        The granularities of Wang et al., Gradient vaccine, ICLR 2021 (encoder and decoder, layers, matrices), for any
        rule.

    Example:
        >>> rule = grouped({"trunk": upgrad(), "head": mean()})
        >>> jacobian = {"trunk": torch.tensor([[2.0, 0.0], [-1.0, 1.0]]), "head": torch.tensor([[2.0], [-1.0]])}
        >>> aggregate(rule, jacobian).direction
        {'trunk': tensor([0.5000, 1.0000]), 'head': tensor([0.5000])}
    """
    check_mapping("grouped", "rules", rules, "Pass for instance {'encoder': upgrad(), 'decoder': mean()}.")
    if not rules:
        raise ValueError("grouped: expected one rule per group of parameters, found none. Name at least one group.")
    for key, rule in rules.items():
        if not isinstance(rule, Aggregator):
            raise TypeError(
                f"grouped: expected a rule for group {key!r}, found {type(rule).__name__}. "
                "Call its builder first: upgrad(), not upgrad."
            )
    chosen = dict(rules)
    views = {key: as_view(rule.view) for key, rule in chosen.items()}
    # The first group with an equal rule; a user's rule need not be hashable.
    twins = {key: next(other for other in chosen if chosen[other] == rule) for key, rule in chosen.items()}

    def init(received: dict[str, Any]) -> dict[str, Tree]:
        return {key: rule.init(received[key]) for key, rule in chosen.items()}

    def update(received: dict[str, Any], state: dict[str, Tree]) -> tuple[dict[str, Weights], dict[str, Tree]]:
        weights: dict[str, Weights] = {}
        states: dict[str, Tree] = {}
        for key, rule in chosen.items():
            twin = twins[key]
            if twin != key and views[key].products == "none" and not tree_leaves(state[key]):
                # The same tensor, and not only an equal one, tells the engine that one backward pass serves both.
                weights[key], states[key] = weights[twin], ()
            else:
                weights[key], states[key] = rule.update(received[key], state[key])
        return weights, states

    # Rows stay where they are.
    on_host = any(rule.on_host for rule in chosen.values()) and all(view.products != "rows" for view in views.values())
    bounds = [rule.sensitivity for rule in chosen.values()]
    squares = [bound**2 for bound in bounds if bound is not None]
    sensitivity = sum(squares) ** 0.5 if len(squares) == len(bounds) else None
    return Aggregator(view_of_groups(views, passes=len(set(twins.values()))), init, update, on_host, sensitivity)
