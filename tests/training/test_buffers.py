"""Buffers and aux: what losses carry from step to step, in every engine, kind of losses and transform."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product

import pytest
import torch
from bounds import check_derivatives, check_same
from torch import nn
from torch.utils._pytree import tree_map
from two_tasks import close, same

import functional_jd as fj
from functional_jd.engines import PLAIN, Declared, Kind

TASKS = ("class", "size")
# In float64, where a few steps through a few layers add up to far less, and a wrong statistic to far more.
AGREE = {"rtol": 2.0**16 * torch.finfo(torch.float64).eps, "atol": 2.0**16 * torch.finfo(torch.float64).eps}


class Block(nn.Module):
    """Two convolutions with BatchNorm and a way around them, as in a ResNet."""

    def __init__(self, channels):
        super().__init__()
        conv = partial(nn.Conv2d, channels, channels, 3, padding=1, bias=False)
        self.body = nn.Sequential(conv(), nn.BatchNorm2d(channels), nn.ReLU(), conv(), nn.BatchNorm2d(channels))

    def forward(self, x):
        return nn.functional.relu(x + self.body(x))


def residual_net():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        stem = [nn.Conv2d(1, 4, 3, stride=2, bias=False), nn.BatchNorm2d(4), nn.ReLU()]
        trunk = nn.Sequential(*stem, Block(4), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        return trunk.double(), nn.ModuleDict({"class": nn.Linear(4, 3), "size": nn.Linear(4, 1)}).double()


def images(seed=0):
    draw = torch.Generator().manual_seed(seed)
    x, y = torch.randn(6, 1, 8, 8, generator=draw), torch.randint(3, (6,), generator=draw)
    return x.double(), y, torch.randn(6, generator=draw).double()


def task_losses(found, y, size):
    fit, error = nn.functional.cross_entropy(found["class"], y), found["size"][:, 0] - size
    return {"class": fit, "size": error.square().mean()}


def states(module):
    return dict(module.named_parameters()), dict(module.named_buffers())


def problem(kind, net=None):
    """Parameters, buffers and losses of a residual net with two heads."""
    trunk, heads = net or residual_net()
    apply_trunk, apply_heads = fj.functional(trunk), {name: fj.functional(head) for name, head in heads.items()}
    shared, buffers = states(trunk)
    params = {"shared": shared, "heads": {name: states(head)[0] for name, head in heads.items()}}

    def features(shared, buffers, x, y, size):
        return apply_trunk(shared, buffers, x)

    def top(own, h, buffers, x, y, size):
        return task_losses({name: apply_heads[name](own[name], {}, h)[0] for name in TASKS}, y, size), buffers

    def plain(params, buffers, *batch):
        h, buffers = features(params["shared"], buffers, *batch)
        return top(params["heads"], h, buffers, *batch)

    return params, buffers, fj.multitask(features, top) if kind == "multitask" else plain


def how(losses, rule=None, **others):
    rule = rule or fj.upgrad()
    return {"losses": losses, "aggregator": rule, "optimizer": fj.sgd(0.05, momentum=0.9), **others}


def trained(state, n, method, **options):
    infos = []
    for seed in range(n):
        state, info = fj.step(state, *images(seed), **method, **options)
        infos.append(info)
    return state, infos


def by_hand(n):
    """The statistics and parameters of a plain loop, which trains the sum of the losses."""
    trunk, heads = residual_net()
    parameters = [*trunk.parameters(), *heads.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    for step in range(n):
        x, y, size = images(step)
        h = trunk(x)
        optimizer.zero_grad()
        sum(task_losses({name: heads[name](h) for name in TASKS}, y, size).values()).backward()
        optimizer.step()
    return {name: p.detach() for name, p in trunk.named_parameters()}, dict(trunk.named_buffers())


@pytest.mark.parametrize(
    ("kind", "engine"), [*product(["plain", "multitask"], ["jacobian", "weighted"]), ("multitask", "compiled")]
)
def test_statistics_and_parameters_are_those_of_a_plain_loop(kind, engine):
    params, buffers, losses = problem(kind)
    method = how(losses, rule=fj.total())
    state = fj.train_state(params, *images(), buffers=buffers, **method)
    if engine == "compiled":
        torch._dynamo.reset()
        take = torch.compile(partial(fj.step, **method), backend="aot_eager", fullgraph=True)
    else:
        take = partial(fj.step, engine=engine, **method)
    for seed in range(3):
        state, _ = take(state, *images(seed))
    expected_params, expected_buffers = by_hand(3)
    close(state.buffers, expected_buffers, **AGREE)
    close(state.params["shared"], expected_params, **AGREE)


@pytest.mark.parametrize("kind", ["plain", "multitask"])
def test_the_gramian_engine_carries_the_same_buffers_and_nothing_but_the_state_changes(kind):
    trunk, heads = residual_net()
    before = [x.clone() for x in (*trunk.buffers(), *trunk.parameters(), *heads.parameters())]
    params, buffers, losses = problem(kind, net=(trunk, heads))
    method = how(losses)
    state = fj.train_state(params, *images(), buffers=buffers, **method)
    assert same(state.buffers, buffers)
    kept = tree_map(torch.clone, state)
    (found, infos), (expected, others) = (trained(state, 3, method, engine=e) for e in ("gramian", "jacobian"))
    assert same(state, kept)
    assert same([*trunk.buffers(), *trunk.parameters(), *heads.parameters()], before)
    close(found, expected, **AGREE)
    close([info.gramian for info in infos], [info.gramian for info in others], **AGREE)


def test_examples_share_buffers_and_draw_with_keys_of_their_own():
    def loss(p, buffers, x):
        noise = fj.random.uniform(buffers["key"], (3,)).double()
        moved = {"key": buffers["key"], "mean": 0.5 * buffers["mean"] + 0.5 * x.sum(), "n": buffers["n"] + 1}
        return (p * (x + noise)).sum(), moved, noise

    buffers = {"key": fj.random.key(3), "mean": torch.tensor(2.0).double(), "n": torch.tensor(4)}
    method = how(fj.per_example(loss), rule=fj.mean(), has_aux=True)
    x = torch.arange(12.0).double().reshape(4, 3)
    state = fj.train_state(torch.ones(3).double(), x, buffers=buffers, **method)
    assert same(state.buffers, buffers)
    keys = fj.random.split(buffers["key"], 5)
    for engine in ("jacobian", "weighted"):
        after, info = fj.step(state, x, engine=engine, **method)
        close(info.aux, torch.stack([fj.random.uniform(key, (3,)).double() for key in keys[1:]]), rtol=0, atol=0)
        assert torch.equal(after.buffers["key"], keys[0])
        torch.testing.assert_close(after.buffers["mean"], 0.5 * 2.0 + 0.5 * x.sum(1).mean())
        assert int(after.buffers["n"]) == 5
        torch.testing.assert_close(after.params, 1 - 0.05 * (x + info.aux).mean(0))
    gramian = how(fj.per_example(loss), has_aux=True)
    found, expected = (fj.step(state, x, engine=engine, **gramian) for engine in ("gramian", "jacobian"))
    close(found, expected, **AGREE)


DROPPED = fj.random.keyed(lambda x: torch.nn.functional.dropout(x, 0.5))


def drawing(name, of):
    """The losses of examples that draw with what `of` makes of the key in the buffers, beside a counter `[2]`."""

    def loss(p, buffers, x):
        later = fj.random.split(buffers[name])[1]
        return (p * DROPPED(of(buffers[name], x), x)).sum(), {name: later, "count": buffers["count"] + 1}

    buffers = {name: fj.random.key(3), "count": torch.tensor([1, 2])}
    x = torch.linspace(0.1, 1, 64).reshape(4, 16)
    method = how(fj.per_example(loss), rule=fj.mean())
    state = fj.train_state(torch.ones(16), x, buffers=buffers, **method)
    return fj.step(state, torch.ones_like(x), **method)[1].losses


@pytest.mark.parametrize("part", [None, 0, 2])
def test_examples_draw_alike_with_a_key_unless_its_name_says_that_it_is_one(part):
    own = lambda key, x: key if part is None else fj.random.split(key, 3)[part]
    assert len(set(drawing("seed", own).tolist())) == 1
    assert len(set(drawing("dropout_key", own).tolist())) > 1


@pytest.mark.parametrize("name", ["seed", "key"])
def test_a_kind_of_ones_own_for_examples_may_have_buffers_and_no_batch(name):
    def losses(p, buffers):
        now, later = fj.random.split(buffers[name])
        return DROPPED(now, p).square(), {name: later}

    @dataclass(frozen=True)
    class Own(Declared):
        losses: Callable
        kind = Kind(lambda own, *how: PLAIN.jacobian(own.losses, *how), rows_are_examples=True)
        __call__ = lambda own, *args: own.losses(*args)

    fj.train_state(torch.ones(4), buffers={name: fj.random.key(0)}, **how(Own(losses), rule=fj.mean()))


@pytest.mark.parametrize("engine", ["jacobian", "gramian"])
@pytest.mark.parametrize("kind", ["plain", "multitask", "per_example"])
def test_aux_comes_back_from_every_kind_and_engine(kind, engine):
    params = {"w": torch.ones(3, 2).double()}
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).double()
    trunk, h = lambda p, x: x @ p["w"], x @ params["w"]
    values = lambda z: {"a": z.square().sum(), "b": (z - 1).square().sum()}
    losses = {
        "plain": lambda p, x: (values(trunk(p, x)), {"h": trunk(p, x), "n": 1}),
        "multitask": fj.multitask(trunk, lambda p, h, x: (values(h * p["v"]), {"h": h, "n": 1})),
        "per_example": fj.per_example(lambda p, x: (trunk(p, x).square().sum(), {"h": trunk(p, x)})),
    }[kind]
    if kind == "multitask":
        params = {"shared": params, "heads": {"v": torch.ones(2).double()}}
    method = how(losses, has_aux=True)
    state = fj.train_state(params, x, **method)
    _, info = fj.step(state, x, engine=engine, **method)
    torch.testing.assert_close(info.aux["h"], h)
    assert not info.aux["h"].requires_grad
    if kind == "per_example":
        torch.testing.assert_close(info.losses, h.square().sum(1))


@pytest.mark.parametrize("engine", ["jacobian", "gramian", "weighted"])
@pytest.mark.parametrize("kind", ["plain", "multitask"])
def test_derivatives_reach_the_buffers_and_parameters_that_training_starts_with(kind, engine):
    x = torch.tensor([[0.3, 0.2], [-0.5, 0.9], [0.1, -1.2]], dtype=torch.float64)

    def features(w, average, x):
        h = (x @ w).tanh()
        return h - average, (average + h.mean(0)) / 2

    def heads(v, h, average, x):
        return torch.stack([(h @ v - 1).square().mean(), (h.square() @ v - average.sum()).square().mean()]), average

    def plain(params, average, x):
        return heads(params["heads"], *features(params["shared"], average, x), x)

    losses = fj.multitask(features, heads) if kind == "multitask" else plain
    rule = fj.mean() if engine == "weighted" else fj.upgrad()
    method = {"losses": losses, "aggregator": rule, "optimizer": fj.sgd(0.1)}

    def trained(start):
        params = {"shared": start[:4].view(2, 2), "heads": start[:2]}
        state = fj.train_state(params, x, buffers=start[4:], **method)
        for _ in range(3):
            state, _ = fj.step(state, x, engine=engine, **method)
        return state.params["shared"].pow(3).sum() + state.params["heads"].sum() + state.buffers.exp().sum()

    start = torch.tensor([0.4, -0.7, 0.9, 0.2, 0.1, -0.2], dtype=torch.float64)
    leaf, slopes = start.clone().requires_grad_(), torch.func.jacfwd(trained)(start)
    check_derivatives(slopes, trained, start)
    check_same(torch.vmap(torch.func.grad(trained))(start[None])[0], slopes)
    check_same(torch.func.grad(trained)(start), slopes)
    check_same(torch.autograd.grad(trained(leaf), leaf)[0][:4], slopes[:4])  # buffers are detached


def test_what_does_not_fit_is_named():
    params, x = torch.ones(3), torch.ones(3)
    start = {"a": torch.zeros(2), "n": torch.tensor(0)}

    def begin(result, **others):
        return fj.train_state(params, x, **how(lambda p, *_: result(p), **others))

    with pytest.raises(TypeError, match=r"train_state: with buffers the losses .* \(losses, buffers\).*found Tensor"):
        begin(lambda p: p, buffers=start)
    with pytest.raises(TypeError, match=r"buffers and has_aux=True .*\(losses, buffers, aux\), found a tuple of 2"):
        begin(lambda p: (p, start), buffers=start, has_aux=True)
    with pytest.raises(TypeError, match=r"with has_aux=True the losses must return \(losses, aux\), found Tensor"):
        begin(lambda p: p, has_aux=True)
    with pytest.warns(UserWarning, match="losses must return losses alone, found a number and a matrix.*has_aux=True"):
        begin(lambda p: (p.sum(), {"logits": p.expand(2, 3)}))
    state = begin(lambda p: (p, start), buffers=(given := fj.core.tree.tree_map(torch.clone, start)))
    given["n"].add_(1)
    assert state.buffers["n"] == 0  # in memory of their own
    for changed, words in (
        ({"a": torch.zeros(3)}, r"found torch.float32 \[3\] in 'a', expected torch.float32 \[2\]"),
        ({"n": torch.tensor(0.0)}, r"found torch.float32 \[\] in 'n', expected torch.int64 \[\]"),
        ({"m": torch.tensor(0)}, r"structure .* differs in \['m'\]"),
    ):
        with pytest.raises(ValueError, match=f"step: the losses must return buffers .*{words}"):
            fj.step(state, x, **how(lambda p, *_, returned=start | changed: (p, returned)))
    with pytest.raises(ValueError, match=r"step: the losses must return buffers .*structure .* differs in \['n'\]"):
        fj.step(state, x, **how(lambda p, *_: (p, {"a": start["a"]})))
    for write in (lambda b: b["a"].lerp_(torch.ones(2), 0.1), lambda b: b["n"].add_(1)):
        with pytest.raises(
            ValueError, match=r"train_state: expected losses that leave .* buffers, .* change '[an]' in"
        ):
            fj.train_state(
                params, x, buffers=start, **how(lambda p, b, x, write=write: (p, b | {"new": write(b)} and b))
            )
    for wrong in (None, {"a": torch.eye(2).to_sparse()}):
        with pytest.raises(TypeError, match="train_state: buffers must be a pytree of dense tensors, found"):
            begin(lambda p, own=wrong: (p, own), buffers=wrong)
    trunk = {"shared": params, "heads": ()}
    for features, found in ((lambda p, b, x: p * x, "Tensor"), (lambda p, b, x: (p * x, b, b), "tuple")):
        tasks = fj.multitask(features, lambda own, h, b, x: (h, b))
        with pytest.raises(TypeError, match=rf"features must return a pair \(features, buffers\), found {found}"):
            fj.train_state(trunk, x, buffers=start, **how(tasks))


@pytest.mark.parametrize("kind", ["plain", "multitask", "per_example"])
def test_dropout_from_a_key_in_the_buffers_goes_on_bit_for_bit(kind):
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)).double()
    params = {"w": torch.ones(3, 4).double()}

    def features(p, b, x):
        key, own = fj.random.split(b["key"])
        return DROPPED(own, x @ p["w"]), {"key": key}

    def plain(p, b, x):
        h, b = features(p, b, x)
        return h.square().mean(0), b

    losses = plain
    if kind == "per_example":  # every example receives a key of its own
        losses = fj.per_example(lambda p, b, x: (DROPPED(b["key"], x @ p["w"]).square().mean(), b))
    elif kind == "multitask":
        params = {"shared": params, "heads": {"v": torch.ones(4).double()}}
        losses = fj.multitask(features, lambda p, h, b, x: ((h * p["v"]).square().mean(0), b))
    method, before = how(losses), torch.get_rng_state()
    state = fj.train_state(params, x, buffers={"key": fj.random.key(0)}, **method)
    states = [state]
    for _ in range(3):
        states.append(fj.step(states[-1], x, **method)[0])
    again = fj.step(tree_map(torch.clone, states[1]), x, **method)[0]
    assert same(again, states[2])
    assert len({tuple(s.buffers["key"].tolist()) for s in states}) == 4  # other draws in every step
    assert torch.equal(torch.get_rng_state(), before)
    other = fj.step(states[1]._replace(buffers={"key": fj.random.key(1)}), x, **method)[0]
    assert not same(other.params, states[2].params)
    for engine in ("jacobian", "gramian"):
        close(fj.step(states[1], x, engine=engine, **method)[0], states[2], **AGREE)
