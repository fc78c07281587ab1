"""The tables of the page that set our rules beside those of TorchJD, in the same trainings."""

from collections.abc import Iterable
from statistics import mean, median

import torch
from pages import table
from problems import PROBLEMS
from study_format import Cells, counted, points, signed, spelled
from study_peers import ALL, NAMES, OURS, PREFIX, STANDARDISED
from study_queue import PEERS
from study_statistics import difference, holm, scores, signed_rank

AS_THEY_COME = (
    "Ours minus the rule of the same name of TorchJD 0.18, in the same trainings on losses as they come, in hundredths "
    "of the score. Other arguments are defaults; `projector` is `QuadprogProjector(norm_eps=0, reg_eps=1e-14)`, which "
    "takes away what `UPGrad` adds to the Gramian. `ConFIG()` gives the same directions as ours up to rounding: what "
    "differs there is what rounding does to a training. p: Wilcoxon's signed ranks over problems, corrected after "
    "Holm; of six rules, on fewer than eight problems, it cannot be below 0.05."
)
ON_STANDARDISED = (
    "The same on standardised losses. `nash_mtl()` stands for itself there, as its direction does not depend on units."
)


def beside_the_peer(cells: Cells) -> list[str]:
    """By paragraphs: ours minus the peer's, on losses as they come and standardised; how far directions are apart."""
    as_they_come = [AS_THEY_COME, *ours_less_theirs(cells, NAMES), *how_far_apart(cells, NAMES)]
    return ["### Exact rules beside the peer's", *as_they_come, ON_STANDARDISED, *ours_less_theirs(cells, STANDARDISED)]


def ours_less_theirs(cells: Cells, rules: Iterable[str]) -> list[str]:
    """A row a problem and a column a rule; then means, counts and tests over problems."""
    found = {
        rule: [
            difference(*(scores(cells[name][m]) for m in (OURS[rule], PREFIX + rule)), PROBLEMS[name].shared)
            for name in PEERS
        ]
        for rule in rules
    }
    columns = found.values()
    rows = [[name, *map(points, row)] for name, row in zip(PEERS, zip(*columns, strict=True), strict=True)]
    chances = holm([signed_rank(torch.tensor([d.mean for d in column])) for column in columns])
    rows.append(["mean", *(signed(mean(d.mean for d in column)) for column in columns)])
    rows.append(["better / none seen / worse", *map(counted, columns)])
    rows.append(["p", *(f"{p:.3f}" for p in chances)])
    count = len(PEERS) * len(found)
    few, many = (f"{share * count:.0f}" for share in (0.05, 0.11))
    chance = f"Of {count} intervals some {few} to {many} would leave out 0 by chance."
    return [table(["", *(f"{spelled(OURS[r])} over `{ALL[r]}`" for r in found)], rows), chance]


def how_far_apart(cells: Cells, rules: Iterable[str]) -> list[str]:
    """A row a problem, a column a rule of the peer: the mean distance of directions over draws, and the largest."""
    rows, errors = [], 0
    for name in PEERS:
        row = [name, f"{median(cells[name]['advice']['imbalance']):.1g}"]
        for found in (cells[name][PREFIX + rule] for rule in rules):
            errors += sum(found["errors"].values())
            row.append(f"{mean(found['apart']['mean']):.1g} ({max(found['apart']['largest']):.1g})")
        rows.append(row)
    return [
        "How far apart the two directions are, each made as long as 1, at the same gradients, on the way of the peer's "
        "chosen trainings: mean (largest). Opposite ones are 2 apart; a direction of zero is 1 from ours. *Lengths*: "
        "the longest gradient over the shortest, in the first tenth of a training with `mean()`. The peer raised an "
        f"error in {errors} steps of all its trainings.",
        table(["", "lengths", *(f"`{NAMES[rule]}`" for rule in rules)], rows),
    ]
