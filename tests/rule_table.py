"""The rules of the package: how tests build each, which laws each claims, and the table of `docs/rules.md`.

`python tests/rule_table.py docs/rules.md` writes the table into the page, between its marks.
"""

import inspect
import math
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from pages import line, write_between
from torch import Tensor

from functional_jd.aggregation.aggregate import Aggregator, aggregate, start
from functional_jd.aggregation.views import as_view
from functional_jd.aggregators.mean import mean
from functional_jd.aggregators.mgda import mgda
from functional_jd.aggregators.upgrad import upgrad
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
from functional_jd.testing.strategies import Range, Size
from functional_jd.testing.strategies import jacobians as any_jacobians

Builder = Callable[..., Aggregator]

_VIEWS = {
    "no_gradients": "nothing",
    "losses": "losses",
    "gramian": "Gramian",
    "cross_gramian": "Gramian of two batches",
    "full_jacobian": "Jacobian",
    "jacobian_entries": "Jacobian",
    "full_jacobian_and_losses": "Jacobian and losses",
    "norms": "norms of rows",
    "norms_and_losses": "norms of rows and losses",
    "gramian_and_losses": "Gramian and losses",
}
_COLUMNS = {
    non_conflicting: "never conflicts",
    linear_under_row_scaling: "linear in row scales",
    homogeneous: "homogeneous",
    on_the_simplex: "on the simplex",
    weakly_stationary: "stationary",
    permutation_equivariant: "any row order",
    rotation_blind: "rotation blind",
}


class Entry(NamedTuple):
    """How a rule is tested.

    Attributes:
        claims: the laws that it obeys, in addition to `ALWAYS`.
        fails: the laws that it must break, with the reason. Laws in neither depend on its arguments, or are open.
        hyper: the hyper-parameters that take any number, each with the range over which the laws are tested.
        build: builds the rule to test, given its builder and any of the hyper-parameters in `hyper`.
        where: laws that it obeys for some hyper-parameters only, each with their ranges.
        rows: the number of rows that it accepts.
        like: the parameters that it accepts; `None` means any.
        wide: whether the laws hold for rows of very different norms.
        invalid: values for which the direction is not finite if losses have them, for a rule that uses the losses.
    """

    claims: tuple[Law, ...]
    fails: Mapping[Law, str]
    hyper: Mapping[str, Range] = MappingProxyType({})
    build: Callable[..., Aggregator] = lambda f, **hyper: f(**hyper)
    where: Mapping[Law, Mapping[str, Range]] = MappingProxyType({})
    rows: Size = (1, 5)
    like: Params = None
    wide: bool = True
    invalid: tuple[float, ...] = ()


def builder(name: str) -> Builder:
    """Return the builder of a rule: the function with the name of its module."""
    return getattr(import_module(f"functional_jd.aggregators.{name}"), name)


def rule_of(name: str, **hyper: Any) -> Aggregator:
    """Return the rule as it is tested, with the given hyper-parameters."""
    return RULES[name].build(builder(name), **hyper)


def jacobians_for(name: str) -> st.SearchStrategy[Any]:
    """Return a strategy for the Jacobians that the rule accepts."""
    entry = RULES[name]
    return any_jacobians(entry.rows, like=entry.like, wide=entry.wide)


def rules_table() -> str:
    """All rules as a Markdown table: what each reads and stores, and the laws that it claims."""
    rows = [["---", "---", "---", *[":-:"] * len(_COLUMNS)]]
    for name, entry in RULES.items():
        marks, seen = [_mark(entry, law) for law in _COLUMNS], _seen_by(rule_of(name))
        if any("Aggregator" in str(p.annotation) for p in inspect.signature(builder(name)).parameters.values()):
            marks, seen = ["as its rules"] + [""] * (len(_COLUMNS) - 1), "as its rules"
        rows.append([f"`{name}`", seen, _state_of(name), *marks])
    return "\n".join(map(line, [["rule", "reads", "memory", *_COLUMNS.values()], *rows]))


