"""One line tests a rule; what it finds can be pasted into a notebook."""

import contextlib
import importlib.util
import io
import itertools
import re
import subprocess
import sys

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis.strategies import sampled_from

import functional_jd as jd
from functional_jd import testing
from functional_jd.aggregation.views import cross_gramian, gramian, losses
from functional_jd.core.tree import tree_leaves
from functional_jd.optimizers.sgd import SgdState
from functional_jd.testing import ALWAYS, BY_CLAIM, hyper_parameters_are_values, jacobians, laws_of, obeys

torch.set_num_threads(1)
Range, laws = testing.Range, testing.laws

FEW = settings(max_examples=30, derandomize=True, database=None, deadline=None)


def shy(temperature=1.0):
    """Lean towards the objectives whose gradients are small."""
    return jd.stateless(gramian, lambda G: torch.softmax(-G.diagonal() / temperature, dim=0))


test_shy_anywhere = obeys(shy, hyper={"temperature": Range(0.1, 10.0)})


def modest():
    """Lean towards the objectives whose losses are small; looks at another batch as well."""

    def view(jacobian, *others, losses=None):
        return losses_of(jacobian, losses=losses), cross_gramian(jacobian, *others)

    return jd.stateless(view, lambda seen: torch.softmax(-seen[0], dim=0) + 0 * seen[1].sum())


losses_of = losses

test_modest = obeys(modest(), laws.pure, laws.finite, laws.batched, laws.permutation_equivariant)


def shown(law, rule, **options):
    """What a failing test prints, below its first line."""
    with pytest.raises(AssertionError) as caught:
        obeys(rule, law, settings=settings(FEW, phases=[Phase.generate]), **options)(law)  # any case will do
    headline, _, code = str(caught.value).partition("\n\n")
    assert headline.startswith(f"{law.__name__} is broken: ")
    return code


@pytest.mark.parametrize("law", [laws.non_conflicting, laws.compiled], ids=lambda law: law.__name__)
def test_what_a_failing_law_prints_runs_and_fails_in_the_same_way(law):
    rule = (
        jd.mean() if law is laws.non_conflicting else jd.stateless(gramian, lambda G: G[0] if G[0, 0] > 1 else 0 * G[0])
    )
    code = shown(law, rule)
    with pytest.raises((AssertionError, RuntimeError)):
        exec(code, {"rule": rule})
    exec(code, {"rule": jd.upgrad()})  # it fails because of the rule


def test_other_batches_and_losses_are_printed_too():
    code = shown(laws.non_conflicting, modest())
    assert "J2 = torch.tensor(" in code
    assert "losses = torch.tensor(" in code
    with pytest.raises(AssertionError, match="conflicted"):
        exec(code, {"rule": modest()})


def test_trees_are_printed_with_their_containers():
    tree = {"a": [torch.zeros(2)], "b": SgdState(torch.zeros(()), (torch.zeros(1),))}
    code = shown(laws.non_conflicting, jd.mean(), jacobians=jacobians(like=tree))
    scope = {"rule": jd.mean()}
    with pytest.raises(AssertionError, match="conflicted"):
        exec(code, scope)
    assert type(scope["J"]["b"]) is SgdState
    assert [leaf.shape[1:] for leaf in tree_leaves(scope["J"])] == [(2,), (), (1,)]


def stiff(temperature=1.0):
    """A rule whose law fails from a temperature of 5 on, and whose temperature is not differentiable."""
    number = float(temperature.detach()) if isinstance(temperature, torch.Tensor) else temperature
    return jd.mean() if number > 5 else jd.upgrad()


@pytest.mark.parametrize("law", [laws.non_conflicting, hyper_parameters_are_values], ids=lambda law: law.__name__)
def test_hyper_parameters_are_drawn_and_printed(law):
    code = shown(law, stiff, hyper={"temperature": Range(0.0, 10.0)})
    assert "{'temperature': " in code
    with pytest.raises((AssertionError, RuntimeError)):
        exec(code, {"build": stiff})
    exec(code, {"build": lambda temperature: jd.upgrad()})  # it fails because of the rule


def test_without_laws_those_of_all_rules_are_meant_and_with_hyper_parameters_theirs():
    for found, expected in (
        (obeys(shy()), ALWAYS),
        (obeys(shy(), laws.finite), (laws.finite,)),
        (obeys(shy, hyper={"temperature": Range(0.1, 10.0)}), (*ALWAYS, hyper_parameters_are_values)),
    ):
        assert found.pytestmark[0].args == ("law", expected)
    found = laws_of(shy, hyper={"temperature": Range(0.1, 10.0)}, settings=settings(FEW, max_examples=5))
    assert found["hyper_parameters_are_values"]


@pytest.mark.parametrize("ask", [obeys, laws_of])
def test_a_rule_or_with_hyper_parameters_its_builder_is_needed(ask):
    with pytest.raises(TypeError, match=r"aggregator must be a rule, found function. Call its builder"):
        ask(jd.upgrad)
    with pytest.raises(TypeError, match="rule must be a function that builds a rule from temperature, found Agg"):
        ask(shy(), hyper={"temperature": Range(0.1, 10.0)})


def test_a_law_of_one_s_own():
    def short(rule, jacobian, *others, losses=None):
        assert len(jacobian) < 3, "too long"

    assert not laws_of(jd.mean(), short)["short"]
    assert laws_of(jd.mean(), short, jacobians=jacobians(rows=2))["short"]


