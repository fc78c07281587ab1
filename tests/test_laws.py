"""Rule by rule and law by law: what is claimed holds, and what must not hold does not.

Claims are tested with hyper-parameters from their whole ranges.

The table is `rule_table.RULES`: a new rule is one entry there.
"""

import inspect
import itertools
import pkgutil
from functools import partial

import hypothesis
import pytest
import torch
from rule_table import RULES, builder, jacobians_for, rule_of

from functional_jd import aggregators, testing
from functional_jd.aggregation.aggregate import aggregate
from functional_jd.aggregation.hyper_parameters import Numbers
from functional_jd.aggregation.views import cross_gramian
from functional_jd.core.arguments import Number
from functional_jd.core.tree import tree_leaves
from functional_jd.testing import ALWAYS, BY_CLAIM, hyper_parameters_are_values, jacobians, laws_of
from functional_jd.testing.conformance import counterexample

PROFILE = hypothesis.settings()
CLAIMED = hypothesis.settings(max_examples=max(10, PROFILE.max_examples // 2))
# What must be broken need not be broken in a small way.
BROKEN = hypothesis.settings(max_examples=400, phases=[hypothesis.Phase.generate])

# Broken by Jacobians that chance hardly ever draws.
WITNESSES = {
    ("krum", "strongly_stationary"): [[0.0], [0.0], [1.0], [1.0]],
    ("trimmed_mean", "weakly_stationary"): [[1.0, -2.0, 0.0], [0.0, 1.0, -2.0], [-2.0, 0.0, 1.0]],
}


def cases():
    for name, entry in RULES.items():
        for law in ALWAYS + BY_CLAIM:
            if law in ALWAYS or law in entry.claims or law in entry.where or law in entry.fails:
                yield pytest.param(name, law, id=f"{name}-{law.__name__}")
        if entry.hyper:
            yield pytest.param(name, hyper_parameters_are_values, id=f"{name}-hyper_parameters_are_values")


@pytest.mark.parametrize(("name", "law"), list(cases()))
def test_law(name, law):
    rule, entry = rule_of(name), RULES[name]
    broken = law in entry.fails and law not in entry.where
    if (name, law.__name__) in WITNESSES:
        assert broken
        with pytest.raises(AssertionError):
            law(rule, torch.tensor(WITNESSES[name, law.__name__], dtype=torch.float64))
        return
    ranges = {} if broken else {**entry.hyper, **entry.where.get(law, {})}
    # Each example of hyper-parameters takes a dozen trainings of three steps.
    few = hypothesis.settings(CLAIMED, max_examples=max(6, CLAIMED.max_examples // 2))
    examples = BROKEN if broken else few if law is hyper_parameters_are_values else CLAIMED
    found = counterexample(partial(rule_of, name) if ranges else rule, law, jacobians_for(name), examples, ranges)
    if found is not None and not isinstance(found.error, AssertionError):
        raise found.error  # a law that does not run shows nothing
    if broken:
        assert found is not None, f"{name} obeys {law.__name__}, although {entry.fails[law]}"
    elif found is not None:
        raise AssertionError(f"{name} breaks {law.__name__}: {found.error}\n\n{found}") from found.error


SWEPT = [name for name, entry in RULES.items() if entry.hyper]


def test_every_number_that_a_rule_takes_is_a_hyper_parameter():
    parameters = [(name, p) for name in RULES for p in inspect.signature(builder(name)).parameters.values()]
    numbers = {(name, p.name) for name, p in parameters if p.annotation in (float, Number, Number | Numbers)}
    assert numbers == {(name, hyper) for name in SWEPT for hyper in RULES[name].hyper}


J = torch.tensor([[2.0, -1, 3, 0], [-1, 2, 1, 1], [1, 1, -3, 2]], dtype=torch.float64)


def step(rule, rows, state):
    """With losses and another batch where the rule uses them."""
    others = (rows.roll(1, 1),) if rule.view is cross_gramian else ()
    return aggregate(rule, rows, state, *others, losses=rows.square().sum(1) / 8)


TWO = J, J.roll(1, 1) + 0.5


def steps(rule, jacobians=TWO):
    """The directions of a step for each Jacobian."""
    state, found = None, []
    for rows in jacobians:
        result = step(rule, rows, state)
        state = result.state
        found.append(result.direction)
    return torch.stack(found)


TABLED = [name for name in RULES if name != "grouped"]  # tests/aggregators/test_grouped.py has its trees


def rows_of(name):
    return torch.cat([J, J[:1] - 0.5]) if name == "krum" else J


@pytest.mark.parametrize("name", TABLED)
def test_a_batch_of_gradients_is_the_loop_and_compiles_into_one_graph(name):
    """By the rows, also through the losses, and by all hyper-parameters."""
    build, f, ranges = RULES[name].build, builder(name), RULES[name].hyper  # torch.compile traces no import
    rows = rows_of(name)
    remembers = tree_leaves(step(rule_of(name), rows, None).state)

    def size(rows, fractions):
        pairs = zip(ranges.items(), fractions, strict=True)
        hyper = {number: within.low + t * (within.high - within.low) for (number, within), t in pairs}
        jacobians = (rows, rows.roll(1, 1) + 0.5) if remembers else (rows,)
        return steps(build(f, **hyper), jacobians).square().sum()

    sweep = torch.linspace(0.2, 0.7, 2 * len(ranges), dtype=torch.float64).reshape(2, len(ranges))
    cases, gradient = (torch.stack([rows, 2 * rows.flip(0)]), sweep), torch.func.grad(size, (0, 1))
    expected = tuple(map(torch.stack, zip(*(gradient(*case) for case in zip(*cases, strict=True)), strict=True)))
    torch.testing.assert_close(torch.vmap(gradient)(*cases), expected)
    torch.compiler.reset()  # the graphs of other tests count against the limit of this one
    in_one_graph = torch.compile(torch.vmap(gradient), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(in_one_graph(*cases), expected)


@pytest.mark.parametrize("name", TABLED)
def test_rows_of_zeros_give_zeros(name):
    rule, rows = rule_of(name), rows_of(name)
    others = (0 * rows,) if rule.view is cross_gramian else ()
    assert not aggregate(rule, 0 * rows, None, *others, losses=rows.abs().sum(1)).direction.any()


@pytest.mark.parametrize("name", TABLED)
def test_rows_that_are_not_finite_change_no_other_element_of_a_batch(name):
    rule, rows = rule_of(name), rows_of(name)
    take = torch.vmap(lambda rows: step(rule, rows, None)[:2])
    for bad, row, first in itertools.product((torch.nan, torch.inf, -torch.inf), (1, -1), (0.0, 1.0)):
        batch = torch.stack([rows, 2 * rows.flip(0), rows - 0.5])
        batch[:, 0] *= first  # a row of zeros may have all the weight
        expected, _ = take(batch)
        batch[1, row, 2] = bad
        found, weights = take(batch)
        assert not found[1].isfinite().all()
        torch.testing.assert_close(found[[0, 2]], expected[[0, 2]], equal_nan=True)
        if rule.view.products == "gramian":
            assert found[1].isnan().all()
            assert weights[1, int(first == 0.0) :].isnan().all()  # some leave a row of zeros out


@pytest.mark.parametrize(("name", "hyper"), [(name, hyper) for name in SWEPT for hyper in RULES[name].hyper])
def test_a_number_out_of_range_is_refused_and_a_tensor_gives_nan(name, hyper):
    with pytest.raises(ValueError, match=rf"^{name}: {hyper} must be .*, found -1.0. "):
        rule_of(name, **{hyper: -1.0})
    assert steps(rule_of(name, **{hyper: torch.tensor(-1.0)}))[-1].isnan().all()


U, Z = [0.5, 1.0, 0.25], [0.1, -0.5, 0.25]
OPTIONS = {
    "aligned_mtl": [{"preference": U, "scale_mode": "median"}, {"scale_mode": "rmse"}],
    "config": [{"preference": U}],
    "dualproj": [{"preference": U}],
    "excess_mtl": [{"n_warmup": 0}],
    "natural_gradient": [
        *({"damping": 0}, {"damping": 0.1, "relative": True}, {"damping": 0.1, "rank": 2}),
        {"damping": 0.1, "rank": 2, "momentum": 0.5},
    ],
    "nash_mtl": [{"every": 2}, {"every": 3, "max_norm": 0.0}],
    "pbi": [{"theta": 5.0, "weights": U, "reference": Z}],
    "sdmgrad": [{"rate": 0.1, "n_steps": 2, "preference": U}],
    "stch": [{"mu": 0.5, "weights": U, "reference": Z}],
    "tchebycheff": [{"weights": U, "reference": Z}],
    "upgrad": [{"preference": U}],
}
"""What the table leaves at its default: other ways through the same rules, for three rows."""


@pytest.mark.parametrize(("name", "options"), [(name, how) for name, several in OPTIONS.items() for how in several])
def test_rules_with_options_obey_the_laws_of_transforms(name, options):
    few = hypothesis.settings(max_examples=8, derandomize=True, database=None, deadline=None)
    laws = testing.batched, testing.compiled, testing.differentiable, testing.non_finite
    found = laws_of(builder(name)(**options), *laws, jacobians=jacobians(3, wide=RULES[name].wide), settings=few)
    assert all(value is True for value in found.values()), found


def test_every_rule_of_the_package_stands_in_the_table():
    pairs = {"alternating"}  # a rule and an optimizer, which have tests of their own
    assert {module.name for module in pkgutil.iter_modules(aggregators.__path__)} - pairs == RULES.keys()


def test_no_law_is_both_claimed_and_denied_and_all_are_by_claim():
    found = []
    for name, entry in RULES.items():
        claims, fails, where = set(entry.claims), set(entry.fails), set(entry.where)
        found += [f"{name} claims and denies {law.__name__}" for law in claims & (fails | where)]
        found += [f"{name}: {law.__name__} is not by claim" for law in (claims | fails | where) - set(BY_CLAIM)]
        found += [
            f"{name} has no {hyper}" for ranges in entry.where.values() for hyper in ranges if hyper not in entry.hyper
        ]
    assert not found, "\n".join(found)
