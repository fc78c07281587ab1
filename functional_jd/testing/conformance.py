"""Conformance: does a rule obey the laws? `obeys` makes a pytest test of the question, `laws_of` answers it."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import hypothesis
import pytest
import torch
from hypothesis import Phase, find
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample
from torch import Tensor

from functional_jd.aggregation.aggregate import Aggregator, check_rule
from functional_jd.core.tree import tree_leaves, tree_map
from functional_jd.core.types import Jacobian, Losses, Tree
from functional_jd.testing.laws import ALWAYS, BY_CLAIM, Case, Law, compiled
from functional_jd.testing.strategies import jacobians as any_jacobians

Cases = st.SearchStrategy[Any]

_SETTINGS = hypothesis.settings(max_examples=100, derandomize=True, database=None, deadline=None)


class Counterexample(NamedTuple):
    """A case in which a rule breaks a law. It is false, and prints as code to paste into a notebook.

    Attributes:
        law: the law that is broken.
        jacobian: as small as hypothesis could make it.
        others: the Jacobians on other batches, for a rule that looks at them.
        losses: the losses, for a rule that looks at them.
        error: what the law, or torch, said.
    """

    law: Law
    jacobian: Jacobian
    others: tuple[Jacobian, ...]
    losses: Losses
    error: BaseException

    def __bool__(self) -> bool:
        return False

    def __str__(self) -> str:
        names = ["J", *(f"J{number}" for number in range(2, 2 + len(self.others)))]
        values = dict(zip(names, (self.jacobian, *self.others), strict=True))
        arguments = ["rule", *names]
        if self.losses is not None:
            values["losses"] = self.losses
            arguments.append("losses=losses")
        imports = {"import torch", f"from {self.law.__module__} import {self.law.__name__}"}
        assignments = [f"{name} = {_code(value, imports)}" for name, value in values.items()]
        call = f"{self.law.__name__}({', '.join(arguments)})  # rule: the one that was tested"
        return "\n".join([*sorted(imports, key=len), "", *assignments, call])


class Findings(dict[str, "bool | Counterexample"]):
    """Which laws hold: by name, `True` or a `Counterexample` (which is false). Prints as a list."""

    def __str__(self) -> str:
        lines: list[str] = []
        for name, found in self.items():
            lines.append(f"{name:26}{'holds' if found else 'broken'}")
            if isinstance(found, Counterexample):
                lines.append(f"    # {_message(found.error)}")
                lines += [f"    {line}".rstrip() for line in str(found).splitlines()]
        return "\n".join(lines)


def obeys(
    rule: Aggregator, *laws: Law, jacobians: Cases | None = None, settings: hypothesis.settings | None = None
) -> Callable[..., None]:
    """A test of a rule, one case per law: assign it to a name that begins with `test_`.

    Args:
        rule: the rule.
        laws: functions of this package, or of your own: `law(rule, jacobian, *others, losses=None)`, which raise where
            the law is broken. Without any: `ALWAYS`.
        jacobians: the Jacobians to try, for a rule that does not take all: `jacobians(rows=3)`,
            `jacobians(like=params)`. Rules that look at other batches or at losses get those too: Jacobians of the same
            shape, and positive numbers.
        settings: of hypothesis; by default those of the profile that is loaded, without deadlines.

    Returns:
        A parametrised pytest test. Where a law is broken it raises an `AssertionError` whose message is the smallest
        such Jacobian, as code to paste into a notebook.

    Raises:
        TypeError: `rule` is no rule.

    Laws:
        `compiled` is checked on one Jacobian that is not zero, and on variants of it, because every shape costs a
        compilation.

    Example:
        >>> test_shy = obeys(shy())
        >>> test_shy_claims = obeys(shy(), permutation_equivariant, on_the_simplex)
    """
    check_rule(rule, "obeys")

    @pytest.mark.parametrize("law", laws or ALWAYS)
    def test(law: Law) -> None:
        found = counterexample(rule, law, jacobians, settings or hypothesis.settings(deadline=None))
        if found is not None:
            raise AssertionError(f"{law.__name__} is broken: {_message(found.error)}\n\n{found}") from found.error

    return test


def laws_of(
    rule: Aggregator, *laws: Law, jacobians: Cases | None = None, settings: hypothesis.settings = _SETTINGS
) -> Findings:
    """Which laws a rule obeys, as far as a hundred Jacobians per law tell. Needs no pytest run.

    Args:
        rule: the rule.
        laws: which to try; without any, all of `ALWAYS` and `BY_CLAIM`.
        jacobians: as for `obeys`.
        settings: of hypothesis; by default 100 examples, the same ones in every call.

    Returns:
        `Findings`: a dict from the laws' names to `True` or a `Counterexample`. Print it.

    Raises:
        TypeError: `rule` is no rule.

    Laws:
        Deterministic. A broken law is broken; a law that holds may still be broken by a Jacobian that was not tried.
    """
    check_rule(rule, "laws_of")
    found = {law.__name__: counterexample(rule, law, jacobians, settings) for law in laws or ALWAYS + BY_CLAIM}
    return Findings({name: True if broken is None else broken for name, broken in found.items()})


def counterexample(
    rule: Aggregator, law: Law, jacobians: Cases | None, settings: hypothesis.settings
) -> Counterexample | None:
    """The smallest case that hypothesis finds in which the rule breaks the law, if it finds one."""
    strategy = _cases(rule, any_jacobians() if jacobians is None else jacobians)
    if law is compiled:
        return _broken(rule, law, _one(strategy, settings))
    try:
        found = _broken(rule, law, find(strategy, lambda case: not _obeyed(rule, law, case), settings=settings))
    except NoSuchExample:
        return None
    return None if found is None else _trimmed(rule, law, found)


def _trimmed(rule: Aggregator, law: Law, found: Counterexample) -> Counterexample:
    """Without the rows and columns that do not matter: hypothesis knows numbers, not matrices."""
    for case in _smaller((found.jacobian, found.others, found.losses)):
        less = _broken(rule, law, case)
        if less is not None and type(less.error) is type(found.error):
            return _trimmed(rule, law, less)
    return found


def _smaller(case: Case) -> Iterator[Case]:
    """The same case with one row, or one column, less."""
    jacobian, others, losses = case
    if not isinstance(jacobian, Tensor) or jacobian.ndim != 2:
        return
    for dim in (1, 0):
        for index in range(jacobian.shape[dim] if jacobian.shape[dim] > 1 else 0):
            kept = [k for k in range(jacobian.shape[dim]) if k != index]
            fewer = losses if losses is None or dim else losses[kept]
            yield (
                jacobian[:, kept] if dim else jacobian[kept],
                tuple(other[:, kept] if dim else other[kept] for other in others),
                fewer,
            )


def _broken(rule: Aggregator, law: Law, case: Case) -> Counterexample | None:
    jacobian, others, losses = case
    try:
        law(rule, jacobian, *others, losses=losses)
    except Exception as error:
        return Counterexample(law, jacobian, others, losses, error)
    return None


def _obeyed(rule: Aggregator, law: Law, case: Case) -> bool:
    return _broken(rule, law, case) is None


def _one(strategy: Cases, settings: hypothesis.settings) -> Case:
    """A case that says something, if there is one: several rows, and no leaf of zeros."""
    drawn = hypothesis.settings(settings, phases=[Phase.generate])
    try:
        return find(strategy, _is_rich, settings=drawn)
    except NoSuchExample:
        return find(strategy, lambda _: True, settings=drawn)


@st.composite
def _cases(draw: st.DrawFn, rule: Aggregator, jacobians: Cases) -> Case:
    """A Jacobian, and what else the rule looks at."""
    jacobian = draw(jacobians)
    m = len(tree_leaves(jacobian)[0])
    others, losses = _wants(rule, jacobian)
    if others:
        others = (draw(any_jacobians(m, like=tree_map(lambda leaf: leaf[0], jacobian), wide=False)),)
    if losses is not None:
        values = draw(st.lists(st.integers(1, 8).map(float), min_size=m, max_size=m))
        losses = torch.tensor(values, dtype=torch.float64)
    return jacobian, others, losses


def _wants(rule: Aggregator, jacobian: Jacobian) -> tuple[tuple[Jacobian, ...], Losses]:
    """The least that the view of a rule is content with."""
    losses = torch.ones(len(tree_leaves(jacobian)[0]), dtype=torch.float64)
    for others, values in (((), None), ((), losses), ((jacobian,), None)):
        try:
            rule.view(jacobian, *others, losses=values)
        except ValueError:
            continue
        return others, values
    return (jacobian,), losses


def _is_rich(case: Case) -> bool:
    leaves = tree_leaves(case[0])
    return len(leaves[0]) > 1 and all(leaf.any() for leaf in leaves)


def _message(error: BaseException) -> str:
    """What went wrong, in one line; the rest stands in the error itself."""
    line = (str(error).strip().splitlines() or [""])[0]
    return line if isinstance(error, AssertionError) else f"{type(error).__name__}: {line}"


def _code(tree: Tree, imports: set[str]) -> str:
    """An expression that makes the tree; what must be imported for it is added to `imports`."""
    if isinstance(tree, Tensor):
        return f"torch.tensor({tree.tolist()}, dtype={tree.dtype})"
    if isinstance(tree, dict):
        return "{" + ", ".join(f"{key!r}: {_code(value, imports)}" for key, value in tree.items()) + "}"
    parts = ", ".join(_code(value, imports) for value in tree)
    if isinstance(tree, list):
        return f"[{parts}]"
    if hasattr(tree, "_fields"):
        imports.add(f"from {type(tree).__module__} import {type(tree).__name__}")
        return f"{type(tree).__name__}({parts})"
    return f"({parts},)"
