"""The models that are timed: several tasks on one trunk, or one network of which every example is an objective."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

import functional_jd as jd
from functional_jd.core.tree import tree_leaves

Trunk = tuple[nn.Module, int, tuple[int, ...]]
"""A network, the width of its features, and the shape of an example."""


class Tasks(NamedTuple):
    """A trunk, one head per task, a batch."""

    trunk: nn.Module
    heads: nn.ModuleList
    x: Tensor
    y: Tensor

    @property
    def params(self) -> dict[str, Any]:
        """As `multitask` losses take them."""
        return {"shared": values(self.trunk), "heads": values(self.heads)}

    def losses(self) -> Any:
        """The losses as functions of the parameters."""

        def heads(params: Any, h: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
            # The heads' own modules, each with its part of the parameters, as the peer calls them.
            outputs = [functional_call(head, _part(params, f"{i}."), h) for i, head in enumerate(self.heads)]
            return tuple(nn.functional.mse_loss(output, target) for output, target in zip(outputs, y, strict=True))

        return jd.multitask(lambda params, x, y: functional_call(self.trunk, params, x), heads)

    def forward(self) -> tuple[list[Tensor], Tensor]:
        """The losses as the modules compute them, and the features."""
        h = self.trunk(self.x)
        return [nn.functional.mse_loss(head(h), y) for head, y in zip(self.heads, self.y, strict=True)], h


class Examples(NamedTuple):
    """A classifier and a batch."""

    model: nn.Module
    x: Tensor
    y: Tensor

    def losses(self) -> Any:
        """The losses as functions of the parameters."""

        def one(params: Any, x: Tensor, y: Tensor) -> Tensor:
            return nn.functional.cross_entropy(functional_call(self.model, params, x[None])[0], y)

        return jd.per_example(one)

    def forward(self) -> Tensor:
        """The losses as the module computes them."""
        return nn.functional.cross_entropy(self.model(self.x), self.y, reduction="none")


class Mean(nn.Module):
    """The mean over the positions of `[batch, positions, width]`."""

    def forward(self, x: Tensor) -> Tensor:
        """Average."""
        return x.mean(1)


def dense(*widths: int) -> Trunk:
    """Linear layers, each followed by a ReLU."""
    layers = [layer for i, o in pairwise(widths) for layer in (nn.Linear(i, o), nn.ReLU())]
    return nn.Sequential(*layers), widths[-1], (widths[0],)


def conv(width: int, side: int, norm: bool = True) -> Trunk:
    """Three convolutions, with GroupNorm where wanted."""
    widths = (3, width, 2 * width, 2 * width)
    blocks: list[nn.Module] = []
    for stride, (i, o) in zip((1, 2, 2), pairwise(widths), strict=True):
        blocks += [nn.Conv2d(i, o, 3, stride, 1), *([nn.GroupNorm(4, o)] if norm else []), nn.ReLU()]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(2), nn.Flatten()), 4 * widths[-1], (3, side, side)


def transformer(width: int, positions: int) -> Trunk:
    """Two encoder layers of torch, and the mean over positions."""
    layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return nn.Sequential(encoder, Mean()), width, (positions, width)


TRUNKS: dict[str, Callable[[], Trunk]] = {
    "tiny MLP": lambda: dense(16, 32, 32),
    "MLP": lambda: dense(256, 512, 512),
    "wide MLP": lambda: dense(1024, 2048, 2048, 2048, 512),  # 11.5 million parameters
    "conv": lambda: conv(16, 16),
    "transformer": lambda: transformer(128, 16),
    "plain conv": lambda: conv(16, 16, norm=False),
}

TOYS: dict[str, Callable[[], Trunk]] = {
    "tiny MLP": lambda: dense(4, 8),
    "MLP": lambda: dense(6, 16, 16),
    "wide MLP": lambda: dense(8, 16, 16),
    "conv": lambda: conv(4, 4),
    "transformer": lambda: transformer(4, 2),
    "plain conv": lambda: conv(4, 4, norm=False),
}
"""The same, so small that all tables run through in seconds: to try the bench, not the library."""


def tasks(trunk: Callable[[], Trunk], n: int, batch: int, device: str = "cpu") -> Tasks:
    """So many tasks on a trunk, always the same ones."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(n)
        body, width, shape = trunk()
        heads = nn.ModuleList(nn.Linear(width, 1) for _ in range(n))
        x, y = torch.randn(batch, *shape), torch.randn(n, batch, 1)
    return Tasks(body.to(device), heads.to(device), x.to(device), y.to(device))


def examples(trunk: Callable[[], Trunk], m: int, device: str = "cpu", classes: int = 10) -> Examples:
    """A classifier and so many examples, always the same ones."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(m)
        body, width, shape = trunk()
        model = nn.Sequential(body, nn.Linear(width, classes))
        x, y = torch.randn(m, *shape), torch.randint(classes, (m,))
    return Examples(model.to(device), x.to(device), y.to(device))


def values(module: nn.Module) -> dict[str, Tensor]:
    """The parameters, copied."""
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def gradients(modules: Sequence[nn.Module]) -> list[dict[str, Any]]:
    """What stands in `.grad`, by name."""
    return [{name: p.grad for name, p in module.named_parameters()} for module in modules]


def flat(tensors: Any) -> Tensor:
    """A pytree as one vector."""
    return torch.cat([tensor.detach().flatten().double().cpu() for tensor in tree_leaves(tensors)])


def _part(params: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): p for name, p in params.items() if name.startswith(prefix)}
