"""Losses that probably do not train: statistics that are lost, tasks without labels, buffers."""

import warnings

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional
from torch.utils._pytree import tree_map

import functional_jd as fj

METHOD = {"aggregator": fj.upgrad(), "optimizer": fj.sgd(0.1)}
X = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
Y = X[:, :2].square()


def network(**options):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, **options), nn.Linear(4, 2))
    return net, dict(net.named_parameters()), dict(net.named_buffers())


def begin(losses, params, *batch, **others):
    return fj.train_state(params, *(batch or (X, Y)), losses=losses, **METHOD, **others)


def error(found, y):
    return (found - y).square().mean(0)


LOSING = {
    "dropped": lambda net, b: lambda p, x, y: error(fj.functional(net)(p, b, x)[0], y),
    "in the module": lambda net, b: lambda p, x, y: error(functional_call(net, p, (x,)), y),
    "tasks": lambda net, b: fj.multitask(
        lambda p, x, y: fj.functional(net)(p, b, x)[0],
        lambda v, z, x, y: {"a": error(z * v, y).sum(), "b": z.sum() * v},
    ),
}


@pytest.mark.parametrize("losing", LOSING)
@pytest.mark.parametrize("with_key", [False, True])
def test_averages_that_are_lost_are_told(losing, with_key):
    net, params, buffers = network()
    before = tree_map(torch.clone, buffers)
    losses = LOSING[losing](net, buffers)
    if losing == "tasks":
        params = {"shared": params, "heads": torch.ones(())}
    others = {}
    if with_key and losing != "tasks":
        plain, others = losses, {"buffers": {"key": fj.random.key(0)}}
        losses = lambda p, b, *batch: (plain(p, *batch), b)
    words = r"^train_state: the losses must return .*functional\(module\).*buffers=dict\("
    with pytest.warns(UserWarning, match=words) as seen:
        begin(losses, params, **others)
    assert (len(seen), seen[0].filename) == (1, __file__)
    if losing != "in the module":
        assert all(torch.equal(x, before[name]) for name, x in net.named_buffers())


def returned(net):
    def losses(p, b, x, y):
        found, b = fj.functional(net)(p, b, x)
        return error(found, y), b

    return losses


@pytest.mark.parametrize("kind", ["returned", "eval", "without averages", "layer norm"])
def test_averages_that_are_kept_or_do_not_move_are_not_told(kind):
    net, params, buffers = network(track_running_stats=kind != "without averages")
    if kind == "returned":
        begin(returned(net), params, buffers=buffers)  # no warning: warnings are errors
        once = lambda p, b, x, y: (lambda found, b: (error(found, y), b))(*fj.functional(net)(p, b, x))
        begin(lambda p, b, x, y: once(p, once(p, b, x, y)[1], x + 1, y), params, buffers=buffers)
        return
    if kind == "layer norm":
        net[1] = nn.LayerNorm(4)
    net.train(kind != "eval")
    begin(LOSING["in the module"](net, buffers), dict(net.named_parameters()))


