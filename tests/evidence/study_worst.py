"""The worst part of each score: the same trainings, judged by the thing that they do least well."""

from statistics import mean

import torch
from study_cells import Cell
from study_format import Cells, signed, spelled, table
from study_statistics import REFERENCE, Difference, complete, difference
from torch import Tensor


def worst_of(cell: Cell) -> Tensor:
    """The lowest part `[d]` of the score of each draw, in the training that validation chooses."""
    return torch.tensor(cell["parts"], dtype=torch.float64).amin(1)


def over(cells: Cells, shared: dict[str, bool], method: str) -> dict[str, Difference]:
    """By problem, the worst part under a method less that under the reference, where a score has more than one part."""
    return {
        name: difference(worst_of(found[method]), worst_of(found[REFERENCE]), shared[name])
        for name, found in cells.items()
        if method in found and REFERENCE in found and len(found[REFERENCE]["parts"][0]) > 1
    }


def worst_parts(cells: Cells, shared: dict[str, bool], methods: list[str]) -> list[str]:
    """A row a method: the problems where its worst part is better or worse beyond the interval, and the mean."""
    found = {method: over(cells, shared, method) for method in methods}
    common = [name for name in complete(cells, [REFERENCE, *methods]) if all(name in own for own in found.values())]
    rows = []
    for method, own in found.items():
        names = {
            word: ", ".join(f"{name} {signed(d.mean)}" for name, d in own.items() if d.word == word) or "-"
            for word in ("better", "worse")
        }
        unseen = sum(d.word == "none seen" for d in own.values())
        middle = signed(mean(own[name].mean for name in common)) if common else "-"
        rows.append([spelled(method), middle, names["better"], str(unseen), names["worse"]])
    words = (
        "The lowest part of each score in place of the mean of its parts, in the same trainings, less that of "
        "*standardised*; problems whose scores have one part are left out. *Mean*: over the "
        f"{len(common)} problems that have all of these methods."
    )
    return [words, "", *table(["", "mean", "better", "none seen", "worse"], rows)]
