"""However a module reaches its layers, `functional` computes with the tensors that it is given, or it refuses."""

import contextlib
import gc
import signal
import time
import weakref

import pytest
import torch
import torch._dynamo.testing
from bounds import check_within, eps
from small_modules import MODULES, X, made
from torch import nn
from torch.nn import functional as F  # noqa: N812 - torch's own name for it
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import functional_jd as fj
from functional_jd.torch_compat.held_tensors import eagerly


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


class CompiledPart(Base):
    def prepare(self):
        self.first.compile(backend="eager")


class Scripted(Base):
    def prepare(self):
        self.first = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))


class Norms(Base):
    """Norms of torch's first kind, which set the weight on the layer whenever it is called."""

    def prepare(self):
        torch.nn.utils.spectral_norm(self.last)


class TiedNorm(nn.Module):
    """The output layer reads the rows that the embedding has shortened."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(5, 4, max_norm=0.5), nn.Linear(4, 5, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x):
        return self.out(self.embed(x.long().abs() % 5)).sum(-1)


class Nested(Base):
    """Calls its first layer with parameters that a step of its own has moved."""

    def way(self, x):
        apply, params = fj.functional(self.first), dict(self.first.named_parameters())
        slopes = torch.func.grad(lambda params: apply(params, {}, x)[0].square().mean())(params)
        return apply({name: p - 0.5 * slopes[name] for name, p in params.items()}, {}, x)[0]


def exported():
    return torch.export.export(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)), (X,)).module()


WAYS = MODULES | {cls.__name__: cls for cls in Base.__subclasses__()} | {"TiedNorm": TiedNorm, "Exported": exported}
# torch.jit and the old forms of norms have no rules for vmap, or torch.compile none for them.
NO_VMAP = {"Scripted", "Norms", "TiedNorm", "attention", "lstm", "spectral_norm", "weight_norm"}
NO_COMPILE = {"Scripted", "Nested", "lstm"}


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
    after = {name: b.clone() for name, b in module.named_buffers()}  # what runs again moves its own a second time
    return value, torch.autograd.grad(value, list(module.parameters())), after


def loss(y):
    y = y[0] if isinstance(y, tuple) else y
    return y.square().mean() + y.sin().mean()


def moved(module):
    params = {name: 1.5 * p.detach() + 0.01 for name, p in module.named_parameters()}
    return params, {name: b.clone() for name, b in module.named_buffers()}


@pytest.mark.filterwarnings("ignore:.*deprecated")
@pytest.mark.parametrize("name", WAYS)
def test_it_computes_with_what_it_is_given_and_leaves_the_module(name):
    module = made(WAYS[name])
    params, buffers = moved(module)
    value, slopes, after = reference(WAYS[name], params)
    apply, before, start = fj.functional(module), held(module), {key: b.clone() for key, b in buffers.items()}

    def check(found_value, found):
        torch.testing.assert_close(found_value, value)
        largest = max(y.abs().max() for y in slopes)
        for x, y in zip(found, slopes, strict=True):
            check_within(x, y, 2**8 * eps(y.dtype) * largest)
        assert unchanged(before, held(module))

    runs = [apply, apply]
    if name not in NO_COMPILE:
        torch.compiler.reset()
        runs += [torch.compile(lambda p, b, x: apply(p, b, x), backend="aot_eager", fullgraph=True)]
    for run in runs:
        points = {key: p.clone().requires_grad_() for key, p in params.items()}
        output, found_buffers = run(points, buffers, X)
        check(loss(output), torch.autograd.grad(loss(output), list(points.values())))
        for key, x in found_buffers.items():
            torch.testing.assert_close(x, after[key])
            assert not x.requires_grad
            assert x.data_ptr() != buffers[key].data_ptr()
        assert found_buffers.keys() == buffers.keys() == after.keys()
        assert all(torch.equal(x, start[key]) for key, x in buffers.items())
    if name == "checkpointed":
        return  # torch.func takes no hooks of saved tensors
    of = lambda params: loss(apply(params, buffers, X)[0])
    found, found_value = torch.func.grad_and_value(of)(params)
    check(found_value, found.values())
    if name not in NO_VMAP:
        stacked = {key: torch.stack([p, 2 * p]) for key, p in params.items()}
        found, found_value = torch.vmap(torch.func.grad_and_value(of))(stacked)
        check(found_value[0], [x[0] for x in found.values()])


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
    words = r"functional: forward must leave its parameters.* '1\.weight'"
    with pytest.raises(torch._dynamo.exc.Unsupported, match=words):
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
        given = torch.ones(()).requires_grad_() * X  # with a graph of its own
        torch.autograd.grad(loss(fj.functional(module)(points, {}, given)[0]), list(points.values()))
        return weakref.ref(points["first.weight"]), weakref.ref(given)

    gc.collect()
    gc.disable()
    try:
        assert [x() for x in run()] == [None, None]
    finally:
        gc.enable()


def test_a_backward_pass_that_is_interrupted_leaves_the_module_its_parameters():
    module, x = made(Base), X.repeat(20_000, 1)
    own, params = dict(module.named_parameters()), {key: p.detach() for key, p in module.named_parameters()}

    armed = []  # a late alarm must not end the run of all tests

    def interrupt(*_):
        if armed:
            armed.clear()
            raise KeyboardInterrupt

    def run(after=0.0):
        y = loss(fj.functional(module)({key: p.requires_grad_() for key, p in params.items()}, {}, x)[0])
        began, ended = time.perf_counter(), None
        with contextlib.suppress(KeyboardInterrupt):
            armed.append(True)
            signal.setitimer(signal.ITIMER_REAL, after)
            torch.autograd.grad(y, list(params.values()))
            ended = time.perf_counter() - began
            armed.clear()
        signal.setitimer(signal.ITIMER_REAL, 0)
        return ended

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        took = min(run() for _ in range(3))
        interrupted = 0
        for k in range(1, 21):
            interrupted += run(took * k / 20) is None
            assert all(module.get_parameter(name) is p for name, p in own.items())
        assert interrupted
    finally:
        signal.signal(signal.SIGALRM, before)


def test_two_threads_that_look_at_one_time_leave_the_compiler_as_it_was():
    one, two = eagerly(), eagerly()
    for act in (one.__enter__, two.__enter__, lambda: one.__exit__(None, None, None)):
        act()
    two.__exit__(None, None, None)
    counter = torch._dynamo.testing.CompileCounter()
    torch.compile(torch.sin, backend=counter)(X)
    assert counter.frame_count == 1


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


def writes(change):
    """Writes to its first layer before it calls it."""

    class Writing(Base):
        def way(self, x):
            change(self.first)
            return self.first(x)

    return Writing


@torch.no_grad()
def copies(layer):
    layer.weight.copy_(F.normalize(layer.weight))


def sets_data(layer):
    layer.weight.data = layer.weight.data / 2


def replaces(layer):
    layer.weight = nn.Parameter(0.9 * layer.weight.detach())


def deletes(layer):
    del layer.bias
    layer.bias = None


LEAVES = "functional: forward must leave its parameters, found that it "
WRITTEN = (
    r"train_state: expected losses that leave parameters and buffers, .* change '(shared\.)?first\.weight' in place"
)
REFUSED = {
    "copies": (writes(copies), LEAVES + r"has changed 'first\.weight' in place\. Make"),
    "sets data": (writes(sets_data), LEAVES + r"has changed 'first\.weight' in place\. Make"),
    "replaces": (writes(replaces), LEAVES + r"replaces 'first\.weight'\. Make"),
    "deletes": (writes(deletes), LEAVES + r"replaces 'first\.bias'\. Make"),
}
CHANGES = (lambda layer: layer.weight.data.clamp_(-0.1, 0.1), lambda layer: layer.weight.data.clamp_(max=9))
FOUND_LATER = {f"changes data {bool(k)}": (writes(change), WRITTEN) for k, change in enumerate(CHANGES)}


def losses_of(kind, apply):
    """Losses of `apply(params, x)`, and their parameters, of those of the module."""
    two = lambda params, x: torch.stack([(y := apply(params, x)).square().mean(), y.sin().mean()])
    if kind == "plain":
        return two, lambda params: params
    if kind == "per_example":
        return fj.per_example(lambda params, x: two(params, x[None]).sum()), lambda params: params
    heads = lambda heads, y, x: [heads * y.sum(), y.square().sum()]
    return fj.multitask(apply, heads), lambda params: {"shared": params, "heads": torch.tensor(2.0)}


def trains(losses, params):
    fj.train_state(params, X, losses=losses, aggregator=fj.upgrad(), optimizer=fj.sgd(0.1))


@pytest.mark.parametrize("name", REFUSED)
def test_a_forward_that_writes_its_parameters_is_refused(name):
    make, words = REFUSED[name]
    module = made(make)
    apply, (params, _) = fj.functional(module), moved(module)
    before = held(module)
    run = lambda params: loss(apply(params, {}, X)[0])
    stacked = {key: torch.stack([p, p]) for key, p in params.items()}
    points = {key: p.clone().requires_grad_() for key, p in params.items()}
    with pytest.raises(ValueError, match=words):
        run(points)
    # Under a transform it is torch itself that refuses `.data =`.
    error, words = (RuntimeError, "`data`|`.data`") if name == "sets data" else (ValueError, words)
    for call, given in ((torch.func.grad(run), params), (torch.vmap(run), stacked)):
        with pytest.raises(error, match=words):
            call({key: p.clone() for key, p in given.items()})
    assert unchanged(before, held(module))


@pytest.mark.parametrize("kind", ["plain", "per_example", "multitask"])
@pytest.mark.parametrize("name", [*REFUSED, *FOUND_LATER])
def test_train_state_refuses_it_also_of_frozen_parameters_and_puts_the_values_back(name, kind):
    make, words = (REFUSED | FOUND_LATER)[name]
    for frozen in (False, True):
        module = made(make)
        module.first.requires_grad_(not frozen)
        trained, constant = fj.objectives.partition(dict(module.named_parameters()), lambda _, p: p.requires_grad)
        forward, before = fj.functional(module), held(module)
        given = lambda params, constant=constant: fj.objectives.merge(params, constant) if constant else params
        losses, params = losses_of(kind, lambda params, x, given=given, f=forward: f(given(params), {}, x)[0])
        with pytest.raises(ValueError, match=words):
            trains(losses, params(trained))
        assert unchanged(before, held(module))


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


@pytest.mark.parametrize("output", [lambda layer, x: {"later": lambda: layer(x)}, lambda layer, x: Plain((layer, x))])
def test_an_output_that_would_compute_later_is_refused(output):
    class Later(Base):
        def forward(self, x):
            return output(self.last, self.first(x))

    module = made(Later)
    words = r"functional: expected an output of tensors, found .* holds a part of the mod"
    with pytest.raises(ValueError, match=words):
        fj.functional(module)(*moved(module), X)


def test_a_module_that_has_got_other_parts_is_refused():
    module = made(Base)
    apply, given = fj.functional(module), moved(module)
    module.last = nn.Linear(4, 2)
    with pytest.raises(ValueError, match=r"functional: expected the module as it was .* buffers in its Base\. Call"):
        apply(*given, X)
    apply, given = fj.functional(module), moved(module)
    module.last.register_parameter("gain", nn.Parameter(torch.ones(2)))
    with pytest.raises(ValueError, match=r"parameters or buffers in its Linear"):
        apply(*given, X)
    prune.identity(module.last, "weight")
    apply, (params, buffers) = fj.functional(module), moved(module)
    prune.remove(module.last, "weight")
    with pytest.raises(ValueError, match=r"parameters or buffers in its Linear"):
        apply(params, buffers, X)


def test_parameters_without_shapes_are_refused_before_they_get_one():
    module = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(ValueError, match=r"functional: expected parameters with shapes, found that '0\.weight' gets"):
        fj.functional(module)
    assert isinstance(module[0], nn.LazyLinear)
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
