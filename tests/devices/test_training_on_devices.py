"""Training on the simulated accelerator: every kind of losses, engine, scale, precision and optimizer as on the CPU."""

from functools import partial

import pytest
import torch
import torchopt
from bounds import check_same
from jacobian_by_hand import KINDS
from simulated import simulated
from small_modules import made
from torch import nn
from torch.utils._pytree import tree_leaves
from zoo import MODELS, numbers, plain, tasks

import functional_jd as jd

LIMIT = 4000


def same_on_both(run, *inputs, dtype=torch.float64, limit=LIMIT):
    """`run(device, *inputs)` gives the same numbers there as on the CPU, and leaves them there."""
    torch.manual_seed(0)
    expected = run("cpu", *inputs)
    with simulated() as device:
        there = device.put(inputs)
        device.reset()
        device.limit = limit
        torch.manual_seed(0)
        found = run("sim", *there)
        assert all(x.device.type == "sim" for x in tree_leaves(found) if isinstance(x, torch.Tensor))
        found = device.get(found)
    check_same(found, expected, dtype)


def trained(device, params, *batch, losses, aggregator=None, optimizer=None, engine="auto", steps=2, **start):
    """The state after some steps, and what the last one tells."""
    how = {"losses": losses, "aggregator": aggregator or jd.config(), "optimizer": optimizer or jd.sgd(0.1, 0.9)}
    state = jd.train_state(params, *batch, engine=engine, **start, **how)
    for _ in range(steps):
        state, info = jd.step(state, *batch, engine=engine, **how)
    return state, info.losses, info.weights, info.finite, info.moved, info.gramian


def of_case(case, device, *values, scale=None, **how):
    start = {} if scale is None else {"scale": jd.scale_state(2.0**8, shape=scale, device=device)}
    return trained(device, *values, losses=case.losses, **start, **how)


