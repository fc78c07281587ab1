"""What a problem of the study is, and the parts that several problems share: a small network, splits, scores."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

Params = dict[str, Tensor]
Split = tuple[Tensor, ...]


class Data(NamedTuple):
    """The rows of a draw; their shapes are those of every other draw."""

    train: Split
    validation: Split
    test: Split


@dataclass(frozen=True)
class Problem:
    """A training with several losses, and what counts in the end.

    Scores say how good a result is, one for each thing that counts: 1 is perfect, 0 is what a constant answer gets.
    Rules see the losses only; they do not know the scores.
    """

    data: Callable[[int], Data]  # of a draw
    init: Callable[[torch.Generator], Params]
    losses: Callable[..., Tensor]  # losses(params, *rows of the batch) -> [m]
    constant: Callable[..., Tensor]  # constant(*training rows) -> [m], the losses of the best constant answer
    scores: Callable[..., Tensor]  # scores(params, *rows of a split) -> [k]
    scored: tuple[str, ...]  # names of the k scores
    m: int
    batch: int | None = 64  # rows of a batch; None: all of them
    steps: int = 1000  # at most
    draws: int = 10


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


def generator_of(draw: int, salt: int) -> torch.Generator:
    """Random numbers of a draw, apart for each use."""
    return torch.Generator().manual_seed(100_000 * salt + draw)


def splits(columns: Split, draw: int, rows: int | None = None) -> Data:
    """Three fifths of the rows for training, a fifth for validation, a fifth for the test.

    With `rows`, every draw takes so many rows that no other draw has.
    """
    if rows is None:
        order = torch.randperm(len(columns[0]), generator=generator_of(draw, 1))
    else:
        order = torch.randperm(len(columns[0]), generator=generator_of(0, 1))[draw * rows : (draw + 1) * rows]
    n = len(order) // 5
    parts = order[2 * n :], order[:n], order[n : 2 * n]
    return Data(*(tuple(column[part] for column in columns) for part in parts))


def standardized(data: Data, *columns: int) -> Data:
    """These columns with mean 0 and deviation 1 over the training rows."""

    def moved(split: Split, i: int) -> Tensor:
        train = data.train[i]
        return (split[i] - train.mean(0)) / train.std(0).clamp(min=1e-6)

    return Data(*(tuple(moved(s, i) if i in columns else s[i] for i in range(len(s))) for s in data))


def accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits.argmax(-1) == labels).float().mean()


def explained(estimate: Tensor, target: Tensor) -> Tensor:
    """The share of the variance that is explained, R^2, by column; at least 0."""
    error = (estimate - target).square().mean(0)
    return (1 - error / target.var(0, unbiased=False)).clamp(min=0)


def closeness(estimate: Tensor, target: Tensor) -> Tensor:
    """One minus the relative L2 error, at least 0."""
    return (1 - (estimate - target).norm() / target.norm()).clamp(min=0)


def skill(logits: Tensor, labels: Tensor) -> Tensor:
    """The share of the cross entropy of the best constant answer that is saved; at least 0."""
    base = torch.nn.functional.one_hot(labels, logits.shape[1]).float().mean(0)
    return (1 - cross_entropy(logits, labels) / torch.special.entr(base).sum()).clamp(min=0)


def entropy(labels: Tensor, classes: int) -> Tensor:
    """The cross entropy of the best constant answer: the entropy of the labels."""
    share = torch.bincount(labels, minlength=classes) / len(labels)
    return torch.special.entr(share).sum()


def judged(
    values: Callable[..., Any],
    targets: Callable[..., Any],
    classes: Sequence[int],
    units: Sequence[Any] = (),
    right: Callable[[Tensor, Tensor], Tensor] = accuracy,
) -> tuple[Callable[..., Tensor], Callable[..., Tensor], Callable[..., Tensor]]:
    """The losses of outputs, those of the best constant answer, and scores, one for each output.

    `values(params, *rows)` are the outputs, `targets(*rows)` what they should be. Of a number of classes, the loss is
    the cross entropy and `right` the score; of 0, the mean squared error and R^2. Losses are multiplied by units.
    """
    units = units or (1.0,) * len(classes)

    def losses(params: Params, *rows: Tensor) -> Tensor:
        parts = zip(units, values(params, *rows), targets(*rows), classes, strict=True)
        return torch.stack([u * (cross_entropy(out, y) if c else (out - y).square().mean()) for u, out, y, c in parts])

    def constant(*rows: Tensor) -> Tensor:
        parts = zip(units, targets(*rows), classes, strict=True)
        return torch.stack([u * (entropy(y, c) if c else y.var(0).mean()) for u, y, c in parts])

    def scores(params: Params, *rows: Tensor) -> Tensor:
        parts = zip(values(params, *rows), targets(*rows), classes, strict=True)
        return torch.stack([right(out, y) if c else explained(out.flatten(), y.flatten()) for out, y, c in parts])

    return losses, constant, scores


def mixed(x: Tensor, y: Tensor, labels: Sequence[Tensor], scored: tuple[str, ...], rows: int | None = None) -> Problem:
    """Regressions of the columns of y, each in its own unit, and classifications, by one network.

    Inputs and columns are standardised, and losses multiplied by the variance of their column, which puts them back
    into its unit. With `rows`, every draw has so many of its own.
    """
    k, counts, variance = y.shape[1], [int(label.max()) + 1 for label in labels], y.var(0)
    return Problem(
        lambda draw: standardized(splits((x, y, *labels), draw, rows), 0, 1),
        lambda g: network(g, x.shape[1], 24, k + sum(counts)),
        *judged(
            lambda params, x, *_: apply(params, x).split([1] * k + counts, dim=1),
            lambda x, y, *labels: (*y.split(1, dim=1), *labels),
            [0] * k + counts,
            [*variance, *[1.0] * len(labels)],
            skill,
        ),
        scored,
        m=k + len(labels),
    )


def data_set(name: str, **options: Any) -> Any:
    """A data set that scikit-learn bundles."""
    from sklearn import datasets

    return getattr(datasets, f"load_{name}")(**options)
