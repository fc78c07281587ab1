"""Modules as pure functions: the module's numbers, its buffers as values, right where it runs again."""

import copy
import io

import pytest
import torch
from small_modules import X, made
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.optim.swa_utils import AveragedModel

import functional_jd as fj


def parts(module, factor=1.0):
    params = {name: factor * p.detach().clone() for name, p in module.named_parameters()}
    return params, {name: b.clone() for name, b in module.named_buffers()}


def state_of(module):
    return {name: x.clone() for name, x in [*module.named_parameters(), *module.named_buffers()]}


def same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], msg=lambda words, name=name: f"{name}: {words}")


def test_forward_leaves_its_attributes_on_the_module_and_its_buffers_alone():
    module = made("counting")
    fj.functional(module)(*parts(module), X)
    assert module.seen is X
    assert module.calls == 0


class Converting(nn.Module):
    """Converts a submodule while it runs, as routers of experts do."""

    def __init__(self):
        super().__init__()
        self.router = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))

    def forward(self, x):
        self.router = self.router.to(torch.float32)
        return self.router(x.float()).to(x.dtype)


def test_a_module_that_converts_itself_runs_if_nothing_is_converted_and_raises_else():
    module = Converting()
    output, moved = fj.functional(module)(*parts(module), X)
    torch.testing.assert_close(output, copy.deepcopy(module)(X))
    assert int(moved["router.1.num_batches_tracked"]) == 1
    module = Converting().double()
    with pytest.raises(ValueError, match=r"functional: forward must leave its parameters, .* 'router\.0\.weight'"):
        fj.functional(module)(*parts(module), X.double())
    assert all(p.dtype == torch.float64 for p in module.parameters())


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_an_embedding_with_a_largest_norm_leaves_the_parameters(kind):
    ids = torch.tensor([[0, 2], [2, 3]])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = kind(5, 3, max_norm=0.5)
    params, theirs = parts(module)[0], copy.deepcopy(module)
    before = state_of(module)
    points = {"weight": params["weight"].clone().requires_grad_()}
    expected = theirs(ids)  # shortens its own rows
    (gradient,) = torch.autograd.grad(expected.square().sum(), list(theirs.parameters()))
    for _ in range(2):
        output, _ = fj.functional(module)(points, {}, ids)
        (found,) = torch.autograd.grad(output.square().sum(), list(points.values()))
        torch.testing.assert_close(output, expected)
        torch.testing.assert_close(found, gradient)
    same({"weight": points["weight"].detach()}, params)
    same(state_of(module), before)
    computed = nn.utils.parametrizations.weight_norm(module)
    torch.testing.assert_close(fj.functional(computed)(*parts(computed), ids)[0], expected)


def test_batch_statistics_are_mapped_with_the_parameters():
    module = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5))
    apply, (params, buffers) = fj.functional(module), parts(module)
    seeds = {key: torch.stack([x, 2 * x, 3 * x]).detach() for key, x in params.items()}
    with pytest.raises(RuntimeError, match=r"^Batch norm got a batched tensor"):
        torch.vmap(apply, in_dims=(0, None, None))(seeds, buffers, X)
    mapped = {n: b.expand(3, *b.shape) for n, b in module.named_buffers()}
    outputs, moved = torch.vmap(apply, in_dims=(0, 0, None))(seeds, mapped, X)
    for i in range(3):
        output, own = apply({key: x[i] for key, x in seeds.items()}, buffers, X)
        torch.testing.assert_close(outputs[i], output)
        same({key: b[i] for key, b in moved.items()}, own)


def test_composes_with_jvp():
    module = made("counting")
    params, buffers = parts(module)
    f = lambda params: fj.functional(module)(params, buffers, X)[0].square().sum()
    gradient = dict(zip(params, torch.autograd.grad(module(X).square().sum(), list(module.parameters())), strict=True))
    tangent = torch.func.jvp(f, (params,), (gradient,))[1]
    torch.testing.assert_close(tangent, sum(g.square().sum() for g in gradient.values()))


def test_what_a_module_left_on_itself_elsewhere_is_no_reason_to_compile_again():
    module = made("counting")
    params, buffers = parts(module)
    apply, graphs = fj.functional(module), CompileCounter()
    torch._dynamo.reset()
    compiled = torch.compile(lambda p, b, x: apply(p, b, x), backend=graphs, fullgraph=True)
    compiled(params, buffers, X)
    module(X - 1)  # there was nothing before this, and there is a tensor from now on
    output, _ = compiled(params, buffers, X)
    before = graphs.frame_count
    for k in range(3):
        module(X + k)
        assert torch.equal(compiled(params, buffers, X)[0], output)
    assert graphs.frame_count == before


def test_called_inside_a_compiled_function_it_says_to_be_called_before():
    module = made("counting")
    params, buffers = parts(module)
    f = lambda p, b, x: fj.functional(module)(p, b, x)[0]
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"functional: expected a call outside .*Write apply ="):
        torch.compile(f, backend="aot_eager", fullgraph=True)(params, buffers, X)
    torch._dynamo.reset()  # where the graph may break, it does
    torch.testing.assert_close(torch.compile(f, backend="aot_eager")(params, buffers, X), module(X))


