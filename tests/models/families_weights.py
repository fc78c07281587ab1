"""Models whose weights are made of other weights, rounded, masked, cut or shortened."""

import math
import warnings
from functools import partial

import torch
from families import Family, images, vectors, words
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

fn = nn.functional


class FakeQuantized(nn.Module):
    """Quantisation aware: weights by a scale that is learned, activations by the observed range."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(5, 4), nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.tensor([0.05]))
        self.register_buffer("zero", torch.zeros(1))
        self.register_buffer("top", torch.ones(()))

    def forward(self, x):
        if self.training:
            self.top.copy_(0.9 * self.top + 0.1 * x.detach().abs().max())
        x = torch.fake_quantize_per_tensor_affine(x.float(), self.top.float() / 127, torch.tensor(0).int(), -128, 127)
        weight = torch._fake_quantize_learnable_per_tensor_affine(
            self.layer.weight.float(), self.scale.float(), self.zero.float(), -128, 127, 1.0
        )
        return self.head(fn.linear(x, weight).to(self.head.weight.dtype).relu())


class Hyper(nn.Module):
    """A net whose weights another net gives, example by example, on a part of low rank that all share."""

    def __init__(self):
        super().__init__()
        self.gives = nn.Linear(5, 4 * 3 + 4)
        self.a, self.b = nn.Parameter(torch.randn(4, 2)), nn.Parameter(torch.randn(2, 3))
        self.size = nn.Parameter(torch.ones(4))

    def forward(self, x):
        weight, bias = self.gives(x).split([12, 4], -1)
        shared = self.a @ self.b
        weight = weight.reshape(-1, 4, 3) + self.size[:, None] * shared / shared.norm(dim=1, keepdim=True)
        return torch.einsum("bij,bj->bi", weight, x[:, :3]).tanh() + bias


class Symmetric(nn.Module):
    def forward(self, w):
        return w.triu() + w.triu(1).mT


def parametrized():
    first = parametrizations.weight_norm(nn.Linear(5, 4))
    second = parametrizations.orthogonal(nn.Linear(4, 4))
    third = nn.Linear(4, 4)
    parametrize.register_parametrization(third, "weight", Symmetric())
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), third)


def old_norms():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first = nn.utils.weight_norm(nn.Conv1d(1, 3, 2))
        second = nn.utils.spectral_norm(nn.Conv1d(3, 2, 2))
    return nn.Sequential(first, nn.ELU(), second)


class Masked(nn.Module):
    """MADE: weights times masks that are buffers, and weights that were pruned, changed before every call."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.register_buffer("mask", torch.ones(5, 5).tril(-1))
        prune.l1_unstructured(self.second, "weight", 0.3)

    def forward(self, x):
        h = fn.linear(x, self.first.weight * self.mask, self.first.bias).relu()
        return self.second(h * self.mask.sum(0))


class Adapted(nn.Module):
    """DoRA: low-rank additions with magnitudes, on a weight whose rows are cut, joined and used twice."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 5))
        self.a, self.b = nn.Parameter(torch.randn(2, 5)), nn.Parameter(torch.randn(6, 2))
        self.size, self.gain = nn.Parameter(torch.ones(6, 1)), nn.Parameter(torch.ones(1))

    def forward(self, x):
        full = self.weight + self.b @ self.a
        weight = self.size * full / full.norm(dim=1, keepdim=True)
        q, k, v = x @ weight.mT.chunk(3, 1)[0], x @ self.weight[2:4].T, fn.linear(x, self.weight[4:])
        return torch.cat([q * self.gain, k, v, torch.addmm(q, x, self.weight.t()[:, :2])], 1)


class Discriminator(nn.Module):
    """Shapes that change: instance norm, a stack in three dimensions, pooling with indices, pixel shuffle, prelu."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding="same"), nn.InstanceNorm2d(8, affine=True)
        self.slope, self.deep = nn.PReLU(8), nn.Conv3d(1, 2, 3, padding=1)
        self.back = nn.ConvTranspose2d(2, 2, 3, stride=2, output_padding=1, groups=2)

    def forward(self, x):
        x = self.slope(self.norm(self.first(x)))
        x = fn.pixel_shuffle(x, 2)
        small, at = fn.max_pool2d(x, 2, return_indices=True)
        small = self.deep(small[:, None]).mean(2)
        return self.back(small) + fn.max_unpool2d(fn.avg_pool2d(x, 2), at, 2).mean() + math.pi


WEIGHTS = {
    # An embedding that shortens the rows that it looks up, in place, before it does.
    "renormed": lambda: Family(
        lambda: nn.Sequential(nn.Embedding(32, 4, max_norm=1.0), nn.Tanh(), nn.Linear(4, 2)), words()
    ),
    "fake_quantized": lambda: Family(FakeQuantized, vectors(), inside=torch.float32),
    "hyper": lambda: Family(Hyper, vectors()),
    "parametrized": lambda: Family(parametrized, vectors()),
    "spectral": lambda: Family(
        lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(5, 4)), nn.Tanh(), nn.Linear(4, 3)), vectors()
    ),
    "old_norms": lambda: Family(old_norms, vectors(), lambda call, x: call(x[:, None])),
    "masked": lambda: Family(Masked, vectors()),
    "adapted": lambda: Family(Adapted, vectors()),
    "bilinear": lambda: Family(partial(nn.Bilinear, 5, 5, 3), vectors(), lambda call, x: call(x, x.flip(1))),
    "discriminator": lambda: Family(Discriminator, images(8)),
}
