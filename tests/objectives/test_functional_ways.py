"""However a module reaches its layers, `functional` computes with the tensors that it is given, or it refuses."""

import dataclasses
import gc
import importlib
import threading
import weakref
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - torch's own name for it
from torch.utils.checkpoint import checkpoint

import functional_jd as fj

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))


class Base(nn.Module):
    """Two layers; subclasses reach the first in their own way, and directly as well."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)
        self.prepare()

    def prepare(self):
        pass

    def way(self, x):
        return self.first(x)

    def forward(self, x):
        return self.last(torch.tanh(self.way(x)) + self.first(x))


class Plain:
    def __init__(self, layer):
        self.layer = layer

    def run(self, x):
        return self.layer(x)


@dataclasses.dataclass
class Held:
    layer: nn.Module


class Named(NamedTuple):
    layer: nn.Module


class OwnList(list):
    pass


class Lambda(Base):
    def prepare(self):
        self.way = lambda x: self.first(x)


class Object(Base):
    def prepare(self):
        self.object = Plain(self.first)
        self.way = self.object.run


class Dataclass(Base):
    def prepare(self):
        self.held = Held(self.first)

    def way(self, x):
        return self.held.layer(x)


class InNamedTuple(Base):
    def prepare(self):
        self.held = Named(self.first)

    def way(self, x):
        return self.held.layer(x)


class InOwnList(Base):
    def prepare(self):
        self.held = OwnList([self.first])

    def way(self, x):
        return self.held[0](x)


class WeakReference(Base):
    def prepare(self):
        self.held = weakref.ref(self.first)

    def way(self, x):
        return self.held()(x)


class Batched(Base):
    def prepare(self):
        self.way = torch.func.vmap(self.first)


class CompiledFunction(Base):
    def prepare(self):
        self.way = torch.compile(self.first, backend="eager")


class CompiledPart(Base):
    def prepare(self):
        self.first.compile(backend="eager")


class Scripted(Base):
    def prepare(self):
        self.first = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))


class Keeps:
    """Holds a parameter elsewhere than in the registered layers: functional_call does not replace it."""


class Hidden(Base, Keeps):
    """A layer that is not registered, made of parameters that are."""

    def prepare(self):
        layer = nn.Linear(4, 4)
        layer.weight, layer.bias = self.first.weight, self.first.bias
        self.held = {"layers": (layer,)}

    def way(self, x):
        return self.held["layers"][0](x)


class InContainers(Base, Keeps):
    """Parameters themselves in a list in a dict, and in a tuple."""

    def prepare(self):
        self.held, self.pair = {"weights": [self.first.weight]}, (self.first.bias, 1)

    def way(self, x):
        return F.linear(x, self.held["weights"][0], self.pair[0])


class SharedList(Base):
    """A hook fills a list that the module reads."""

    def prepare(self):
        self.seen = seen = []
        self.first.register_forward_hook(lambda module, args, output: seen.append(output))

    def way(self, x):
        self.seen.clear()
        self.first(x)
        return sum(self.seen) * len(self.seen)


class Norms(Base):
    """Norms of torch's first kind, which set the weight on the layer whenever it is called."""

    def prepare(self):
        torch.nn.utils.spectral_norm(self.last)


class Replicated(Base):
    def prepare(self):
        self.way = nn.DataParallel(self.first)


