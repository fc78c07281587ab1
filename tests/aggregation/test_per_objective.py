"""Numbers of the user: copied, checked by name where a rule is built, and one per row."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import functional_jd as jd
from functional_jd.aggregation.hyper_parameters import FINITE, PREFERENCES, per_objective, preferences

LOSSES = torch.zeros(3, dtype=torch.float64)
G = torch.eye(2, dtype=torch.float64)


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=4), st.sampled_from([None, FINITE, PREFERENCES]))
def test_what_is_accepted_comes_back_and_nothing_else_is(numbers, domain):
    if domain is PREFERENCES and (min(numbers) < 0 or max(numbers) == 0):
        words = "functional_jd: numbers must be finite and non-negative, with a positive element"
        with pytest.raises(ValueError, match=words):
            per_objective("numbers", numbers, domain)
        return
    found = per_objective("numbers", numbers, domain)(torch.zeros(len(numbers)))
    assert found.dtype == torch.float64
    assert found.tolist() == numbers


def test_a_tensor_is_copied_and_widened():
    given = torch.ones(3)
    of = per_objective("numbers", given)
    given.zero_()
    assert torch.equal(of(LOSSES), torch.ones(3, dtype=torch.float64))


def test_none_is_one_share_each_or_what_the_rule_says():
    assert preferences("preference", None)(torch.eye(4)).tolist() == [0.25] * 4
    assert per_objective("numbers", None, default=lambda m: m + 0.5)(LOSSES).tolist() == [3.5] * 3
    assert preferences("preference", None)(LOSSES).dtype == torch.float64


def test_derivatives_reach_what_was_given_also_batched():
    f = lambda given: per_objective("numbers", given, PREFERENCES)(LOSSES).square().sum()
    given = torch.tensor([[1.0, 2.0, 3.0], [0.0, 1.0, 0.0]])
    torch.testing.assert_close(torch.vmap(torch.func.grad(f))(given), 2 * given)
    torch.compiler.reset()  # the graphs of other tests count against the limit of this one
    compiled = torch.compile(torch.vmap(f), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(given), torch.tensor([14.0, 1.0], dtype=torch.float64))
    u = torch.tensor([1.0, 2.0], dtype=torch.float64)
    assert torch.func.jacrev(lambda u: preferences("preference", u)(G))(u).tolist() == [[1, 0], [0, 1]]
    assert torch.func.jvp(lambda u: preferences("preference", u)(G), (u,), (2 * u,))[1].tolist() == [2, 4]


def test_what_cannot_be_checked_under_a_transform_gives_nan():
    swept = torch.vmap(lambda u: preferences("preference", u)(G))(torch.tensor([[1.0, 2.0], [-1.0, 2.0], [0.0, 0.0]]))
    assert swept.isnan().all(1).tolist() == [False, True, True]
    assert swept[0].tolist() == [1, 2]
    torch.compiler.reset()  # the graphs of other tests count against the limit of this one
    compiled = torch.compile(lambda u: preferences("preference", u)(G), fullgraph=True, backend="aot_eager")
    assert compiled(torch.tensor([-1.0, 2.0])).isnan().all()


def test_a_sequence_may_hold_tensors():
    f = lambda c: preferences("preference", [c, 1 - c])(G)
    c = torch.tensor([0.25, 1.5])
    assert torch.vmap(f)(c).nan_to_num(7).tolist() == [[0.25, 0.75], [7, 7]]
    assert torch.func.jacfwd(f)(c[0]).tolist() == [1, -1]
    words = r"functional_jd: preference must be finite and non-negative, .* found \[1.5, -0.5\]"
    with pytest.raises(ValueError, match=words):
        f(c[1])


def test_numbers_are_checked_within_a_transform_of_something_else():
    with pytest.raises(ValueError, match=r"functional_jd: preference must be .*, found \[-1.0, 2.0\]"):
        torch.vmap(lambda x: preferences("preference", [-1.0, 2.0])(G) * x)(torch.ones(3))


RULES = [
    ("aligned_mtl", "preference", jd.aligned_mtl),
    ("config", "preference", jd.config),
    ("constant", "weights", jd.constant),
    ("cosmos", "weights", lambda u: jd.cosmos(1.0, u)),
    ("dualproj", "preference", jd.dualproj),
    ("epo", "preference", jd.epo),
    ("graddrop", "leak", lambda u: jd.graddrop(jd.random.key(0), u)),
    ("pbi", "reference", lambda z: jd.pbi(1.0, [1.0, 2.0], z)),
    ("pbi", "weights", lambda u: jd.pbi(1.0, u)),
    ("pcd", "tau", jd.pcd),
    ("sdmgrad", "preference", lambda u: jd.sdmgrad(preference=u)),
    ("stch", "reference", lambda z: jd.stch(reference=z)),
    ("stch", "weights", lambda u: jd.stch(weights=u)),
    ("tchebycheff", "reference", lambda z: jd.tchebycheff(reference=z)),
    ("tchebycheff", "weights", lambda u: jd.tchebycheff(weights=u)),
    ("upgrad", "preference", jd.upgrad),
]


@pytest.mark.parametrize(
    ("name", "argument", "build"), RULES, ids=[f"{name}-{argument}" for name, argument, _ in RULES]
)
def test_rules_check_the_numbers_of_objectives(name, argument, build):
    wrong = [[], [[1.0, 2.0]], torch.ones(2, 2)]
    if name != "constant":  # it takes any numbers
        wrong += [[math.nan, 1.0], [math.inf, 0.5], torch.tensor([torch.nan, 1.0])]
        wrong += [] if argument == "reference" else [[-1.0, 0.5], torch.tensor([-1.0, 0.5])]
        wrong += (
            [[0.0, 0.0]] if argument in ("preference", "weights") else [] if argument == "reference" else [[0.5, 2.0]]
        )
    for numbers in wrong:
        with pytest.raises(ValueError, match=rf"^{name}: {argument} must .*found .*\. \S"):
            build(numbers)
    with pytest.raises(TypeError, match=rf"^{name}: {argument} must be a floating-point tensor, found torch.int64"):
        build(torch.ones(2, dtype=torch.int64))
    J = torch.eye(4, dtype=torch.float64)
    with pytest.raises(ValueError, match=rf"^{name}: .*found 2 and (4 rows|3 such objectives)"):
        jd.aggregate(build([0.5, 0.5]), J, None, J, losses=torch.ones(4))
