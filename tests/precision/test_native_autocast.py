"""Native autocast: that of an accelerator under `autocast`, and `torch.autocast` inside losses."""

from contextlib import nullcontext
from importlib import import_module

import pytest
import torch
from bounds import eps
from jacobian_by_hand import rows_of
from simulated import simulated
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.overrides import has_torch_function

import functional_jd as jd

both = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])


def draw(*shape, key=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(key)) - 0.5


def seen_inside(device, transform=lambda f: f):
    """Whether a mode sees the ops of a function, the dtypes of some, and how native autocast is."""
    found = []

    def f(w):
        h = w @ w
        dtypes = h.dtype, nn.functional.gelu(h).dtype, h.exp().dtype
        switched = *map(torch.is_autocast_enabled, (device, "cpu")), torch.is_autocast_cache_enabled()
        found.append((has_torch_function((w,)), dtypes, switched))
        return h.float().sum()

    transform(jd.autocast(f, torch.bfloat16))
    return found


on = True, True, False
DTYPES = torch.bfloat16, torch.bfloat16, torch.float32


@pytest.fixture
def other_devices():
    """A process looks for an accelerator once, and has none before `simulated()`."""
    found = import_module("functional_jd.precision.autocast")._found_devices
    found.cache_clear()
    yield
    found.cache_clear()


@pytest.mark.usefixtures("other_devices")
def test_it_is_native_autocast_on_an_accelerator_outside_of_transforms():
    with simulated() as device:
        w = device.put(draw(3, 3))
        roads = {
            "plain": lambda f: f(w),
            "an argument by name": lambda f: f(w=w),
            "rows": lambda f: jd.jacobian_fn(lambda w: f(w).reshape(1))(w),
        }
        for name, road in roads.items():
            assert set(seen_inside("sim", road)) == {(False, DTYPES, on)}, name
        transformed = {
            "grad": lambda f: grad(f)(w),
            "vmap": lambda f: vmap(f)(w[None]),
            "jvp": lambda f: torch.func.jvp(f, (w,), (w,)),
            "examples": lambda f: jd.jacobian_fn(jd.per_example(lambda p, x: f(p * x)))(w, device.put(torch.ones(2))),
            "the CPU": lambda f: f(draw(3, 3)),
        }
        for name, road in transformed.items():
            assert set(seen_inside("sim", road)) == {(True, DTYPES, on)}, name


NORMS = {
    "layer": lambda: nn.LayerNorm(4),
    "group": lambda: nn.GroupNorm(2, 4),
    "batch": lambda: nn.BatchNorm1d(4, track_running_stats=False),
    "rms": lambda: nn.RMSNorm(4),
    "attention": lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0),
}


def network(kind, dtype):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 4), NORMS[kind](), nn.Tanh(), nn.Linear(4, 5))

    def losses(params, x):
        with torch.autocast("cpu", dtype):
            return functional_call(net, params, (x,)).float().square().mean(0)

    return losses, {name: p.detach() for name, p in net.named_parameters()}


@both
@pytest.mark.parametrize("kind", NORMS)
def test_rows_of_native_autocast_are_those_of_a_loop(kind, dtype):
    losses, params = network(kind, dtype)
    x = draw(6, 3, key=1)
    expected = dict(zip(sorted(params), rows_of(losses, params, x), strict=True))
    # torch's kernels of the CPU take no rows together if the input of a norm is in half precision, its weight not.
    with pytest.warns(jd.SlowPathWarning, match="calar type") if kind != "rms" else nullcontext():
        found, values = jd.jacobian_fn(losses)(params, x)
    assert torch.equal(values, losses(params, x))
    scale = max(row.norm() for row in expected.values())
    for name, row in expected.items():
        assert (found[name] - row).norm() <= eps(dtype) * scale


@both
@pytest.mark.parametrize("engine", ["jacobian", "gramian", "weighted"])
def test_examples_of_native_autocast_are_right(engine, dtype):
    losses, params = network("layer", dtype)
    x, weights = draw(6, 3, key=1), torch.arange(1.0, 7.0)
    loss = lambda params, x: losses(params, x[None]).mean()
    exact = lambda params: torch.stack([weights[i] * loss(params, one) for i, one in enumerate(x)]).sum()
    leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
    expected = torch.autograd.grad(exact(leaves), [*leaves.values()])
    run = {"jacobian": jd.jacobian_fn, "gramian": jd.gramian_fn, "weighted": jd.weighted_fn}[engine]
    with pytest.warns(jd.SlowPathWarning, match="calar type") if engine == "jacobian" else nullcontext():
        found = run(jd.per_example(loss))(params, x)
    rows = found[0] if engine == "jacobian" else found[-1](weights)[0]
    found = [torch.tensordot(weights, g, 1) if engine == "jacobian" else g for g in rows.values()]
    scale = max(g.norm() for g in expected)
    for mine, g in zip(found, expected, strict=True):
        assert (mine - g).norm() <= 8 * eps(dtype) * scale