class TiedNorm(nn.Module):
    """The output layer reads the rows that the embedding has shortened."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(5, 4, max_norm=0.5), nn.Linear(4, 5, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x):
        return self.out(self.embed(x.long().abs() % 5)).sum(-1)


class Recursive(Base):
    def forward(self, x, depth=2):
        return self(torch.tanh(self.first(x)), depth - 1) if depth else self.last(x)


class Nested(Base):
    """Calls its first layer with parameters that a step of its own has moved."""

    def way(self, x):
        apply, params = fj.functional(self.first), dict(self.first.named_parameters())
        slopes = torch.func.grad(lambda params: apply(params, {}, x)[0].square().mean())(params)
        return apply({name: p - 0.5 * slopes[name] for name, p in params.items()}, {}, x)[0]


def sequential():
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))


def exported():
    return torch.export.export(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)), (X,)).module()


def quantized():
    quantize = importlib.import_module("torch.ao.quantization.quantize_fx")
    config = torch.ao.quantization.get_default_qat_qconfig_mapping("fbgemm")
    net = quantize.prepare_qat_fx(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3)).train(), config, (X,))
    net(X)  # its observers grow
    return net


WAYS = {cls.__name__: cls for cls in Base.__subclasses__() if not issubclass(cls, Keeps)} | {
    "TiedNorm": TiedNorm,
    "Graph": lambda: torch.fx.symbolic_trace(sequential()),
    "Interpreter": lambda: torch.fx.Interpreter(torch.fx.symbolic_trace(sequential())),
    "Exported": exported,
    "Quantized": quantized,
}
# torch.jit and the old forms of norms have no rules for vmap, or torch.compile none for them.
NO_VMAP = {"Scripted", "Quantized", "Norms", "Graph", "Interpreter", "TiedNorm"}
NO_COMPILE = {"Scripted", "Quantized", "CompiledFunction", "Nested"}


def made(make):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        found = make()
    return found.module if isinstance(found, torch.fx.Interpreter) else found


def held(module):
    """The parameters and buffers of a module by name, and their values."""
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    return tensors, [x.detach().clone() for x in tensors.values()]


def unchanged(before, after):
    same = before[0].keys() == after[0].keys() and all(x is after[0][name] for name, x in before[0].items())
    return same and all(torch.equal(x, y) for x, y in zip(before[1], after[1], strict=True))


def reference(make, params):
    """Loss, gradients and buffers of another module of this kind, whose own parameters have these values."""
    module = made(make)
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.copy_(params[name])
    value = loss(module(X))
    return value, torch.autograd.grad(value, list(module.parameters())), dict(module.named_buffers())


def loss(y):
    return y.square().mean() + y.sin().mean()


def moved(module):
    params = {name: 1.5 * p.detach() + 0.01 for name, p in module.named_parameters()}
    return params, {name: b.clone() for name, b in module.named_buffers()}


@pytest.mark.filterwarnings("ignore:.*(deprecated|quant_min|has been removed)")
@pytest.mark.parametrize("name", WAYS)
def test_it_computes_with_what_it_is_given_and_leaves_the_module(name):
    module = made(WAYS[name])
    params, buffers = moved(module)
    value, slopes, after = reference(WAYS[name], params)
    apply, before = fj.functional(module), held(module)

    def check(found_value, found, found_buffers=None):
        torch.testing.assert_close(found_value, value)
        for x, y in zip(found, slopes, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-6)
        for key, x in (found_buffers or {}).items():
            torch.testing.assert_close(x, after[key])
        assert unchanged(before, held(module))

    for _ in range(2):
        points = {key: p.clone().requires_grad_() for key, p in params.items()}
        output, found_buffers = apply(points, buffers, X)
        found = torch.autograd.grad(loss(output), list(points.values()))
        check(loss(output), found, found_buffers)
    of = lambda params: loss(apply(params, buffers, X)[0])
    found, found_value = torch.func.grad_and_value(of)(params)
    check(found_value, found.values())
    if name not in NO_VMAP:
        stacked = {key: torch.stack([p, 2 * p]) for key, p in params.items()}
        found, found_value = torch.vmap(torch.func.grad_and_value(of))(stacked)
        check(found_value[0], [x[0] for x in found.values()])


@pytest.mark.filterwarnings("ignore:.*(deprecated|quant_min|has been removed)")
@pytest.mark.parametrize("name", sorted(WAYS.keys() - NO_COMPILE))
def test_it_computes_with_what_it_is_given_where_it_is_compiled(name):
    module = made(WAYS[name])
    params, buffers = moved(module)
    value, slopes, after = reference(WAYS[name], params)
    apply, before = fj.functional(module), held(module)
    torch.compiler.reset()
    compiled = torch.compile(lambda p, b, x: apply(p, b, x), backend="aot_eager", fullgraph=True)
    points = {key: p.clone().requires_grad_() for key, p in params.items()}
    output, found_buffers = compiled(points, buffers, X)
    torch.testing.assert_close(loss(output), value)
    for x, y in zip(torch.autograd.grad(loss(output), list(points.values())), slopes, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-6)
    for key, x in found_buffers.items():
        torch.testing.assert_close(x, after[key])
    assert unchanged(before, held(module))


class Writes(nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            self.weight.mul_(0.5)
        return super().forward(x)


def test_a_compiled_forward_that_writes_its_parameters_is_refused():
    net = made(lambda: nn.Sequential(nn.Linear(4, 4), Writes(4, 3)))
    apply, params = fj.functional(net), {name: p.detach().clone() for name, p in net.named_parameters()}
    torch.compiler.reset()
    compiled = torch.compile(lambda p, x: apply(p, {}, x)[0], backend="eager", fullgraph=True)
    with pytest.raises(
        torch._dynamo.exc.Unsupported, match=r"functional: forward must leave its parameters.* '1\.weight'"
    ):
        compiled(params, X)
    assert all(torch.equal(params[name], p) for name, p in net.named_parameters())


class Adjoint(torch.autograd.Function):
    """Calls a function in the forward pass, and again in the backward pass."""

    @staticmethod
    def forward(ctx, f, x, *params):
        ctx.f = f
        ctx.save_for_backward(x, *params)
        return f(x)

    @staticmethod
    def backward(ctx, cotangent):
        x, *params = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            found = torch.autograd.grad(ctx.f(x), [x, *params], cotangent, allow_unused=True)
        return None, *found


adjoint = Adjoint.apply


class Again(Base):
    """Runs its first layer again in the backward pass."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def inner(self, x):
        return self.first(x) * 2.0

    def way(self, x):
        once = lambda x: checkpoint(self.inner, x, use_reentrant=False)
        return {
            "checkpoint": lambda: once(x),
            "nested": lambda: checkpoint(lambda x: once(x).sin(), x, use_reentrant=False),
            "reentrant": lambda: checkpoint(self.inner, x, use_reentrant=True),
            "adjoint": lambda: Adjoint.apply(self.inner, x, *self.first.parameters()),
            "kept": lambda: adjoint(self.inner, x, *self.first.parameters()),
        }[self.how]()  # fmt: skip


