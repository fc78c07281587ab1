"""What a problem of the study is, and the parts that several problems share: a small network, splits, scores."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

Params = dict[str, Tensor]
Split = tuple[Tensor, ...]


@dataclass(frozen=True)
class Problem:
    """A training with several losses, and what counts in the end.

    Scores say how good a result is, one for each thing that counts: 1 is perfect, 0 is what a constant answer gets.
    Rules see the losses only; they do not know the scores.
    """

    name: str
    about: str  # one sentence, for the page
    losses: Callable[..., Tensor]  # losses(params, *batch) -> [m]
    init: Callable[[torch.Generator], Params]
    batch: Callable[[torch.Generator], Split]  # the batch of one step
    scores: Callable[[Params, str], Tensor]  # scores(params, "validation" or "test") -> [k]
    scored: tuple[str, ...]  # names of the k scores
    m: int
    steps: int
    rates: tuple[float, float, float] = (4e-3, 1.6e-2, 6.4e-2)
    exchangeable: bool = False  # whether objectives have no identity, so that fixed weights mean nothing


def network(generator: torch.Generator, *widths: int) -> Params:
    """The parameters of a network with tanh between its layers."""
    params = {}
    for i, (n_in, n_out) in enumerate(pairwise(widths)):
        params[f"w{i}"] = torch.randn(n_in, n_out, generator=generator) / n_in**0.5
        params[f"b{i}"] = torch.zeros(n_out)
    return params


def apply(params: Params, x: Tensor) -> Tensor:
    """What the network returns."""
    last = len(params) // 2 - 1
    for i in range(last + 1):
        x = x @ params[f"w{i}"] + params[f"b{i}"]
        x = torch.tanh(x) if i < last else x
    return x


def splits(*columns: Tensor, seed: int = 0) -> dict[str, Split]:
    """Three fifths of the rows for training, a fifth for validation, a fifth for the test: always the same."""
    order = torch.randperm(len(columns[0]), generator=torch.Generator().manual_seed(seed))
    n = len(order) // 5
    parts = {"train": order[2 * n :], "validation": order[:n], "test": order[n : 2 * n]}
    return {name: tuple(column[rows] for column in columns) for name, rows in parts.items()}


def standardized(parts: dict[str, Split]) -> dict[str, Split]:
    """The splits with first columns of mean 0 and deviation 1 over the training rows."""
    x = parts["train"][0]
    mean, deviation = x.mean(0), x.std(0).clamp(min=1e-6)
    return {name: ((columns[0] - mean) / deviation, *columns[1:]) for name, columns in parts.items()}


def sampler(columns: Split, size: int) -> Callable[[torch.Generator], Split]:
    """Batches of rows, drawn with replacement."""

    def batch(generator: torch.Generator) -> Split:
        rows = torch.randint(len(columns[0]), (size,), generator=generator)
        return tuple(column[rows] for column in columns)

    return batch


def always(*columns: Tensor) -> Callable[[torch.Generator], Split]:
    """All rows in every step."""
    return lambda generator: columns


def accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits.argmax(-1) == labels).float().mean()


def explained(estimate: Tensor, target: Tensor) -> Tensor:
    """The share of the variance that is explained, R^2, by column; at least 0."""
    error = (estimate - target).square().mean(0)
    return (1 - error / target.var(0, unbiased=False)).clamp(min=0)


def closeness(estimate: Tensor, target: Tensor) -> Tensor:
    """One minus the relative L2 error, at least 0."""
    return (1 - (estimate - target).norm() / target.norm()).clamp(min=0)


def data_set(name: str, **options: Any) -> Any:
    """A data set that scikit-learn bundles."""
    from sklearn import datasets

    return getattr(datasets, f"load_{name}")(**options)
