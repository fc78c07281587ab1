"""The models of `make bench-gpu`, with random weights: two that the host limits, and two that the device limits."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from models import Tasks, Trunk, dense, tasks, transformer
from torch import Tensor, nn

import functional_jd as jd


class Bottleneck(nn.Module):
    """The residual block of ResNet-50: 1 x 1, 3 x 3, 1 x 1, and a projection where shapes differ."""

    def __init__(self, inputs: int, width: int, stride: int):
        super().__init__()
        conv = lambda i, o, k, s=1: [nn.Conv2d(i, o, k, s, k // 2, bias=False), nn.BatchNorm2d(o)]
        outputs = 4 * width
        self.path = nn.Sequential(
            *conv(inputs, width, 1), nn.ReLU(), *conv(width, width, 3, stride), nn.ReLU(), *conv(width, outputs, 1)
        )
        self.short = nn.Sequential(*conv(inputs, outputs, 1, stride)) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block."""
        return torch.relu(self.path(x) + self.short(x))


def resnet50() -> Trunk:
    """He et al., "Deep Residual Learning", table 1, column 50-layer; 224 x 224 pixels."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    inputs = 64
    for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for index in range(blocks):
            layers.append(Bottleneck(inputs, width, stride if index == 0 else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()), inputs, (3, 224, 224)


class Block(nn.Module):
    """A block of GPT-2: causal attention, then a layer four times as wide, each after a normalisation."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block to `[batch, positions, width]`."""
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(self.before(x)).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.wide(self.between(x))


class GPT2(nn.Module):
    """GPT-2 small without its output layer: Radford et al., 2019; 124 million parameters."""

    def __init__(self, positions: int, tokens: int = 50257, width: int = 768, heads: int = 12, blocks: int = 12):
        super().__init__()
        self.token, self.place = nn.Embedding(tokens, width), nn.Embedding(positions, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(blocks)])
        self.last = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Features `[batch, positions, width]` of tokens `[batch, positions]`."""
        return self.last(self.blocks(self.token(tokens) + self.place.weight[: tokens.shape[1]]))


@dataclass(frozen=True)
class Case(Tasks):
    """Tasks on a trunk that may have buffers, and the precision of autocast."""

    precision: str = "float32"

    def losses(self) -> Any:
        """The losses as functions of parameters and, if the trunk has any, of buffers."""
        apply = jd.functional(self.trunk)
        heads = [jd.functional(head) for head in self.heads]

        def of_heads(params: Any, h: Tensor, *batch: Tensor) -> Any:
            y = batch[-1]
            return {
                str(i): nn.functional.mse_loss(head(params[str(i)], {}, h)[0], y[i]) for i, head in enumerate(heads)
            }

        if self.buffers:
            features = lambda params, buffers, x, y: apply(params, buffers, x)
            top = lambda params, h, buffers, x, y: (of_heads(params, h, x, y), buffers)
        else:
            features, top = (lambda params, x, y: apply(params, {}, x)[0]), of_heads
        if self.precision == "float32":
            return jd.multitask(features, top)
        return jd.multitask(*(jd.autocast(f, getattr(torch, self.precision)) for f in (features, top)))

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The buffers of the trunk."""
        return dict(self.trunk.named_buffers())


def _case(trunk: Trunk, n: int, batch: int, precision: str, device: str) -> Case:
    made = tasks(lambda: trunk, n, batch, device)
    return Case(made.trunk, made.heads, made.batch, precision)


def _gpt2(batch: int, positions: int, n: int, toy: bool, device: str) -> Case:
    torch.manual_seed(n)
    sizes = {"tokens": 50, "width": 16, "heads": 2, "blocks": 1} if toy else {}
    trunk = GPT2(positions, **sizes)
    width = trunk.place.embedding_dim
    heads = nn.ModuleList(nn.Linear(width, 1) for _ in range(n))
    x = torch.randint(trunk.token.num_embeddings, (batch, positions))
    y = torch.randn(n, batch, positions, 1)
    return Case(trunk.to(device), heads.to(device), (x.to(device), y.to(device)), "bfloat16")


def cases(device: str, toy: bool = False) -> dict[str, Callable[[], Case]]:
    """What makes each case; `toy`: so small that a CPU runs all of them in seconds."""
    small = "bfloat16" if device == "cpu" else "float16"
    wide, layers = (dense(6, 16, 16), transformer(8, 4)) if toy else (dense(96, 200, 160), transformer(64, 16))
    tiny = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(32, 8)), 8, (3, 2, 2)
    image, images, text = (lambda: tiny, 4, (2, 4)) if toy else (resnet50, 64, (16, 256))
    return {
        "MLP, T = 8, float32": partial(_case, wide, 8, 64, "float32", device),
        "2 transformer layers, T = 3, float16": partial(_case, layers, 3, 16, small, device),
        "ResNet-50, 64 x 224 x 224, T = 3, bfloat16": lambda: _case(image(), 3, images, "bfloat16", device),
        "GPT-2 small, 16 x 256, T = 4, bfloat16": partial(_gpt2, *text, 4, toy, device),
    }
