"""Trained and constant parts: every leaf in one of the two, and together the whole."""

from collections import namedtuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._pytree import tree_flatten

import functional_jd as fj

Pair = namedtuple("Pair", ["left", "right"])

leaf = st.integers(0, 99).map(lambda n: torch.tensor(float(n)))
trees = st.recursive(
    leaf,
    lambda inner: st.one_of(
        st.dictionaries(st.sampled_from("abcd"), inner, min_size=1, max_size=3),
        st.lists(inner, min_size=1, max_size=3),
        st.tuples(inner, inner),
        st.builds(Pair, inner, inner),
    ),
    max_leaves=8,
)


@given(trees, st.integers(1, 4))
def test_every_leaf_is_in_one_of_the_two_and_together_they_are_the_tree(tree, divisor):
    rest, chosen = fj.objectives.partition(tree, lambda _, x: int(x) % divisor)
    leaves = tree_flatten(tree)[0]
    assert all(int(x) % divisor == 0 for x in tree_flatten(chosen)[0])
    assert all(int(x) % divisor for x in tree_flatten(rest)[0])
    assert len(tree_flatten(chosen)[0]) + len(tree_flatten(rest)[0]) == len(leaves)
    again, structure = tree_flatten(fj.objectives.merge(chosen, rest))
    assert all(x is y for x, y in zip(again, tree_flatten(_sorted(tree))[0], strict=True))
    assert structure == tree_flatten(_sorted(tree))[1]


def _sorted(tree):
    if isinstance(tree, dict):
        return {key: _sorted(tree[key]) for key in sorted(tree)}
    if isinstance(tree, Pair):
        return Pair(*map(_sorted, tree))
    return type(tree)(map(_sorted, tree)) if isinstance(tree, list | tuple) else tree


def test_names_are_dotted_and_absent_keys_are_left_out():
    names = []
    tree = {"trunk": {"w": torch.ones(1)}, "heads": [torch.ones(2), torch.ones(3)]}
    chosen, rest = fj.objectives.partition(tree, lambda name, _: names.append(name) or name.startswith("heads"))
    assert sorted(names) == ["heads.0", "heads.1", "trunk.w"]
    assert chosen.keys() == {"heads"} or not chosen["trunk"]
    assert not tree_flatten(rest.get("heads", []))[0]


def test_frozen_layers_of_a_module_stay_while_the_others_train():
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    params = {name: p.detach() for name, p in net.named_parameters()}
    trained, constant = fj.objectives.partition(params, lambda name, _: name.startswith("2."))
    assert set(trained) == {"2.weight", "2.bias"}
    apply, x = fj.functional(net), torch.randn(5, 3)
    losses = lambda trained, x: apply(fj.objectives.merge(trained, constant), {}, x)[0].square().squeeze(1)
    rows = fj.jacobian_fn(losses)(trained, x)[0]
    theirs = torch.func.jacrev(lambda p: torch.func.functional_call(net, p, (x,)).square().squeeze(1))(params)
    for name in trained:
        torch.testing.assert_close(rows[name], theirs[name])


def test_mistakes_are_named_with_their_cure():
    with pytest.raises(TypeError, match=r"partition: predicate must be a function, found str\. Pass predicate"):
        fj.objectives.partition({"a": torch.ones(1)}, "a")
    with pytest.raises(ValueError, match=r"merge: expected two parts of one pytree, found Tensor and Tensor"):
        fj.objectives.merge({"a": torch.ones(1)}, {"a": torch.ones(1)})
