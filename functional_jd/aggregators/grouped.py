"""Grouped: one rule per top-level group of parameters (partial Jacobian descent)."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from functional_jd.aggregation import Aggregator, Tree, View, Weights, as_view, view_of_groups
from functional_jd.core.arguments import check_mapping, is_size
from functional_jd.core.tree import tree_leaves, tree_map


def grouped(rules: Mapping[str, Aggregator], rows: Mapping[str, Sequence[int]] | None = None) -> Aggregator:
    """Give every top-level group of parameters a rule of its own, which receives that group only.

    `direction[key] = aggregate(rules[key], jacobian[key]).direction`

    Args:
        rules: one rule for every key of params: `grouped({"backbone": upgrad(), "decoder": mean()})`. Of a
            `MultitaskJacobian`, the groups are those of `shared`.
        rows: for groups that only some losses reach, the places of these, in leaf order: `{"decoder": [1, 2]}`. The
            group's rule receives their rows alone; the others have weight 0. Else a loss that does not reach a group
            has a row of zeros there, which stops `mgda` and `cagrad`, and counts in the mean of `upgrad`.

    Returns:
        A rule with the costs of its rules together: one backward pass for groups whose rules need no gradients and are
        one rule, inner products by group, or rows, which groups inside a group have always. Its weights and its state
        are dicts of those of the groups.

    Raises:
        TypeError: a value of `rules` is not an `Aggregator`; when called, params that are not a dict.
        ValueError: no rules; `rows` without a rule or places; when called, a group without a rule, or the reverse.

    Warns:
        UserWarning: where training starts, a loss with a row of zeros in a group whose rule needs the Gramian.

    Guarantees:
        The direction of one group does not depend on the others' rows. The laws of the rules (non-conflicting,
        scale-equivariant) hold group by group. `cr_mogm(grouped(...))` averages all weights, `grouped({key:
        cr_mogm(...)})` those of one group.

    Source:
        The granularities of Wang et al., Gradient vaccine, ICLR 2021 (encoder and decoder, layers), for any rule.

    Example:
        >>> rule = grouped({"trunk": upgrad(), "head": mean()})
        >>> jacobian = {"trunk": torch.tensor([[2.0, 0.0], [-1.0, 1.0]]), "head": torch.tensor([[2.0], [-1.0]])}
        >>> aggregate(rule, jacobian).direction
        {'trunk': tensor([0.5000, 1.0000]), 'head': tensor([0.5000])}
    """
    check_mapping("rules", rules, "Pass for instance {'encoder': upgrad(), 'decoder': mean()}.")
    check_mapping("rows", {} if rows is None else rows, "Pass for instance {'decoder': [1, 2]}.")
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
    alike = lambda key, other: chosen[other] == chosen[key] and not {key, other} & (rows or {}).keys()
    twins = {key: next((other for other in chosen if alike(key, other)), key) for key in chosen}

    if wrong := [key for key, own in (rows or {}).items() if key not in chosen or not _are_places(own)]:
        raise ValueError(f"grouped: rows must have keys of rules, and places, found {wrong}. Pass {{'a': [1]}}.")
    places = {key: list(own) for key, own in (rows or {}).items()}

    def init(received: dict[str, Any]) -> dict[str, Tree]:
        return {key: rule.init(_some(received[key], views[key], places.get(key))) for key, rule in chosen.items()}

    def update(received: dict[str, Any], state: dict[str, Tree]) -> tuple[dict[str, Weights], dict[str, Tree]]:
        weights: dict[str, Weights] = {}
        states: dict[str, Tree] = {}
        for key, rule in chosen.items():
            twin = twins[key]
            if twin != key and views[key].products == "none" and not tree_leaves(state[key]):
                # The same tensor, and not only an equal one, tells the engine that one backward pass serves both.
                weights[key], states[key] = weights[twin], ()
            else:
                own, states[key] = rule.update(_some(received[key], views[key], places.get(key)), state[key])
                weights[key] = own if key not in places else _among(own, received[key], places[key])
        return weights, states

    # Rows stay where they are.
    on_host = any(rule.on_host for rule in chosen.values()) and all(view.products != "rows" for view in views.values())
    bounds = [rule.sensitivity for rule in chosen.values()]
    squares = [bound**2 for bound in bounds if bound is not None]
    sensitivity = sum(squares) ** 0.5 if len(squares) == len(bounds) else None
    view = view_of_groups(views, len(set(twins.values())), partial=places)
    takes = next((rule.takes for rule in chosen.values() if rule.takes is not None), None)
    return Aggregator(view, init, update, on_host, sensitivity, takes)


def _are_places(own: Any) -> bool:
    is_list = isinstance(own, list | tuple) and len({*map(repr, own)}) == len(own) > 0
    return is_list and all(is_size(i) and i >= 0 for i in own)


def _some(received: Any, view: View, places: list[int] | None) -> Any:
    """What a rule with this view receives, of some of the rows."""
    if places is None:
        return received
    square = view.products == "gramian"
    return tree_map(lambda x: x[places][:, places] if square and x.ndim == 2 else x[places], received)


def _among(weights: Weights, received: Any, places: list[int]) -> Weights:
    """The weights of some of the rows, with 0 for the others."""
    m = len(tree_leaves(received)[0])
    index = torch.tensor(places, device=tree_leaves(weights)[0].device)
    return tree_map(lambda w: w.new_zeros(m, *w.shape[1:]).index_copy(0, index, w), weights)
