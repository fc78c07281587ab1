"""The tables of the page that set our rules beside those of TorchJD, in the same trainings."""

from collections.abc import Iterable
from statistics import mean, median

import torch
from pages import table
from problems import PROBLEMS
from study_format import Cells, counted, points, signed, spelled
from study_peers import ALL, NAMES, OURS, PREFIX, STANDARDISED
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


def trained(cells: Cells, rules: Iterable[str]) -> tuple[list[str], list[str]]:
    """The problems, and those of these rules, of which the cells of both are stored somewhere."""
    pairs = [(name, r) for name in cells for r in rules if {OURS[r], PREFIX + r} <= cells[name].keys()]
    return [*dict.fromkeys(name for name, _ in pairs)], [rule for rule in rules if any(of == rule for _, of in pairs)]


def ours_less_theirs(cells: Cells, rules: Iterable[str]) -> list[str]:
    """A row a problem and a column a rule; then means, counts and tests over problems."""
    names, rules = trained(cells, rules)
    found = {
        (name, rule): difference(*(scores(cells[name][m]) for m in (OURS[rule], PREFIX + rule)), PROBLEMS[name].shared)
        for name in names
        for rule in rules
        if {OURS[rule], PREFIX + rule} <= cells[name].keys()
    }
    rows = [[name, *(points(found.get((name, rule))) for rule in rules)] for name in names]
    own = [[d for (_, of), d in found.items() if of == rule] for rule in rules]
    chances = holm([signed_rank(torch.tensor([d.mean for d in column])) for column in own])
    rows.append(["mean", *(signed(mean(d.mean for d in column)) for column in own)])
    rows.append(["better / none seen / worse", *map(counted, own)])
    rows.append(["p", *(f"{p:.3f}" for p in chances)])
    few, many = (f"{share * len(found):.0f}" for share in (0.05, 0.11))
    chance = f"Of {len(found)} intervals some {few} to {many} would leave out 0 by chance."
    return [table(["", *(f"{spelled(OURS[r])} over `{ALL[r]}`" for r in rules)], rows), chance]


def how_far_apart(cells: Cells, rules: Iterable[str]) -> list[str]:
    """A row a problem, a column a rule of the peer: the mean distance of directions over draws, and the largest."""
    names, rules = trained(cells, rules)
    rows, errors = [], 0
    for name in names:
        row = [name, f"{median(cells[name]['advice']['imbalance']):.1g}" if "advice" in cells[name] else "-"]
        for found in (cells[name].get(PREFIX + rule) for rule in rules):
            errors += sum(found["errors"].values()) if found else 0
            apart = found and found["apart"]
            row.append(f"{mean(apart['mean']):.1g} ({max(apart['largest']):.1g})" if apart else "-")
        rows.append(row)
    return [
        "How far apart the two directions are, each made as long as 1, at the same gradients, on the way of the peer's "
        "chosen trainings: mean (largest). Opposite ones are 2 apart; a direction of zero is 1 from ours. *Lengths*: "
        "the longest gradient over the shortest, in the first tenth of a training with `mean()`. The peer raised an "
        f"error in {errors} steps of all its trainings.",
        table(["", "lengths", *(f"`{NAMES[rule]}`" for rule in rules)], rows),
    ]
