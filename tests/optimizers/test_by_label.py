"""Groups of parameters: what `torch.optim` computes with param groups, and labels that do not fit."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from optimizers.steps import assert_close, run, run_torch
from torch import nn

from functional_jd import adamw, by_label, from_torch, sgd
from functional_jd.core.tree import tree_flatten, tree_map, tree_names

LAYERS = {"trunk": nn.Linear(3, 4), "norm": nn.LayerNorm(4), "head": nn.Linear(4, 2)}
SHAPES = {key: {name: torch.zeros(p.shape) for name, p in layer.named_parameters()} for key, layer in LAYERS.items()}


def labels(name, leaf):
    return "trunk" if name.startswith("trunk.") else "plain" if leaf.ndim < 2 else "decayed"


def tree(seed):
    draw = torch.Generator().manual_seed(seed)
    return tree_map(lambda p: torch.randn(p.shape, generator=draw, dtype=torch.float64), SHAPES)


def torch_groups(cls, settings, leaves):
    """An optimizer of torch with a group and a schedule for each label."""
    members = {label: [] for label in settings}
    for name, leaf in zip(tree_names(SHAPES), leaves, strict=True):
        members[labels(name, leaf)].append(leaf)
    optimizer = cls([{"params": members[label], "lr": 1.0, **hyper} for label, hyper in settings.items()])
    optimizer.schedules = torch.optim.lr_scheduler.LambdaLR(optimizer, [SCHEDULES[label] for label in settings])
    return optimizer


SCHEDULES = {"trunk": lambda k: 0.01 * 0.5**k, "plain": lambda k: 0.1 / (1 + k), "decayed": lambda _: 0.1}
SETTINGS = {
    "adamw": {"trunk": {"betas": (0.8, 0.9)}, "plain": {"weight_decay": 0.0}, "decayed": {"weight_decay": 0.3}},
    "sgd": {"trunk": {"momentum": 0.9, "nesterov": True}, "plain": {}, "decayed": {"weight_decay": 0.3}},
}
CLASSES = {"adamw": (adamw, torch.optim.AdamW), "sgd": (sgd, torch.optim.SGD)}


def grouped(name, builder):
    settings = SETTINGS[name]
    rates = {label: lambda steps, f=f: f(steps.double()) for label, f in SCHEDULES.items()}
    return by_label({label: builder(lr=rates[label], **settings[label]) for label in SCHEDULES}, labels)


@pytest.mark.parametrize("wrapped", [False, True], ids=["ours", "from_torch"])
@pytest.mark.parametrize("name", CLASSES)
@given(seed=st.integers(0, 2**16))
def test_it_is_torch_with_param_groups_and_schedules(name, wrapped, seed):
    cls, settings = CLASSES[name][1], SETTINGS[name]
    directions = [tree(seed + i) for i in range(1, 6)]
    optimizer = grouped(name, partial(from_torch, cls) if wrapped else CLASSES[name][0])
    made = partial(torch_groups, cls, settings)
    expected = run_torch(made, tree(seed), directions, lambda optimizer: optimizer.schedules.step())
    assert_close(run(optimizer, tree(seed), directions)[0], expected)


def test_labels_are_given_dotted_names_and_leaves_and_the_state_keeps_the_names():
    seen = {}
    optimizer = by_label({"all": sgd(0.1, momentum=0.9)}, lambda name, leaf: seen.update({name: leaf.shape}) or "all")
    state = optimizer.init(tree(0))
    expected = {name: p.shape for name, p in nn.ModuleDict(LAYERS).named_parameters()}
    assert seen == expected
    assert state["all"].velocity.keys() == expected.keys()


@pytest.mark.parametrize("params", [torch.ones(2), [torch.ones(2), (torch.ones(1),)]], ids=["one", "lists"])
def test_any_pytree_keeps_its_structure(params):
    optimizer = by_label({"all": sgd(0.5)}, lambda name, leaf: "all")
    state = optimizer.init(params)
    after = optimizer.update(params, state, params)
    assert_close(after[0], tree_map(lambda p: p / 2, params))
    assert [tree_flatten(x)[1] for x in after] == [tree_flatten(x)[1] for x in (params, state)]


def test_every_group_keeps_its_own_guard_and_without_guards_there_is_none():
    seen = []
    watched = adamw(0.1)

    def guarded(moving, *arguments):
        seen.append(sorted(arguments[-1]))
        return watched.guarded_update(moving, *arguments)

    optimizer = by_label({"a": watched._replace(guarded_update=guarded), "b": sgd(0.1)}, lambda name, _: name[0])
    params = {"a": torch.ones(1), "b": torch.ones(1), "a.c": torch.ones(1)}
    for moving, b in ((True, 0.9), (False, 1.0)):  # sgd has no guard
        moved, _ = optimizer.guarded_update(torch.tensor(moving), params, optimizer.init(params), params)
        assert_close(moved["b"], torch.tensor([b]))
    assert seen == [["a", "a.c"]] * 2
    assert by_label({"all": sgd(0.1)}, labels).guarded_update is None


LEAVES = {"a": torch.ones(1), "b": torch.ones(1), "c": [torch.ones(1)]}
TWICE = {"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}


@pytest.mark.parametrize(
    ("params", "labelled", "message"),
    [
        (LEAVES, lambda name, _: name[0], r"one of the labels \['a', 'b'\], found 'c' for 'c.0'. Add an optimizer"),
        (LEAVES, lambda *_: "a", r"every label must be that of some leaf, found no leaf for \['b'\] among \['a', 'b'"),
        (LEAVES, lambda *_: None, r"found None for 'a'"),
        (TWICE, lambda *_: "a", r"every leaf must have a name of its own, found \['a.b'\] twice"),
    ],
)
def test_labels_and_optimizers_must_fit_when_training_starts(params, labelled, message):
    with pytest.raises(ValueError, match=f"by_label: .*{message}"):
        by_label({"a": sgd(0.1), "b": sgd(0.2)}, labelled).init(params)
