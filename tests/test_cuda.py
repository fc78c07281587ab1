"""The same steps on a GPU: skipped where there is none."""

import gc
import warnings
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from bounds import check_same, check_stable, check_within, eps, product_bound
from sequences import rows_of_condition, rows_of_kind
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves, tree_map
from two_tasks import close, method, two_tasks

import functional_jd as fj
from functional_jd.core.foreach import clone_each
from functional_jd.core.safe import cosines
from functional_jd.solvers.lcp import linear_complementarity
from functional_jd.solvers.pivoting import least_pivot

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

NORMS = [
    partial(nn.LayerNorm, 5),
    partial(nn.GroupNorm, 1, 5),
    partial(nn.RMSNorm, 5),
    partial(nn.BatchNorm1d, 5, track_running_stats=False),
]


def on_gpu(tree):
    return tree_map(lambda leaf: leaf.cuda(), tree)


def on_one_gpu(rule, norm=NORMS[0], low=lambda f: f):
    """Parameters and a batch of two tasks there, and a method with this rule."""
    params, features, top, batch = two_tasks(norm)
    return on_gpu(params), on_gpu(batch), method(params, low(features), low(top), aggregator=rule)


@contextmanager
def waiting(effect):
    """Meanwhile a wait for the GPU raises an error, or warns."""
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings():  # torch warns once in a process that the mode is a prototype
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode(effect)
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # torch's own, of RMSNorm under autocast
@pytest.mark.parametrize("engine", ["jacobian", "gramian"])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_mixed_precision_trains_without_waiting_for_the_device(norm, dtype, engine):
    params, batch, how = on_one_gpu(fj.upgrad(solver="device"), norm, lambda f: fj.autocast(f, dtype))
    state = fj.train_state(params, *batch, scale=fj.scale_state(shape=(2,)), **how)  # which goes to the GPU
    state, _ = fj.step(state, *batch, engine=engine, **how)
    with waiting("error"):
        for _ in range(30):
            state, info = fj.step(state, *batch, engine=engine, **how)
    assert all(leaf.isfinite().all() and leaf.is_cuda for leaf in tree_leaves(state))
    _, features, top, _ = two_tasks(norm)
    before = top(params["heads"], features(params["shared"], *batch), *batch)
    assert all(info.losses[name] < before[name] for name in ("one", "two"))


