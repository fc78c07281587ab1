"""Pictures of the study, readable on white and on black: rules beside the tuned weights, and price against result."""

from pathlib import Path
from statistics import median
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from study_results import NEAR, best, overall
from study_rules import RULES

INK, FAINT, NEAR_COLOR, FAR_COLOR = "#777777", "#77777755", "#0072B2", "#D55E00"


def draw(stored: dict[str, Any], folder: Path) -> list[Path]:
    """Draw both pictures."""
    settings = {
        "text.color": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK, "axes.edgecolor": INK,
        "font.size": 9, "svg.hashsalt": "evidence", "svg.fonttype": "none",
    }  # fmt: skip
    with mpl.rc_context(settings):
        pictures = {"evidence_scores.svg": scores(stored), "evidence_price.svg": price(stored)}
        for name, figure in pictures.items():
            figure.savefig(folder / name, transparent=True, metadata={"Date": None})
    return [folder / name for name in pictures]


def order(problems: dict[str, Any]) -> list[str]:
    """Rules by the mean of their scores relative to the tuned weights, best last; absent ones count nothing."""
    return sorted(RULES, key=lambda rule: mean_ratio(problems, rule))


def mean_ratio(problems: dict[str, Any], rule: str) -> float:
    found = [overall(p["rules"][rule]) / overall(p["grid"]) for p in problems.values() if rule in p["rules"]]
    return sum(found) / max(len(found), 1)


def scores(stored: dict[str, Any]) -> Figure:
    """A panel a problem, a line a rule: the score over that of the tuned weights."""
    problems = stored["problems"]
    rules = order(problems)
    columns = 5
    lines = -(-len(problems) // columns)
    figure = Figure(figsize=(11, 0.4 + 3.9 * lines), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False, sharey=True)
    for axis in axes.flat[len(problems) :]:
        axis.set_visible(False)
    for axis, problem in zip(axes.flat, problems.values(), strict=False):
        top, tuned = best(problem), overall(problem["grid"])
        found = [(y, overall(problem["rules"][rule])) for y, rule in enumerate(rules) if rule in problem["rules"]]
        near = [(value / tuned, y) for y, value in found if value >= NEAR * top]
        far = [(value / tuned, y) for y, value in found if value < NEAR * top]
        axis.plot(*zip(*near, strict=True), "o", markersize=4.5, color=NEAR_COLOR)
        if far:
            axis.plot(*zip(*far, strict=True), "s", markersize=4.5, color=FAR_COLOR, markerfacecolor="none")
        axis.axvline(1, color=INK, linewidth=0.8)
        axis.set_title(problem["name"], fontsize=9, color=INK)
        axis.set_yticks(range(len(rules)), rules, fontsize=7)
        axis.grid(color=FAINT, linewidth=0.5)
        axis.spines[["top", "right"]].set_visible(False)
        axis.patch.set_alpha(0)
    figure.supxlabel(
        "score over that of the tuned weights (the line); filled blue circles: within 2 % of the best rule",
        fontsize=9,
        color=INK,
    )
    return figure


def price(stored: dict[str, Any]) -> Figure:
    """Median time of a step against the mean score relative to the tuned weights."""
    problems = stored["problems"]
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axis = figure.subplots()
    axis.axhline(1, color=INK, linewidth=0.8)
    for rule in RULES:
        times = [p["rules"][rule]["time"] for p in problems.values() if rule in p["rules"]]
        if times:
            x, y = median(times), mean_ratio(problems, rule)
            axis.plot(x, y, "o", color=NEAR_COLOR, markersize=4)
            axis.annotate(rule, (x, y), xytext=(4, 2), textcoords="offset points", fontsize=7, color=INK)
    axis.set_xlabel("time of a step over that of mean (median over problems)")
    axis.set_ylabel("score over that of the tuned weights (mean over problems)")
    axis.grid(color=FAINT, linewidth=0.5)
    axis.spines[["top", "right"]].set_visible(False)
    axis.patch.set_alpha(0)
    return figure