@pytest.mark.parametrize("how", ["checkpoint", "nested", "reentrant", "adjoint", "kept"])
def test_what_runs_again_finds_the_tensors_of_the_call(how):
    module = made(lambda: Again(how))
    params, _ = moved(module)
    plain = Again(how)
    plain.way = lambda x: (plain.first(x) * 2.0).sin() if how == "nested" else plain.first(x) * 2.0
    with torch.no_grad():
        for key, p in plain.named_parameters():
            p.copy_(params[key])
    x = X.clone().requires_grad_()
    expected = torch.autograd.grad(loss(plain(x)), [*plain.parameters(), x])
    points = {key: p.requires_grad_() for key, p in params.items()}
    before = held(module)
    output, _ = fj.functional(module)(points, {}, x)
    loss(output).backward()  # the only form that reentrant checkpoints take
    for key, y in zip([*points.values(), x], expected, strict=True):
        torch.testing.assert_close(key.grad, y)
    assert unchanged(before, held(module))


@pytest.mark.parametrize("how", ["checkpoint", "adjoint"])
def test_what_runs_again_does_not_keep_the_graph_alive(how):
    module = made(lambda: Again(how))

    def run():
        points = {key: p.detach().requires_grad_() for key, p in module.named_parameters()}
        torch.autograd.grad(loss(fj.functional(module)(points, {}, X)[0]), list(points.values()))
        return weakref.ref(points["first.weight"])

    gc.collect()
    gc.disable()
    try:
        assert run()() is None
    finally:
        gc.enable()


def test_threads_that_share_a_module_wait_for_one_another():
    module = made(lambda: Again("checkpoint"))
    apply, found = fj.functional(module), {}
    given = {k: {key: (k + 1.0) * p.detach() for key, p in module.named_parameters()} for k in range(4)}

    def gradient(k):
        points = {key: p.clone().requires_grad_() for key, p in given[k].items()}
        return torch.autograd.grad(loss(apply(points, {}, X)[0]), list(points.values()))

    def work(k):
        found[k] = [gradient(k) for _ in range(20)]

    threads = [threading.Thread(target=work, args=(k,)) for k in given]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for k in given:
        for row in found[k]:
            assert all(torch.equal(x, y) for x, y in zip(row, gradient(k), strict=True))


class Failing(Base):
    def way(self, x):
        self.seen = x
        self.first.register_forward_hook(print)
        raise ArithmeticError


def test_a_module_that_raises_is_left_as_it_was():
    module = made(Failing)
    before = held(module)
    with pytest.raises(ArithmeticError):
        fj.functional(module)(*moved(module), X)
    assert unchanged(before, held(module))
    assert torch.equal(module.first(X), F.linear(X, module.first.weight, module.first.bias))


class Copies(Base):
    def way(self, x):
        with torch.no_grad():
            self.first.weight.copy_(F.normalize(self.first.weight))
        return self.first(x)


class SetsData(Base):
    def way(self, x):
        self.first.weight.data = self.first.weight.data / 2
        return self.first(x)


class ChangesData(Base):
    def way(self, x):
        self.first.weight.data.clamp_(-0.1, 0.1)
        return self.first(x)


class Replaces(Base):
    def way(self, x):
        self.first.weight = nn.Parameter(0.9 * self.first.weight.detach())
        return self.first(x)


