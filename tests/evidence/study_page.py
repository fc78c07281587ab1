"""Tables of the study, in a terminal and between the marks of `docs/evidence.md`."""

from pathlib import Path
from statistics import median
from typing import Any

from study_pictures import draw
from study_results import best, by_score, near_best, overall, search_cost, share_to_grid, spread
from study_rules import RULES, SPELLED

PAGE = Path(__file__).parents[2] / "docs" / "evidence.md"
ADVICE = """\
Figures are those of the record `Advice`, from the first tenth of a training with `mean()` at the middle rate: medians
over the five seeds. On the left what `advise` says with its own thresholds and rules, which are those that hit most of
these ten problems, of the few in `CHOICES` of `tests/evidence/study_advice.py`; on the right what it would say if they
had been chosen on the nine other problems. The right side is what to expect on a problem of your own, as far as ten
problems can tell. Where `advise` says to explore the front, these are its rules all the same."""
BEGIN, END = "<!-- begin: made by tests/evidence -->", "<!-- end -->"


def summary(stored: dict[str, Any]) -> list[str]:
    """A row a rule, a column a problem: the score over that of the tuned weights, bold within 2 % of the best rule."""
    problems = stored["problems"]
    near = {name: near_best(problem) for name, problem in problems.items()}
    rows = []
    for rule in RULES:
        cells, times, count = [], [], 0
        for name, problem in problems.items():
            result = problem["rules"].get(rule)
            if result is None:
                cells.append("-")
                continue
            ratio = overall(result) / overall(problem["grid"])
            hit = rule in near[name]
            count += hit
            times.append(result["time"])
            cells.append(f"**{ratio:.2f}**" if hit else f"{ratio:.2f}")
        if times:
            rows.append((count, [f"`{spelled(rule)}`", *cells, f"{count} of {len(times)}", f"{median(times):.2f}"]))
    rows.sort(key=lambda row: -row[0])
    titles = ["", *(problem["name"] for problem in problems.values()), "near the best", "time of a step"]
    cells = [f"{overall(p['grid']):.2f}" for p in problems.values()]
    reached = [overall(p["grid"]) >= 0.98 * best(p) for p in problems.values()]
    bold = [f"**1** ({cell})" if near else f"1 ({cell})" for cell, near in zip(cells, reached, strict=True)]
    tuned = ["tuned weights (score)", *bold, f"{sum(reached)} of {len(cells)}", "1.00"]
    return table(titles, [tuned, *(row for _, row in rows)])


def table(titles: list[str], rows: list[list[str]]) -> list[str]:
    """The lines of a table in Markdown."""
    lines = ["| " + " | ".join(titles) + " |", "| --- |" + " --- |" * (len(titles) - 1)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows)]


def spelled(rule: str) -> str:
    return SPELLED.get(
        rule, f"{rule}()" if rule not in ("pcgrad", "gradvac", "graddrop", "random_weights") else f"{rule}(key)"
    )


def of_problem(problem: dict[str, Any]) -> list[str]:
    """Everything that is known of a problem, rules from best to worst."""
    grid = problem["grid"]
    weights = ", ".join(f"{w:.2g}" for w in grid["weights"])
    anonymous = len(set(grid["weights"])) == 1
    lines = [
        "",
        f"### {problem['name'][0].upper()}{problem['name'][1:]}",
        "",
        f"{problem['about']} {problem['m']} objectives, {problem['parameters']} parameters, {problem['steps']} steps, "
        f"rates {', '.join(f'{rate:g}' for rate in problem['rates'])}; {problem['seeds']} seeds. "
        f"Tuned weights: {'equal ones' if anonymous else weights}, of {grid['candidates']}.",
        "",
    ]
    rules = sorted(problem["rules"].items(), key=lambda pair: -overall(pair[1]))
    titles = [
        "",
        "score",
        "of tuned",
        *problem["scored"],
        "worst",
        "step",
        "time to tuned",
        "search",
        "rate",
        "skipped",
    ]
    rows = [row("**tuned weights**", problem, grid)]
    rows += [row(f"`{spelled(name)}`", problem, result) for name, result in rules]
    return lines + table(titles, rows)


def row(title: str, problem: dict[str, Any], result: dict[str, Any]) -> list[str]:
    """A line of the table of a problem."""
    scores, grid = by_score(result), problem["grid"]
    share = share_to_grid(problem, result)
    return [
        title,
        f"{overall(result):.3f} ± {spread(result):.3f}",
        f"{overall(result) / overall(grid):.3f}",
        *(f"{score:.3f}" for score in scores),
        f"{min(scores):.3f}",
        f"{result['time']:.2f}",
        "never" if share is None else f"{share * result['time']:.2f}",
        f"{search_cost(result)}",
        f"{result['rate']:g}",
        f"{result['skipped']:.0%}" if result["skipped"] else "0",
    ]


def advice(found: dict[str, Any], problems: dict[str, Any]) -> list[str]:
    """What `advise` saw and said, and how good that was."""
    titles = [
        "",
        "conflict",
        "imbalance",
        "rank",
        "noise",
        "rising",
        "says",
        "score of the best",
        "hit",
        "left out: says",
        "score of the best",
        "hit",
    ]
    rows = []
    for name, line in found["problems"].items():
        figures = [f"{line['figures'][key]:.2g}" for key in ("conflict", "imbalance", "rank", "noise", "rising")]
        said = [cell for part in ("all", "left_out") for cell in _said(line[part])]
        rows.append([problems[name]["name"], *figures, *said])
    return table(titles, rows)


def _said(line: dict[str, Any]) -> list[str]:
    return [f"{line['verdict']}: `{line['rule']}`", f"{line['share']:.3f}", "yes" if line["hit"] else "**no**"]


def write_page(stored: dict[str, Any]) -> None:
    """Write tables between the marks, and the pictures beside the page."""
    problems, machine = stored["problems"], stored["machine"]
    made = [
        f"Measured with torch {machine['torch']}, functional_jd {machine['functional_jd']}, {machine['threads']} "
        f"thread on a machine with {machine['cores']} cores, which was not idle.",
        "",
        *summary(stored),
    ]
    if "advice" in stored:
        found = stored["advice"]
        made += ["", "## What `advise` says", "", ADVICE, "", *advice(found, problems), "", found["words"]]
    made += ["", "## Problem by problem", *(line for problem in problems.values() for line in of_problem(problem))]
    before, begin, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    if not begin:
        raise ValueError(f"expected the mark {BEGIN!r} in {PAGE.name}")
    PAGE.write_text(before + "\n".join([BEGIN, "", *made, "", ""]) + END + rest.partition(END)[2], encoding="utf-8")
    draw(stored, PAGE.parent)