@pytest.mark.parametrize("rule", [partial(fj.upgrad, solver="host"), fj.config, fj.nash_mtl])
def test_a_rule_on_the_host_waits_once_in_a_step(rule):
    params, batch, how = on_one_gpu(rule())
    state = fj.train_state(params, *batch, **how)
    state, _ = fj.step(state, *batch, **how)
    with waiting("warn"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fj.step(state, *batch, **how)
    assert sum("synchroniz" in str(each.message) for each in caught) == 1


@pytest.mark.parametrize("rule", [fj.upgrad, fj.dualproj, fj.mgda])
def test_a_search_in_one_launch_does_not_wait(rule):
    pytest.importorskip("triton")
    J = rows_of_condition(5, 10.0)
    there = J.cuda()
    fj.aggregate(rule(), there)  # compiles
    with waiting("error"):
        found = fj.aggregate(rule(), there)
    close((found.weights.cpu(), found.direction.cpu()), fj.aggregate(rule(), J)[1::-1])
    several = torch.vmap(lambda J: fj.aggregate(rule(), J).direction)(torch.stack([there, 2 * there]))
    close(several[1], 2 * found.direction)


CAPTURED = [fj.mean, fj.upgrad, fj.mgda, fj.dualproj]


@pytest.mark.parametrize("rule", CAPTURED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("donate", [False, True])
def test_captured_steps_are_those_of_eager_ones(rule, dtype, donate):
    low = (lambda f: fj.autocast(f, dtype)) if dtype == torch.float16 else (lambda f: f)
    params, batch, how = on_one_gpu(rule(), low=low)
    begin = {"scale": fj.scale_state(2.0**10, shape=(2,))} if dtype == torch.float16 else {}
    expected = fj.train_state(params, *batch, **how, **begin)
    take = fj.compiled(partial(fj.step, **how), backend="cudagraphs", donate=donate)
    state = tree_map(torch.clone, expected)
    for _ in range(5):
        expected, info = fj.step(expected, *batch, **how)
        before = state
        state, found = take(state, *batch)
        if donate:
            with pytest.raises(RuntimeError, match="has donated"):
                tree_leaves(before.params)[0].sum()
        close(found.losses, info.losses)
    close(state.params, expected.params)


def test_a_captured_front_is_that_of_operators():
    losses = lambda p, x: torch.stack([(p - x).square().sum(), (p + 1).square().sum()])
    how = {"losses": losses, "rule": fj.tchebycheff, "optimizer": fj.adamw(0.05)}
    how["preferences"] = fj.fronts.lattice(2, 4).cuda()
    train = partial(fj.fronts.train, torch.zeros(3).cuda(), [(torch.full((3,), k).cuda(),) for k in (1.0, 2.0)], **how)
    close(train(compile="cudagraphs").states.params, train(compile="eager").states.params)


def test_a_rule_that_decomposes_is_refused_before_the_capture():
    params, batch, how = on_one_gpu(fj.aligned_mtl())
    state = fj.train_state(params, *batch, **how)
    with pytest.raises(ValueError, match="must not wait"):
        fj.compiled(partial(fj.step, **how), backend="cudagraphs")(state, *batch)
    how["aggregator"] = fj.mean()  # the process can still capture
    fj.compiled(partial(fj.step, **how), backend="cudagraphs")(fj.train_state(params, *batch, **how), *batch)


def test_a_replay_finds_its_constants_and_results_are_fresh():
    f = lambda x: (x * torch.tensor([1.0, 2.0, 3.0]).cuda(), x.sum(), x.max())
    take = fj.compiled(f, backend="cudagraphs")
    first = take(torch.ones(3, device="cuda"))
    gc.collect()
    others = [torch.full((3,), 7.0, device="cuda") for _ in range(1000)]
    second = take(torch.full((3,), 2.0, device="cuda"))
    assert [x.tolist() for x in first] == [[1.0, 2.0, 3.0], 3.0, 1.0]
    assert [x.tolist() for x in second] == [[2.0, 4.0, 6.0], 6.0, 2.0]
    assert all((x == 7).all() for x in others)


@pytest.mark.parametrize(("m", "condition"), [(2, 10.0), (5, 1e7), (32, 1e4), (32, 1e7), (128, 10.0)])
@pytest.mark.parametrize("solver", ["host", "device"])
def test_rules_find_on_a_gpu_what_they_find_on_a_cpu(m, condition, solver):
    """To what roundings of the Gramian do, which a GPU adds up in another order."""
    J = rows_of_condition(m, condition)

    def by_gramian(G):
        G = G.triu() + G.triu(1).mT
        return rule().update(G, rule().init(G))[0] @ J

    for rule in (fj.upgrad, fj.mgda, fj.config, fj.nash_mtl):
        found = fj.aggregate(rule(solver=solver), J.cuda()).direction
        assert found.is_cuda
        check_stable(found.cpu(), by_gramian, J @ J.mT, roundings=128)


@pytest.mark.parametrize("kind", ["conflicting", "dependent", "opposite", "zeros", "ill"])
@pytest.mark.parametrize("m", [2, 3, 5, 8, 16, 32, 64])
def test_the_search_in_one_launch_meets_its_conditions_in_a_graph_too(m, kind):
    pytest.importorskip("triton")
    J = torch.stack([rows_of_kind(kind, m, seed) for seed in range(3)])
    C, _ = cosines(J @ J.mT)
    free = ~torch.eye(m, dtype=torch.bool).expand_as(C)
    expected = linear_complementarity(C, C, free)
    C, free, s = C.cuda(), free.cuda(), expected.cuda()
    linear_complementarity(C, C, free, solver="device")  # compiles
    with waiting("error"):
        found = linear_complementarity(C, C, free, solver="device")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = linear_complementarity(C, C, free, solver="device")
    graph.replay()
    assert torch.equal(captured, found)
    w, size = C + found @ C, 1 + found.sum(-1, keepdim=True)
    limit = 2e-13 * size
    assert (found >= -limit).all()
    if kind == "ill":  # a row at a squared distance of at most `least_pivot` from the active ones counts as one of them
        length = ((found @ C) * found).sum(-1, keepdim=True).clamp(min=0).sqrt()
        limit = limit + least_pivot(m) ** 0.5 * length
    assert (torch.where(free, w, 0) >= -limit).all()
    assert ((found * w).abs() <= limit * size).all()
    # The length of the difference of two solutions, squared, is at most their slack.
    change = found - s
    assert (((change @ C) * change).sum(-1, keepdim=True) <= 4 * m * limit * (size + s.sum(-1, keepdim=True))).all()


def test_a_step_is_that_of_the_cpu():
    params, features, top, batch = two_tasks(partial(nn.LayerNorm, 5), dtype=torch.float64)
    how = method(params, features, top)
    alone, _ = fj.step(fj.train_state(params, *batch, **how), *batch, **how)
    state = fj.train_state(on_gpu(params), *on_gpu(batch), **how)
    there, _ = fj.step(state, *on_gpu(batch), **how)
    check_same(tree_map(lambda leaf: leaf.cpu(), there.params), alone.params)


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64])
def test_copies_of_many_tensors_have_the_same_bits(dtype):
    values = [0.0, 1.5, -7.0]
    if dtype.is_floating_point:
        info = torch.finfo(dtype)
        values += [-0.0, torch.inf, -torch.inf, info.max, info.min, info.tiny, info.tiny * info.eps]
    x = torch.tensor(values, dtype=torch.float64).to(dtype).cuda()
    given = [x, x.repeat(2, 1).mT, x[::2], x[:0]]
    for y, z in zip(clone_each(given), given, strict=True):
        assert torch.equal(y.contiguous().view(torch.uint8), z.contiguous().view(torch.uint8))
        assert not z.numel() or y.data_ptr() != z.data_ptr()


