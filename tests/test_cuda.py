"""The same steps on a GPU: skipped where there is none."""

import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map
from two_tasks import close, method, two_tasks

import functional_jd as fj

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

NORMS = [
    partial(nn.LayerNorm, 5),
    partial(nn.GroupNorm, 1, 5),
    partial(nn.RMSNorm, 5),
    partial(nn.BatchNorm1d, 5, track_running_stats=False),
]


def on_gpu(tree):
    return tree_map(lambda leaf: leaf.cuda(), tree)


@pytest.mark.parametrize("engine", ["jacobian", "gramian"])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_mixed_precision_trains_without_waiting_for_the_device(norm, dtype, engine):
    params, features, top, batch = two_tasks(norm)
    params, batch = on_gpu(params), on_gpu(batch)
    how = method(params, fj.autocast(features, dtype), fj.autocast(top, dtype), aggregator=fj.upgrad(solver="device"))
    state = fj.train_state(params, *batch, scale=fj.scale_state(shape=(2,)), **how)  # which goes to the GPU
    state, _ = fj.step(state, *batch, engine=engine, **how)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(30):
            state, info = fj.step(state, *batch, engine=engine, **how)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(leaf.isfinite().all() and leaf.is_cuda for leaf in tree_leaves(state))
    before = top(params["heads"], features(params["shared"], *batch), *batch)
    assert info.losses["one"] < before["one"]
    assert info.losses["two"] < before["two"]


@pytest.mark.parametrize("rule", [fj.upgrad, fj.config, fj.nash_mtl])
def test_a_rule_on_the_host_waits_once_in_a_step(rule):
    params, features, top, batch = two_tasks(partial(nn.LayerNorm, 5))
    params, batch = on_gpu(params), on_gpu(batch)
    how = method(params, features, top, aggregator=rule())
    state = fj.train_state(params, *batch, **how)
    state, _ = fj.step(state, *batch, **how)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fj.step(state, *batch, **how)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sum("synchroniz" in str(each.message) for each in caught) == 1


@pytest.mark.parametrize("rule", [fj.mean, partial(fj.upgrad, solver="device")])
def test_a_step_is_captured_in_a_graph(rule):
    params, features, top, batch = two_tasks(partial(nn.LayerNorm, 5))
    params, batch = on_gpu(params), on_gpu(batch)
    how = method(params, features, top, aggregator=rule())
    state = fj.train_state(params, *batch, **how)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        expected, _ = fj.step(state, *batch, **how)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, _ = fj.step(state, *batch, **how)
    graph.replay()
    torch.cuda.synchronize()
    close(captured.params, expected.params)


@pytest.mark.parametrize("m", [2, 5, 32, 128])
@pytest.mark.parametrize("solver", ["host", "device"])
def test_rules_find_on_a_gpu_what_they_find_on_a_cpu(m, solver):
    J = torch.randn(m, 2 * m, dtype=torch.float64, generator=torch.Generator().manual_seed(m))
    for rule in (fj.upgrad, fj.mgda, fj.config):
        found = fj.aggregate(rule(solver=solver), J.cuda()).direction
        assert found.is_cuda
        close(found.cpu(), fj.aggregate(rule(), J).direction, rtol=1e-9, atol=1e-11)


def test_a_step_is_that_of_the_cpu():
    params, features, top, batch = two_tasks(partial(nn.LayerNorm, 5), dtype=torch.float64)
    how = method(params, features, top)
    alone, _ = fj.step(fj.train_state(params, *batch, **how), *batch, **how)
    state = fj.train_state(on_gpu(params), *on_gpu(batch), **how)
    there, _ = fj.step(state, *on_gpu(batch), **how)
    close(tree_map(lambda leaf: leaf.cpu(), there.params), alone.params, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("shape", [(), (2,)])
def test_a_skipped_step_changes_nothing_but_the_scale(shape):
    how = {"losses": lambda p, x: {"a": (p * 2).sum(), "b": (p * x).sum()}, "aggregator": fj.upgrad()}
    how["optimizer"] = fj.adamw(1e-2)
    x, bad = torch.ones((), device="cuda"), torch.full((), 1e37, device="cuda")
    state = fj.train_state(torch.ones(3, device="cuda"), x, scale=fj.scale_state(shape=shape, device="cuda"), **how)
    after, info = fj.step(state, bad, **how)
    assert not info.finite.all()
    assert all(torch.equal(u, v) for u, v in zip(tree_leaves(after[:3]), tree_leaves(state[:3]), strict=True))
    assert torch.equal(after.scale.scale, torch.where(info.finite, state.scale.scale, state.scale.scale / 2))
