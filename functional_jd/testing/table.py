"""The rules of the package: how a test builds each, what each claims, and the README's table made of that."""

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from functional_jd.aggregation.aggregate import Aggregator, start
from functional_jd.core.tree import tree_map
from functional_jd.core.types import Params
from functional_jd.random import key
from functional_jd.testing.laws import (
    Law,
    homogeneous,
    linear_under_row_scaling,
    non_conflicting,
    on_the_simplex,
    permutation_equivariant,
    rotation_blind,
    strongly_stationary,
    weakly_stationary,
)
from functional_jd.testing.strategies import Size, jacobians

Builder = Callable[..., Aggregator]

_VIEWS = {
    "no_gradients": "nothing",
    "gramian": "Gramian",
    "cross_gramian": "Gramian of two batches",
    "full_jacobian": "Jacobian",
    "jacobian_and_losses": "Jacobian and losses",
    "norms_and_losses": "norms of rows and losses",
}
_COLUMNS = {
    non_conflicting: "never conflicts",
    linear_under_row_scaling: "linear in row scales",
    homogeneous: "homogeneous",
    on_the_simplex: "on the simplex",
    weakly_stationary: "weakly stationary",
    strongly_stationary: "strongly stationary",
    permutation_equivariant: "any row order",
    rotation_blind: "rotation blind",
}
_OPEN, _CLOSE = "<!-- rules -->", "<!-- /rules -->"


class Entry(NamedTuple):
    """What the tests know of a rule.

    Attributes:
        build: makes the rule to be tested of its builder.
        claims: the laws that it obeys, beside those that all do.
        fails: the laws that it must not obey, and why. What stands in neither depends, or nobody knows.
        rows: how many rows it takes.
        like: the parameters that it takes; `None` means any.
        wide: whether the laws hold for rows of very different norms.
        invalid: numbers that the losses must not all be, if the rule looks at them: the direction is not finite then.
    """

    build: Callable[[Builder], Aggregator]
    claims: tuple[Law, ...]
    fails: Mapping[Law, str]
    rows: Size = (1, 5)
    like: Params = None
    wide: bool = True
    invalid: tuple[float, ...] = ()


def builder(name: str) -> Builder:
    """The builder of a rule: the function of the same name in the file of the same name."""
    return getattr(import_module(f"functional_jd.aggregators.{name}"), name)


def rule_of(name: str) -> Aggregator:
    """The rule of the table, as it is tested."""
    return RULES[name].build(builder(name))


def jacobians_for(name: str) -> st.SearchStrategy[Any]:
    """The Jacobians that the rule of the table takes."""
    entry = RULES[name]
    return jacobians(entry.rows, like=entry.like, wide=entry.wide)


def rules_table() -> str:
    """The rules as a Markdown table: what each looks at and remembers, and the laws that it claims.

    Returns:
        One line per rule, after two of header. Where a rule is from stands in its docstring.
    """
    lines = [_row(["rule", "looks at", "remembers", *_COLUMNS.values()])]
    lines.append(_row(["---", "---", "---", *[":-:"] * len(_COLUMNS)]))
    for name, entry in RULES.items():
        build = builder(name)
        if _wraps_rules(name):
            marks = ["as its rules"] + [""] * (len(_COLUMNS) - 1)
        else:
            marks = ["✓" if law in entry.claims else "" for law in _COLUMNS]
        lines.append(_row([f"`{name}{_parameters(build)}`", _looks_at(name), _remembers(name), *marks]))
    return "\n".join(lines)


def with_rules_table(text: str) -> str:
    """A Markdown text with the table between its markers `<!-- rules -->` and `<!-- /rules -->` brought up to date.

    Args:
        text: the Markdown, with both markers.

    Returns:
        The text, with nothing else changed.

    Raises:
        ValueError: the text does not have both markers, in order.
    """
    before, opening, rest = text.partition(_OPEN)
    _, closing, after = rest.partition(_CLOSE)
    if not (opening and closing):
        raise ValueError(
            f"rules table: expected the markers {_OPEN} and {_CLOSE} in the text, found not both, in this order. "
            "Put them on lines of their own where the table shall stand."
        )
    return f"{before}{_OPEN}\n{rules_table()}\n{_CLOSE}{after}"


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _parameters(build: Builder) -> str:
    shown: list[str] = []
    for parameter in inspect.signature(build).parameters.values():
        bare = parameter.default is parameter.empty
        shown.append(parameter.name if bare else f"{parameter.name}={parameter.default!r}".replace("'", '"'))
    return f"({', '.join(shown)})"


def _wraps_rules(name: str) -> bool:
    return any("Aggregator" in str(p.annotation) for p in inspect.signature(builder(name)).parameters.values())


