"""Pytrees: leaf order, round trips, foreign containers, and what is said about mistakes."""

import warnings
from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass
from typing import NamedTuple

import optree
import pytest
import torch
import torch._dynamo
from hypothesis import given
from hypothesis import strategies as st
from simulated import simulated
from torch import Tensor
from torch.utils import _pytree

from functional_jd.core import tree as trees

Point = namedtuple("Point", ["z", "a"])
ONE = torch.tensor(1.0)


@dataclass
class Foreign:
    """Registered with torch only."""

    second: Tensor
    first: Tensor


_pytree.register_dataclass(Foreign)


@dataclass
class Unregistered:
    w: Tensor


leaf = st.integers(-9, 9).map(lambda n: torch.tensor(float(n)))
keys = st.sampled_from(["a", "b", "c", "layers", "0"])
nested = st.recursive(
    leaf,
    lambda inner: st.one_of(
        st.dictionaries(keys, inner, max_size=3),
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.builds(Point, inner, inner),
        st.builds(Foreign, inner, inner),
        st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
    ),
    max_leaves=8,
)


def in_order(tree):
    """The leaves by a walk of our own: plain dicts by sorted key, everything else as it stands, with their paths."""
    if isinstance(tree, dict):
        order = tree if isinstance(tree, OrderedDict) else sorted(tree)
        return [((key, *path), x) for key in order for path, x in in_order(tree[key])]
    if isinstance(tree, list | tuple):
        words = getattr(tree, "_fields", map(str, range(len(tree))))
        return [((word, *path), x) for word, part in zip(words, tree, strict=True) for path, x in in_order(part)]
    if isinstance(tree, Foreign):
        return [((word, *path), x) for word in ("second", "first") for path, x in in_order(getattr(tree, word))]
    return [((), tree)]


def kinds(tree):
    """What a tree is made of, without its leaves."""
    if isinstance(tree, dict):
        return type(tree), list(tree), [kinds(part) for part in tree.values()]
    if isinstance(tree, list | tuple):
        return type(tree), [kinds(part) for part in tree]
    return (Foreign, [kinds(tree.second), kinds(tree.first)]) if isinstance(tree, Foreign) else Tensor


@given(nested)
def test_leaves_come_in_sorted_order_with_their_names_and_go_back_where_they_were(tree):
    leaves, structure = trees.tree_flatten(tree)
    expected = [x for _, x in in_order(tree)]
    assert len(leaves) == len(expected)
    assert all(x is y for x, y in zip(leaves, expected, strict=True))
    assert all(x is y for x, y in zip(trees.tree_leaves(tree), expected, strict=True))
    again = structure.unflatten(leaves)
    assert kinds(again) == kinds(tree)
    assert all(x is y for (_, x), (_, y) in zip(in_order(again), in_order(tree), strict=True))
    assert trees.tree_names(tree) == [".".join(path) or "value" for path, _ in in_order(tree)]
    mapped = trees.tree_map(lambda x, y: 2 * x + y, tree, trees.tree_map(lambda x: x * x, tree))
    assert kinds(mapped) == kinds(tree)
    for (_, x), (_, y) in zip(in_order(tree), in_order(mapped), strict=True):
        assert y == 2 * x + x * x


class Registered(NamedTuple):
    """A named tuple with a flattening of its own: the second field is no leaf."""

    x: Tensor
    name: str


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # optree doubts that named tuples should be registered
    optree.register_pytree_node(
        Registered, lambda r: ((r.x,), r.name), lambda name, x: Registered(*x, name), namespace="functional_jd"
    )


class Opaque:
    """A container that only optree knows."""

    def __init__(self, *parts: Tensor):
        self.parts = parts


optree.register_pytree_node(
    Opaque, lambda c: (c.parts, None, ("a", "b")), lambda _, parts: Opaque(*parts), namespace="functional_jd"
)


def test_containers_that_only_optree_knows_have_names():
    assert trees.tree_names({"x": Opaque(ONE, ONE)}) == ["x.a", "x.b"]


class Nothing(NamedTuple):
    """A state without numbers."""


