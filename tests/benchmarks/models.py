"""The models that are timed: several tasks on one trunk, or one network of which every example is an objective."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

import functional_jd as jd
from functional_jd.core.tree import tree_leaves

Trunk = tuple[nn.Module, int, tuple[int, ...]]
"""A network, the width of its features, and the shape of an example."""

Low = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Makes a function one in half precision."""


def _as_it_is(f: Callable[..., Any]) -> Callable[..., Any]:
    return f


class OneModel:
    """A problem that trains one module, `model`, and whose losses are `forward()`."""

    model: nn.Module

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """What is trained."""
        return (self.model,)

    def tree(self, of: Callable[[nn.Module], Any]) -> Any:
        """What `of` returns for the model."""
        return of(self.model)


@dataclass(frozen=True)
class Tasks:
    """A trunk, one head per task, a batch of inputs and of targets."""

    trunk: nn.Module
    heads: nn.ModuleList
    batch: tuple[Tensor, Tensor]

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """What is trained."""
        return self.trunk, self.heads

    def tree(self, of: Callable[[nn.Module], Any]) -> dict[str, Any]:
        """What `of` returns for each module, arranged as `multitask` losses take the parameters."""
        return {"shared": of(self.trunk), "heads": {str(i): of(head) for i, head in enumerate(self.heads)}}

    def losses(self, low: Low = _as_it_is, stacked: bool = False) -> Any:
        """The losses as functions of the parameters: a dict, or one tensor."""

        def heads(params: Any, h: Tensor, x: Tensor, y: Tensor) -> Any:
            found = {
                str(i): nn.functional.mse_loss(functional_call(head, params[str(i)], (h,)), target)
                for i, (head, target) in enumerate(zip(self.heads, y, strict=True))
            }
            return torch.stack(list(found.values())) if stacked else found

        return jd.multitask(low(lambda params, x, y: functional_call(self.trunk, params, (x,))), low(heads))

    def forward(self) -> tuple[list[Tensor], Tensor]:
        """The losses as the modules compute them, and the features."""
        h = self.trunk(self.batch[0])
        return self.of_features(h), h

    def of_features(self, h: Tensor) -> list[Tensor]:
        """The losses as the heads compute them."""
        return [nn.functional.mse_loss(head(h), y) for head, y in zip(self.heads, self.batch[1], strict=True)]

    def mean(self) -> Tensor:
        """The loss of plain training."""
        return sum(self.forward()[0]) / len(self.heads)


@dataclass(frozen=True)
class Examples(OneModel):
    """A classifier, a batch of inputs and of classes."""

    model: nn.Module
    batch: tuple[Tensor, Tensor]

    def losses(self, low: Low = _as_it_is) -> Any:
        """The losses as functions of the parameters."""

        def one(params: Any, x: Tensor, y: Tensor) -> Tensor:
            return nn.functional.cross_entropy(functional_call(self.model, params, x[None])[0], y)

        return jd.per_example(low(one))

    def forward(self) -> Tensor:
        """The losses as the module computes them."""
        x, y = self.batch
        return nn.functional.cross_entropy(self.model(x), y, reduction="none")

    def mean(self) -> Tensor:
        """The loss of plain training."""
        return self.forward().mean()


class Mean(nn.Module):
    """The mean over the positions of `[batch, positions, width]`."""

    def forward(self, x: Tensor) -> Tensor:
        """Average."""
        return x.mean(1)


def dense(*widths: int) -> Trunk:
    """Linear layers, each followed by a ReLU."""
    layers = [layer for i, o in pairwise(widths) for layer in (nn.Linear(i, o), nn.ReLU())]
    return nn.Sequential(*layers), widths[-1], (widths[0],)


def conv(width: int, side: int) -> Trunk:
    """Two strided convolutions with GroupNorm, and the mean over the pixels."""
    widths = (3, width, 2 * width)
    blocks: list[nn.Module] = []
    for i, o in pairwise(widths):
        blocks += [nn.Conv2d(i, o, 3, stride=2), nn.GroupNorm(4, o), nn.ReLU()]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten()), widths[-1], (3, side, side)


def transformer(width: int, positions: int) -> Trunk:
    """Two encoder layers of torch, and the mean over positions."""
    layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return nn.Sequential(encoder, Mean()), width, (positions, width)


TRUNKS: dict[str, Callable[[], Trunk]] = {
    "tiny MLP": lambda: dense(16, 32, 16),
    "MLP": lambda: dense(96, 200, 160),
    "wide MLP": lambda: dense(128, 256, 256),
    "conv": lambda: conv(16, 32),
    "transformer": lambda: transformer(64, 16),
}

TOYS: dict[str, Callable[[], Trunk]] = {
    "tiny MLP": lambda: dense(4, 8),
    "MLP": lambda: dense(6, 16, 16),
    "wide MLP": lambda: dense(8, 16, 16),
    "conv": lambda: conv(4, 8),
    "transformer": lambda: transformer(4, 2),
}
"""The same, so small that all tables run through in seconds: to try the bench, not the library."""

_BATCH = {"tiny MLP": 16, "MLP": 64, "wide MLP": 128, "conv": 16, "transformer": 16}


def trunk_and_batch(name: str, toy: bool = False) -> tuple[Callable[[], Trunk], int]:
    """A trunk by name, and the size of its batch where objectives are tasks."""
    return (TOYS[name], 4) if toy else (TRUNKS[name], _BATCH[name])


def tasks(trunk: Callable[[], Trunk], n: int, batch: int, device: str = "cpu") -> Tasks:
    """So many tasks on a trunk, always the same ones."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(n)
        body, width, shape = trunk()
        heads = nn.ModuleList(nn.Linear(width, 1) for _ in range(n))
        x, y = torch.randn(batch, *shape), torch.randn(n, batch, 1)
    return Tasks(body.to(device), heads.to(device), (x.to(device), y.to(device)))


def examples(trunk: Callable[[], Trunk], m: int, classes: int = 10) -> Examples:
    """A classifier and so many examples, always the same ones."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(m)
        body, width, shape = trunk()
        model = nn.Sequential(body, nn.Linear(width, classes))
        x, y = torch.randn(m, *shape), torch.randint(classes, (m,))
    return Examples(model, (x, y))


def values(module: nn.Module) -> dict[str, Tensor]:
    """The parameters, copied."""
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def flat(tensors: Any) -> Tensor:
    """A pytree as one vector."""
    return torch.cat([tensor.detach().flatten().double().cpu() for tensor in tree_leaves(tensors)])