def test_draws_have_the_bits_of_the_cpu():
    key = fj.random.key(3)
    dropped = fj.random.keyed(lambda x: nn.functional.dropout(nn.functional.dropout(x, 0.5), 0.3))
    for draw in (
        lambda key: fj.random.normal(key, (1001,)),
        lambda key: fj.random.uniform(key, (70, 30), dtype=torch.float16),
        lambda key: fj.random.permutation(key, 1000),
        lambda key: dropped(key, torch.ones(40, 50, device=key.device)),
    ):
        assert torch.equal(draw(key.cuda()).cpu(), draw(key))


def test_tf32_does_not_reach_the_direction():
    J = torch.randn(4, 4096, generator=torch.Generator().manual_seed(0))
    weights = torch.tensor([0.1, 0.2, 0.3, 0.4])
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        found = fj.aggregate(fj.constant(weights), J.cuda()).direction
    finally:
        torch.set_float32_matmul_precision(before)
    wide, J = weights.double()[None], J.double()
    check_within(found.cpu(), (wide @ J)[0], product_bound(wide, J, torch.float32)[0])


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # else the vmap raises, and a loop takes its place
@pytest.mark.parametrize("mode", ["vmap", "loop"])
@pytest.mark.parametrize("name", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"])
def test_rows_through_fused_attention_are_those_by_products(name, mode):
    x = torch.randn(2, 4, 64, 32, generator=torch.Generator().manual_seed(0)).cuda().half()
    w = torch.linspace(0.5, 1.5, 32).cuda().half()

    def losses(w, x):
        return nn.functional.scaled_dot_product_attention(x * w, x, x).float().square().mean((0, 2, 3))

    def rows(backend):
        with sdpa_kernel(backend):
            jacobian, _, finite = fj.jacobian_fn(losses, scale=fj.scale_state(2.0**10, device="cuda"), mode=mode)(w, x)
        assert finite
        return jacobian.float()

    with sdpa_kernel(getattr(SDPBackend, name)):
        try:
            losses(w, x)
        except RuntimeError as error:
            pytest.skip(f"this GPU has no {name}: {error}")
    expected = rows(SDPBackend.MATH)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as ops:
        found = rows(getattr(SDPBackend, name))
    backward = f"aten::_scaled_dot_product_{name.lower()}_backward"
    assert sum(op.count for op in ops.key_averages() if op.key == backward) >= len(expected)
    # A few dozen roundings in float16, of which neither way knows the order.
    check_within(found, expected, 64 * eps(torch.float16) * expected.abs().max())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_generators_of_a_gpu_that_is_not_the_current_one_are_put_back():
    def losses(params, x):
        return nn.functional.dropout(params * x, 0.5).square()

    x = torch.ones(8, device="cuda:1")
    state = torch.cuda.get_rng_state(1)
    fj.train_state(x, x, losses=losses, aggregator=fj.config(), optimizer=fj.sgd(0.1))
    assert torch.equal(torch.cuda.get_rng_state(1), state)
