"""Activation checkpoints inside the losses: in every engine and every precision they change no gradient."""

from contextlib import nullcontext

import pytest
import torch
from bounds import eps
from gramian_by_hand import refuse_all_rows
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F  # noqa: N812 - torch's own name for it
from torch.utils.checkpoint import checkpoint

import functional_jd as fj
from functional_jd.objectives import Multitask

PRECISIONS = ["float32", "jd float16", "jd bfloat16", "native float16", "native bfloat16"]
ENGINES = ["auto", "loop", "gramian", "weighted"]
SLOPES = torch.tensor([1.0, 4.0, 0.25])

every_precision = pytest.mark.parametrize("precision", PRECISIONS)
every_engine = pytest.mark.parametrize("engine", ENGINES)
trained = pytest.mark.parametrize("requires_grad", [False, True], ids=["constant", "requires_grad"])


class Block(nn.Module):
    """Ops of every table, attention, and an island."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.register_buffer("shift", torch.zeros(4))

    def forward(self, x):
        h = self.norm(self.first(x)).softmax(-1) + self.shift
        h = h + self.attention(h, h, h, need_weights=False)[0]
        with torch.autocast("cpu", enabled=False):
            h = h.float() @ h.float().mT
        return self.second((h @ x).tanh()) + x


class Net(nn.Module):
    """Two blocks and a layer: `"none"` of the blocks is a checkpoint, each by itself, or both together as well."""

    def __init__(self, checkpoints="none"):
        super().__init__()
        self.first, self.second, self.last = Block(), Block(), nn.Linear(4, 3)
        self.checkpoints = checkpoints

    def blocks(self, x):
        if self.checkpoints == "none":
            return self.second(self.first(x))
        h = checkpoint(self.first, x, use_reentrant=False)
        return checkpoint(self.second, h, use_reentrant=False)

    def forward(self, x):
        nested = self.checkpoints == "nested"
        return self.last(checkpoint(self.blocks, x, use_reentrant=False) if nested else self.blocks(x))


class Small(nn.Module):
    """A checkpoint around a norm, which forward mode can differentiate."""

    def __init__(self, checkpoints="none"):
        super().__init__()
        self.first, self.last = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Softmax(-1)), nn.Linear(4, 3)
        self.checkpoints = checkpoints

    def forward(self, x):
        plain = self.checkpoints == "none"
        return self.last(self.first(x) if plain else checkpoint(self.first, x, use_reentrant=False))


def drawn(module, key):
    """The module with other weights."""
    generator = torch.Generator().manual_seed(key)
    with torch.no_grad():
        for x in (*module.parameters(), *module.buffers()):
            x.copy_(torch.rand(x.shape, generator=generator) - 0.5)
    return module


X = torch.rand(5, 3, 4, generator=torch.Generator().manual_seed(7)) - 0.5


def made(kind, checkpoints, requires_grad=False):
    """A function of parameters and inputs, and parameters and buffers that are not those of its module."""
    module, others = drawn(kind(checkpoints), 1), drawn(kind(), 2)
    params = {name: p.detach().requires_grad_(requires_grad) for name, p in others.named_parameters()}
    buffers = dict(others.named_buffers())
    apply = fj.functional(module)
    return lambda params, x: apply(params, buffers, x)[0], params


def in_precision(f, precision):
    dtype = dtype_of(precision)
    if precision.startswith("jd"):
        return fj.autocast(f, dtype)

    def native(*args):
        with torch.autocast("cpu", dtype):
            return f(*args)

    return native if precision.startswith("native") else f


dtype_of = lambda precision: getattr(torch, precision.split()[-1])
flat = lambda tree: torch.cat([x.detach().double().flatten() for x in torch.utils._pytree.tree_leaves(tree)])
# A path through two blocks rounds about thirty times, in the forward pass and in the backward pass.
near = lambda found, expected, of: bool((found - expected).norm() <= 30 * eps(dtype_of(of)) * expected.norm())
batch_losses = lambda f: lambda params, x: f(params, x).float().square().mean((0, 1)) * SLOPES
example_loss = lambda f: lambda params, x: f(params, x[None]).float().square().mean() * SLOPES[0]


def rows_by_loop(losses, params, *args):
    """Plain autograd, one loss after the other, `[m, n]`."""
    points = {name: p.detach().requires_grad_() for name, p in params.items()}
    values = losses(points, *args)
    rows = [torch.autograd.grad(y, list(points.values()), retain_graph=True) for y in values]
    return torch.stack([flat(row) for row in rows])


def found_by(engine, losses, params, *args):
    """What an engine makes of the rows, and the same of given rows; those of tasks are the trunk's."""
    weights = lambda m: torch.linspace(0.5, 1.5, m, dtype=torch.float64)
    trunk = lambda direction: flat(direction["shared"] if isinstance(losses, Multitask) else direction)
    if engine == "gramian":
        gramian, values, pullback = fj.gramian_fn(losses)(params, *args)
        found = torch.cat([flat(gramian), trunk(pullback(weights(len(values)))[0])])
        return found, lambda rows: torch.cat([(rows @ rows.T).flatten(), weights(len(rows)) @ rows])
    if engine == "weighted":
        values, pullback = fj.weighted_fn(losses)(params, *args)
        return trunk(pullback(weights(len(values)))[0]), lambda rows: weights(len(rows)) @ rows
    jacobian, values = fj.jacobian_fn(losses, mode=engine)(params, *args)
    rows = [flat([leaf[i] for leaf in getattr(jacobian, "shared", jacobian).values()]) for i in range(len(values))]
    return torch.stack(rows), lambda rows: rows


