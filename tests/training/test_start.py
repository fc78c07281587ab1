"""How training starts: what `train_state` refuses, by the graph of the losses, and what it leaves as it was."""

import contextlib
import random
import warnings

import numpy as np
import pytest
import torch
import torch._dynamo.testing
from rule_table import RULES, rows_of, rule_of
from torch import nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

import functional_jd as fj
from functional_jd.training import checks

METHOD = {"aggregator": fj.upgrad(), "optimizer": fj.sgd(0.1)}
X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
PARAMS = {"w": torch.ones(3, 2), "v": torch.ones(2)}


def begin(losses, params=None, *batch, **others):
    params = PARAMS if params is None else params
    return fj.train_state(params, *(batch or (X,)), losses=losses, **(METHOD | others))


def output(p, x):
    return x @ p["w"] * p["v"]


def high(p, x):
    """An accuracy: a number without a gradient."""
    return (output(p, x) > 0).float().mean()


HALVES = fj.multitask(lambda p, x: x @ p["w"], lambda h, z, x: {"a": (z * h).sum(), "b": x.sum(), "c": x.mean()})
# Losses, and the words of the error.
REFUSED = {
    "detached": (lambda p, x: output(p, x).detach().mean(0), "found no loss"),
    "an accuracy": (lambda p, x: [high(p, x)], "found no loss"),
    "other tensors": (lambda p, x: x.sum(0), "found no loss"),
    "examples": (fj.per_example(lambda p, x: x.sum()), "found no loss"),
    "dict": (
        lambda p, x: {"loss": output(p, x).sum(), "accuracy": high(p, x)},
        "found 'accuracy' without a gradient.*has_aux",
    ),
    "stack": (lambda p, x: torch.stack([output(p, x).sum(), high(p, x)]), "found '1' without a gradient.*has_aux"),
    "multitask": (HALVES, "found 'b', 'c' without a gradient.*has_aux"),
}
# Those that start, and whether they reach `w`.
STARTED = {
    "dict": (lambda p, x: {"a": output(p, x).sum(), "b": p["v"].sum()}, True),
    "stack": (lambda p, x: torch.stack([output(p, x).sum(), p["v"].sum()]), True),
    "vector": (lambda p, x: output(p, x).square().mean(1), True),
    "stacked vectors": (lambda p, x: torch.stack([output(p, x).mean(0), p["v"]]), True),
    "checkpoint": (lambda p, x: checkpoint(output, p, x, use_reentrant=False).mean(0), True),
    "bfloat16": (lambda p, x: output(p, x).bfloat16().mean(0), True),
    "examples": (fj.per_example(lambda p, x: output(p, x).square().sum()), True),
    "the parameter itself": (lambda p, x: p["v"], False),
    "one parameter only": (lambda p, x: [p["v"].sum(), p["v"].square().sum()], False),
    "inner gradient": (lambda p, x: torch.func.grad(lambda v: (v * p["v"]).square().sum())(torch.ones(2)), False),
}


@pytest.mark.parametrize(("losses", "words"), REFUSED.values(), ids=REFUSED)
def test_losses_that_reach_no_parameter_are_refused_by_name(losses, words):
    params = {"shared": {"w": torch.ones(3, 2)}, "heads": torch.ones(2)} if losses is HALVES else None
    with pytest.raises(ValueError, match=f"train_state: (the|all) losses must depend on the parameters, {words}"):
        begin(losses, params)


@pytest.mark.parametrize(("losses", "all_reached"), STARTED.values(), ids=STARTED)
@pytest.mark.parametrize("rule", [fj.upgrad(), fj.mean(), fj.trimmed_mean(0)], ids=["upgrad", "mean", "trimmed"])
def test_losses_that_reach_a_parameter_start_and_one_that_none_reaches_is_named(losses, all_reached, rule):
    words = "^train_state: no loss reaches 'w' on this batch, so"
    with contextlib.nullcontext([]) if all_reached else pytest.warns(UserWarning, match=words) as seen:
        begin(losses, aggregator=rule)
    assert [warning.filename for warning in seen] == [__file__] * (not all_reached)