def test_a_module_that_is_converted_afterwards_takes_the_same_names():
    module = made("counting")
    apply = fj.functional(module)
    params, buffers = parts(module.double())  # which puts other buffers in the place of those before
    found, moved = apply(params, buffers, X.double())
    same({"output": found}, {"output": module(X.double())})
    same(moved, dict(module.named_buffers()))


MISTAKES = [
    ([1], {}, TypeError, r"functional: params must be a dict of tensors by name, found list\. .*named_parameters"),
    ({"weight": 1.0}, {}, TypeError, r"params must be a dict of tensors by name, found a dict with other values"),
    ({}, {}, ValueError, r"params must have the names of module\.named_parameters\(\), found \['bias', 'weight'\]"),
    ({"weight": X, "bias": X, "more": X}, {}, ValueError, r"\['more'\] unknown.*merge"),
    ({"weight": X, "bias": X}, {"b": X}, ValueError, r"buffers must have the names of module\.named_buffers\(\)"),
]


def test_mistakes_are_named_with_their_cure():
    for params, buffers, error, words in MISTAKES:
        with pytest.raises(error, match=words):
            fj.functional(nn.Linear(4, 3))(params, buffers, X)
    with pytest.raises(TypeError, match=r"functional: expected an nn\.Module, found builtin_function_or_method\. Pass"):
        fj.functional(torch.relu)
    lazy = nn.Sequential(nn.LazyLinear(3))
    losses = lambda params, x: fj.functional(lazy)(params, {}, x)[0].mean(0)
    with pytest.raises(ValueError, match=r"Call `forward` with a dummy batch to initialize the parameters"):
        fj.train_state(dict(lazy.named_parameters()), X, losses=losses, aggregator=fj.mean(), optimizer=fj.sgd(0.1))


class Average(nn.Module):
    """What is compared with its moving average, which begins with the first batch."""

    def __init__(self, persistent, registered):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        if registered:
            self.register_buffer("average", None, persistent)
        self.persistent = persistent

    def forward(self, x):
        y = self.layer(x)
        if getattr(self, "average", None) is None:
            self.register_buffer("average", y.detach().mean(0), self.persistent)
        self.average = torch.lerp(self.average, y.detach().mean(0), 0.1)
        return y - self.average


@pytest.mark.parametrize("registered", [True, False])
def test_a_buffer_without_a_value_before_is_refused(registered):
    net = Average(True, registered)
    params, x = {name: p.detach() for name, p in net.named_parameters()}, torch.ones(4, 3)
    with pytest.raises(ValueError, match=r"'average' of Average.*call the module once before functional\(module\)"):
        fj.functional(net)(params, {}, x)
    assert getattr(net, "average", None) is None
    net(x)
    _, buffers = fj.functional(net)(params, dict(net.named_buffers()), 2 * x)
    assert (buffers["average"] != net.average).all()
    net = Average(False, registered)
    assert fj.functional(net)(params, {}, x)[1] == {}


class FullyShardedDataParallel(nn.Module):
    """Stands for torch's, which needs ranks."""

    def __init__(self, module):
        super().__init__()
        self.module = module


def test_modules_with_flat_parameters_of_fsdp_are_refused(monkeypatch):
    monkeypatch.setattr("torch.distributed.fsdp.FullyShardedDataParallel", FullyShardedDataParallel)
    with pytest.raises(ValueError, match=r"functional: expected a module without .*, found FullyShardedDataParallel"):
        fj.functional(FullyShardedDataParallel(nn.Linear(2, 2)))


class Keeping(nn.Module):
    """A module that keeps the functions of a part, and of itself, as trainers do."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.whole, self.call = fj.functional(self), fj.functional(self.net)

    def forward(self, x):
        return self.net(x)


def pickled(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled, AveragedModel], ids=["deepcopy", "pickle", "average"])
def test_a_copy_of_a_module_that_keeps_its_function_has_the_function_of_the_copy(copied):
    module, x = Keeping(), torch.randn(6, 4)
    params, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    module.whole(params, buffers, x)
    module.eval()
    other = copied(module)
    other = other.module if isinstance(other, AveragedModel) else other
    other.train()
    other.net[2].p = 0.0
    assert other.call.module is other.net
    assert other.whole.module is other
    assert module.call.module is module.net
    own = dict(other.net.named_parameters()), dict(other.net.named_buffers())
    for found, moved in (other.whole(params, buffers, x), other.call(*own, x)):
        torch.testing.assert_close(found, copy.deepcopy(other.net)(x), rtol=0, atol=0)
        tracked = int(buffers["net.1.num_batches_tracked"])
        assert max(int(v) for name, v in moved.items() if name.endswith("tracked")) > tracked
    torch.testing.assert_close(module.whole(params, buffers, x)[0], module(x), rtol=0, atol=0)