def rows_of(name: str) -> int:
    """How many objectives tests give to a rule: at most four, unless it wants another number."""
    rows = RULES[name].rows
    return rows if isinstance(rows, int) else min(4, rows[1])


def two_calls(name: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Two calls of a rule, as a function of tensors; and the tensors."""
    rule, m, draw = rule_of(name), rows_of(name), torch.Generator().manual_seed(1)
    like = RULES[name].like or {"a": torch.zeros(3, 2), "b": torch.zeros(2)}
    batches = [{k: torch.randn(m, *v.shape, generator=draw) for k, v in like.items()} for _ in range(2)]
    view = as_view(rule.view)

    def f(values: Tensor, first: Params, second: Params) -> Any:
        others, given = [second] * (view.batches - 1), {"losses": values} if view.losses else {}
        once = aggregate(rule, first, None, *others, **given)
        return once, aggregate(rule, second, once.state, *others[:1], **given)

    return f, (torch.rand(m, generator=draw) + 0.5, *batches)


def _mark(entry: Entry, law: Law) -> str:
    if law is weakly_stationary and strongly_stationary in entry.claims:
        return "strongly"
    if law is weakly_stationary:
        return "weakly" if law in entry.claims else ""
    if law in entry.where:
        shown = {name: " to ".join(f"{x:g}" for x in dict.fromkeys(ends)) for name, ends in entry.where[law].items()}
        return ", ".join(f"`{name}` {ends}" for name, ends in shown.items())
    return "✓" if law in entry.claims else ""


def _seen_by(rule: Aggregator) -> str:
    view = as_view(rule.view)
    return "what its rules look at" if view.groups else _VIEWS.get(view.__name__, view.needs)


def _state_of(name: str) -> str:
    rows, like = RULES[name].rows, RULES[name].like
    row = torch.ones(2, dtype=torch.float64) if like is None else like
    m = rows if isinstance(rows, int) else rows[1]
    jacobian = tree_map(lambda leaf: leaf.expand(m, *leaf.shape), row)
    return _remembered(start(rule_of(name), jacobian, jacobian, losses=torch.ones(m, dtype=torch.float64)))


def _remembered(state: Any) -> str:
    if isinstance(state, Tensor):
        return "key" if state.dtype == torch.int64 else "a tensor"
    if isinstance(state, dict):
        (name, value), *_ = state.items()
        return name.replace("_", " ") if isinstance(value, Tensor) else "as its rules"
    return ", ".join(field.replace("_", " ") for field in getattr(state, "_fields", ()))


_ORDER, _DUAL, _SCALE, _LINEAR = permutation_equivariant, non_conflicting, homogeneous, linear_under_row_scaling
_SIMPLEX, _WEAK, _STRONG, _ROTATE = on_the_simplex, weakly_stationary, strongly_stationary, rotation_blind

_OUTWEIGHED = {_DUAL: "a row may be outweighed by the others"}
_RANDOM = {_ORDER: "random numbers are drawn by the index of a row"}
_SUM = {_SIMPLEX: "weights do not sum to one"}
_NORM = {_LINEAR: "the influence of a row is not proportional to its norm"}
_LENGTH = {_SCALE: "the length of the direction is fixed"}
_RATE = {_SCALE: "the rate has a unit"}
_ENTRYWISE = {_ROTATE: "weights depend on single entries"}
_BLOCKED = {_STRONG: "the direction is zero also if only some of the objectives block each other"}
_NO_NUMBER = (math.nan,)
_INVALID = (-1.0, 0.0, *_NO_NUMBER)
# What many rules claim, and what they break.
_USUAL = (_ORDER, _SCALE, _LINEAR, _WEAK, _STRONG, _ROTATE)
_FREE, _FITTED = _OUTWEIGHED | _SUM, _OUTWEIGHED | _SUM | _NORM
# Ranges end where the rule's own does, or where its results no longer change much.
_SHARE, _DECAY, _SIZE, _RATES = Range(0.0, 1.0), Range(0.0, 0.99), Range(0.0, 10.0), Range(0.01, 10.0)

_RESIDUALS = Entry(
    (_ORDER, _ROTATE),
    _FITTED | {_SCALE: "the direction is in the unit of parameters"},
    {"damping": _RATES},
    build=lambda f, damping=1.0, **hyper: f(damping, **hyper),
    wide=False,
    invalid=(math.inf, *_NO_NUMBER),
)


def _between_mean_and_mgda(build: Builder, cap: Any = 1.0) -> Aggregator:
    """A cap that is so far on the way from 1 / m to 1, whatever the number of rows."""
    return build(cap=cap)._replace(
        init=lambda _: (), update=lambda G, state: build(cap=cap + (1 - cap) / len(G)).update(G, state)
    )


RULES: dict[str, Entry] = {
    "mean": Entry((*_USUAL, _SIMPLEX), _OUTWEIGHED),
    "total": Entry(_USUAL, _FREE),
    "constant": Entry(
        (_SCALE, _LINEAR, _ROTATE),
        _FREE | dict.fromkeys((_ORDER, _WEAK, _STRONG), "every row has its weight, negative ones too"),
        build=lambda f: f([1.0, 1.0, -1.0]),
        rows=3,
    ),
    "random_weights": Entry(
        (_SCALE, _LINEAR, _SIMPLEX, _WEAK, _STRONG, _ROTATE), _OUTWEIGHED | _RANDOM, build=lambda f: f(key(0))
    ),
    "upgrad": Entry((*_USUAL, _DUAL), _SUM),
    "dualproj": Entry((_ORDER, _DUAL, _SCALE, _WEAK, _STRONG, _ROTATE), _SUM | _NORM),
    "mgda": Entry(
        (_ORDER, _SCALE, _SIMPLEX, _WEAK, _ROTATE),
        _NORM | _BLOCKED,
        {"cap": Range(0.01, 1.0)},
        build=_between_mean_and_mgda,
        where={_DUAL: {"cap": Range(1.0, 1.0)}},
    ),
    "aligned_mtl": Entry((_ORDER, _SCALE, _WEAK, _STRONG, _ROTATE), _FITTED, wide=False),
    "cagrad": Entry(
        (_ORDER, _SCALE, _WEAK, _ROTATE),
        _FITTED,
        {"c": _SIZE},
        build=lambda f, c=0.5: f(c),
        where={_DUAL: {"c": Range(1.0, 10.0)}},
    ),
    "config": Entry((_ORDER, _SCALE, _LINEAR, _ROTATE), _FREE, wide=False),
    "imtl_g": Entry((_ORDER, _SCALE, _ROTATE), _FITTED, wide=False),
    "fairgrad": Entry(
        (_ORDER, _DUAL, _WEAK, _ROTATE),
        _SUM | _NORM | _LENGTH | _BLOCKED,
        {"alpha": Range(0.1, 10.0)},
        build=lambda f, alpha=1.0: f(alpha),
    ),
    "nash_mtl": Entry((_ORDER, _DUAL, _WEAK, _ROTATE), _SUM | _NORM | _LENGTH | _BLOCKED, {"max_norm": _SIZE}),
    "pcgrad": Entry((_SCALE, _LINEAR, _WEAK, _STRONG, _ROTATE), _FREE | _RANDOM, build=lambda f: f(key(0))),
    "gradvac": Entry(
        (_SCALE, _LINEAR, _WEAK, _STRONG, _ROTATE),
        _FREE | _RANDOM,
        {"beta": Range(0.0, 0.9)},  # of 1, targets are the cosines that were just seen, where it has no derivative
        build=lambda f, **hyper: f(key(0), **hyper),
    ),
    "graddrop": Entry((_ORDER, _SCALE, _WEAK, _STRONG), _FITTED | _ENTRYWISE, build=lambda f: f(key(0))),
    "krum": Entry(
        (_SCALE, _SIMPLEX, _WEAK, _ROTATE),
        _OUTWEIGHED | _NORM | _BLOCKED | {_ORDER: "ties between scores are broken by the order of the rows"},
        build=lambda f: f(1),
        rows=(4, 6),
    ),
    "trimmed_mean": Entry(
        (_ORDER, _SCALE, _SIMPLEX),
        _OUTWEIGHED | _NORM | _BLOCKED | _ENTRYWISE | {_WEAK: "the rows that are trimmed differ between entries"},
        build=lambda f: f(1),
        rows=(3, 5),
    ),
    "clipped": Entry(
        (_ORDER, _WEAK, _STRONG, _ROTATE),
        _FITTED | {_SCALE: "the largest norm has a unit"},
        {"max_norm": _RATES},
        build=lambda f, max_norm=1.0: f(max_norm),
    ),
    "auto_clipped": Entry(
        (_ORDER, _WEAK, _STRONG, _ROTATE), _FITTED | {_SCALE: "gamma has a unit"}, {"gamma": _RATES, "max_norm": _RATES}
    ),
    "excess_mtl": Entry((_ORDER, _SIMPLEX, _WEAK), _OUTWEIGHED | _NORM | _RATE | _ENTRYWISE, {"rate": _RATES}),
    "modo": Entry(
        (_ORDER, _SIMPLEX, _WEAK, _ROTATE), _OUTWEIGHED | _NORM | _RATE, {"rate": _RATES, "ridge": _SIZE}, wide=False
    ),
    "sdmgrad": Entry(
        (_ORDER, _SCALE, _SIMPLEX, _WEAK, _STRONG, _ROTATE),
        _OUTWEIGHED | _NORM,
        {"rate": Range(0.01, 1.0), "momentum": _DECAY, "pull": _SIZE},
        # Few and small steps, as every step amplifies rounding errors if the two batches disagree.
        build=lambda f, rate=0.1, **hyper: f(rate, n_steps=2, **hyper),
        wide=False,
    ),
    "pcd": Entry(
        (_SCALE, _LINEAR, _WEAK, _ROTATE),
        _FREE | _BLOCKED | {_ORDER: "the first row is the primary objective"},
        {"tau": _SHARE, "beta": _DECAY},
    ),
    "natural_gradient": _RESIDUALS._replace(hyper={"damping": _RATES, "momentum": _DECAY}),
    "levenberg_marquardt": _RESIDUALS,
    "cr_mogm": Entry(
        _USUAL,
        _SUM | {_DUAL: "in a later step, the weights are those of earlier rows too"},
        {"momentum": _DECAY},
        build=lambda f, **hyper: f(upgrad(), **hyper),
    ),
    "grouped": Entry(
        (_ORDER, _SCALE, _LINEAR, _ROTATE),
        _FREE,
        build=lambda f: f({"trunk": rule_of("upgrad"), "head": rule_of("mean")}),
        like={"trunk": torch.zeros(2, 2), "head": torch.zeros(2)},
    ),
    "geometric_mean": Entry(_USUAL, _FREE, invalid=_INVALID),
    "stch": Entry(_USUAL, _FREE, {"mu": _RATES}, invalid=(math.inf, *_NO_NUMBER)),
    "tchebycheff": Entry(
        (_ORDER, _SCALE, _LINEAR, _WEAK, _ROTATE),
        _FREE | {_STRONG: "only the worst objective has a weight"},
        invalid=_NO_NUMBER,
    ),
    "cosmos": Entry(
        (_ORDER, _SCALE, _LINEAR, _ROTATE),
        _FREE,
        {"lambda_": _SIZE},
        build=lambda f, lambda_=1.0: f(lambda_, [0.5] * 3),
        rows=3,
        invalid=(0.0, *_NO_NUMBER),
    ),
    "pbi": Entry(
        (_ORDER, _SCALE, _LINEAR, _ROTATE),
        _FREE,
        {"theta": _SIZE},
        build=lambda f, theta=5.0: f(theta, [1.0] * 3),
        rows=3,
        invalid=_NO_NUMBER,
    ),
    "epo": Entry(
        (_ORDER, _SCALE, _SIMPLEX, _ROTATE),
        _OUTWEIGHED | _NORM,
        {"tolerance": _RATES},
        build=lambda f, **hyper: f([1 / 3] * 3, **hyper),
        rows=3,
        wide=False,
        invalid=(-1.0, *_NO_NUMBER),
    ),
    "uw": Entry(_USUAL, _FREE, {"rate": _RATES}),
    "imtl_l": Entry(_USUAL, _FREE, {"rate": _RATES}),
    "dwa": Entry(_USUAL, _FREE, {"temperature": _RATES}),
    "famo": Entry((*_USUAL, _SIMPLEX), _OUTWEIGHED, {"rate": _SIZE, "decay": _SIZE}, invalid=_INVALID),
    "db_mtl": Entry(
        (_ORDER, _SCALE, _WEAK, _STRONG, _ROTATE), _FITTED, {"beta": _DECAY, "beta_sigma": _SIZE}, invalid=_INVALID
    ),
    "moco": Entry(
        (_ORDER, _WEAK, _STRONG, _ROTATE),
        _FITTED | _LENGTH,
        {"beta": Range(0.01, 1.0), "gamma": _SIZE, "rho": _SIZE, "beta_sigma": _SIZE, "gamma_sigma": _SIZE},
        invalid=(-1.0, math.inf, *_NO_NUMBER),
    ),
    "unit_sum": Entry((_ORDER, _WEAK, _STRONG, _ROTATE), _FITTED | _LENGTH, {"momentum": _DECAY}),
    "uw_so": Entry(
        (*_USUAL, _SIMPLEX),
        _OUTWEIGHED,
        {"temperature": _RATES},
        build=lambda f, temperature=1.0: f(temperature),
        invalid=_INVALID,
    ),
    "constrained": Entry(
        (_SCALE, _LINEAR, _ROTATE),
        _FREE | {_ORDER: "every objective has a bound of its own"},
        {"rate": _RATES, "damping": _SIZE},
        build=lambda f, **hyper: f([1.0, 0.5, math.inf], **hyper),
        rows=3,
        invalid=(math.inf, *_NO_NUMBER),
    ),
    "softadapt": Entry((*_USUAL, _SIMPLEX), _OUTWEIGHED, {"beta": _SIZE}, invalid=(math.inf, *_NO_NUMBER)),
    "relobralo": Entry(
        _USUAL,
        _FREE,
        {"temperature": _RATES, "alpha": _SHARE, "rho": _SHARE},
        build=lambda f, **hyper: f(key(0), **hyper),
        invalid=_INVALID,
    ),
    "ntk_weights": Entry((_ORDER, _ROTATE), _FREE, invalid=(math.inf, *_NO_NUMBER)),
    "learning_rate_annealing": Entry((_SCALE,), _FREE | _ENTRYWISE, {"momentum": _DECAY}),
    "protect": Entry((_SCALE, _ROTATE), _FREE | {_ORDER: "the first row is protected"}, build=lambda f: f(mean(), 0)),
    "normalized": Entry((_ORDER, _ROTATE), _SUM | _NORM | _LENGTH, build=lambda f: f(mgda())),
    "gradnorm": Entry((_ORDER, _SCALE, _WEAK, _STRONG, _ROTATE), _FREE, {"alpha": _SIZE, "rate": _RATES}),
}
"""All rules by name: how each is tested, and the laws that it claims."""


if __name__ == "__main__":
    for page in map(Path, sys.argv[1:]):
        write_between(page, "<!-- rules -->", "<!-- /rules -->", rules_table())
