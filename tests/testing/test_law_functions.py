"""Every law can fail: for each there is a rule that breaks it, and one that keeps it."""

import hypothesis
import numpy as np
import pytest
import torch

import functional_jd as jd
from functional_jd.aggregation.views import full_jacobian, gramian, no_gradients
from functional_jd.core.tree import tree_flatten, tree_map
from functional_jd.testing import laws, laws_of
from functional_jd.testing.conformance import SETTINGS

FOUND = hypothesis.settings(SETTINGS, phases=[hypothesis.Phase.generate])  # any counterexample will do
torch.set_num_threads(1)

J = torch.tensor([[-4.0, 1.0, 1.0], [6.0, 1.0, 1.0], [1.0, 0.0, -2.0]], dtype=torch.float64)
ones = torch.ones_like


def forgetful(update, init=lambda view: ()):
    return jd.Aggregator(no_gradients, init, update)


def counting():
    calls = []

    def weigh(view):
        calls.append(1)
        return len(calls) * ones(view)

    return jd.stateless(no_gradients, weigh)


def remembering(weigh, after=lambda state: state + 1):
    """Its weights depend on how many steps there were."""
    init = lambda view: view.new_zeros(())
    return jd.Aggregator(no_gradients, init, lambda view, steps: (weigh(steps) * ones(view), after(steps)))


class Doubled(torch.autograd.Function):
    """A copy, but twice that under vmap."""

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def vmap(info, in_dims, x):
        return 2 * x, in_dims[0]


def tallying():
    """Right weights, and a tally of all calls in a tensor of the closure."""
    tally = torch.zeros(2)

    def weigh(view):
        tally[0].add_(1)
        return ones(view)

    return jd.stateless(no_gradients, weigh)


def leaves(J):
    return len(tree_flatten(J)[0])


