"""Grouped: one rule per top-level group of parameters (partial Jacobian descent)."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_jd.aggregation.aggregate import Aggregator
from functional_jd.aggregation.views import View
from functional_jd.core.arguments import check_mapping
from functional_jd.core.heads import rows_of
from functional_jd.core.rows import per_row
from functional_jd.core.tree import tree_map
from functional_jd.core.types import Jacobian, Losses, Tree, Weights


class GroupView(NamedTuple):
    """The view of `grouped` for one group.

    Attributes:
        seen: the view of the group's rule.
        ones: pytree like the group, leaves `[1, ..., 1]` with as many dimensions, in the dtype of the sum.
    """

    seen: View
    ones: Tree


def grouped(rules: Mapping[str, Aggregator]) -> Aggregator:
    """Give every top-level group of parameters a rule of its own, which receives that group only.

    `direction[key] = aggregate(rules[key], jacobian[key]).direction`

    Args:
        rules: one rule for every key of params: `grouped({"backbone": upgrad(), "decoder": mean()})`. Of a
            `MultitaskJacobian`, the groups are those of `shared`.

    Returns:
        A rule whose view is, for every group, that of the group's rule. Its weights are a pytree like the Jacobian that
        broadcasts to it, leaves `[m, 1, ..., 1]` (or entrywise, as the group's rule returns them), at least float32.
        Its state is the dict of the groups' states.

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

    def view(jacobian: Jacobian, *others: Jacobian, losses: Losses = None) -> dict[str, GroupView]:
        groups, *other_groups = (_groups(rows, chosen) for rows in (jacobian, *others))
        return {
            key: GroupView(
                rule.view(groups[key], *(other[key] for other in other_groups), losses=losses),
                tree_map(_ones, groups[key]),
            )
            for key, rule in chosen.items()
        }

    def init(views: dict[str, GroupView]) -> dict[str, Tree]:
        return {key: rule.init(views[key].seen) for key, rule in chosen.items()}

    def update(views: dict[str, GroupView], state: dict[str, Tree]) -> tuple[dict[str, Weights], dict[str, Tree]]:
        updated = {key: rule.update(views[key].seen, state[key]) for key, rule in chosen.items()}
        weights = {key: _broadcastable(weights, views[key].ones) for key, (weights, _) in updated.items()}
        return weights, {key: state for key, (_, state) in updated.items()}

    return Aggregator(view, init, update)


def _groups(jacobian: Jacobian, rules: Mapping[str, Aggregator]) -> Mapping[str, Any]:
    rows = rows_of(jacobian)
    if not isinstance(rows, Mapping):
        raise TypeError(
            f"grouped: expected parameters in a dict, one key per group, found {type(rows).__name__}. "
            "Put them in a dict: {'backbone': ..., 'decoder': ...}."
        )
    if missing := [key for key in rows if key not in rules]:
        raise ValueError(
            f"grouped: expected a rule for every group of parameters, found none for {', '.join(map(repr, missing))}. "
            "Add one, mean() for instance."
        )
    if unused := [key for key in rules if key not in rows]:
        raise ValueError(
            f"grouped: expected a group of parameters for every rule, found none for {', '.join(map(repr, unused))}; "
            f"the groups are {', '.join(map(repr, rows))}. Check its spelling."
        )
    return rows


def _ones(leaf: Tensor) -> Tensor:
    wide = torch.promote_types(leaf.dtype, torch.float32)
    return torch.ones([1] * leaf.ndim, dtype=wide, device=leaf.device)


def _broadcastable(weights: Weights, ones: Tree) -> Tree:
    """Weights `[m]` as a pytree that broadcasts to the group; entrywise weights are returned as they are."""
    if not (isinstance(weights, Tensor) and weights.ndim == 1):
        return weights
    return tree_map(lambda one: one * per_row(weights, one).to(one.dtype), ones)