FOR_TRACERS = {
    "no fields": {"a": Nothing(), "b": (Nothing(), ONE)},
    "tensor": ONE,
    "dict": {"b": ONE, "a": {"d": ONE + 1, "c": ONE + 2}},
    "numbers as keys": {2: ONE, 10: ONE + 1, 1: {}},
    "ordered": {"o": OrderedDict(b=ONE, a=OrderedDict(d=ONE + 1, c=ONE + 2)), "e": OrderedDict()},
    "sequences": [(ONE, [ONE + 1]), Point([], Point(ONE + 2, ONE + 3)), (), None],
    "default": [defaultdict(list, b=ONE, a=ONE + 1), defaultdict(list)],
    "foreign": [Foreign(ONE, {"z": ONE + 1}), ONE + 2],
    "registered": {"r": Registered(ONE, "leaf?"), "a": None},
    "no tensors": ("text", 3, 2.5, True, ONE),
}


@pytest.mark.parametrize("tree", FOR_TRACERS.values(), ids=FOR_TRACERS)
def test_a_traced_flattening_is_that_of_optree(tree):
    double = lambda x: 2 * x

    def run(tree):
        leaves, structure = trees.tree_flatten(tree)
        again = structure.unflatten([double(x) for x in leaves])
        others = structure.flatten_up_to(again)
        pairs = trees.tree_map(lambda x, y: (x, y), tree, again)
        return leaves, again, others, pairs, trees.tree_names(tree)

    torch._dynamo.reset()
    found = torch.compile(run, fullgraph=True, backend="eager")(tree)
    expected = run(tree)
    assert repr(found) == repr(expected)  # kinds, keys in their order, and leaves


def test_a_tracer_knows_a_container_of_torch_that_nothing_met_before():
    @dataclass
    class New:
        second: Tensor
        first: Tensor

    def run(other, tree):
        trees.tree_flatten(other)
        return trees.tree_map(lambda x: 2 * x, tree)

    _pytree.register_dataclass(New)
    torch._dynamo.reset()
    other = Point(ONE, defaultdict(list, a=ONE))
    found = torch.compile(run, fullgraph=True, backend="eager")(other, {"n": [New(ONE, {"z": ONE + 1})]})
    assert found == {"n": [New(2 * ONE, {"z": 2 * (ONE + 1)})]}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": ONE}, {"b": ONE}),
        ([ONE], (ONE,)),
        ([ONE], [ONE, ONE]),
        ([ONE, {}], [{}, ONE]),
        ([ONE, {}], [ONE, {"a": ONE}]),
        (Point(ONE, ONE), (ONE, ONE)),
        (None, {}),
        ({"a": ONE}, {"a": [ONE]}),
        (Registered(ONE, "x"), Registered(ONE, "y")),
    ],
)
def test_another_structure_raises_traced_or_not(one, other):
    def add(a, b):
        return trees.tree_map(torch.add, a, b)

    torch._dynamo.reset()
    for f in (add, torch.compile(add, fullgraph=True, backend="eager")):
        with pytest.raises(Exception, match=r"xpected|must be Tensor|mismatch|Observed"):
            f([one], [other])


def test_the_order_of_keys_is_kept_and_makes_no_other_structure():
    one, other = {"b": ONE, "a": 3 * ONE}, {"a": ONE, "b": ONE}
    for subtract in (trees.tree_map, torch.compile(trees.tree_map, fullgraph=True, backend="eager")):
        for same in (other, OrderedDict(other), defaultdict(None, other)):
            assert list(subtract(torch.sub, one, same).items()) == [("b", 0), ("a", 2)]
    for difference in (trees.tree_difference, torch.compile(trees.tree_difference, fullgraph=True, backend="eager")):
        assert difference([one], [other]) == ""
        records = Registered(ONE, "x"), Registered(ONE, "y")
        for x, y in (({"a": ONE}, OrderedDict(a=ONE)), ({1: ONE}, {"1": ONE}), records):
            torch._dynamo.reset()
            assert "another structure" in difference([x], [y])
            assert difference([x], [x]) == ""


