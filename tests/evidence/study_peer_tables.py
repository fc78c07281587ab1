"""The tables of the page that set our rules beside those of TorchJD, in the same trainings."""

from statistics import mean, median

import torch
from study_cells import Cell
from study_format import Cells, points, signed, spelled, table
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


def beside_the_peer(cells: Cells, shared: dict[str, bool]) -> list[str]:
    """Tables of ours minus the peer's, on losses as they come and standardised; how far directions are apart."""
    lines = ["### Exact rules beside the peer's", "", AS_THEY_COME, "", *ours_less_theirs(cells, shared, [*NAMES])]
    lines += ["", *how_far_apart(cells, [*NAMES])]
    return [*lines, "", ON_STANDARDISED, "", *ours_less_theirs(cells, shared, [*STANDARDISED])]


def pairs_of(cells: Cells, rules: list[str]) -> dict[tuple[str, str], tuple[Cell, Cell]]:
    """By problem and rule: the cell of ours and that of the peer's, where both are stored."""
    return {
        (name, rule): (found[OURS[rule]], found[PREFIX + rule])
        for name, found in cells.items()
        for rule in rules
        if OURS[rule] in found and PREFIX + rule in found
    }


def ours_less_theirs(cells: Cells, shared: dict[str, bool], rules: list[str]) -> list[str]:
    """A row a problem and a column a rule; then means, counts and tests over problems."""
    pairs = pairs_of(cells, rules)
    names = list(dict.fromkeys(name for name, _ in pairs))
    rules = [rule for rule in rules if any(of == rule for _, of in pairs)]
    if not names:
        return ["None of these has been trained so far."]
    points_of = {
        (name, rule): difference(scores(ours), scores(theirs), shared[name])
        for (name, rule), (ours, theirs) in pairs.items()
    }
    rows = [[n, *(points(points_of[n, rule]) if (n, rule) in pairs else "-" for rule in rules)] for n in names]
    own = [[d for (_, of), d in points_of.items() if of == rule] for rule in rules]
    means = [signed(mean(d.mean for d in column)) for column in own]
    counts = [
        " / ".join(str([d.word for d in column].count(word)) for word in ("better", "none seen", "worse"))
        for column in own
    ]
    chances = holm([signed_rank(torch.tensor([d.mean for d in column])) for column in own])
    below = [["mean", *means], ["better / none seen / worse", *counts], ["p", *(f"{p:.3f}" for p in chances)]]
    few, many = (f"{share * len(pairs):.0f}" for share in (0.05, 0.11))
    chance = f"Of {len(pairs)} intervals some {few} to {many} would leave out 0 by chance."
    titles = [f"{spelled(OURS[rule])} over `{ALL[rule]}`" for rule in rules]
    return [*table(["", *titles], rows + below), "", chance]


def how_far_apart(cells: Cells, rules: list[str]) -> list[str]:
    """A row a problem, a column a rule of the peer: the mean distance of directions over draws, and the largest."""
    pairs = pairs_of(cells, rules)
    names = list(dict.fromkeys(name for name, _ in pairs))
    rules = [rule for rule in rules if any(of == rule for _, of in pairs)]
    rows, errors = [], 0
    for name in names:
        lengths = median(cells[name]["advice"]["imbalance"]) if "advice" in cells[name] else None
        row = [name, "-" if lengths is None else f"{lengths:.1g}"]
        for rule in rules:
            found = cells[name].get(PREFIX + rule)
            if found is None:
                row.append("-")
                continue
            errors += sum(found["errors"].values())
            row.append(f"{mean(found['apart']['mean']):.1g} ({max(found['apart']['largest']):.1g})")
        rows.append(row)
    return [
        "How far apart the two directions are, each made as long as 1, at the same gradients, on the way of the peer's "
        "chosen trainings: mean (largest). Opposite ones are 2 apart; a direction of zero is 1 from ours. *Lengths*: "
        "the longest gradient over the shortest, in the first tenth of a training with `mean()`. The peer raised an "
        f"error in {errors} steps of all its trainings.",
        "",
        *table(["", "lengths", *(f"`{NAMES[rule]}`" for rule in rules)], rows),
    ]
