"""Groups of parameters: what a rule receives that has another rule for every top-level key."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from functional_jd.aggregation.aggregate import Aggregator, check_rule
from functional_jd.aggregation.observation import Observation
from functional_jd.aggregation.views import View, as_view, most
from functional_jd.core.arguments import refuse
from functional_jd.core.heads import rows_of
from functional_jd.core.tree import tree_leaves


def view_of_groups(views: Mapping[str, View], passes: int) -> View:
    """The view of a rule that receives, by top-level key, what each of `views` does; `passes` of their rules differ."""

    def by_group(seen: Observation) -> dict[str, Any]:
        for rows in (seen.rows, *seen.others):
            if rows is not None:
                check_groups(rows_of(rows), views)
        return {key: view.receive(seen.of_group(key)) for key, view in views.items()}

    # Groups inside a group have rows: products are known, and passes taken, by top-level key only.
    return View(
        by_group,
        most("rows" if view.groups is not None else view.products for view in views.values()),
        losses=any(view.losses for view in views.values()),
        batches=max(view.batches for view in views.values()),
        groups=dict(views),
        passes=passes,
    )


def from_part(rule: Aggregator, names: Sequence[str]) -> Aggregator:
    """A rule that receives the rows of some parameters, whose weights count for all of them.

    Args:
        rule: a rule with one weight per row.
        names: top-level keys of the parameters that have rows: `from_part(gradnorm(), ["last"])` balances one layer.

    Returns:
        A rule that needs the rows, of all parameters. Its weights and its state are those of `rule`. When called, it
        raises ValueError for a name that is not a key of the parameters.
    """
    check_rule(rule)
    if not isinstance(names, list | tuple) or not names:
        refuse("names", "a list of keys of the parameters", names, 'Pass for instance ["last"].')
    view = as_view(rule.view)

    def part(rows: Any) -> dict[str, Any]:
        found = rows_of(rows)
        if missing := [name for name in names if not isinstance(found, Mapping) or name not in found]:
            raise ValueError(f"from_part: names must be keys of the parameters that have rows, found {missing}.")
        return {name: found[name] for name in names}

    def receive(seen: Observation) -> Any:
        return view.receive(seen._replace(rows=part(seen.rows), others=tuple(map(part, seen.others))))

    receive.__name__ = f"{view.__name__}_of_a_part"
    whole = View(receive, "rows", losses=view.losses, batches=view.batches)
    return rule._replace(view=whole, on_host=False, sensitivity=None)


def check_groups(tree: Any, groups: Mapping[str, Any]) -> None:
    """Refuse parameters, or their rows, whose top-level keys are not those of the groups."""
    if not isinstance(tree, Mapping):
        raise TypeError(f"grouped: parameters must be a dict by groups, found {type(tree).__name__}. Name the parts.")
    if set(tree) != set(groups):
        raise ValueError(
            f"grouped: rules must have the top-level keys of the parameters, {list(tree)}, found {list(groups)}. "
            "Give each key one rule."
        )


def leaf_groups(params: Any, groups: Mapping[str, View]) -> list[tuple[str, int, str]]:
    """The groups in the order of their leaves: a name, the number of leaves, which values of rows the rule needs."""
    check_groups(params, groups)
    keys = sorted(params) if type(params) in (dict, defaultdict) else params  # an OrderedDict keeps its order
    return [(key, len(tree_leaves(params[key])), groups[key].products) for key in keys]
