"""What `train_state` says of losses that look wrong: averages that are lost, buffers that were not given."""

import warnings

import pytest
import torch
from torch import nn
from torch.func import functional_call
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
    with pytest.warns(UserWarning, match=r"^train_state: normalization .*functional\(module\).*buffers=dict\(") as seen:
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
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if kind == "returned":
            begin(returned(net), params, buffers=buffers)
            return
        if kind == "layer norm":
            net[1] = nn.LayerNorm(4)
        net.train(kind != "eval")
        begin(LOSING["in the module"](net, buffers), dict(net.named_parameters()))


def test_buffers_that_were_not_given_are_named():
    net, params, buffers = network()
    tasks = fj.multitask(lambda p, state, x, y: fj.functional(net)(p, state, x), lambda v, z, state, x, y: (z, state))
    examples = fj.per_example(lambda p, state, x, y: (fj.functional(net)(p, state, x[None])[0].sum(), state))
    plain = returned(net)
    for losses, start, batch, name in (
        (plain, params, (X, Y), "'b'"),
        (lambda p, buffers, both: plain(p, buffers, *both.values()), params, ({"x": X, "y": Y},), "'buffers'"),
        (tasks, {"shared": params, "heads": torch.ones(())}, (X, Y), "'state'"),
        (examples, params, (X, Y), "'state'"),
        (fj.autocast(plain), params, (X, Y), "'b'"),
    ):
        words = rf"^train_state: expected losses of .*{len(batch)} arg.* another, {name}, .*pass buffers=dict\("
        with pytest.raises(TypeError, match=words):
            begin(losses, start, *batch)
    begin(plain, params, buffers=buffers)


@pytest.mark.parametrize("batch", [(X, Y), ({"x": X, "y": Y},)], ids=["tensors", "a dict"])
def test_a_batch_that_was_taken_for_buffers_is_told(batch):
    net, params, _ = network()
    losses = lambda p, buffers, *batch: returned(net)(p, buffers, *batch)
    with pytest.raises((TypeError, ValueError), match=r"train_state: the losses take 'buffers'.*pass buffers=dict\("):
        begin(losses, params, *batch)


def test_other_errors_of_losses_are_their_own():
    with pytest.raises(ZeroDivisionError) as failed:
        begin(lambda p, x, y: 1 / 0, {"w": torch.ones(3)})
    assert not getattr(failed.value, "__notes__", [])
    with pytest.raises(TypeError, match=r"missing 2 required positional arguments") as failed:
        begin(lambda p, x, y, z, u: 1, {"w": torch.ones(3)})
    assert not getattr(failed.value, "__notes__", [])