def multitask_losses(trunk, precision, checkpoints):
    head = lambda params, h: F.layer_norm(h @ params["w"], (3,), params["w"][0]).float()

    def heads(params, h, x):
        run = head if checkpoints == "none" else lambda *args: checkpoint(head, *args, use_reentrant=False)
        return [run(params[name], h).sin().mean() for name in ("one", "two")]

    return fj.multitask(in_precision(trunk, precision), in_precision(heads, precision))


def of_kind(kind, checkpoints, precision, requires_grad):
    """Losses, the parameters, and all losses as a function of those that have rows."""
    f, params = made(Net if kind == "losses" else Small, checkpoints, requires_grad)
    if kind == "losses":
        losses = in_precision(batch_losses(f), precision)
        return losses, params, lambda params: losses(params, X)
    if kind == "examples":
        loss = in_precision(example_loss(f), precision)
        return fj.per_example(loss), params, lambda params: [loss(params, x) for x in X]
    own = {
        name: {"w": torch.eye(3).add(0.1 * i).requires_grad_(requires_grad)} for i, name in enumerate(("one", "two"))
    }
    tasks = multitask_losses(f, precision, checkpoints)
    return tasks, {"shared": params, "heads": own}, lambda shared: tasks({"shared": shared, "heads": own}, X)


@every_precision
@trained
@every_engine
@pytest.mark.parametrize(
    ("kind", "checkpoints"), [("losses", "each"), ("losses", "nested"), ("examples", "each"), ("tasks", "each")]
)
def test_checkpoints_change_no_gradient(kind, checkpoints, engine, requires_grad, precision, monkeypatch):
    if engine == "gramian" and kind != "examples":  # vmap cannot run a part again
        refuse_all_rows(monkeypatch)
    losses, params, _ = of_kind(kind, checkpoints, precision, requires_grad)
    found, of_rows = found_by(engine, losses, params, X)
    _, params, alone = of_kind(kind, "none", precision, requires_grad)
    assert near(found, of_rows(rows_by_loop(alone, params["shared"] if kind == "tasks" else params)), precision)


@trained
def test_derivatives_of_rows_through_checkpoints_are_right(requires_grad):
    norms = []
    for checkpoints in ("none", "each"):
        f, params = made(Small, checkpoints, True)
        x = X.clone().requires_grad_()
        jacobian, _ = fj.jacobian_fn(batch_losses(f), mode="loop")(params, x)
        wanted = [x, *(params.values() if requires_grad else ())]
        norm = sum((rows * rows).sum() for rows in jacobian.values())
        norms.append(flat(torch.autograd.grad(norm, wanted, allow_unused=True, materialize_grads=True)))
    assert norms[0].norm() > 0
    assert near(norms[1], norms[0], "float32")


@pytest.mark.filterwarnings("ignore:.*Gradients will be None:UserWarning")
@pytest.mark.parametrize("engine", [*ENGINES, "vmap"])
@pytest.mark.parametrize("kind", ["plain", "per_example", "multitask"])
def test_reentrant_checkpoints_raise_torchs_error(kind, engine):
    f = lambda params, x: checkpoint(lambda w: F.layer_norm(x @ w, (3,)), params, use_reentrant=True)
    plain = lambda params, x: f(params, x).square().sum(-1)
    losses, params = {
        "plain": (plain, torch.ones(4, 3)),
        "per_example": (fj.per_example(plain), torch.ones(4, 3)),
        "multitask": (fj.multitask(f, lambda _, h, x: h.square().sum(-1)), {"shared": torch.ones(4, 3), "heads": {}}),
    }[kind]
    with pytest.raises(RuntimeError, match=r"either set use_reentrant=False|In order to use an autograd.Function with"):
        found_by(engine, losses, params, X[0])