class PerStep(nn.Module):
    """Batch normalization with averages for each step, in the rows of its buffers."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("mean", torch.zeros(2, 2))
        self.register_buffer("variance", torch.ones(2, 2))

    def forward(self, x):
        return nn.functional.batch_norm(self.layer(x), self.mean[1], self.variance[1], training=True)


def with_missing_labels(kind):
    """Two tasks, of which the second has labels in some batches only."""
    params = {"shared": {"w": torch.ones(3, 2)}, "heads": {"a": torch.ones(2), "b": torch.ones(2)}}

    def heads(own, h, x, labels):
        known = ~labels.isnan()
        other = (h @ own["b"])[known].sub(labels[known]).square().mean() if known.any() else torch.zeros(())
        return {"a": (h @ own["a"]).square().mean(), "b": other}

    losses = fj.multitask(lambda shared, x, labels: x @ shared["w"], heads)
    return params, losses if kind == "tasks" else lambda p, *batch: losses(p, *batch)


LABELS = torch.tensor([torch.nan, 1.0, torch.nan, 2.0, 0.0, torch.nan, 1.0, 3.0])


@pytest.mark.parametrize("kind", ["tasks", "plain"])
@pytest.mark.parametrize("rule", [fj.mean, fj.upgrad])
def test_a_task_without_labels_in_the_first_batch_starts_by_name(kind, rule):
    params, losses = with_missing_labels(kind)
    method = {"losses": losses, "aggregator": rule(), "optimizer": fj.sgd(0.1)}
    nothing = torch.full((8,), torch.nan)
    with pytest.raises(ValueError, match=r"found 'b' without a gradient.*for a task without labels, constant=\[name\]"):
        fj.train_state(params, X, nothing, **method)
    state = fj.train_state(params, X, nothing, constant=["b"], **method)  # no warning: warnings are errors
    state, info = fj.step(state, X, nothing, **method)
    assert info.moved
    assert torch.equal(state.params["heads"]["b"], params["heads"]["b"])
    labelled = fj.train_state(state.params, X, LABELS, constant=["b"], **method)  # may be, need not
    found, info = fj.step(state, X, LABELS, **method)
    assert info.moved
    assert not torch.equal(found.params["heads"]["b"], params["heads"]["b"])
    torch.testing.assert_close(found.params, fj.step(labelled, X, LABELS, **method)[0].params)


def test_losses_that_may_be_constant_are_names_and_others_may_not():
    losses = lambda p, x, y: {"a": (p["w"] * x).sum(), "b": x.sum(), "c": y.sum()}
    params = {"w": torch.ones(3)}
    for wrong, found in ((["d"], "'d'"), ("d", "'d'"), ([1], "1"), (7, "7"), (torch.ones(()), r"torch.float32 \[\]")):
        with pytest.raises(ValueError, match=rf"constant must be names of losses, 'a', 'b', 'c', found {found}\."):
            begin(losses, params, constant=wrong)
    with pytest.raises(ValueError, match=r"found 'c' without a gradient"):
        begin(losses, params, constant=["b"])
    begin(losses, params, constant={"b", "c"})
    begin(lambda p, x, y: {"b": x.sum()}, params, constant="b")


FLOAT16 = "gradients pass through float16 without a scale"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("through", ["autocast", "cast", "parameters", "constant"])
def test_gradients_that_pass_through_float16_want_a_scale(through, dtype):
    def losses(p, x, y):
        w = p["w"].to(dtype).to(p["w"].dtype) if through == "cast" else p["w"]
        x = (x.to(dtype) if through == "constant" else x).to(w.dtype)
        return {"a": (x @ w).square().mean(), "b": w.square().sum()}

    f = fj.autocast(losses, dtype) if through == "autocast" else losses
    params = {"w": torch.ones(3, dtype=dtype if through == "parameters" else torch.float32)}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "train_state: parameters must be in float32")
        begin(f, params)
        fj.weights_fn(f, fj.mean())(params, X, Y)
        here = len(seen)
        begin(f, params, scale=fj.scale_state())
        fj.weights_fn(f, fj.mean())(params, X, Y, scale=fj.scale_state(shape=2))
    wanted = dtype == torch.float16 and through != "constant"
    assert len(seen) == here == 2 * wanted
    expected = [f"{name}: {FLOAT16}" for name in ["train_state", "weights_fn"] * wanted]
    assert [str(x.message).split(", ")[0] for x in seen] == expected
    assert all(x.filename == __file__ for x in seen)


class Observer(nn.Module):
    """Of the largest inputs, which has a shape after the first forward pass, as those of `prepare_qat`."""

    def __init__(self):
        super().__init__()
        self.register_buffer("most", torch.empty(0))

    def forward(self, x):
        now = x.detach().amax(0)
        self.most = torch.maximum(self.most, now) if self.most.numel() else now
        return x


def test_buffers_that_grow_are_refused_with_the_cure_and_averages_in_rows_are_kept():
    net = nn.Sequential(nn.Linear(3, 2), Observer())
    states = lambda module: (dict(module.named_parameters()), dict(module.named_buffers()))
    losses, (params, buffers) = returned(net), states(net)
    state = begin(losses, params, buffers=buffers)
    with pytest.raises(ValueError, match=r"'1\.most', expected torch.float32 \[0\]\. Call a module whose first"):
        fj.step(state, X, Y, losses=losses, **METHOD)
    net(X)
    state = begin(losses, params, buffers=states(net)[1])
    assert fj.step(state, X, Y, losses=losses, **METHOD)[0].buffers["1.most"].shape == (2,)
    params, buffers = states(PerStep())
    state = begin(returned(PerStep()), params, buffers=buffers)
    state, _ = fj.step(state, X, Y, losses=returned(PerStep()), **METHOD)
    assert state.buffers["mean"].any(1).tolist() == [False, True]


class Codes(nn.Module):
    """A codebook of moving averages, in buffers."""

    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(3, 2)
        self.register_buffer("codes", torch.linspace(-1, 1, 8).reshape(4, 2))

    def forward(self, x):
        z = self.encode(x)
        code = torch.cdist(z, self.codes).argmin(1)
        if self.training:
            hits = nn.functional.one_hot(code, 4).to(z.dtype)
            moved = 0.9 * self.codes + 0.1 * hits.mT @ z.detach()
            self.codes = torch.where(hits.sum(0)[:, None] > 0, moved, self.codes)
        return z + (self.codes[code] - z).detach()


def spectral():
    net = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 2))
    with torch.no_grad():
        net.parametrizations.weight.original.add_(torch.eye(2, 3))  # its vectors are of another weight now
    return net


@pytest.mark.parametrize("make", [Codes, spectral])
def test_buffers_of_any_module_that_are_lost_are_told(make):
    net = make()
    apply, params, buffers = fj.functional(net), dict(net.named_parameters()), dict(net.named_buffers())
    dropped = lambda p, x, y: error(apply(p, buffers, x)[0], y)
    with pytest.warns(UserWarning, match=r"train_state: the losses must return the buffer '.* buffers=dict\("):
        begin(dropped, params)
    stale = lambda p, b, x, y: (dropped(p, x, y), b)
    with pytest.warns(UserWarning, match=r"train_state: the losses must return the buffer"):
        begin(stale, params, buffers=buffers)

    def carried(p, b, x, y):
        z, b = apply(p, b, x)
        z, b = apply(p, b, x + z.mean())  # those of the first call enter the second
        return error(z, y), b

    begin(carried, params, buffers=buffers)
    net.eval()
    begin(dropped, params)


def test_a_loop_by_hand_checks_what_train_state_does():
    net, params, buffers = network()
    call = fj.functional(net)
    kept = lambda p, b, x, y: (lambda found: (error(found[0], y), found[1]))(call(p, b, x))
    before = {name: x.clone() for name, x in buffers.items()}
    fj.check(kept, params, X, Y, buffers=buffers, scale=fj.scale_state(shape=2))  # no warning
    assert all(torch.equal(x, before[name]) for name, x in buffers.items())
    with pytest.warns(UserWarning, match="check: the losses must return the running statistics"):
        fj.check(LOSING["dropped"](net, buffers), params, X, Y)
    with pytest.raises(ValueError, match="check: the losses must depend on the parameters"):
        fj.check(lambda p, x, y: error(x[:, :2], y), params, X, Y)
    with pytest.raises(ValueError, match="check: expected a call outside of transforms"):
        torch.vmap(lambda x: fj.check(lambda p, x: (p["w"] * x).sum(), {"w": torch.ones(2)}, x))(X)


class Unit(torch.autograd.Function):
    """Gradients of length one, as in some straight-through estimators."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g / (g.norm() + 1e-30)


