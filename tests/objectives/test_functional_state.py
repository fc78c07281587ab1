"""Values that forward stores on its module, parameters that it keeps elsewhere, and what backward passes run again."""

import threading

import pytest
import torch
from bounds import check_same, check_within, eps
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import functional_jd as fj
from functional_jd.objectives.functional import READS_MODULES

X = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))


class Penalized(nn.Module):
    """Stores penalties on itself and on a part, in an attribute and in a list, as Bayesian layers and experts do."""

    def __init__(self, checkpoints=False):
        super().__init__()
        self.first, self.last, self.checkpoints = nn.Linear(3, 4), nn.Linear(4, 2), checkpoints
        self.kl, self.parts = 0.0, []
        with torch.no_grad():
            for i, p in enumerate(self.parameters()):
                p.copy_(torch.linspace(-1, 1, p.numel()).reshape(p.shape) + 0.1 * i)

    def hidden(self, x):
        h = torch.tanh(self.first(x))
        self.first.penalty = h.square().mean() + self.first.weight.square().sum()
        return h

    def forward(self, x):
        h = checkpoint(self.hidden, x, use_reentrant=False) if self.checkpoints else self.hidden(x)
        self.kl = self.last.weight.exp().sum()
        self.parts = [(h.sin() * self.last.weight.sum()).mean()]
        return self.last(h)

    def penalty(self):
        return self.kl + self.parts[0] + self.first.penalty


def check_moved(moved, weights, expected):
    """A step of 0.1 times a weighted sum of rows in float32, seen as a difference of parameters of order one."""
    terms = weights.float().abs() @ expected.abs()
    check_within(moved, 0.1 * weights.float() @ expected, 64 * eps(torch.float32) * (1 + 0.1 * terms))


def losses_of(kind, run, net):
    """Losses that read what forward has left on the module; `run(params, x)` returns its output."""
    if kind == "plain":

        def losses(params, x):
            y = run(params, x)
            return torch.stack([y.square().mean() + net.penalty(), y.sin().mean() * net.penalty()])

        return losses
    if kind == "multitask":

        def features(shared, x):
            y = run(shared, x)
            return {"y": y, "penalty": net.penalty()}

        heads = lambda own, h, x: [(own * h["y"]).square().mean() + h["penalty"], h["y"].sin().mean() * h["penalty"]]
        return fj.multitask(features, heads)

    def loss(params, x):
        y = run(params, x[None])
        return y.square().mean() + net.penalty()

    return fj.per_example(loss)


def rows_by_hand(kind, params, x):
    """The rows by plain autograd, on a module that holds these parameters."""
    net = Penalized()
    net.load_state_dict(params)
    run = lambda _, x: net(x)
    losses = losses_of(kind, run, net)
    if kind == "per_example":
        values = [losses.loss(None, each) for each in x]
    elif kind == "multitask":
        values = losses.heads(torch.tensor(2.0), losses.features(None, x), x)
    else:
        values = losses(None, x)
    rows = [torch.autograd.grad(y, list(net.parameters()), retain_graph=True) for y in values]
    return torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])


def flat(rows):
    return torch.cat([g.flatten(1) for g in rows.values()], 1)


KINDS = ["plain", "multitask", "per_example"]