@pytest.mark.parametrize("kind", ["trunk", "head", "neither"])
def test_a_trunk_or_a_head_that_is_called_directly_is_told(kind):
    trunk, head = nn.Linear(3, 2), nn.Linear(2, 2)
    given = {"shared": dict(trunk.named_parameters()), "heads": dict(head.named_parameters())}
    features = lambda shared, x: trunk(x) if kind == "trunk" else functional_call(trunk, shared, (x,))
    outputs = lambda own, z: head(z) if kind == "head" else functional_call(head, own, (z,))
    tasks = fj.multitask(features, lambda own, z, x: outputs(own, z).square().mean(0))
    if kind == "trunk":
        with pytest.raises(ValueError, match=r"must depend on params\['shared'\]"):
            begin(tasks, given)
    elif kind == "head":
        with pytest.warns(UserWarning, match="no loss reaches 'heads.bias', 'heads.weight' on this batch") as seen:
            begin(tasks, given)
        assert len(seen) == 1
    else:
        begin(tasks, given)  # no warning: warnings are errors


def test_the_graph_of_a_vector_of_losses_is_searched_once(monkeypatch):
    """Once for each of 2,000 residuals took as long as hundreds of steps."""
    searches, search = [], checks.leaves_behind
    monkeypatch.setattr(checks, "leaves_behind", lambda roots: searches.append(roots) or search(roots))
    begin(lambda p, x: (x.repeat(400, 1) @ p["w"]).flatten(), {"w": torch.ones(3, 1)})
    assert len(searches) < 5


def test_modules_that_are_called_directly_and_frozen_parameters_are_refused_with_the_cure():
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    params = dict(net.named_parameters())
    losses = lambda p, x: functional_call(net, p, (x,)).square().mean(0)
    with pytest.raises(ValueError, match=r"found no loss that does.*functional\(model\)\(params"):
        begin(lambda p, x: net(x).square().mean(0), params)
    begin(losses, params)
    net[0].weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"train_state: .*found frozen '0.weight'\. .*partition\("):
        begin(losses, params)
    trained, constant = fj.objectives.partition(params, lambda name, p: p.requires_grad)
    state = begin(lambda p, x: losses(fj.objectives.merge(p, constant), x), trained)
    assert sorted(state.params) == ["0.bias", "1.bias", "1.weight"]


class Teacher(nn.Module):
    """Changes itself in place in every call, in all the ways that models do."""

    def __init__(self, own):
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.online, self.momentum, self.averaged = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
        self.register_buffer("calls", torch.zeros(()))
        self.own, self.drawn, self.unseen = own, [], torch.Generator()
        self.requires_grad_(False)

    def forward(self, x):
        self.calls.add_(1)
        for slow, fast in zip(self.momentum.parameters(), self.online.parameters(), strict=True):
            slow.data = 0.9 * slow.data + 0.1 * fast.data
            slow.data.mul_(0.5)
        torch._foreach_lerp_(list(self.averaged.parameters()), list(self.online.parameters()), 0.5)
        self.drawn.append(torch.rand(()) + torch.rand((), generator=self.own))
        return x * self.drawn[-1]


def student(p, x):
    return x @ p["trunk"] * p["head"]


def plain(teacher, m):
    def losses(p, x):
        y = teacher.norm(teacher(student(p, x))) + student(p, x)
        return torch.stack([(y - i).square().mean() for i in range(m)])

    return losses, {"trunk": torch.ones(3, 2), "head": torch.ones(2)}


def multitask(teacher, m):
    def heads(own, y, x):
        return {name: (teacher(y) * w - 1).square().mean() for name, w in own.items()}

    own = {str(i): torch.tensor([1.0, i]) for i in range(m)}
    return fj.multitask(student, heads), {"shared": plain(teacher, m)[1], "heads": own}


def per_example(teacher, m):
    return fj.per_example(lambda p, x: (teacher(student(p, x)) - 1).square().mean()), plain(teacher, m)[1]


def snapshot(teacher):
    """The tensors of a module and the generators, as text."""
    tensors = {**dict(teacher.named_parameters()), **dict(teacher.named_buffers())}
    seen = {name: (id(x), x.data_ptr(), x.tolist()) for name, x in tensors.items()}
    generators = [state.numpy().tobytes() for state in (torch.get_rng_state(), teacher.own.get_state())]
    return seen | {"generators": generators}


