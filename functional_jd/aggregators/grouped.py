"""Grouped: one rule per top-level group of parameters (partial Jacobian descent)."""

from collections.abc import Mapping, Sequence
from typing import Any

from functional_jd.aggregation import Aggregator, Tree, Weights, as_view, of_reached, of_some, view_of_groups
from functional_jd.core.arguments import check_mapping, is_size, refuse
from functional_jd.core.tree import tree_leaves


def grouped(rules: Mapping[str, Aggregator], rows: Mapping[str, Sequence[int]] | None = None) -> Aggregator:
    """Give every top-level group of parameters a rule of its own, which receives that group only.

    `direction[key] = aggregate(rules[key], jacobian[key]).direction`

    Args:
        rules: one rule for every key of params: `grouped({"backbone": upgrad(), "decoder": mean()})`. For
            a `MultitaskJacobian`, the groups are those of `shared`.
        rows: the places, rising, of the losses that reach a group: `{"decoder": [1, 2]}`. Its rule receives their rows
            alone. By default `train_state` finds them by the graph, for rules without memory by inner products, and
            warns of other rows of zeros, which stop `mgda`.

    Returns:
        A rule with the costs of its rules together: one backward pass for groups of one rule that needs no gradients,
        inner products by group, or rows, as for groups inside a group. Weights and state are dicts by groups.

    Guarantees:
        The direction of one group does not depend on the others' rows. The laws of the rules hold group by group.
        `cr_mogm(grouped(...))` averages all weights, `grouped({key: cr_mogm(...)})` those of one group.

    Source:
        The granularities of Wang et al., ICLR 2021, arXiv 2010.05874, for any rule.

    Example:
        >>> rule = grouped({"trunk": upgrad(), "head": mean()})
        >>> jacobian = {"trunk": torch.tensor([[2.0, 0.0], [-1.0, 1.0]]), "head": torch.tensor([[2.0], [-1.0]])}
        >>> aggregate(rule, jacobian).direction
        {'trunk': tensor([0.5000, 1.0000]), 'head': tensor([0.5000])}
    """
    check_mapping("rules", rules, "Pass for instance {'encoder': upgrad(), 'decoder': mean()}.")
    check_mapping("rows", {} if rows is None else rows, "Pass for instance {'decoder': [1, 2]}.")
    if not rules:
        refuse("rules", "one rule for each group of parameters", "none", "Name at least one group.", ValueError)
    if bare := [key for key, rule in rules.items() if not isinstance(rule, Aggregator)]:
        refuse(f"rules[{bare[0]!r}]", "a rule", rules[bare[0]], "Call its builder first: upgrad(), not upgrad.")
    if wrong := [key for key, own in (rows or {}).items() if key not in rules or not _are_places(own)]:
        raise ValueError(f"grouped: rows must have keys of rules, and places, found {wrong}. Pass {{'a': [1]}}.")
    chosen = {key: of_reached(rule) for key, rule in rules.items()}
    chosen |= {key: of_some(rules[key], lambda _, own=[*own]: (own, {})) for key, own in (rows or {}).items()}
    views = {key: as_view(rule.view) for key, rule in chosen.items()}
    # The first group with an equal rule; a user's rule need not be hashable.
    twins = {key: next((other for other in chosen if chosen[other] == chosen[key]), key) for key in chosen}

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
    view = view_of_groups(views, len(set(twins.values())))
    takes = next((rule.takes for rule in chosen.values() if rule.takes is not None), None)
    return Aggregator(view, init, update, on_host, sensitivity, takes)


def _are_places(own: Any) -> bool:
    are_sizes = isinstance(own, list | tuple) and all(is_size(i) and i >= 0 for i in own)
    return are_sizes and [*own] == sorted({*own}) != []