@pytest.mark.parametrize("scale", [None, (), "each"])
@pytest.mark.parametrize("engine", ["auto", "jacobian", "gramian"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_engine_and_scale(kind, engine, scale):
    case = KINDS[kind](MODELS["mlp"]())
    m = (3 if kind == "tasks" else 4,)
    run = partial(of_case, case, engine=engine, scale=m if scale == "each" else scale)
    # Rows unscaled in float32.
    same_on_both(run, case.params, *case.args, dtype=torch.float64 if scale is None else torch.float32)


@pytest.mark.parametrize("engine", ["auto", "weighted", "jacobian"])
@pytest.mark.parametrize("kind", KINDS)
def test_rules_that_need_no_rows(kind, engine):
    case = KINDS[kind](MODELS["mlp"]())
    for rule in (jd.mean(), jd.stch(), jd.random_weights(jd.random.key(0))):
        same_on_both(partial(of_case, case, engine=engine, aggregator=rule), case.params, *case.args)


def test_groups_of_rules_on_the_host_and_without_gradients():
    def losses(p):
        first = sum(x.square().sum() for x in p.values())
        second = (p["a"] - 2).square().sum() + p["b"].sum() * p["c"].sum()
        return {"x": first, "y": second, "z": (p["b"] + p["c"]).exp().sum()}

    rule = jd.grouped({"a": jd.upgrad(), "b": jd.config(), "c": jd.mean()}, rows={"a": [0, 1]})
    params = {name: torch.ones(size, dtype=torch.float64) for name, size in (("a", 3), ("b", 2), ("c", 2))}
    same_on_both(partial(trained, losses=losses, aggregator=rule, optimizer=jd.sgd(0.05)), params)


# They hold tensors in a closure, leave torch, are sparse; torch has fused cells on devices, and none on the CPU.
ON_THE_HOST = ("frozen", "numpy_backward", "sparse_embedding", "lstm", "gru")


@pytest.mark.filterwarnings("ignore:train_state. (the losses must return the running statistics|no loss reaches)")
@pytest.mark.parametrize("name", [name for name in MODELS if name not in ON_THE_HOST])
def test_every_model(name):
    def run(device, *inputs):
        model = MODELS[name]()
        if model.module is not None:
            model.module.to(device)
        return of_case(tasks(model), device, *inputs, steps=1)

    case = tasks(MODELS[name]())
    same_on_both(run, case.params, *case.args, dtype=torch.float32 if name == "mixed" else torch.float64)


OPTIMIZERS = {
    "sgd": lambda: jd.sgd(0.1),
    "nesterov": lambda: jd.sgd(lambda steps: 0.1 / (steps + 1), momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": lambda: jd.adamw(0.01),
    "schedule": lambda: jd.adamw(lambda steps: 0.01 * torch.clamp((steps + 1) / 10, max=1.0)),
    "rate on the host": lambda: jd.adamw(torch.tensor(0.01)),
    "torch": lambda: jd.from_torch(torch.optim.Adam, lr=0.01),
    "torch, without memory": lambda: jd.from_torch(torch.optim.Adagrad, lr=0.01),
    "torchopt": lambda: jd.from_transformation(torchopt.adam(lr=0.01)),
    "by label": lambda: jd.by_label(
        {"a": jd.adamw(0.01), "b": jd.sgd(0.1)}, lambda name, leaf: "a" if leaf.ndim < 2 else "b"
    ),
    "line search": lambda: jd.line_search(jd.sgd(1.0), [1.0, 0.5, 0.25, 0.0]),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer(name):
    case = plain(MODELS["mlp"]())
    # A rate in float32 is multiplied in float32.
    dtype = torch.float32 if name == "rate on the host" else torch.float64
    same_on_both(partial(of_case, case, optimizer=OPTIMIZERS[name]()), case.params, *case.args, dtype=dtype)


@pytest.mark.parametrize("around", ["jd", "torch"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (2,)])
def test_autocast(dtype, shape, around):
    net = made(lambda: nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2)))
    apply = jd.functional(net)
    losses = lambda params, x, y: (apply(params, {}, x)[0].float() - y).square().mean(0)

    def run(device, params, *batch):
        if around == "jd":
            low = jd.autocast(losses, dtype)
        else:

            def low(*args):
                with torch.autocast(device, dtype):
                    return losses(*args)

        scale = jd.scale_state(2.0**8, shape=shape, device=device)
        return trained(device, params, *batch, losses=low, scale=scale, optimizer=jd.adamw(0.01))

    params = {name: p.detach() for name, p in net.named_parameters()}
    same_on_both(run, params, numbers(4, 5).float(), numbers(4, 2, seed=1).float(), dtype=dtype)


@pytest.mark.parametrize("shape", [(), (2,)])
def test_a_skipped_step(shape):
    losses = lambda params, x: torch.stack([(params * x).sum(), (params * 2).sum()])

    def run(device, *inputs):
        scale = jd.scale_state(shape=shape, device=device)
        return trained(device, *inputs, losses=losses, scale=scale, optimizer=jd.adamw(0.1))

    same_on_both(run, torch.ones(3), torch.full((), 1e37), dtype=torch.float32)


def test_a_row_that_shares_memory_with_parts_of_it_is_unscaled_once():
    params = {"a": torch.ones(1), "b": torch.ones(1), "c": torch.ones((), dtype=torch.float64), "d": torch.ones(2)}
    loss = lambda p, x: (x @ (torch.cat([p["a"], p["b"]]) + p["d"])).square() * p["c"].float()
    rows = lambda device, p, x, scale: jd.jacobian_fn(jd.per_example(loss), scale=scale)(p, x)[0]
    same_on_both(rows, params, numbers(3, 2).float(), torch.tensor(4.0), dtype=torch.float32)


def test_buffers():
    net = made(lambda: nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double())
    apply = jd.functional(net)

    def losses(params, buffers, x):
        y, buffers = apply(params, buffers, x)
        return y.square().mean(0), buffers

    run = lambda device, params, buffers, x: trained(device, params, x, losses=losses, buffers=buffers)
    values = [{name: x.detach() for name, x in found} for found in (net.named_parameters(), net.named_buffers())]
    same_on_both(run, *values, numbers(6, 5))


@pytest.mark.parametrize("engine", ["jacobian", "gramian"])
def test_keys_and_torchs_own_draws(engine):
    dropout = jd.random.keyed(nn.Dropout(0.5))

    def losses(params, key, x):
        key, now = jd.random.split(key)
        y = dropout(now, x @ params["w"]) + jd.random.normal(now, (3,), dtype=x.dtype)
        return nn.functional.dropout(y, 0.5).square().mean(0), key

    run = lambda device, params, key, x: trained(device, params, x, losses=losses, buffers=key, engine=engine)
    same_on_both(run, {"w": numbers(5, 3)}, jd.random.key(0), numbers(4, 5))


def test_steps_of_several_models_at_once_and_their_derivatives():
    case = plain(MODELS["mlp"]())
    params = torch.utils._pytree.tree_map(lambda p: torch.stack([p, p.flip(-1)]), case.params)

    def run(device, params, *batch):
        one = lambda p: of_case(case, device, p, *batch, steps=1)[0].params
        length = lambda p: sum(x.square().sum() for x in tree_leaves(one(p)))
        return torch.vmap(one)(params), torch.vmap(torch.func.grad(length))(params)

    same_on_both(run, params, *case.args)