@pytest.mark.parametrize("begin", [None, [], {}])
def test_an_attribute_of_a_layer_of_torch_that_was_there_before_counts(begin):
    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
            self.trunk.features = begin

        def forward(self, x):
            self.trunk.features = [checkpoint(self.trunk, x, use_reentrant=False)]
            return x.new_zeros(())

    net, x = Keeps(), torch.ones(2, 3)
    params = {name: (p.detach() + 1).requires_grad_() for name, p in net.named_parameters()}
    fj.functional(net)(params, {}, x)
    found = torch.autograd.grad(net.trunk.features[0].sum(), [*params.values()])
    expected = torch.autograd.grad(torch.tanh(nn.functional.linear(x, *params.values())).sum(), [*params.values()])
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_losses_may_read_what_forward_stores(kind, checkpoints):
    net = Penalized(checkpoints)
    apply = fj.functional(net)
    params = {name: 1.5 * p.detach() for name, p in net.named_parameters()}
    expected = rows_by_hand(kind, params, X)
    losses = losses_of(kind, lambda params, x: apply(params, {}, x)[0], net)
    given = {"shared": params, "heads": torch.tensor(2.0)} if kind == "multitask" else params
    trunk = lambda tree: tree["shared"] if kind == "multitask" else tree
    under_vmap = kind == "per_example" and checkpoints  # torch has no hooks of saved tensors there
    for mode in ("auto", "loop") if under_vmap else ("auto", "vmap", "loop"):
        jacobian, _ = fj.jacobian_fn(losses, mode=mode)(given, X)
        torch.testing.assert_close(flat(jacobian.shared if kind == "multitask" else jacobian), expected)
    weights = torch.linspace(0.5, 1.5, len(expected), dtype=torch.float64)
    for make in (fj.gramian_fn, fj.weighted_fn):
        *_, pullback = make(losses)(given, X)
        found = trunk(pullback(weights)[0])
        torch.testing.assert_close(torch.cat([g.flatten() for g in found.values()]), weights.float() @ expected)
    found = fj.weights_fn(losses, fj.mean())(given, X)
    torch.testing.assert_close(found.weights.float(), torch.full((len(expected),), 1 / len(expected)))
    for engine in ("auto", "jacobian", "gramian", "weighted"):
        rule = fj.mean() if engine == "weighted" else fj.upgrad()
        method = {"losses": losses, "aggregator": rule, "optimizer": fj.sgd(0.1)}
        state, info = fj.step(fj.train_state(given, X, **method), X, engine=engine, **method)
        assert info.moved
        moved = torch.cat([(params[name] - p).flatten() for name, p in trunk(state.params).items()])
        check_moved(moved, info.weights, expected)
    if kind == "plain":
        assert torch.isfinite(net.penalty())


class Lambda(nn.Module):
    """Reaches a layer's tensors by a lambda, which keeps them."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.h = lambda x, w=self.lin.weight, b=self.lin.bias: nn.functional.linear(x, w, b)

    def forward(self, x):
        return self.h(torch.tanh(self.lin(x)))


class Inside(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.pair = ([self.lin.weight], 1)

    def forward(self, x):
        return torch.stack([self.lin(x) @ self.pair[0][0]])[0]


class Scripted(nn.Module):
    """A layer of torch.jit that is not registered, which no mode sees."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.pair = (torch.jit.script(self.lin),)

    def forward(self, x):
        return self.lin(x) + self.pair[0](x)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("make", [Lambda, Inside, Scripted])
def test_a_parameter_that_is_kept_elsewhere_raises_by_name(make, frozen):
    if frozen and make is Scripted:
        pytest.skip("a graph shows no frozen parameters, and a mode no scripted layers")
    net = make().requires_grad_(not frozen)
    apply, params = fj.functional(net), {name: p.detach() + 0.1 for name, p in net.named_parameters()}
    losses = lambda params, x: apply(params, {}, x)[0].square().mean(0)
    words = r"functional: forward must use the parameters that are passed, .* own 'lin\.(weight|bias)'"
    start = lambda losses, params: fj.train_state(params, X, losses=losses, aggregator=fj.mean(), optimizer=fj.sgd(0.1))
    examples = fj.per_example(lambda params, x: losses(params, x[None]).sum())
    tasks = fj.multitask(
        lambda params, x: apply(params, {}, x)[0], lambda heads, y, x: [heads * y.sum(), y.exp().sum()]
    )
    own = dict(net.named_parameters())
    assert apply(own, {}, X)[0].shape == (5, 3)  # its own are no others, and such a call shows nothing
    torch.func.grad(lambda own: apply(own, {}, X)[0].sum())(own)
    for run in (
        lambda: apply(params, {}, X),
        lambda: fj.jacobian_fn(losses)(params, X),
        lambda: torch.func.grad(lambda params: losses(params, X).sum())(params),
        lambda: torch.vmap(lambda x: apply(params, {}, x))(X),
        lambda: start(losses, params),
        lambda: start(examples, params),
        lambda: start(tasks, {"shared": params, "heads": torch.tensor(2.0)}),
        lambda: fj.weights_fn(losses, fj.upgrad())(params, X),
    )[: 2 if make is Scripted else None]:
        with pytest.raises(ValueError, match=words):
            run()


def test_each_parameter_is_looked_at_where_another_takes_its_place():
    net = nn.Linear(3, 1)
    apply, weight, own = fj.functional(net), net.weight, dict(net.named_parameters())
    net.forward = lambda x: nn.functional.linear(x, weight, net.bias)
    apply(own | {"bias": torch.zeros(1)}, {}, X)
    with pytest.raises(ValueError, match="own 'weight'"):
        apply(own | {"weight": torch.zeros(1, 3)}, {}, X)


