"""What an accelerator asks of a step: no waiting, few launches, no float64 where there is none, one place for all."""

from functools import partial

import pytest
import torch
from bounds import check_same
from jacobian_by_hand import KINDS
from simulated import simulated
from torch.utils._pytree import tree_leaves, tree_map
from zoo import MODELS

import functional_jd as jd
from functional_jd import views
from functional_jd.solvers.linear_program import simplex_projection


def on_device(device, kind, dtype=torch.float32):
    case = KINDS[kind](MODELS["mlp"]())
    lower = lambda x: x.to(dtype) if x.is_floating_point() else x
    params, batch = torch.utils._pytree.tree_map(lower, (case.params, case.args))
    put = (lambda tree: tree) if device is None else device.put
    return case.losses, put(params), put(batch)


def warm_step(device, losses, params, *batch, aggregator=None, optimizer=None, engine="auto", scale=None, buffers=()):
    """A step whose predecessors have set up what there is to set up."""
    how = {"losses": losses, "aggregator": aggregator or jd.mean(), "optimizer": optimizer or jd.adamw(0.01)}
    state = jd.train_state(params, *batch, engine=engine, scale=scale, buffers=buffers, **how)
    take = partial(jd.step, engine=engine, **how)
    state, _ = take(state, *batch)
    device.reset()
    return take(state, *batch)


HOST_NUMBERS = {
    "one scale": lambda: {"scale": jd.scale_state(2.0**8)},
    "a scale each": lambda: {"scale": jd.scale_state(2.0**8, shape=(3,))},
    "constant": lambda: {"aggregator": jd.constant(torch.tensor([1.0, 2.0, 3.0]))},
    "pbi": lambda: {"aggregator": jd.pbi(5.0, torch.tensor([1.0, 1.0, 2.0]))},
    "clipped": lambda: {"aggregator": jd.clipped(torch.tensor(1.0))},
    "random_weights": lambda: {"aggregator": jd.random_weights(jd.random.key(0))},
}


@pytest.mark.parametrize("name", HOST_NUMBERS)
def test_scales_preferences_and_keys_of_rules_follow_the_parameters(name):
    with simulated() as device:
        losses, params, batch = on_device(device, "tasks")
        state, info = warm_step(device, losses, params, *batch, **HOST_NUMBERS[name]())
        assert all(x.device.type == "sim" for x in tree_leaves((state, info)))


@pytest.mark.parametrize("current", [0, 1])
def test_generators_are_put_back_as_on_the_cpu(current):
    losses = lambda params, x: torch.nn.functional.dropout(params * x, 0.5).square()
    how = {"losses": losses, "aggregator": jd.config(), "optimizer": jd.sgd(0.1)}
    torch.manual_seed(0)
    jd.train_state(torch.ones(8), torch.ones(8), **how)
    expected = torch.get_rng_state()
    with simulated() as device:
        params, x = device.put((torch.ones(8), torch.ones(8)))
        device.current = current
        torch.manual_seed(0)
        jd.train_state(params, x, **how)
        assert torch.equal(torch.sim.get_rng_state(0), expected)


WITHOUT_SEARCH = {
    "mean": jd.mean,
    "stch": jd.stch,
    "dwa": jd.dwa,
    "db_mtl": jd.db_mtl,
    "constant": lambda: jd.constant([1.0, 2.0, 3.0]),
    "pbi": lambda: jd.pbi(5.0, [1.0, 1.0, 2.0]),
    "random_weights": lambda: jd.random_weights(jd.random.key(0)),
}
WITHOUT_WAITING = {name: lambda rule=rule: {"aggregator": rule()} for name, rule in WITHOUT_SEARCH.items()} | {
    cls.__name__: lambda cls=cls: {"optimizer": jd.from_torch(cls, lr=0.01)}
    for cls in (torch.optim.Adam, torch.optim.AdamW, torch.optim.RAdam)
}
WITHOUT_WAITING |= {"a rate on the host": lambda: {"optimizer": jd.sgd(torch.tensor(0.01))}}
ON_THE_HOST = {
    "upgrad": jd.upgrad,
    "config": jd.config,
    "imtl_g": jd.imtl_g,
    "aligned_mtl": jd.aligned_mtl,
    "nash_mtl": jd.nash_mtl,
    "pcgrad": lambda: jd.pcgrad(jd.random.key(0)),
}


@pytest.mark.parametrize("name", WITHOUT_WAITING)
def test_rules_without_a_search_and_optimizers_of_torch_do_not_wait(name):
    with simulated() as device:
        losses, params, batch = on_device(device, "tasks")
        warm_step(device, losses, params, *batch, **WITHOUT_WAITING[name]())
        assert not device.waits


@pytest.mark.parametrize("scale", [None, (), (3,)])
@pytest.mark.parametrize("name", ON_THE_HOST)
def test_a_rule_that_goes_to_the_host_goes_there_once(name, scale):
    with simulated() as device:
        losses, params, batch = on_device(device, "tasks")
        scale = None if scale is None else jd.scale_state(2.0**8, shape=scale)
        warm_step(device, losses, params, *batch, aggregator=ON_THE_HOST[name](), scale=scale)
        assert device.waits == {"copy to the host": 1, "copy from the host": 1}