class Deletes(Base):
    def way(self, x):
        del self.first.bias
        self.first.bias = None
        return self.first(x)


class KeepsItself(Base):
    """A function of the module keeps a parameter, which is the module's own whatever it is given."""

    def prepare(self):
        weight = self.first.weight
        self.way = lambda x: x @ weight.T


LEAVES = "functional: forward must leave its parameters, found that it "
REFUSED = {
    Copies: LEAVES + r"has changed 'first\.weight' in place\. Make",
    SetsData: LEAVES + r"has changed 'first\.weight' in place\. Make",
    Replaces: LEAVES + r"replaces 'first\.weight'\. Make",
    Deletes: LEAVES + r"replaces 'first\.bias'\. Make",
}


@pytest.mark.parametrize("make", REFUSED)
def test_a_forward_that_writes_its_parameters_is_refused(make):
    module = made(make)
    apply, (params, _) = fj.functional(module), moved(module)
    before = held(module)
    run = lambda params: loss(apply(params, {}, X)[0])
    stacked = {key: torch.stack([p, p]) for key, p in params.items()}
    points = {key: p.clone().requires_grad_() for key, p in params.items()}
    # Under a transform it is torch itself that refuses `.data =`.
    error, words = (RuntimeError, "`data`|`.data`") if make is SetsData else (ValueError, REFUSED[make])
    with pytest.raises(ValueError, match=REFUSED[make]):
        run(points)
    for call, given in ((torch.func.grad(run), params), (torch.vmap(run), stacked)):
        with pytest.raises(error, match=words):
            call({key: p.clone() for key, p in given.items()})
    assert unchanged(before, held(module))


@pytest.mark.parametrize("engine", ["auto", "jacobian", "gramian"])
@pytest.mark.parametrize("make", [*REFUSED, ChangesData, KeepsItself])
def test_train_state_refuses_it_for_every_engine_and_puts_the_values_back(make, engine):
    module = made(make)
    apply, params = fj.functional(module), dict(module.named_parameters())
    values = {key: p.detach().clone() for key, p in params.items()}
    losses = lambda params, x: torch.stack([(y := apply(params, {}, x)[0]).square().mean(), y.sin().mean()])
    written = r"train_state: expected losses that leave the parameters, found that they change 'first\.weight' in place"
    kept = r"functional: forward must use the parameters that are passed, .* own 'first\.weight'"
    words = {ChangesData: written, KeepsItself: kept} | REFUSED
    with pytest.raises(ValueError, match=words[make]):
        fj.train_state(params, X, losses=losses, aggregator=fj.upgrad(), optimizer=fj.sgd(0.1), engine=engine)
    for key, p in params.items():
        assert torch.equal(p, values[key])


@pytest.mark.parametrize("kind", ["plain", "per_example", "multitask"])
@pytest.mark.parametrize("make", [*REFUSED, ChangesData])
def test_train_state_refuses_it_of_frozen_parameters_too(make, kind):
    module = made(make)
    module.first.requires_grad_(False)
    own = dict(module.named_parameters())
    trained, constant = fj.objectives.partition(own, lambda _, p: p.requires_grad)
    values = {key: p.detach().clone() for key, p in own.items()}
    forward = fj.functional(module)
    apply = lambda params, x: forward(fj.objectives.merge(params, constant), {}, x)[0]
    losses = {
        "plain": lambda params, x: torch.stack([(y := apply(params, x)).square().mean(), y.sin().mean()]),
        "per_example": fj.per_example(lambda params, x: apply(params, x[None]).square().mean()),
        "multitask": fj.multitask(apply, lambda heads, y, x: [heads * y.sum(), y.square().sum()]),
    }[kind]
    params = {"shared": trained, "heads": torch.tensor(2.0)} if kind == "multitask" else trained
    written = r"train_state: expected losses that leave the parameters, found that they change 'first\.weight' in place"
    with pytest.raises(ValueError, match=({ChangesData: written} | REFUSED)[make]):
        fj.train_state(params, X, losses=losses, aggregator=fj.upgrad(), optimizer=fj.sgd(0.1))
    for key, p in own.items():
        assert torch.equal(p, values[key])


class KeepsInOwnList(Base):
    def prepare(self):
        self.held = OwnList([self.first.weight])

    def way(self, x):
        return x @ self.held[0].T