def test_what_a_later_call_keeps_raises_when_training_starts():
    net = nn.Sequential(nn.Linear(3, 3), nn.Identity())
    apply, params = fj.functional(net), {name: 2 * p.detach() for name, p in net.named_parameters()}
    apply(params, {}, X)
    weight = net[0].weight
    net[1].forward = lambda x: x @ weight
    losses = lambda params, x: apply(params, {}, x)[0].square().mean(0)
    with pytest.raises(ValueError, match=r"own '0\.weight'"):
        fj.train_state(params, X, losses=losses, aggregator=fj.mean(), optimizer=fj.sgd(0.1))


def test_a_detached_parameter_is_a_constant():
    net = nn.Linear(3, 3)
    start = net.weight
    net.register_forward_hook(lambda module, args, y: y + (module.weight - start.detach()).square().sum())
    apply, params = fj.functional(net), {name: p.detach() + 1 for name, p in net.named_parameters()}
    torch.testing.assert_close(apply(params, {}, X)[0], X @ params["weight"].T + params["bias"] + 9)


@pytest.mark.parametrize("make", [torch.jit.script, nn.DataParallel])
def test_what_functional_call_does_not_support_raises_its_error(make):
    net = make(nn.Linear(3, 2))
    params = {name: p.detach() for name, p in net.named_parameters()}
    with pytest.raises(RuntimeError, match="The stateless API can't be used with"):
        fj.functional(net)(params, {}, X)


class Again(nn.Module):
    """Two layers that run again in the backward pass, and statistics."""

    def __init__(self, checkpoints=True):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)
        self.run = (lambda f, x: checkpoint(f, x, use_reentrant=False)) if checkpoints else lambda f, x: f(x)

    def inner(self, x):
        return torch.tanh(self.norm(self.first(x)))

    def forward(self, x):
        return self.run(self.last, self.run(self.inner, x))


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


def sets(net, *factors):
    names = dict(net.named_parameters())
    return [{name: (f * p.detach()).requires_grad_() for name, p in names.items()} for f in factors]


@pytest.mark.parametrize("device", DEVICES)
def test_two_sets_of_parameters_run_again_with_their_own(device):
    net, x = Again().to(device), X.to(device)
    apply, buffers, plain = fj.functional(net), dict(net.named_buffers()), Again(False).to(device)
    one, two = sets(net, 0.5, 2.0)
    every = [*one.values(), *two.values()]
    ways = {
        "side by side": lambda f: f(one, x).square().mean() + f(two, x).sin().mean(),
        "chained": lambda f: f(two, f(one, x)).square().mean(),
        "made of one": lambda f: f({name: 2 * p for name, p in one.items()}, f(one, x)).sum() + f(two, x).sum(),
    }
    copies = {name: b.clone() for name, b in buffers.items()}
    ours = lambda params, x: apply(params, buffers, x)[0]
    theirs = lambda params, x: functional_call(plain, {**params, **{k: b.clone() for k, b in copies.items()}}, (x,))
    own = {name: (p, p.detach().clone()) for name, p in net.named_parameters()}
    for way in ways.values():
        found = torch.autograd.grad(way(ours), every, allow_unused=True)
        expected = torch.autograd.grad(way(theirs), every, allow_unused=True)
        for g, h in zip(found, expected, strict=True):
            torch.testing.assert_close(g, h)
        for name, p in net.named_parameters():
            assert p is own[name][0]
            assert torch.equal(p, own[name][1])
        assert all(torch.equal(b, copies[name]) for name, b in net.named_buffers())


def test_passes_through_gradients_run_again_with_one_set_and_raise_with_two():
    net, plain = Again(), Again(False)
    apply, buffers = fj.functional(net), dict(net.named_buffers())
    one, two = sets(net, 0.5, 2.0)
    ours = lambda params, x: apply(params, buffers, x)[0]
    theirs = lambda params, x: functional_call(plain, {**params, **{k: b.clone() for k, b in buffers.items()}}, (x,))

    def second(f, *given):
        x = X.clone().requires_grad_()
        total = sum(f(params, x).sum() for params in given)  # whose gradients reach no output
        (slope,) = torch.autograd.grad(total, x, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), [x, *given[0].values()], allow_unused=True)

    for x, y in zip(second(ours, one), second(theirs, one), strict=True):
        check_same(x, y)
    with pytest.raises(ValueError, match=r"functional: what runs again must find one set"):
        second(ours, one, two)
    assert all(isinstance(p, nn.Parameter) for p in net.parameters())
    assert torch.isfinite(net(X)).all()


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, cotangent):
        raise ArithmeticError