@pytest.mark.parametrize("engine", ["auto", "jacobian", "gramian"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [None, "each"])
def test_a_step_is_captured(kind, engine, scale):
    m = (3 if kind == "tasks" else 4,)
    with simulated() as device:
        losses, params, batch = on_device(device, kind)
        scale = jd.scale_state(2.0**8, shape=m, device="sim") if scale else None
        how = {"losses": losses, "aggregator": jd.clipped(1.0), "optimizer": jd.adamw(0.01)}
        state = jd.train_state(params, *batch, engine=engine, scale=scale, **how)
        state, _ = jd.step(state, *batch, engine=engine, **how)
        device.capturing = True
        jd.step(state, *batch, engine=engine, **how)


def test_a_gramian_takes_four_launches_a_leaf():
    with simulated() as device:
        jacobian = {name: torch.ones(8, 2**17 * k, device="sim") for name, k in (("a", 16), ("b", 4), ("c", 1))}
        device.reset()
        views.gramian(jacobian)
        assert device.launches <= 4 * len(jacobian)


def test_the_direction_is_no_product_of_matrices_that_tf32_would_round():
    with simulated() as device:
        jacobian = {"w": torch.ones(3, 4, 5, device="sim"), "b": torch.ones(3, 6, device="sim")}
        for rule in (jd.upgrad(), jd.mean()):
            device.reset()
            jd.aggregate(rule, jacobian)
            assert "mm" not in device.by_name or device.by_name["mm"] == int(rule.view.products == "gramian")
        losses, params, batch = on_device(device, "tasks")
        seen = []
        for rule in (jd.upgrad, jd.total):  # total takes one backward pass
            warm_step(device, losses, params, *batch, aggregator=rule(), engine="jacobian")
            seen.append(device.by_name["mv"] + device.by_name["addmv"] + device.by_name["addmv_"])
        assert all(seen)


def test_examples_take_no_fused_attention():
    def loss(params, x):
        enabled.append(torch.backends.cuda.flash_sdp_enabled() or torch.backends.cuda.mem_efficient_sdp_enabled())
        q = (x * params)[None]
        return torch.nn.functional.scaled_dot_product_attention(q, q, q).square().sum()

    with simulated() as device:
        enabled = []
        params, x = device.put((torch.ones(4), torch.randn(3, 2, 4)))
        torch.vmap(lambda params: jd.gramian_fn(jd.per_example(loss))(params, x)[0])(params[None])
        assert enabled[-1] is False


ATTENTION = [f"_scaled_dot_product_{kernel}_attention_backward" for kernel in ("flash", "efficient", "cudnn")]


@pytest.mark.parametrize("name", [*ATTENTION, "_fused_rms_norm_backward"])
def test_torch_has_no_batching_rule_for_what_the_limits_name(name):
    """If it has one, `docs/limits.md` names it in vain."""
    knows = partial(torch._C._dispatch_has_kernel_for_dispatch_key, f"aten::{name}")
    assert not any(map(knows, ("FuncTorchBatched", "FuncTorchBatchedDecomposition", "CompositeImplicitAutograd")))
    assert hasattr(torch.ops.aten, name)


def test_a_rate_on_the_device_is_as_exact_as_the_parameters():
    def moved(put, rate):
        rate = put(torch.tensor(rate, dtype=torch.float64))
        params = put({"w": torch.ones(3, dtype=torch.float64)})
        optimizer = jd.adamw(lambda _: rate)
        return optimizer.update({"w": params["w"] * 2}, optimizer.init(params), params)[0]["w"]

    expected = moved(lambda tree: tree, 0.1)
    with simulated() as device:
        found = device.get(moved(device.put, 0.1))
    check_same(found, expected)


def test_the_projection_on_the_simplex_is_deterministic():
    points = torch.randn(4, 7, dtype=torch.float64)
    with simulated() as device:
        found = simplex_projection(device.put(points))
        assert not device.by_name["cumsum"]
        found = device.get(found)
    check_same(found, simplex_projection(points))


def two_steps(kind, rule, scale, device=None):
    """Where two steps lead, on the device or on the CPU, and whether anything warned."""
    losses, params, batch = on_device(device, kind)
    how = {"losses": losses, "aggregator": rule(), "optimizer": jd.adamw(0.01)}
    scale = None if scale is None else jd.scale_state(2.0**8, shape=scale, device=None if device is None else "sim")
    state = jd.train_state(params, *batch, scale=scale, **how)
    for _ in range(2):
        state, info = jd.step(state, *batch, **how)
    return state, info


@pytest.mark.parametrize("scale", [None, (), "each"])
@pytest.mark.parametrize("rule", [jd.mean, jd.stch, jd.config, jd.upgrad, jd.db_mtl])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_without_float64_is_that_of_the_cpu(kind, rule, scale):
    scale = (3 if kind == "tasks" else 4,) if scale == "each" else scale
    expected, expected_info = two_steps(kind, rule, scale)
    with simulated(float64=False) as device:
        state, info = two_steps(kind, rule, scale, device)
        assert all(x.device.type == "sim" for x in tree_leaves((state, info)))
        state, info = device.get((state, info))
    assert info.moved
    wide = lambda tree: tree_map(torch.Tensor.double, tree)
    check_same(wide((info.weights, state.params)), wide((expected_info.weights, expected.params)), torch.float32)


def test_draws_without_float64_are_those_of_the_cpu():
    drawn = lambda key: (jd.random.normal(key, (50,)), jd.random.uniform(key, (7,)))
    with simulated(float64=False) as device:
        found = drawn(device.put(jd.random.key(3)))
        assert all(x.device.type == "sim" for x in found)
        found = device.get(found)
    assert all(map(torch.equal, found, drawn(jd.random.key(3))))