SINGULAR = jd.stateless(gramian, lambda G: ones(G[0]) / torch.linalg.det(G))
BRANCHING = jd.stateless(gramian, lambda G: ones(G[0]) if G[0, 0] > 1 else 0 * G[0])  # vmap and compile cannot follow
NORMALISING = jd.stateless(gramian, lambda G: 1 / G.diagonal().sqrt())
NOTHING = jd.stateless(no_gradients, torch.zeros_like)
BROKEN = {
    "counts calls": (laws.pure, counting()),
    "changes its input": (laws.pure, jd.stateless(full_jacobian, lambda J: J.mul_(2)[:, 0])),
    "changes what it sees": (laws.pure, jd.stateless(gramian, lambda G: ones(G.diagonal().mul_(2)))),
    "counts calls in a tensor": (laws.pure, tallying()),
    "draws from torch": (laws.pure, jd.stateless(no_gradients, lambda view: torch.rand(len(view), dtype=view.dtype))),
    "state changes form": (laws.shaped, forgetful(lambda view, state: (ones(view), (view,)))),
    "weights in half precision": (laws.shaped, jd.stateless(no_gradients, lambda view: ones(view).half())),
    "counts leaves": (laws.tree_equals_flat, jd.stateless(full_jacobian, lambda J: leaves(J) * (no_gradients(J) + 1))),
    "divides by zero": (laws.finite, SINGULAR),
    "divides by zero in its third step": (laws.finite, remembering(lambda steps: 1 / (2 - steps))),
    "differs under vmap in its second step": (laws.batched, remembering(lambda steps: 1 + Doubled.apply(steps))),
    "decides in Python when it starts": (
        laws.compiled,
        forgetful(lambda view, state: (ones(view), state), lambda view: view[0] if view.sum() > 0 else ones(view[0])),
    ),
    "decides in Python": (laws.batched, BRANCHING),
    "decides in Python too": (laws.compiled, BRANCHING),
    "squares in half precision": (
        laws.low_precision,
        jd.stateless(full_jacobian, lambda J: 1 / (1 + (J * J).sum(1)).double()),
    ),
    "raises": (laws.non_finite, jd.stateless(gramian, lambda G: torch.linalg.eigh(G).eigenvalues)),
    "the first row only": (
        laws.permutation_equivariant,
        jd.stateless(no_gradients, lambda view: ones(view) * (torch.arange(len(view)) == 0)),
    ),
    "the mean": (laws.non_conflicting, jd.mean()),
    "unit rows": (laws.homogeneous, NORMALISING),
    "unit rows too": (laws.linear_under_row_scaling, NORMALISING),
    "no weight": (laws.on_the_simplex, NOTHING),
    "stands still": (laws.weakly_stationary, NOTHING),
    "stands still too": (laws.strongly_stationary, NOTHING),
    "looks at entries": (laws.rotation_blind, jd.stateless(full_jacobian, lambda J: J[:, 0])),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_rule_that_breaks_the_law_is_caught(name):
    law, rule = BROKEN[name]
    found = laws_of(rule, law, settings=FOUND)[law.__name__]
    assert not found
    with pytest.raises((AssertionError, RuntimeError)):  # and the counterexample is one, without any search
        law(rule, found.jacobian.clone())


@pytest.mark.parametrize("law", laws.ALWAYS + laws.BY_CLAIM, ids=lambda law: law.__name__)
def test_every_law_has_a_rule_that_breaks_it_and_a_source(law):
    assert law in {law for law, _ in BROKEN.values()}
    assert "Source: " in law.__doc__


def test_hidden_infinities_are_not_overlooked():
    # Zero times inf is nan: only a rule that replaces entries could hide them, and `aggregate` does not let it.
    finite = lambda J: tree_map(lambda leaf: torch.where(leaf.isfinite(), 1, 0), J)
    laws.non_finite(jd.stateless(full_jacobian, finite), J)
    # Weights that stay finite hide nothing: what is weighed does not stay so.
    laws.non_finite(jd.stateless(gramian, lambda G: torch.softmax(-G.nan_to_num(0, 0, 0).diagonal(), 0)), J)


def starting_in(memory):
    return jd.Aggregator(no_gradients, lambda view: memory.add_(1).clone(), lambda view, state: (ones(view), state))


CLOSURE = r"writes into a tensor \[2?\] that is not part of its view or state"
IMPURE = {
    "state": (remembering(lambda n: 1, lambda n: n.add_(1).clone()), "the state that was passed has changed"),
    "losses": (jd.stateless(lambda jacobian, losses: losses, lambda x: ones(x.mul_(2))), "an argument has changed"),
    "generator": (jd.stateless(no_gradients, lambda x: ones(x) + 0 * torch.rand(1)), "generator was used"),
    "closure of update": (tallying(), CLOSURE),
    "closure of init": (starting_in(torch.zeros(2)), CLOSURE),
}


@pytest.mark.parametrize("name", IMPURE)
def test_an_impure_rule_is_told_what_it_changes(name):
    rule, message = IMPURE[name]
    with pytest.raises(AssertionError, match=message):
        laws.pure(rule, J, losses=torch.ones(3, dtype=torch.float64))


def written(view):
    numbers = torch.from_numpy(np.ones(len(view)))
    return numbers.mul_(2).add_(torch.tensor(1.0).sub_(1)).index_fill_(0, torch.tensor([0]), 1)


def test_a_rule_may_write_into_what_it_made_itself():
    laws.pure(jd.stateless(no_gradients, written), J)
    later = remembering(lambda steps: 1 + steps, lambda steps: steps.clone().add_(1))
    laws.pure(later, J)


def test_what_is_not_a_number_twice_is_the_same():
    laws.pure(SINGULAR, torch.zeros(2, 2, dtype=torch.float64))


def refusing(bad):
    """Raises where `bad(steps, *Jacobians)`."""

    def weigh(jacobians, steps):
        if bad(steps, *jacobians):
            raise ArithmeticError
        return ones(jacobians[0][:, 0]) + 0 * sum(x.sum() for x in jacobians), steps + 1

    return jd.Aggregator(lambda *jacobians, losses: jacobians, lambda jacobians: torch.zeros(()), weigh)


def test_every_place_of_what_is_not_finite_is_tried():
    for bad in (
        lambda steps, first, second: first[0].isnan().any(),
        lambda steps, first, second: first[-1].isposinf().any(),
        lambda steps, first, second: first[0].isneginf().any(),
        lambda steps, first, second: steps > 0 and not first.isfinite().all(),
        lambda steps, first, second: not second.isfinite().all(),
    ):
        with pytest.raises(ArithmeticError):
            laws.non_finite(refusing(bad), J, J)
    laws.non_finite(refusing(lambda steps, *jacobians: False), J, J)


def weighted(*weights):
    return jd.stateless(no_gradients, lambda view: torch.tensor(weights, dtype=torch.float64))


def by_gramian(weigh):
    return jd.stateless(gramian, weigh)


def test_what_shows_only_in_some_cases_is_caught_in_them():
    for law, rule, jacobian, message in (
        (laws.permutation_equivariant, weighted(1, 2, 1), J, "the order of the rows matters"),
        (laws.non_conflicting, jd.mean(), [[1.0], [-(2.0**-40)]], "conflicted"),
        (laws.homogeneous, by_gramian(lambda G: G.diagonal() / (G.trace() + 2.0**-50)), J, "times 9.09"),
        (laws.homogeneous, by_gramian(lambda G: ones(G[0]) / (1 + G.trace() * 2.0**-60)), J, "times 1.09"),
        (laws.linear_under_row_scaling, by_gramian(lambda G: G.diagonal() / G.trace()), J, "not linear"),
        (laws.on_the_simplex, weighted(1.5, -0.5), J[:2], "negative weights"),
    ):
        with pytest.raises(AssertionError, match=message):
            law(rule, torch.as_tensor(jacobian, dtype=torch.float64))


def test_a_direction_with_a_zero_in_it_is_not_zero():
    for law in (laws.weakly_stationary, laws.strongly_stationary):
        law(jd.mean(), torch.tensor([[1.0, 0.0], [2.0, 0.0]], dtype=torch.float64))


def remembers(update, init=lambda G: G.new_zeros(())):
    return jd.Aggregator(gramian, init, update)


def rolled(G, before):
    """Every row gets the weight that another one had before."""
    return 1 + before.roll(1), G.diagonal().clone()


def narrower(J, steps):
    """Its weights depend on the dtype of the rows."""
    weights = torch.ones(len(J), dtype=torch.float64)
    return weights * (1 + steps * (J.dtype != torch.float64)), steps + 1


LATER = [
    (laws.on_the_simplex, remembers(lambda G, n: (ones(G[0]) * (1 + n) / len(G), n + 1))),
    (laws.non_conflicting, remembers(lambda G, w: (jd.upgrad().update(w + G, ())[0], w + G), torch.zeros_like)),
    (laws.permutation_equivariant, remembers(rolled, lambda G: torch.zeros_like(G[0]))),
    (laws.homogeneous, remembers(lambda G, n: (ones(G[0]) + n * G.diagonal(), n + 1))),
    (laws.linear_under_row_scaling, remembers(lambda G, n: (ones(G[0]) + n * G.diagonal(), n + 1))),
    (laws.weakly_stationary, remembers(lambda G, n: (ones(G[0]) * (1 - n), n + 1))),
    (laws.strongly_stationary, remembers(lambda G, n: (ones(G[0]) * (1 - n), n + 1))),
    (laws.low_precision, jd.Aggregator(full_jacobian, lambda J: J.new_zeros((), dtype=torch.float64), narrower)),
    (laws.finite, remembers(lambda G, old: (ones(G[0]) / (old == G).all(), old), torch.clone)),
    (laws.shaped, remembers(lambda G, old: (ones(G[0]), G.diagonal()), lambda G: torch.zeros_like(G[0]))),
]


@pytest.mark.parametrize(("law", "rule"), LATER, ids=[law.__name__ for law, _ in LATER])
def test_what_goes_wrong_in_a_later_step_is_noticed(law, rule):
    first = jd.Aggregator(rule.view, lambda view: (), lambda view, _: (rule.update(view, rule.init(view))[0], ()))
    assert laws_of(first, law)[law.__name__]  # nothing is wrong in the first step
    assert not laws_of(rule, law, settings=FOUND)[law.__name__]


def test_an_initial_state_that_is_another_while_it_is_traced_is_noticed():
    zero = lambda G: G.new_zeros((), dtype=torch.float32 if torch.compiler.is_compiling() else torch.float64)
    rule = jd.Aggregator(gramian, zero, lambda G, state: (G.diagonal(), state))
    with pytest.raises(AssertionError, match="the initial state of the compiled rule differs"):
        laws.compiled(rule, J)


def test_a_law_that_returns_instead_of_raising_is_refused():
    words = r"^silent: expected a law, which raises .*, found a function that returns .*Use assert"
    with pytest.raises(TypeError, match=words):
        laws_of(jd.mean(), silent)


def silent(rule, jacobian, *others, losses=None):
    return False