def test_a_rule_gets_only_what_it_needs_and_other_batches_of_small_integers():
    seen = []

    def watching(rule, jacobian, *others, losses=None):
        seen.append((others, losses))

    laws_of(jd.mean(), watching, settings=FEW)
    assert all(case == ((), None) for case in seen)
    seen.clear()
    laws_of(jd.stateless(cross_gramian, lambda C: C.sum(1)), watching, settings=FEW)
    assert all(losses is None for _, losses in seen)
    others = torch.cat([other.flatten() for (other,), _ in seen])
    assert torch.equal(others, others.round())
    assert 0 < others.abs().max() <= 16


def test_a_search_is_the_same_each_time_and_leaves_the_generators_as_they_are():
    def run(seed):
        seen = []

        def watching(rule, jacobian, *others, losses=None):
            seen.append((jacobian.tolist(), float(torch.rand(()))))

        torch.manual_seed(seed)
        before = torch.get_rng_state()
        laws_of(jd.mean(), watching)
        assert torch.equal(torch.get_rng_state(), before)
        return seen

    assert run(1) == run(2)


def test_what_fails_only_once_is_found_too():
    calls = itertools.count()

    def once(rule, jacobian, *others, losses=None):
        assert next(calls) != 5, "only once"

    assert "only once" in str(laws_of(jd.mean(), once, settings=FEW)["once"].error)


def test_without_a_profile_a_search_is_the_same_each_time():
    code = (
        "from functional_jd import mean; from functional_jd.testing import laws_of; seen = [], []\n"
        "for cases in seen:\n"
        "    laws_of(mean(), lambda rule, jacobian, losses=None: cases.append(jacobian.tolist()))\n"
        "assert len(seen[0]) > 50 and seen[0] == seen[1]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_one_case_of_several_rows_is_compiled(monkeypatch):
    seen = []
    monkeypatch.setattr(testing.conformance, "runs", lambda *_, **__: None)  # what is not compiled

    def weigh(G):
        if not torch.compiler.is_compiling():
            seen.append(len(G))
        return torch.ones_like(G[0])

    cases = sampled_from([torch.ones(m, 2, dtype=torch.float64) for m in (1, 2, 3)])
    assert laws_of(jd.stateless(gramian, weigh), laws.compiled, jacobians=cases, settings=FEW)["compiled"]
    assert len(set(seen)) == 1
    assert seen[0] > 1


def test_a_rule_that_raises_for_few_rows_does_not_compile_there_either():
    def weigh(G):
        if len(G) == 1:
            raise ArithmeticError("one row")
        return torch.ones_like(G[0])

    cases = sampled_from([torch.ones(m, 2, dtype=torch.float64) for m in (1, 2, 3)])
    found = laws_of(jd.stateless(gramian, weigh), laws.compiled, jacobians=cases, settings=FEW)
    assert "compiled                  broken\n    # ArithmeticError: one row\n" in str(found)
    assert "from functional_jd.testing.laws import compiled" in str(found)
    assert found["compiled"].jacobian.shape == (1, 2)


def test_one_row_is_compiled_too():
    broken = jd.stateless(gramian, lambda G: G[0] if G[0, 0] > 1 else 0 * G[0])
    assert not laws_of(broken, laws.compiled, jacobians=jacobians(rows=1))["compiled"]


def test_laws_of_tells_which_hold_and_reads_well():
    claims = [law for law in BY_CLAIM if law is not laws.strongly_stationary]
    findings = laws_of(jd.mean(), *claims, settings=FEW)
    assert {name for name, found in findings.items() if not found} == {"non_conflicting"}
    assert list(findings) == [law.__name__ for law in claims]
    lines = str(findings).splitlines()
    assert lines[0].split() == ["permutation_equivariant", "holds"]
    assert lines[1].split() == ["non_conflicting", "broken"]
    assert "    J = torch.tensor([[1.0], [-2.0]], dtype=torch.float64)" in lines


def test_pytest_names_the_cases_after_the_laws_and_prints_little_more_than_the_counterexample(tmp_path):
    path = tmp_path / "test_of_mine.py"
    path.write_text(
        "from functional_jd import mean, stateless\n"
        "from functional_jd.testing import compiled, non_conflicting, obeys, pure\n"
        "from functional_jd.views import gramian\n"
        "test_mean = obeys(mean(), pure, non_conflicting)\n"
        "test_branch = obeys(stateless(gramian, lambda G: G[0] if G[0, 0] > 1 else 0 * G[0]), compiled)\n"
    )
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        pytest.main(["-q", "-rA", "-c", "/dev/null", "--rootdir", str(tmp_path), "-p", "no:cacheprovider", str(path)])
    out = printed.getvalue()
    outcomes = dict(reversed(line) for line in re.findall(r"^(PASSED|FAILED) \S*::(\S+)", out, flags=re.MULTILINE))
    failed = dict.fromkeys(["test_mean[non_conflicting]", "test_branch[compiled]"], "FAILED")
    assert outcomes == {"test_mean[pure]": "PASSED"} | failed
    failures = out.partition("= FAILURES =")[2].partition("= PASSES =")[0]
    _, first, second = re.split(r"\n_+ test_.* _+\n", failures)
    for failure, law in (first, "non_conflicting"), (second.partition("Captured log")[0], "compiled"):  # which logs
        lines = [line.removeprefix("E").strip() for line in failure.splitlines()]
        assert len(lines) <= 15
        last = next(i for i, line in enumerate(lines) if line.startswith(f"{law}(rule, J)"))
        assert lines.index("import torch") < last  # the code of the other test


@pytest.mark.parametrize("missing", ["hypothesis", "pytest", "scipy"])
def test_a_missing_extra_is_named_with_its_cure(missing, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else find_spec(name))
    with pytest.raises(ImportError) as caught:
        importlib.reload(testing)
    assert str(caught.value) == (
        f"functional_jd.testing: needs hypothesis, pytest and scipy, found no {missing}. "
        'Install them: pip install "functional_jd[test]".'
    )