def _looks_at(name: str) -> str:
    if _wraps_rules(name):
        return "what its rules look at"
    view: str = rule_of(name).view.__name__
    return _VIEWS.get(view, view)


def _remembers(name: str) -> str:
    rows, like = RULES[name].rows, RULES[name].like
    row = torch.ones(2, dtype=torch.float64) if like is None else like
    m = rows if isinstance(rows, int) else rows[1]
    jacobian = tree_map(lambda leaf: leaf.expand(m, *leaf.shape), row)
    state = start(rule_of(name), jacobian, jacobian, losses=torch.ones(m, dtype=torch.float64))
    if isinstance(state, Tensor):
        return "key" if state.dtype == torch.int64 else "a tensor"
    if isinstance(state, dict):
        return "what its rules remember"
    return ", ".join(field.replace("_", " ") for field in getattr(state, "_fields", ()))


_ORDER, _SAFE, _UNIT, _LINEAR = permutation_equivariant, non_conflicting, homogeneous, linear_under_row_scaling
_SIMPLEX, _WEAK, _STRONG, _AXES = on_the_simplex, weakly_stationary, strongly_stationary, rotation_blind

_OUTWEIGHED = {_SAFE: "rows may be outweighed by the others"}
_CHANCE = {_ORDER: "chance is drawn for the place of a row"}
_LONGER = {_SIMPLEX: "weights do not add up to one"}
_CHOOSY = {_LINEAR: "how much a row counts depends on its norm, and not in proportion"}
_FIXED = {_UNIT: "the direction has a length of its own"}
_UNITS = {_UNIT: "the rate has a unit"}
_ENTRYWISE = {_AXES: "entries are looked at one by one"}
_BLOCKED = {_STRONG: "zero also where only some objectives block one another"}
_POSITIVE = (-1.0, 0.0)

