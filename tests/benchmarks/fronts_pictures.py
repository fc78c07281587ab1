"""Pictures of fronts: their hypervolume against the gradients that they took, method by method."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from fronts_problems import PROBLEMS, Problem
from torch import Tensor

from functional_jd import fronts

if TYPE_CHECKING:
    from fronts_table import Outcome

Sides = tuple[Sequence["Outcome"], Sequence["Outcome"]]


def curve(problem: Problem, outcome: "Outcome") -> Tensor:
    """The part of the front's hypervolume before each step, in per cent."""
    values = [fronts.hypervolume(losses, problem.reference) for losses in outcome.losses]
    return torch.stack(values) / problem.whole * 100


def draw(found: Mapping[str, Mapping[str, Sides]], folder: Path) -> Path:
    """A panel for each problem; ours is drawn full, the peer's dashed, each at the rate that is best in the end.

    Args:
        found: by problem and method, the outcomes of ours and of the peer's, one for each rate.
        folder: where `fronts.svg` is written.
    """
    from matplotlib import pyplot as plt

    from functional_jd.plotting import legend, look, quiet

    figure = plt.figure(figsize=(4.2 * len(found), 3.6), layout="constrained")
    panels = figure.subplots(1, len(found), squeeze=False)[0]
    for axis, (name, methods) in zip(panels, found.items(), strict=True):
        problem = PROBLEMS[name]()
        for index, (label, sides) in enumerate(methods.items()):
            for side, style in zip(sides, ("-", "--"), strict=True):
                if not side:
                    continue
                curves = [curve(problem, outcome) for outcome in side]
                best = max(range(len(side)), key=lambda k: float(curves[k][-1]))
                spent = side[best].gradients * torch.arange(1, len(curves[best]) + 1)
                whose = label if style == "-" else f"{label}, LibMOON"
                axis.plot(spent, curves[best], color=look(index)["color"], linestyle=style, label=whose)
        quiet(axis, title=name, xlabel="gradients of each solution", ylabel="hypervolume, %")
        axis.set_xscale("log")
    legend(panels[-1])
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "fronts.svg")
    plt.close(figure)
    return folder / "fronts.svg"
