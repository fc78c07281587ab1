"""Conformance tests of rules: `obeys` returns a pytest test, `laws_of` a report."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import hypothesis
import pytest
import torch
from hypothesis import Phase, find
from hypothesis import strategies as st
from hypothesis.errors import Flaky, NoSuchExample
from torch import Tensor

from functional_jd.aggregation.aggregate import Aggregator, check_rule
from functional_jd.aggregation.views import as_view
from functional_jd.core.arguments import check_function, check_mapping, check_type, described, refuse
from functional_jd.core.tree import tree_leaves, tree_map
from functional_jd.core.types import Jacobian, Losses, Tree
from functional_jd.testing.derivatives import hyper_parameters_are_values
from functional_jd.testing.laws import ALWAYS, BY_CLAIM, Law, compiled
from functional_jd.testing.measures import Case, runs
from functional_jd.testing.strategies import Range, numbers
from functional_jd.testing.strategies import jacobians as any_jacobians

Cases = st.SearchStrategy[Any]
Builder = Callable[..., Aggregator]
Drawn = tuple[Case, dict[str, float]]
"""A case, and the hyper-parameters."""

SETTINGS = hypothesis.settings(max_examples=100, derandomize=True, database=None, deadline=None)


class Counterexample(NamedTuple):
    """A case in which a rule breaks a law. Its truth value is false, and it prints as code to paste into a notebook.

    Attributes:
        law: the law that is broken.
        jacobian: the smallest Jacobian that hypothesis found.
        others: the Jacobians on other batches, and
        losses: the losses, for a rule that uses them.
        error: the exception that was raised.
        hyper: the hyper-parameters, for a builder that was tested.
    """

    law: Law
    jacobian: Jacobian
    others: tuple[Jacobian, ...]
    losses: Losses
    error: BaseException
    hyper: Mapping[str, float] = MappingProxyType({})

    def __bool__(self) -> bool:
        return False

    def __str__(self) -> str:
        names = ["J", *(f"J{number}" for number in range(2, 2 + len(self.others)))]
        values = dict(zip(names, (self.jacobian, *self.others), strict=True))
        is_of_builder = self.law is hyper_parameters_are_values
        arguments = ["build", "hyper", *names] if is_of_builder else ["rule", *names]
        if self.losses is not None:
            values["losses"] = self.losses
            arguments.append("losses=losses")
        imports = {"import torch", f"from {self.law.__module__} import {self.law.__name__}"}
        assignments = [f"{name} = {_code(value, imports)}" for name, value in values.items()]
        call = f"{self.law.__name__}({', '.join(arguments)})"
        unknown = f"  # {'build' if self.hyper else 'rule'}: the one that was tested"
        if self.hyper:
            given = f"hyper = {dict(self.hyper)}" if is_of_builder else f"rule = build(**{dict(self.hyper)})"
            assignments.append(given + unknown)
        else:
            call += unknown
        return "\n".join([*sorted(imports, key=len), "", *assignments, call])


class Findings(dict[str, "bool | Counterexample"]):
    """A dict from the names of laws to `True` or a `Counterexample`, which is false.

    Prints as a list, with the code of each counterexample.
    """

    def __str__(self) -> str:
        lines: list[str] = []
        width = max([24, *map(len, self)]) + 2
        for name, result in self.items():
            lines.append(f"{name:{width}}{'holds' if result else 'broken'}")
            if isinstance(result, Counterexample):
                lines.append(f"    # {_message(result.error)}")
                lines += [f"    {line}".rstrip() for line in str(result).splitlines()]
        return "\n".join(lines)

    __repr__ = __str__


def obeys(
    rule: Aggregator | Builder,
    *laws: Law,
    jacobians: Cases | None = None,
    hyper: Mapping[str, Range] | None = None,
    settings: hypothesis.settings | None = None,
) -> Callable[..., None]:
    """Create a pytest test of a rule, with one case per law. Assign it to a name that begins with `test_`.

    Args:
        rule: the rule; with `hyper`, a function that builds it: `rule(**hyper)`.
        laws: functions of this package, or your own: `law(rule, jacobian, *others, losses=None)`, which raise an
            exception if the law is broken. Default: `ALWAYS`, and with `hyper` also `hyper_parameters_are_values`.
        jacobians: a strategy, for a rule that does not accept all Jacobians: `jacobians(rows=3)`,
            `jacobians(like=params)`. Rules that use other batches or losses get Jacobians of the same shape and
            positive numbers.
        hyper: hyper-parameters by name, each with the range over which the laws are tested.
        settings: settings of hypothesis; by default those of the loaded profile, without deadlines.

    Returns:
        A parametrised pytest test. If a law is broken it raises an `AssertionError`, whose message is the smallest such
        Jacobian, as code to paste into a notebook.

    Guarantees:
        `compiled` is tested on one nonzero Jacobian and variants of it, because every shape needs a compilation; on the
        others the rule must not raise, uncompiled.

    Example:
        >>> def shy(temperature=1.0):
        ...     return stateless(views.gramian, lambda G: torch.softmax(-G.diagonal() / temperature, dim=0))
        >>> test_shy = obeys(shy(), permutation_equivariant, on_the_simplex)
        >>> test_shy_anywhere = obeys(shy, hyper={"temperature": Range(0.1, 10.0)})
    """
    _check(rule, laws, jacobians, hyper, SETTINGS if settings is None else settings)

    @pytest.mark.parametrize("law", laws or (*ALWAYS, hyper_parameters_are_values)[: None if hyper else -1])
    def test(law: Law) -> None:
        __tracebackhide__ = True  # pytest shows the message alone: the example is in it
        example = counterexample(rule, law, jacobians, settings or hypothesis.settings(deadline=None), hyper)
        if example is not None:
            raise AssertionError(f"{law.__name__} is broken: {_message(example.error)}\n\n{example}") from None

    return test


def laws_of(
    rule: Aggregator | Builder,
    *laws: Law,
    jacobians: Cases | None = None,
    hyper: Mapping[str, Range] | None = None,
    settings: hypothesis.settings = SETTINGS,
) -> Findings:
    """Test which laws a rule obeys, on a hundred Jacobians per law, without pytest.

    Args:
        rule: the rule; with `hyper`, a function that builds it.
        laws: the laws to test; default: all of `ALWAYS` and `BY_CLAIM`, and with `hyper` also
            `hyper_parameters_are_values`.
        jacobians: as for `obeys`.
        hyper: as for `obeys`.
        settings: settings of hypothesis; by default 100 examples, the same in every call.

    Returns:
        `Findings`: a dict from the names of the laws to `True` or a `Counterexample`. Print it.

    Guarantees:
        Deterministic. A counterexample disproves a law; `True` means that none was found.
    """
    _check(rule, laws, jacobians, hyper, settings)
    chosen = laws or (*ALWAYS, *BY_CLAIM, hyper_parameters_are_values)[: None if hyper else -1]
    examples = {law.__name__: counterexample(rule, law, jacobians, settings, hyper) for law in chosen}
    return Findings({name: True if example is None else example for name, example in examples.items()})


def counterexample(
    rule: Aggregator | Builder,
    law: Law,
    jacobians: Cases | None,
    settings: hypothesis.settings,
    hyper: Mapping[str, Range] | None = None,
) -> Counterexample | None:
    """Return the smallest case found by hypothesis in which the rule breaks the law, or `None`."""
    strategy = _cases_of(rule, any_jacobians() if jacobians is None else jacobians, hyper or {})
    if law is compiled:
        if (raising := counterexample(rule, runs, jacobians, settings, hyper)) is not None:
            return raising._replace(law=law)
        return _counterexample(rule, law, *_nontrivial_case(strategy, settings))
    failed: list[Counterexample] = []

    def fails(drawn: Drawn) -> bool:
        example = _counterexample(rule, law, *drawn)
        failed[:] = failed if example is None else [example]
        return example is not None

    try:
        find(strategy, fails, settings=settings)
    except NoSuchExample:
        return None
    except Flaky:  # the same case holds in one call and fails in another: the function has a state of its own
        return failed[0]
    return failed[0]


def _check(rule: Any, laws: Any, jacobians: Any, hyper: Any, settings: Any) -> None:
    """Refuse other things than rules, their builders, laws, strategies, ranges, and settings of hypothesis."""
    for law in laws:
        check_function("laws", law, "Pass functions of functional_jd.testing, uncalled.")
    if jacobians is not None:
        check_type("jacobians", jacobians, st.SearchStrategy, "Call it: jacobians(rows=3).")
    check_type("settings", settings, hypothesis.settings, "Pass hypothesis.settings(...).")
    ranges: Any = {} if hyper is None else hyper
    check_mapping("hyper", ranges, "Pass for instance {'c': Range(0.1, 2.0)}.")
    for within in ranges.values():
        check_type("hyper", within, Range, "Pass for instance {'c': Range(0.1, 2.0)}.")
    if ranges and (isinstance(rule, Aggregator) or not callable(rule)):
        expected = f"a function that builds a rule from {', '.join(ranges)}"
        refuse("rule", expected, rule, "Pass cagrad, not cagrad(0.5).")
    check_rule(rule(**{name: within.high for name, within in ranges.items()}) if ranges else rule)


def _built(rule: Aggregator | Builder, hyper: Mapping[str, float]) -> Any:
    return rule(**hyper) if hyper and not isinstance(rule, Aggregator) else rule


def _counterexample(
    rule: Aggregator | Builder, law: Law, case: Case, hyper: Mapping[str, float]
) -> Counterexample | None:
    """Return a counterexample if the law is broken in this case, else `None`.

    The global generator starts again for every case, so that a function which draws from it fails in the same cases.
    """
    jacobian, others, losses = case
    subject = (rule, hyper) if law is hyper_parameters_are_values else (_built(rule, hyper),)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            returned = law(*subject, jacobian, *others, losses=losses)
    except Exception as error:
        return Counterexample(law, jacobian, others, losses, error, hyper)
    if returned is not None:
        raise TypeError(
            f"{law.__name__}: expected a law, which raises AssertionError if it is broken and returns nothing, "
            f"found a function that returns {described(returned)}. Use assert."
        )
    return None


def _nontrivial_case(strategy: Cases, settings: hypothesis.settings) -> Drawn:
    """Return a case with several rows and no leaf of zeros; if there is none, any case."""

    def nontrivial(drawn: Drawn) -> bool:
        leaves = tree_leaves(drawn[0][0])
        return len(leaves[0]) > 1 and all(leaf.any() for leaf in leaves)

    generate_only = hypothesis.settings(settings, phases=[Phase.generate])
    try:
        return find(strategy, nontrivial, settings=generate_only)
    except NoSuchExample:
        return find(strategy, lambda _: True, settings=generate_only)


@st.composite
def _cases_of(draw: st.DrawFn, rule: Aggregator | Builder, jacobians: Cases, ranges: Mapping[str, Range]) -> Drawn:
    """Draw hyper-parameters, a Jacobian, and the other Jacobians and losses that the rule needs."""
    hyper = {name: draw(numbers(within)) for name, within in ranges.items()}
    jacobian = draw(jacobians)
    m = len(tree_leaves(jacobian)[0])
    others, losses = _needed_arguments(_built(rule, hyper), jacobian)
    if others:
        others = (draw(any_jacobians(m, like=tree_map(lambda leaf: leaf[0], jacobian), wide=False)),)
    if losses is not None:
        values = draw(st.lists(st.integers(1, 8).map(float), min_size=m, max_size=m))
        losses = torch.tensor(values, dtype=torch.float64)
    return (jacobian, others, losses), hyper


def _needed_arguments(rule: Aggregator, jacobian: Jacobian) -> tuple[tuple[Jacobian, ...], Losses]:
    """Return the other Jacobians and losses without which the view of the rule raises ValueError."""
    losses = torch.ones(len(tree_leaves(jacobian)[0]), dtype=torch.float64)
    for others, values in (((), None), ((), losses), ((jacobian,), None)):
        try:
            as_view(rule.view)(jacobian, *others, losses=values)
        except ValueError:
            continue
        return others, values
    return (jacobian,), losses


def _message(error: BaseException) -> str:
    """Return the first line of an error message; other than an `AssertionError`, with the name of its type."""
    line = (str(error).strip().splitlines() or [""])[0]
    return line if isinstance(error, AssertionError) else f"{type(error).__name__}: {line}"


def _code(tree: Tree, imports: set[str]) -> str:
    """Return a Python expression for the tree, and add the imports that it needs to `imports`."""
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
