"""Every law can fail: for each there is a rule that breaks it, and one that keeps it."""

import pytest
import torch

from functional_jd.aggregation.aggregate import Aggregator
from functional_jd.aggregation.lifts import stateless
from functional_jd.aggregation.views import full_jacobian, gramian, losses, no_gradients
from functional_jd.aggregators.mean import mean
from functional_jd.aggregators.upgrad import upgrad
from functional_jd.core.tree import tree_flatten, tree_map
from functional_jd.testing import laws, laws_of

torch.set_num_threads(1)

J = torch.tensor([[-4.0, 1.0, 1.0], [6.0, 1.0, 1.0], [1.0, 0.0, -2.0]], dtype=torch.float64)
ones = torch.ones_like


def forgetful(update, init=lambda view: ()):
    return Aggregator(no_gradients, init, update)


def counting():
    calls = []

    def weigh(view):
        calls.append(1)
        return len(calls) * ones(view)

    return stateless(no_gradients, weigh)


def scribbling():
    return stateless(full_jacobian, lambda J: J.mul_(2)[:, 0])


def chance():
    return stateless(no_gradients, lambda view: torch.rand(len(view), dtype=view.dtype))


def growing():
    """Its state is another one after the first call."""
    return forgetful(lambda view, state: (ones(view), (view,)))


def half():
    return stateless(no_gradients, lambda view: ones(view).half())


def singular():
    """Divides by a determinant."""
    return stateless(gramian, lambda G: ones(G[0]) / torch.linalg.det(G))


def synchronous():
    """Decides in Python, which neither vmap nor compile can follow."""
    return stateless(gramian, lambda G: ones(G[0]) if G[0, 0] > 1 else 0 * G[0])


def leafy():
    """Counts leaves."""
    return stateless(full_jacobian, lambda J: len(tree_flatten(J)[0]) * no_gradients(J) + len(tree_flatten(J)[0]))


def narrow():
    """Weighs in the dtype of the Jacobian: squares overflow in float16."""
    return stateless(full_jacobian, lambda J: 1 / (1 + (J * J).sum(1)).double())


def hiding():
    return stateless(full_jacobian, lambda J: tree_map(lambda leaf: torch.where(leaf.isfinite(), 1, 0), J))


def sanitised():
    """Weights that stay finite hide nothing: what is weighed does not stay so."""
    return stateless(gramian, lambda G: torch.softmax(-G.nan_to_num(0, 0, 0).diagonal(), 0))


def raising():
    return stateless(gramian, lambda G: torch.linalg.eigh(G).eigenvalues)


def first():
    return stateless(no_gradients, lambda view: ones(view) * (torch.arange(len(view)) == 0))


def normalising():
    return stateless(gramian, lambda G: 1 / G.diagonal().sqrt())


def nothing():
    return stateless(no_gradients, torch.zeros_like)


BROKEN = {
    "counts calls": (laws.pure, counting),
    "changes its input": (laws.pure, scribbling),
    "draws from torch": (laws.pure, chance),
    "state changes form": (laws.shaped, growing),
    "weights in half precision": (laws.shaped, half),
    "looks at the first leaf only": (laws.tree_equals_flat, leafy),
    "decides in Python": (laws.batched, synchronous),
    "decides in Python too": (laws.compiled, synchronous),
    "squares in half precision": (laws.low_precision, narrow),
    "raises": (laws.non_finite, raising),
    "the first row only": (laws.permutation_equivariant, first),
    "the mean": (laws.non_conflicting, mean),
    "unit rows": (laws.homogeneous, normalising),
    "unit rows too": (laws.linear_under_row_scaling, normalising),
    "no weight": (laws.on_the_simplex, nothing),
    "stands still": (laws.weakly_stationary, nothing),
    "stands still too": (laws.strongly_stationary, nothing),
    "looks at entries": (laws.rotation_blind, lambda: stateless(full_jacobian, lambda J: J[:, 0])),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_rule_that_breaks_the_law_is_caught(name):
    law, build = BROKEN[name]
    found = laws_of(build(), law)[law.__name__]
    assert not found
    with pytest.raises((AssertionError, RuntimeError)):  # and the counterexample is one, without any search
        law(build(), found.jacobian.clone())


@pytest.mark.parametrize("law", laws.ALWAYS + laws.BY_CLAIM, ids=lambda law: law.__name__)
def test_every_law_has_a_rule_that_breaks_it_and_a_source(law):
    assert law in {law for law, _ in BROKEN.values()} | {laws.finite}
    assert "Source: " in law.__doc__


def test_a_division_by_zero_is_not_finite():
    found = laws_of(singular(), laws.finite)["finite"]
    assert not found
    assert torch.linalg.det(found.jacobian @ found.jacobian.mT).abs() < 1e-12


def test_hidden_infinities_are_not_overlooked():
    # Zero times inf is nan: only a rule that replaces entries could hide them, and `aggregate` does not let it.
    laws.non_finite(hiding(), J)
    laws.non_finite(sanitised(), J)


@pytest.mark.parametrize("law", [*laws.ALWAYS, *laws.BY_CLAIM], ids=lambda law: law.__name__)
def test_upgrad_and_mean_keep_them_on_the_example_of_the_paper(law):
    law(mean() if law is laws.on_the_simplex else upgrad(), J[:2])


def test_laws_take_trees_and_losses():
    rule = stateless(losses, lambda values: values)
    tree = {"w": J.unsqueeze(2), "b": J[:, 0]}
    for law in laws.ALWAYS:
        law(rule, tree, losses=torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