@pytest.mark.filterwarnings("ignore:train_state. .* running statistics")  # the teacher is no part of the state
@pytest.mark.parametrize("kind", [plain, multitask, per_example])
@pytest.mark.filterwarnings("ignore::functional_jd.SlowPathWarning")
def test_a_start_leaves_no_trace_whatever_the_rule_and_the_engine(kind):
    teacher, started = Teacher(torch.Generator().manual_seed(1)), set()
    before = snapshot(teacher)
    for name in RULES:
        m = rows_of(name)
        losses, params = kind(teacher, m)
        for engine in ("auto", "jacobian", "gramian", "weighted"):
            x = torch.randn(m, 3, generator=teacher.unseen)
            try:
                leaves = tree_leaves(begin(losses, params, x, engine=engine, aggregator=rule_of(name)))
                assert len({id(x) for x in leaves}) == len(leaves)  # a graph of make_fx tells them apart so
                started.add(name)
            except ValueError as error:
                if "serves rules that need" not in str(error) and "compares" not in str(error):
                    raise
            after = snapshot(teacher)
            changed = [key for key in before.keys() | after.keys() if before.get(key) != after.get(key)]
            assert not changed, (name, engine)
    assert started >= set(RULES) - {"modo", "sdmgrad"}
    assert kind is not plain or torch.equal(*teacher.drawn[:2])  # of both evaluations


@pytest.mark.parametrize("engine", ["auto", "jacobian", "gramian"])
def test_the_generators_of_python_and_numpy_stand_where_they_stood(engine):
    seen = []

    def mixed(p, x):
        seen.append((random.random(), np.random.beta(0.4, 0.4)))
        return seen[-1][1] * student(p, x).square().mean(0) + (1 - seen[-1][1]) * student(p, x.flip(0)).square().mean(0)

    params = {"trunk": torch.ones(3, 2), "head": torch.ones(2)}
    states = lambda: (random.getstate(), np.random.get_state()[1].tolist(), np.random.get_state()[2])
    before = states()
    begin(mixed, params, X, engine=engine)
    assert states() == before
    fj.weights_fn(mixed, fj.upgrad())(params, X)
    assert len(set(seen)) == 1  # each was evaluated with the same numbers


VARIED = {"the parameters and the learning rate": (0, None, 0), "the batch": (None, 0, None)}


@pytest.mark.parametrize("dims", VARIED.values(), ids=VARIED)
def test_steps_after_a_start_under_vmap_share_one_graph_also_at_other_learning_rates(dims):
    factors = torch.tensor([1.0, 0.5, -1.0])
    several = lambda x: factors.view(3, *[1] * x.ndim) * x
    params = {"w": torch.ones(3, 2), "v": torch.ones(2)}
    params = tree_map(several, params) if dims[0] == 0 else params
    x, rate = several(X) if dims[1] == 0 else X, torch.full((3,), 0.1) if dims[2] == 0 else torch.tensor(0.1)

    def method(rate):
        losses = lambda p, x: {"a": output(p, x).sum(), "b": p["v"].square().sum()}
        return {"losses": losses, "aggregator": fj.cr_mogm(fj.upgrad()), "optimizer": fj.adamw(rate)}

    begun = torch.vmap(lambda p, x, rate: fj.train_state(p, x, scale=fj.scale_state(), **method(rate)), dims)
    state = expected = begun(params, x, rate)
    assert all(leaf.is_contiguous() for leaf in tree_leaves(state))
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    stepped = torch.vmap(lambda state, x, rate: fj.step(state, x, **method(rate)), (0, *dims[1:]))
    compiled = torch.compile(stepped, fullgraph=True, backend=counter)
    for factor in (1.0, 1.0, 0.5, 2.0):
        state, _ = compiled(state, x, rate * factor)
        expected, _ = stepped(expected, x, rate * factor)
    assert counter.frame_count == 1
    torch.testing.assert_close(state, expected)
    unchecked = torch.vmap(lambda w: begin(lambda p, x: x.mean(0), {"w": w}))
    assert unchecked(torch.ones(3, 2)).params["w"].shape == (3, 2)


def test_training_starts_with_the_engine_of_its_steps():
    """The Gramian engine cannot follow derivatives inside losses, and would warn; few parameters go without it."""

    def losses(params, x):
        slope = torch.func.vmap(torch.func.grad(lambda x: torch.tanh(x @ params["w"])))(x)
        return {"slope": slope.square().mean(), "edge": (x @ params["w"]).square().mean()}

    method = {"losses": losses, "aggregator": fj.config(), "optimizer": fj.sgd(0.1)}
    params, x = {"w": torch.ones(2)}, torch.eye(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", fj.SlowPathWarning)
        fj.step(fj.train_state(params, x, **method), x, **method)