@pytest.mark.parametrize("kind", ["plain", "per_example", "multitask"])
@pytest.mark.parametrize("make", [KeepsItself, KeepsInOwnList])
def test_a_parameter_that_a_module_keeps_elsewhere_is_refused_whatever_training_starts_from(make, kind):
    module = made(make)
    apply, params = fj.functional(module), moved(module)[0]  # copies
    two = lambda params, x: torch.stack([(y := apply(params, {}, x)[0]).square().mean(), y.sin().mean()])
    losses = {
        "plain": two,
        "per_example": fj.per_example(lambda params, x: two(params, x[None]).sum()),
        "multitask": fj.multitask(
            lambda shared, x: apply(shared, {}, x)[0], lambda heads, y, x: [heads * y.sum(), y.square().sum()]
        ),
    }[kind]
    params = {"shared": params, "heads": torch.tensor(2.0)} if kind == "multitask" else params
    words = r"functional: forward must use the parameters that are passed, .* own 'first\.weight'"
    with pytest.raises(ValueError, match=words):
        fj.train_state(params, X, losses=losses, aggregator=fj.upgrad(), optimizer=fj.sgd(0.1))
    if kind == "plain":
        with pytest.raises(ValueError, match=words):
            fj.weights_fn(losses, fj.upgrad())(params, X)


def test_the_own_parameters_of_a_module_may_be_constants_beside_it():
    module = made(Base)
    own, apply = dict(module.named_parameters()), fj.functional(module)
    near = lambda params: sum((p - own[name]).square().sum() for name, p in params.items())
    losses = lambda params, x: torch.stack([apply(params, {}, x)[0].square().mean(), near(params)])
    method = {"losses": losses, "aggregator": fj.upgrad(), "optimizer": fj.sgd(0.1)}
    assert fj.step(fj.train_state(moved(module)[0], X, **method), X, **method)[1].moved
    trained, constant = fj.objectives.partition(own, lambda name, p: name.startswith("last"))
    losses = lambda params, x: apply(fj.objectives.merge(params, constant), {}, x)[0].square().mean(0)
    method |= {"losses": losses}
    assert fj.step(fj.train_state(trained, X, **method), X, **method)[1].moved


def test_an_embedding_without_a_largest_norm_is_not_taken_for_one_that_writes():
    module = made(lambda: nn.Embedding(5, 3))
    apply, params = fj.functional(module), dict(module.named_parameters())
    losses = lambda params, ids: apply(params, {}, ids)[0].square().mean((0, 1))
    ids = torch.tensor([[0, 2], [2, 3]])
    state = fj.train_state(params, ids, losses=losses, aggregator=fj.upgrad(), optimizer=fj.sgd(0.1))
    assert torch.equal(state.params["weight"], module.weight)


class Later(Base):
    def forward(self, x):
        return {"later": lambda: self.last(self.first(x))}


class Distribution:
    def __init__(self, layer, x):
        self.layer, self.x = layer, x


class Lazy(Base):
    def forward(self, x):
        return Distribution(self.last, self.first(x))


@pytest.mark.parametrize("make", [Later, Lazy])
def test_an_output_that_would_compute_later_is_refused(make):
    module = made(make)
    with pytest.raises(
        ValueError, match=r"functional: expected an output of tensors, found .* holds a part of the mod"
    ):
        fj.functional(module)(*moved(module), X)


def test_a_module_that_has_got_other_parts_is_refused():
    module = made(Base)
    apply, given = fj.functional(module), moved(module)
    module.last = nn.Linear(4, 2)
    with pytest.raises(ValueError, match=r"functional: expected the module as it was .* parameters in its Base\. Call"):
        apply(*given, X)
    apply, given = fj.functional(module), moved(module)
    module.last.register_parameter("gain", nn.Parameter(torch.ones(2)))
    with pytest.raises(ValueError, match=r"parameters in its Linear"):
        apply(*given, X)


def test_parameters_without_shapes_are_refused():
    module = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(ValueError, match=r"functional: expected parameters with shapes, found that '0\.weight' gets"):
        fj.functional(module)
    module(X)
    assert fj.functional(module)(*moved(module), X)[0].shape == (6, 3)


def test_a_region_that_is_compiled_trains_without_a_warning():
    torch.compiler.reset()
    module = made(CompiledPart)
    apply, params = fj.functional(module), dict(module.named_parameters())
    losses = lambda params, x: torch.stack([(y := apply(params, {}, x)[0]).square().mean(), y.sin().mean()])
    method = {"losses": losses, "aggregator": fj.upgrad(), "optimizer": fj.sgd(0.1)}
    state, _ = fj.step(fj.train_state(params, X, **method), X, **method)
    assert not torch.equal(state.params["first.weight"], params["first.weight"])