class Clipped(Unit):
    @staticmethod
    def backward(ctx, g):
        return g.clamp(-100, 100)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_check_takes_other_backward_passes_for_linear(dtype):
    """Each evaluation draws another mask: both gradients are of one. What clips is found at a scale that it clips."""
    p, x = {"w": torch.tensor([1.0, 2.0, 3.0], dtype=dtype)}, torch.tensor([1.0, 0.5, 0.1], dtype=dtype)
    p["none"] = x[:0]

    def losses(p, x):
        masked, part = (
            functional.dropout(p["w"], 0.5).exp().sum() + p["none"].sum(),
            (x.sum() * p["w"][:1]).abs().log().sum(),
        )
        return {"c": Clipped.apply(p["w"] * x).square().sum(), "d": masked, "e": part}

    fj.check(losses, p, x)  # no warning
    with pytest.warns(UserWarning, match="check: .* found others of 'c'"):
        fj.check(losses, p, x, scale=fj.scale_state(2.0**10))


def test_a_check_names_losses_whose_backward_pass_is_not_linear():
    def losses(p, x):
        return {"a": (p["w"] * x).square().sum(), "b": 50 * Unit.apply(p["w"] * x).square().sum()}

    def counting(p, b, x):
        return losses(p, x), {"n": b["n"] + 1}

    def heads(p, z, x):
        return {"a": (p["v"] * z).square().sum(), "b": Unit.apply(z).exp().sum() * p["v"]}

    w, x, b = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 0.5, 0.1]), {"n": torch.zeros(())}
    p, scale = {"w": w}, fj.scale_state(shape=2)
    shared = {"shared": p, "heads": {"v": torch.ones(())}}
    for f, params, batch, how in (
        (losses, p, x, {}),
        (losses, p, x, {"scale": scale}),
        (lambda *given: (losses(*given), "aux"), p, x, {"has_aux": True}),
        (counting, p, x, {"buffers": b}),
        (fj.multitask(lambda p, x: p["w"] * x, heads), shared, x, {"scale": scale}),
        (fj.per_example(lambda p, x: losses(p, x)["b"]), p, x.expand(4, 3), {}),
    ):
        with pytest.warns(UserWarning, match="check: gradients must be linear .* found others of '(b|loss)'"):
            fj.check(f, params, batch, **how)
    assert not b["n"]