def test_reentrant_checkpoints_whose_parameters_no_pass_reaches_raise():
    points, x = (torch.ones(4, 3, requires_grad=True), torch.ones(3, requires_grad=True)), X[0].clone().requires_grad_()

    def losses(points, x, shown=False):
        inside, outside = points
        hidden = checkpoint(lambda x: x @ inside.sin(), x.requires_grad_(), use_reentrant=True)
        return (hidden * outside).square().sum(0) + ((x @ inside).sum() if shown else 0.0)

    own, how = tuple(p.detach() for p in points), {"aggregator": fj.upgrad(), "optimizer": fj.sgd(0.1)}
    for call in (
        lambda: fj.weigh(losses(points, x), points, fj.upgrad()),
        lambda: fj.train_state(own, x, losses=losses, **how),
        lambda: fj.train_state(own, x, losses=lambda points, x: losses(points, x, True), **how),  # used outside, too
        lambda: fj.weights_fn(losses, fj.upgrad())(own, x),
        lambda: fj.accumulate(losses, [(x,)], params=own, aggregator=fj.upgrad()),
    ):
        with pytest.raises(ValueError, match="checkpoints must have use_reentrant=False, found True"):
            call()
    features = [checkpoint(torch.sin, x, use_reentrant=True), x.cos()]  # the second is not used
    assert fj.weigh(features[0].square().sum(-1), None, fj.upgrad(), features=features).finite.all()


@every_engine
@pytest.mark.parametrize("checkpoints", ["each", "nested"])
def test_own_parameters_that_run_again_raise_with_the_cure(checkpoints, engine):
    module, (_, params) = drawn(Net(checkpoints), 1), made(Net, "none")
    before = {name: (id(x), x.clone()) for name, x in module.state_dict(keep_vars=True).items()}
    losses = batch_losses(lambda params, x: functional_call(module, params, (x,)))
    for x in (X, X.clone().requires_grad_()):
        for around in (nullcontext(), torch.device("cpu")):  # which is a mode
            with around, pytest.raises(ValueError, match=r"parameters of the forward .* functional\(module\)"):
                found_by(engine, losses, params, x)
    after = module.state_dict(keep_vars=True)
    assert all(id(x) == before[name][0] and torch.equal(x, before[name][1]) for name, x in after.items())
    plain = Net()
    inside = lambda params, x: checkpoint(functional_call, plain, params, (x,), use_reentrant=False)
    found, of_rows = found_by(engine, batch_losses(inside), params, X)
    without = lambda params, x: functional_call(plain, params, (x,))
    assert near(found, of_rows(rows_by_loop(batch_losses(without), params, X)), "float32")


def test_a_checkpoint_around_functional_call_may_use_the_own_weights_too():
    module, (_, params) = drawn(Small(), 1), made(Small, "none")
    both = lambda params, x: functional_call(module, params, (x,)) * module(x)
    again = lambda params, x: checkpoint(both, params, x, use_reentrant=False)
    found, of_rows = found_by("loop", batch_losses(again), params, X)
    assert near(found, of_rows(rows_by_loop(batch_losses(both), params, X)), "float32")


@pytest.mark.parametrize("wrap", [lambda f: f, fj.autocast], ids=["plain", "autocast"])
def test_vmap_inside_a_checkpoint_is_differentiated_as_without(wrap):
    slope = lambda w, x: torch.vmap(lambda x: torch.tanh(x @ w).softmax(0))(x)
    params = {"w": torch.randn(3, 3, generator=torch.Generator().manual_seed(0))}
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    within = wrap(lambda p, x: checkpoint(slope, p["w"], x, use_reentrant=False).square().mean(0))
    without = wrap(lambda p, x: slope(p["w"], x).square().mean(0))
    (found, _), (expected, _) = (fj.jacobian_fn(f, mode="loop")(params, x) for f in (within, without))
    assert torch.equal(found["w"], expected["w"])


class Counted(nn.Module):
    """A buffer that each run changes by `.data`, which no version counter sees, as averages of codebooks do."""

    def __init__(self, recomputed):
        super().__init__()
        self.recomputed, self.layer = recomputed, nn.Linear(3, 3)
        self.register_buffer("size", torch.ones(3))

    def body(self, x):
        size = self.size.clone()
        self.size.data.mul_(2)
        return (self.layer(x) * size).sin()

    def forward(self, x):
        y = checkpoint(self.body, x, use_reentrant=False) if self.recomputed else self.body(x)
        self.left = y.cos().mean(0)
        return 2 * y  # so that the way to what is left does not pass the output


def test_what_runs_again_for_each_row_finds_the_tensors_of_the_call():
    def rows(recomputed):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        torch.manual_seed(0)
        net = Counted(recomputed).double()
        apply, buffers = fj.functional(net), dict(net.named_buffers())
        f = fj.jacobian_fn(lambda p, x: [apply(p, buffers, x)[0].square().mean(0), net.left], mode="loop")
        params = {name: 2 * p.detach() for name, p in net.named_parameters()}
        return [g(params, x)[0] for g in (f, fj.compiled(f, backend="eager"))]

    found = [*rows(True), *rows(False)]
    assert all(torch.equal(other[name], found[0][name]) for other in found for name in other)