@pytest.mark.parametrize("device", DEVICES)
def test_a_backward_pass_that_fails_leaves_the_module_with_its_own(device):
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).to(device)
    net[0].register_forward_hook(lambda module, args, y: Fails.apply(y))
    own, params = dict(net.named_parameters()), sets(net, 2.0)[0]
    with pytest.raises(ArithmeticError):
        fj.functional(net)(params, {}, X.to(device))[0].sum().backward()
    assert all(p is own[name] for name, p in net.named_parameters())


class Outer(nn.Module):
    """Calls a part as it is, and then as a function with other parameters."""

    def __init__(self, checkpoints=True):
        super().__init__()
        self.part = nn.Linear(3, 3)
        self.run = (lambda f, x: checkpoint(f, x, use_reentrant=False)) if checkpoints else lambda f, x: f(x)

    def forward(self, x):
        h = self.run(lambda x: torch.tanh(self.part(x)), x)
        params = {name: 2 * p for name, p in self.part.named_parameters()}
        call = fj.functional(self.part) if isinstance(self.part, nn.Module) else None
        return self.run(lambda x: torch.tanh(self.part(x)), call(params, {}, h)[0]) + h


def test_a_call_inside_a_call_runs_again_with_the_tensors_of_each():
    net, plain = Outer(), Outer(False)
    params = sets(net, 0.5)[0]
    found, expected = (
        torch.autograd.grad(fj.functional(each)(params, {}, X)[0].square().sum(), list(params.values()))
        for each in (net, plain)
    )
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y)
    assert all(isinstance(p, nn.Parameter) for p in net.parameters())


@pytest.mark.parametrize("shared", [False, True])
def test_threads_that_share_a_module_and_its_checkpoints_get_their_own_gradients(shared):
    net, found = Again(), {}
    one = fj.functional(net)
    buffers, given = dict(net.named_buffers()), sets(net, 0.5, 1.0, 1.5, 2.0)

    def work(k):
        apply = one if shared else fj.functional(net)
        row = lambda: torch.autograd.grad(apply(given[k], buffers, X)[0].square().sum(), list(given[k].values()))
        found[k] = [row() for _ in range(20)]

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    together = found
    found = {}
    for k in range(4):
        work(k)
        for row in together[k]:
            assert all(torch.equal(x, y) for x, y in zip(row, found[k][0], strict=True))


@pytest.mark.skipif(not READS_MODULES, reason="torch.compile reads no attributes of modules before torch 2.13")
# torch.compile hides this by `showwarning`, too late for warnings that are errors.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(("kind", "rule"), [*zip(KINDS, [fj.upgrad, fj.upgrad, fj.mean], strict=True)])
def test_compiled_losses_may_read_what_forward_stores(kind, rule):
    net = Penalized()
    apply = fj.functional(net)
    params = {name: 1.5 * p.detach() for name, p in net.named_parameters()}
    expected = rows_by_hand(kind, params, X)
    losses = losses_of(kind, lambda params, x: apply(params, {}, x)[0], net)
    given = {"shared": params, "heads": torch.tensor(2.0)} if kind == "multitask" else params
    method = {"losses": losses, "aggregator": rule(), "optimizer": fj.sgd(0.1)}
    state = fj.train_state(given, X, **method)
    torch.compiler.reset()
    take = torch.compile(lambda state, x: fj.step(state, x, **method), backend="aot_eager", fullgraph=True)
    for _ in range(2):
        after, info = take(state, X)
        trunk = after.params["shared"] if kind == "multitask" else after.params
        moved = torch.cat([(params[name] - p).flatten() for name, p in trunk.items()])
        check_moved(moved, info.weights, expected)


def test_a_checkpoint_that_comes_to_layers_of_torch_later_finds_the_passed_parameters():
    net, x = nn.Sequential(nn.Linear(2, 3), nn.Tanh()), torch.ones(4, 2)
    params = {name: torch.full_like(p, 0.5).requires_grad_() for name, p in net.named_parameters()}
    apply = fj.functional(net)
    gradient = lambda: torch.autograd.grad(apply(params, {}, x)[0].square().sum(), [*params.values()])
    expected = [gradient() for _ in range(2)][1]
    forward = net.forward
    net.forward = lambda x: checkpoint(forward, x, use_reentrant=False)
    assert all(map(torch.equal, gradient(), expected))
