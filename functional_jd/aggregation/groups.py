"""Groups of parameters: what a rule receives that has another rule for every top-level key."""

from collections.abc import Mapping
from typing import Any

from functional_jd.aggregation.observation import Observation
from functional_jd.aggregation.views import View
from functional_jd.core.heads import rows_of
from functional_jd.core.tree import tree_leaves

_STRENGTH = ("none", "norms", "gramian", "rows")


def view_of_groups(views: Mapping[str, View], passes: int) -> View:
    """The view whose rule receives, for every group, what the rule with its view receives.

    Args:
        views: by top-level key of the parameters.
        passes: how many of the rules differ.
    """

    def by_group(seen: Observation) -> dict[str, Any]:
        for rows in (seen.rows, *seen.others):
            if rows is not None:
                check_groups(rows_of(rows), views)
        return {key: view.receive(seen.of_group(key)) for key, view in views.items()}

    # Groups inside a group have rows: products are known, and passes taken, by top-level key only.
    needs = ["rows" if view.groups is not None else view.products for view in views.values()]
    return View(
        by_group,
        max(needs, key=_STRENGTH.index),  # pyright: ignore[reportArgumentType]
        losses=any(view.losses for view in views.values()),
        batches=max(view.batches for view in views.values()),
        groups=dict(views),
        passes=passes,
    )


def check_groups(tree: Any, groups: Mapping[str, Any]) -> None:
    """Refuse parameters, or their rows, whose top-level keys are not those of the groups."""
    if not isinstance(tree, Mapping):
        raise TypeError(
            f"grouped: expected parameters in a dict, one key per group, found {type(tree).__name__}. "
            "Put them in a dict: {'backbone': ..., 'decoder': ...}."
        )
    if missing := [key for key in tree if key not in groups]:
        raise ValueError(
            f"grouped: expected a rule for every group of parameters, found none for {', '.join(map(repr, missing))}. "
            "Groups are the top-level keys of the parameters: add a rule, such as that of another group."
        )
    if unused := [key for key in groups if key not in tree]:
        raise ValueError(
            f"grouped: expected a group of parameters for every rule, found none for {', '.join(map(repr, unused))}; "
            f"the groups are the top-level keys of the parameters, {', '.join(map(repr, tree))}. Check the spelling, "
            "or take a dict with a key for each group."
        )


def leaf_groups(params: Any, groups: Mapping[str, View]) -> list[tuple[str, int, str]]:
    """The groups of the leaves of parameters, in the order of the leaves, whose keys are sorted: their name, how many
    leaves they are, and what their rule needs of the rows.
    """
    check_groups(params, groups)
    return [(key, len(tree_leaves(params[key])), groups[key].products) for key in sorted(params)]