def test_what_is_no_container_is_a_leaf():
    assert not trees.any_sharded([ONE, torch.nn.Parameter(ONE), 2.0])
    assert trees.tree_names(torch.ones(1)) == ["value"]
    assert trees.tree_leaves(None) == []
    mixed = {"b": None, 1: torch.ones(2), "a": [None, ONE]}  # keys that Python does not sort
    assert [x.ndim for x in trees.tree_leaves(mixed)] == [x.ndim for x in trees.tree_flatten(mixed)[0]] == [1, 0]
    assert [type(x) for x in trees.tree_leaves({"u": Unregistered(torch.ones(1)), "n": 3})] == [int, Unregistered]


def test_containers_of_its_own_hold_the_same_leaves():
    x, fixed = torch.ones(1), Point({"x": ONE}, ONE)
    given = {"list": [x, {"deep": x}], "pair": (x, [x]), "order": OrderedDict(b=x, a=x), "fixed": fixed, "n": 3}
    other = type("Other", (namedtuple("Other", "a b"),), {"__new__": lambda cls, a: tuple.__new__(cls, (a, a))})(x)
    own, same = map(trees.own_containers, (given, other))
    assert (own, True) == (given, same is other)
    assert list(own["order"]) == ["b", "a"]
    own["list"][1]["new"] = own["pair"][1][0] = own["order"]["c"] = own["new"] = 1
    assert given == {"list": [x, {"deep": x}], "pair": (x, [x]), "order": OrderedDict(b=x, a=x), "fixed": fixed, "n": 3}


def test_floating_leaves_are_the_leaves_or_a_named_mistake():
    params = {"b": torch.ones(2).half(), "a": [torch.zeros(()).double()]}
    leaves, structure = trees.floating_leaves(params)
    assert [x.dtype for x in leaves] == [torch.float64, torch.float16]
    assert structure.unflatten(leaves)["b"] is params["b"]
    for wrong, error, words in (
        ({**params, "n": [torch.tensor(1)]}, TypeError, "all leaves .* torch.int64 .* in 'n.0'.*further arguments"),
        ({"c": torch.ones(1) + 1j}, TypeError, "found torch.complex64 .* in 'c'"),
        ({"s": "relu"}, TypeError, "found 'relu' in 's'"),
        ([{}, ()], ValueError, "expected at least one parameter tensor, found an empty tree"),
    ):
        with pytest.raises(error, match=words):
            trees.floating_leaves(wrong)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf"), None])
@pytest.mark.parametrize("where", [0, 2, 6, 1000])  # in small leaves, and in one that is looked at alone
def test_one_value_that_is_not_finite_is_seen(poison, where):
    small = [torch.tensor(1.0), torch.tensor([-2.0, 3.0], dtype=torch.float16), torch.zeros(0), torch.ones(2, 2)]
    leaves = [*small, torch.ones(40, 33)]
    values = torch.cat([leaf.flatten().double() for leaf in leaves])
    if poison is not None:
        values[where] = poison
    parts = values.split([leaf.numel() for leaf in leaves])
    tree = {"a": [part.reshape(leaf.shape) for part, leaf in zip(parts, leaves, strict=True)], "b": {}}
    assert trees.all_finite(tree) == (poison is None)
    assert trees.all_finite(tree["a"][:4]) == (poison is None or where > 6)
    with simulated() as device:
        assert trees.all_finite(device.put([x.float() for x in tree["a"]])) == (poison is None)
    assert trees.all_finite({}) == True  # noqa: E712


@pytest.mark.filterwarnings("ignore")
def test_a_break_in_the_graph_of_a_step_is_told():
    from functional_jd import jacobian_fn

    def losses(params, x):
        torch._dynamo.graph_break()
        return (x @ params["w"]).square().mean(0) + params["b"]

    params = {"w": torch.ones(3, 2), "b": torch.ones(2)}
    compiled = torch.compile(lambda params, x: jacobian_fn(losses)(params, x)[1], backend="eager")
    with pytest.raises(RuntimeError, match="traces as one graph, found a break,"):
        compiled(params, torch.ones(4, 3))
