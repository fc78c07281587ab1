"""A ResNet with BatchNorm on handwritten digits, beside an ordinary loop."""

from functools import partial

import pytest
import torch
from plain_loops import ADAMW, SGD, Problem, by_rule, check_trains_alike, our_loop, start_of
from torch import nn
from torch.utils._pytree import tree_leaves

import functional_jd as fj


class Block(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        conv = partial(nn.Conv2d, kernel_size=3, padding=1, bias=False)
        self.body = nn.Sequential(
            conv(inputs, outputs, stride=stride),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            conv(outputs, outputs),
            nn.BatchNorm2d(outputs),
        )
        way = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs))
        self.way = way if stride > 1 or inputs != outputs else nn.Identity()

    def forward(self, x):
        return nn.functional.relu(self.body(x) + self.way(x))


def resnet():
    stem = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU())
    trunk = nn.Sequential(Block(4, 4, 1), Block(4, 8, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(stem, trunk, nn.Linear(8, 11))


def batches(n=20, size=12, dtype=torch.float64):
    digits = pytest.importorskip("sklearn.datasets").load_digits()
    x = torch.tensor(digits.images, dtype=dtype)[:, None] / 16
    y, ink = torch.tensor(digits.target), x.mean((1, 2, 3))
    return [tuple(part[size * k : size * (k + 1)] for part in (x, y, ink)) for k in range(n)]


def two_losses(net, x, y, ink):
    out = net(x)
    return {
        "digit": nn.functional.cross_entropy(out[:, :10].float() if out.dtype.itemsize < 4 else out[:, :10], y),
        "ink": nn.functional.mse_loss(out[:, 10].to(ink.dtype), ink),
    }


def problem(**options):
    return Problem(resnet, two_losses, batches(**options))


@pytest.mark.parametrize(
    ("optimizers", "compiled"),
    [(SGD, False), (ADAMW, False), pytest.param(SGD, True, marks=pytest.mark.slow)],
    ids=["sgd", "adamw", "compiled"],
)
def test_total_trains_as_an_ordinary_loop(optimizers, compiled):
    state = check_trains_alike(problem(), optimizers, compiled=compiled)
    assert int(state.buffers["0.1.num_batches_tracked"]) == 20


@pytest.mark.parametrize("engine", ["jacobian", "gramian"])
def test_upgrad_trains_as_rows_of_an_ordinary_loop(engine):
    check_trains_alike(problem(), SGD, fj.upgrad(), by_rule(fj.upgrad()), engine=engine)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_it_learns_under_autocast_with_a_scale_for_each_task(dtype):
    p = Half(resnet, two_losses, [batches(n=1, size=64, dtype=torch.float32)[0]] * 20)
    how = {"aggregator": fj.upgrad(), "optimizer": fj.adamw(1e-2), "scale": fj.scale_state(shape=(2,))}
    method, state = start_of(p, wrap=lambda f: fj.autocast(f, dtype), **how)
    state, infos = our_loop(p, method, state)
    taken = [info for info in infos if info.moved]
    assert len(taken) >= 10
    assert int(state.buffers["0.1.num_batches_tracked"]) == len(taken)
    assert all(taken[-1].losses[name] < taken[0].losses[name] for name in ("digit", "ink"))
    assert all(x.dtype in (torch.float32, torch.int64) for x in tree_leaves((state.params, state.buffers)))


class Half(Problem):
    """The same from float32."""

    def module(self, seed=0):
        return super().module(seed).float()