def test_a_check_of_half_precision_says_nothing_of_what_a_scale_keeps():
    """Gradients of 1e-7 round in float16, but not at the scale. At a scale that overflows nothing can be said."""
    f = fj.autocast(lambda p, x: {"a": 1e-3 * (x @ p["w"]).square().mean(), "b": (x @ p["w"]).mean()})
    torch.manual_seed(0)
    p, x = {"w": torch.randn(8, 16) / 3}, torch.randn(64, 8)
    for start in (2.0**12, 2.0**16, 2.0**30):
        fj.check(f, p, x, scale=fj.scale_state(start, shape=2))  # no warning


def test_a_module_may_have_a_sparse_buffer():
    net = nn.Linear(2, 2)
    net.register_buffer("adjacent", torch.eye(2).to_sparse())
    params, buffers = {name: p.detach() for name, p in net.named_parameters()}, dict(net.named_buffers())
    losses = lambda p, x: (buffers["adjacent"] @ fj.functional(net)(p, buffers, x)[0]).square().mean(0)
    fj.train_state(params, torch.ones(2, 2), losses=losses, aggregator=fj.mean(), optimizer=fj.sgd(0.1))  # no warning


def test_float16_parameters_are_named_and_other_errors_of_losses_are_their_own():
    half = {"w": torch.ones(2).half(), "b": torch.zeros(2)}
    with pytest.warns(UserWarning, match="parameters must be in float32 to be trained, found float16 in 'w'"):
        begin(lambda p, x: ((p["w"] * x).float() + p["b"]).square(), half, X[0, :2].half(), scale=fj.scale_state())
    with pytest.raises(ZeroDivisionError) as failed:
        begin(lambda p, x, y: 1 / 0, {"w": torch.ones(3)})
    assert not getattr(failed.value, "__notes__", [])