RULES: dict[str, Entry] = {
    "mean": Entry(lambda f: f(), (_ORDER, _UNIT, _LINEAR, _SIMPLEX, _WEAK, _STRONG, _AXES), _OUTWEIGHED),
    "total": Entry(lambda f: f(), (_ORDER, _UNIT, _LINEAR, _WEAK, _STRONG, _AXES), _OUTWEIGHED | _LONGER),
    "constant": Entry(
        lambda f: f([1.0, 1.0, -1.0]),
        (_UNIT, _LINEAR, _AXES),
        _OUTWEIGHED | _LONGER | dict.fromkeys((_ORDER, _WEAK, _STRONG), "every row has its weight, negative ones too"),
        rows=3,
    ),
    "random_weights": Entry(
        lambda f: f(key(0)), (_UNIT, _LINEAR, _SIMPLEX, _WEAK, _STRONG, _AXES), _OUTWEIGHED | _CHANCE
    ),
    "upgrad": Entry(lambda f: f(), (_ORDER, _SAFE, _UNIT, _LINEAR, _WEAK, _STRONG, _AXES), _LONGER),
    "dualproj": Entry(lambda f: f(), (_ORDER, _SAFE, _UNIT, _WEAK, _STRONG, _AXES), _LONGER | _CHOOSY),
    "mgda": Entry(lambda f: f(), (_ORDER, _SAFE, _UNIT, _SIMPLEX, _WEAK, _AXES), _CHOOSY | _BLOCKED),
    "aligned_mtl": Entry(
        lambda f: f(), (_ORDER, _UNIT, _WEAK, _STRONG, _AXES), _OUTWEIGHED | _LONGER | _CHOOSY, wide=False
    ),
    "cagrad": Entry(lambda f: f(0.5), (_ORDER, _UNIT, _WEAK, _AXES), _OUTWEIGHED | _LONGER | _CHOOSY),
    "config": Entry(lambda f: f(), (_ORDER, _UNIT, _LINEAR, _AXES), _OUTWEIGHED | _LONGER, wide=False),
    "imtl_g": Entry(lambda f: f(), (_ORDER, _UNIT, _AXES), _OUTWEIGHED | _LONGER | _CHOOSY, wide=False),
    "fairgrad": Entry(lambda f: f(1.0), (_ORDER, _SAFE, _WEAK, _AXES), _LONGER | _CHOOSY | _FIXED | _BLOCKED),
    "nash_mtl": Entry(lambda f: f(), (_ORDER, _SAFE, _WEAK, _AXES), _LONGER | _CHOOSY | _FIXED | _BLOCKED),
    "pcgrad": Entry(lambda f: f(key(0)), (_UNIT, _LINEAR, _WEAK, _STRONG, _AXES), _OUTWEIGHED | _LONGER | _CHANCE),
    "gradvac": Entry(lambda f: f(key(0)), (_UNIT, _LINEAR, _WEAK, _STRONG, _AXES), _OUTWEIGHED | _LONGER | _CHANCE),
    "graddrop": Entry(
        lambda f: f(key(0)), (_ORDER, _UNIT, _WEAK, _STRONG), _OUTWEIGHED | _LONGER | _CHOOSY | _ENTRYWISE
    ),
    "krum": Entry(
        lambda f: f(1),
        (_UNIT, _SIMPLEX, _WEAK, _AXES),
        _OUTWEIGHED | _CHOOSY | _BLOCKED | {_ORDER: "of equal scores the first win"},
        rows=(4, 6),
    ),
    "trimmed_mean": Entry(
        lambda f: f(1),
        (_ORDER, _UNIT, _SIMPLEX),
        _OUTWEIGHED | _CHOOSY | _BLOCKED | _ENTRYWISE | {_WEAK: "every entry may have another median row"},
        rows=(3, 5),
    ),
    "excess_mtl": Entry(lambda f: f(), (_ORDER, _SIMPLEX, _WEAK), _OUTWEIGHED | _CHOOSY | _UNITS | _ENTRYWISE),
    "modo": Entry(lambda f: f(), (_ORDER, _SIMPLEX, _WEAK, _AXES), _OUTWEIGHED | _CHOOSY | _UNITS, wide=False),
    "sdmgrad": Entry(
        # Few and small steps: where two batches disagree every step magnifies what rounding made different.
        lambda f: f(rate=0.1, n_steps=2),
        (_ORDER, _UNIT, _SIMPLEX, _WEAK, _STRONG, _AXES),
        _OUTWEIGHED | _CHOOSY,
        wide=False,
    ),
    "pcd": Entry(
        lambda f: f(),
        (_UNIT, _LINEAR, _WEAK, _AXES),
        _OUTWEIGHED | _LONGER | _BLOCKED | {_ORDER: "the first row is the primary one"},
    ),
    "cr_mogm": Entry(lambda f: f(rule_of("upgrad")), (_ORDER, _SAFE, _UNIT, _LINEAR, _WEAK, _STRONG, _AXES), _LONGER),
    "grouped": Entry(
        lambda f: f({"trunk": rule_of("upgrad"), "head": rule_of("mean")}),
        (_ORDER, _UNIT, _LINEAR, _AXES),
        _OUTWEIGHED | _LONGER,
        like={"trunk": torch.zeros(2, 2), "head": torch.zeros(2)},
    ),
    "geometric_mean": Entry(
        lambda f: f(),
        (_ORDER, _UNIT, _LINEAR, _WEAK, _STRONG, _AXES),
        _OUTWEIGHED | _LONGER,
        invalid=_POSITIVE,
    ),
    "stch": Entry(lambda f: f(), (_ORDER, _UNIT, _LINEAR, _WEAK, _STRONG, _AXES), _OUTWEIGHED | _LONGER),
    "tchebycheff": Entry(
        lambda f: f(),
        (_ORDER, _UNIT, _LINEAR, _WEAK, _AXES),
        _OUTWEIGHED | _LONGER | {_STRONG: "only the worst objective counts"},
    ),
    "cosmos": Entry(
        lambda f: f(1.0, [0.5] * 3),
        (_ORDER, _UNIT, _LINEAR, _AXES),
        _OUTWEIGHED | _LONGER,
        rows=3,
        invalid=(0.0,),
    ),
    "pbi": Entry(lambda f: f(5.0, [1.0] * 3), (_ORDER, _UNIT, _LINEAR, _AXES), _OUTWEIGHED | _LONGER, rows=3),
    "uw": Entry(lambda f: f(), (_ORDER, _UNIT, _LINEAR, _WEAK, _STRONG, _AXES), _OUTWEIGHED | _LONGER),
    "imtl_l": Entry(lambda f: f(), (_ORDER, _UNIT, _LINEAR, _WEAK, _STRONG, _AXES), _OUTWEIGHED | _LONGER),
    "dwa": Entry(lambda f: f(), (_ORDER, _UNIT, _LINEAR, _WEAK, _STRONG, _AXES), _OUTWEIGHED | _LONGER),
    "famo": Entry(
        lambda f: f(), (_ORDER, _UNIT, _LINEAR, _SIMPLEX, _WEAK, _STRONG, _AXES), _OUTWEIGHED, invalid=_POSITIVE
    ),
    "db_mtl": Entry(lambda f: f(), (_ORDER, _UNIT, _WEAK, _STRONG, _AXES), _OUTWEIGHED | _LONGER | _CHOOSY),
    "moco": Entry(lambda f: f(), (_ORDER, _WEAK, _STRONG, _AXES), _OUTWEIGHED | _LONGER | _CHOOSY | _FIXED),
    "gradnorm": Entry(lambda f: f(), (_ORDER, _UNIT, _WEAK, _STRONG, _AXES), _OUTWEIGHED | _LONGER),
}
"""All rules: how each is tested, and what it claims."""
