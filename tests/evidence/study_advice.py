"""What `advise` says on the problems of the study, and how good that is: with its own thresholds, and with those that
the other problems would have led to (leave one out).
"""

from itertools import product
from statistics import median
from typing import Any

from study_problems import PROBLEMS
from study_results import NEAR, best, overall
from study_training import window

import functional_jd as jd
from functional_jd.diagnostics.advise import Thresholds, verdict

FIGURES = ("conflict", "imbalance", "rank", "noise", "rising")
# All that is chosen from: rules that do not see the units of losses, rules that take conflicts out, and few numbers.
CHOICES = [
    Thresholds(*choice)
    for choice in product(
        (10.0, 3.0, 30.0, 100.0),
        (0.5, 0.25, 1.0, 2.0),  # 2: never
        ("config", "imtl_g", "nash_mtl", "geometric_mean", "famo"),
        ("upgrad", "pcgrad", "cagrad", "aligned_mtl"),
    )
]


def advice_for(stored: dict[str, Any]) -> dict[str, Any]:
    """By problem the figures, what `advise` says, and what it would say if it had never seen the problem."""
    problems = stored["problems"]
    figures = {name: figures_of(name) for name in problems}
    found = {}
    for name in problems:
        others = [other for other in problems if other != name]
        left_out = fitted(others, problems, figures)
        found[name] = {
            "figures": figures[name],
            "all": outcome(problems[name], figures[name], Thresholds()),
            "left_out": outcome(problems[name], figures[name], left_out) | {"thresholds": left_out._asdict()},
        }
    best_choice = fitted(list(problems), problems, figures)
    return {"problems": found, "best": best_choice._asdict(), "words": words(found, problems)}


def figures_of(name: str, seeds: int = 5) -> dict[str, float]:
    """The figures of `advise` early in a training with `mean`: the median over seeds."""
    problem = PROBLEMS[name]()
    gramians, losses = window(problem, seeds, problem.steps)
    said = [jd.diagnostics.advise(G, L) for G, L in zip(gramians, losses, strict=True)]
    return {key: float(f"{median(getattr(one, key) for one in said):.4g}") for key in FIGURES}


def outcome(problem: dict[str, Any], figures: dict[str, float], thresholds: Thresholds) -> dict[str, Any]:
    """What is said, the score of that rule over the best of all rules, and whether it is within 2 % of it."""
    said, rule, _ = verdict(figures["conflict"], figures["imbalance"], thresholds)
    share = overall(problem["rules"][rule]) / best(problem)
    return {"verdict": said, "rule": rule, "share": float(f"{share:.4g}"), "hit": share >= NEAR}


def fitted(names: list[str], problems: dict[str, Any], figures: dict[str, Any]) -> Thresholds:
    """The choice with the most hits on these problems; then with the largest mean share; then the first."""

    def quality(choice: Thresholds) -> tuple[int, float]:
        lines = [outcome(problems[name], figures[name], choice) for name in names]
        return sum(line["hit"] for line in lines), sum(line["share"] for line in lines)

    return max(CHOICES, key=quality)


def words(found: dict[str, Any], problems: dict[str, Any]) -> str:
    """The tally, beside rules that are taken always."""
    n = len(found)
    shares = {part: [line[part]["share"] for line in found.values()] for part in ("all", "left_out")}
    for rule in min((p["rules"] for p in problems.values()), key=len):  # those that exist for every problem
        shares[rule] = [overall(p["rules"][rule]) / best(p) for p in problems.values()]
    hits = {who: sum(share >= NEAR for share in values) for who, values in shares.items()}
    low = {who: f"{min(values):.2f} of the best in the worst case" for who, values in shares.items()}
    top = max((rule for rule in shares if rule not in ("all", "left_out")), key=lambda rule: hits[rule])
    return (
        f"Within 2 % of the best of all rules: on {hits['all']} of {n} problems with the thresholds of `advise`, "
        f"which were chosen on these problems ({low['all']}); on **{hits['left_out']} of {n}** with thresholds and "
        f"rules chosen on the others ({low['left_out']}). `mean()` always: {hits['mean']} of {n} ({low['mean']}); "
        f"the best single rule, `{top}()`, always: {hits[top]} of {n} ({low[top]})."
    )
