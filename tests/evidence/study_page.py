"""Tables of the study, between the marks of `REPORT.md`, made from what is stored."""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median

import study_statistics as stats
import torch
from pages import table, write_between
from problems import PROBLEMS
from study_cells import Cell, load_all
from study_format import Cells, counted, named, points, reference_of, signed, spelled
from study_front_tables import front_tables
from study_fronts import PREFIX as FRONT
from study_peer_tables import beside_the_peer
from study_peers import PREFIX
from study_pictures import draw_fronts, draw_summary
from study_queue import FROZEN, queue
from study_statistics import REFERENCE, SHARES, Difference, complete, difference, passes_taken, scores, spent
from study_training import PATIENCE, RISE

PAGE = Path(__file__).parent / "REPORT.md"
DOCS = Path(__file__).parents[2] / "docs"
CORE = ("mean", "start", "unit_sum", "nash_mtl", "config", "upgrad", "random_search")
CHART = (*CORE, "imtl_g", "cagrad", "aligned_mtl", "pcgrad", "mgda", "uw", "geometric_mean")
ALWAYS = ("mean", REFERENCE, "start", "unit_sum", "nash_mtl", "config")
WORDS = {
    "By method": "Against *standardised*. *Better* and *worse*: the 95 % interval leaves out 0. Differences are in "
    "hundredths of the score; *mean*, *median* and *worst* are over the problems that a method has. *Passes* and "
    "*time*: what the search for rate and weights costs, in trainings of a plain sum of as many steps (median over "
    "problems).",
    "Held-out problems": "Here and below, m is the number of losses, and (=) marks problems whose score is one minus "
    "the loss that *standardised* minimises. noisy_labels stands against `mean()`.",
    "When all stop earlier": "The mean of the same differences over the problems that have all of these methods, each "
    "method at this share of its steps.",
    "At equal budget": "`nash_mtl()` less a search with as many trials. *By steps*: the backward passes of the search "
    "over those of `nash_mtl()`, by the steps that each took; each stops for itself. The last three columns were "
    "thought of after the results: a search that begins with the rates of *standardised* and goes on at random.",
}


def against(cells: Cells, problem: str, method: str, share: int = 2) -> Difference | None:
    """A method against the reference on a problem, where both are stored."""
    found, reference = cells[problem], reference_of(problem)
    if method not in found or method == reference:
        return None
    return difference(scores(found[method], share), scores(found[reference], share), PROBLEMS[problem].shared)


def against_all(cells: Cells, method: str) -> dict[str, Difference]:
    """The same by problem."""
    return {problem: d for problem in cells if (d := against(cells, problem, method)) is not None}


def methods_of() -> list[str]:
    """All methods in the order of the queue, but for the peer's and those of fronts."""
    found = dict.fromkeys(method for _, method in queue() if not method.startswith((PREFIX, FRONT)))
    return [method for method in found if method != "advice"]


def summary(cells: Cells) -> str:
    """A row a method: better, none seen, worse; mean, median and worst difference; what its search costs."""
    rows = []
    for method in methods_of():
        found = against_all(cells, method)
        if not found:
            continue
        counts = [counted(d for p, d in found.items() if PROBLEMS[p].held_out is part) for part in (False, True)]
        means = {p: d.mean for p, d in found.items()}
        low, middle = min(means, key=lambda p: means[p]), mean(means.values())
        figures = [signed(middle), signed(median(means.values())), f"{signed(means[low])} ({low})"]
        costs = [f"{median(each):.0f}" for each in zip(*(spent(cells[p][method]) for p in found), strict=True)]
        rows.append((middle, [spelled(method), *counts, *figures, *costs]))
    rows.sort(key=lambda row: -row[0])
    counts_of = ["development: better / none seen / worse", "held out: the same"]
    return table(["", *counts_of, "mean", "median", "worst", "passes", "time"], [row for _, row in rows])


def differences(cells: Cells, methods: Sequence[str], names: list[str]) -> str:
    """A row a problem, a column a method: points over the reference, with intervals."""
    rows = []
    for name in names:
        reference = scores(cells[name][reference_of(name)])
        shown = [points(against(cells, name, method)) for method in methods]
        rows.append([named(name), str(PROBLEMS[name].m), f"{reference.mean():.3f}", *shown])
    return table(["", "m", "*standardised*", *map(spelled, methods)], rows)


def stopped_earlier(cells: Cells, methods: Sequence[str]) -> str:
    """A row a method: the mean difference at a quarter, a half and all of the steps, where all have been trained."""
    rows, names = [], complete(cells, [REFERENCE, *methods])
    for method in methods:
        found = [[against(cells, name, method, place) for name in names] for place in SHARES.values()]
        rows.append([spelled(method), *(signed(mean(d.mean for d in each if d is not None)) for each in found)])
    return table(["", *SHARES], rows)


def worst_part(cells: Cells, problem: str, method: str) -> Difference | None:
    """The lowest part of the score of each draw less that under the reference, where a score has more than one part."""
    found = cells[problem]
    if not {method, REFERENCE} <= found.keys() or len(found[REFERENCE]["parts"][0]) < 2:
        return None
    lowest = [torch.tensor(found[m]["parts"], dtype=torch.float64).amin(1) for m in (method, REFERENCE)]
    return difference(*lowest, PROBLEMS[problem].shared)


def worst_parts(cells: Cells, methods: Sequence[str]) -> str:
    """A row a method: the problems where its worst part is better or worse beyond the interval, and the mean."""
    found = {m: {p: d for p in cells if (d := worst_part(cells, p, m)) is not None} for m in methods}
    common = [name for name in complete(cells, [REFERENCE, *methods]) if all(name in own for own in found.values())]
    rows = []
    for method, own in found.items():
        better, worse = (
            ", ".join(f"{name} {signed(d.mean)}" for name, d in own.items() if d.word == word) or "-"
            for word in ("better", "worse")
        )
        middle = signed(mean(own[name].mean for name in common))
        rows.append([spelled(method), middle, better, counted(own.values(), ("none seen",)), worse])
    words = (
        "The lowest part of each score in place of the mean of its parts, in the same trainings, less that of "
        "*standardised*; problems whose scores have one part are left out. *Mean*: over the "
        f"{len(common)} problems that have all of these methods."
    )
    return words + "\n\n" + table(["", "mean", "better", "none seen", "worse"], rows)


def trials_of(found: dict[str, Cell]) -> int:
    """As many trials of random search as rates and rows of `nash_mtl` cost."""
    return min(round(spent(found["nash_mtl"])[0]), len(found["random_search"]["configurations"]))


def at_equal_budget(cells: Cells) -> str:
    """Searches after as many trials as rates and rows of `nash_mtl` cost, beside it: random search, and one that begins
    with the rates of the reference, which the protocol does not have.
    """
    rows = []
    for name, found in cells.items():
        if not {"random_search", "nash_mtl", REFERENCE} <= found.keys():
            continue
        first, searched, trials = found[REFERENCE], found["random_search"], trials_of(found)
        nash, rest = scores(found["nash_mtl"]), max(0, trials - len(first["configurations"]))
        row = [name, str(round(spent(found["nash_mtl"])[0])), str(trials)]
        for search, taken, shown in (
            (scores(searched, trials=trials), passes_taken(searched, trials), [f"{nash.mean():.3f}"]),
            (scores(stats.joined(first, searched, trials)), passes_taken(first) + passes_taken(searched, rest), []),
        ):
            by_steps = f"{taken / passes_taken(found['nash_mtl']):.1f}"
            apart = points(difference(nash, search, PROBLEMS[name].shared))
            row += [f"{search.mean():.3f}", by_steps, *shown, apart]
        rows.append(row)
    titles = ["passes of `nash_mtl()`", "trials", "*random_search*", "by steps", "`nash_mtl()`", "difference"]
    return table(["", *titles, "*standardised*, then random", "by steps", "difference"], rows)


def ranks(cells: Cells) -> str:
    """Mean ranks, the critical difference and mean differences, of the methods of the first stage on the problems that
    have them all.
    """
    methods = [REFERENCE, "mean", "start", "unit_sum", "nash_mtl", "config", "upgrad", "random_search"]
    names = complete(cells, methods)
    found = stats.table_of(cells, names, methods)
    chances = stats.signed_ranks(found, 0)
    order, over = stats.mean_ranks(found), (found - found[:, :1]).mean(0).tolist()
    rows = [
        [spelled(methods[i]), f"{order[i]:.2f}", *(("-", "-") if i == 0 else (signed(over[i]), f"{chances[i]:.3f}"))]
        for i in sorted(range(len(methods)), key=lambda i: float(order[i]))
    ]
    apart = stats.critical_difference(len(methods), len(names))
    words = (
        f"On the {len(names)} problems with all of these methods. Mean ranks that differ by less than "
        f"{apart:.2f} are not told apart (Nemenyi, 5 %); Friedman's test: "
        f"p = {stats.friedman(found):.2g}. *Mean*: the difference to *standardised*, in hundredths, here over the same "
        "problems for all. Last column: Wilcoxon's signed ranks against *standardised*, corrected after Holm."
    )
    return words + "\n\n" + table(["", "mean rank", "mean", "p"], rows)


def advice(cells: Cells, names: list[str]) -> list[str]:
    """What `advise` says in every draw, and the score of the rule that it names; the mean over held-out problems."""
    rows, held_out = [], []
    for name in names:
        found = cells[name]
        said = found["advice"]["rule"]
        got = mean(float(scores(found[rule])[i]) for i, rule in enumerate(said))
        named = ", ".join(f"`{rule}` {said.count(rule)}" for rule in dict.fromkeys(said))
        always = [float(scores(found[rule]).mean()) if rule in found else None for rule in ALWAYS]
        searched = "random_search" in found and "nash_mtl" in found
        random = float(scores(found["random_search"], trials=trials_of(found)).mean()) if searched else None
        full = float(scores(found["random_search"]).mean()) if searched else None
        figures = [got, *always, random, full]
        rows.append([name, named, *("-" if x is None else f"{x:.3f}" for x in figures)])
        if PROBLEMS[name].held_out and None not in figures:
            held_out.append(figures)
    if held_out:
        means = [f"{mean(column):.4f}" for column in zip(*held_out, strict=True)]
        rows.append(["mean of held-out problems", f"{len(held_out)} problems", *means])
    searches = ["*random_search* at the budget of `nash_mtl()`", "*random_search*, all trials"]
    titles = [*(f"always {spelled(rule)}" for rule in ALWAYS), *searches]
    frozen = ", ".join(f"{key} {value}" for key, value in FROZEN.items())
    return [
        "### What `advise` says",
        f"Thresholds and rules as they were frozen: {frozen}. Held-out problems first; on the others it was made.",
        table(["", "named, in draws", "score", *titles], rows),
    ]


def intervals(cells: Cells) -> str:
    """How many intervals against the reference leave out 0, by the bootstrap and by Student's t."""
    pairs = [
        (scores(found[method]), scores(found[reference_of(name)]), PROBLEMS[name].shared)
        for name, found in cells.items()
        for method in methods_of()
        if method in found and method != reference_of(name)
    ]
    bold = [pair for pair in pairs if difference(*pair).word != "none seen"]
    still = sum(stats.students_t(*pair).word != "none seen" for pair in bold)
    return (
        f"{len(bold)} of {len(pairs)} intervals against *standardised* leave out 0, and {still} of these do by "
        "Student's t, too."
    )


def honesty(cells: Cells, bold: str) -> str:
    """What the protocol asks to report: missing cells, rates at an edge, trainings that were still moving."""
    todo = list(queue())
    trained = [cells[p][m] for p, m in todo if m != "advice" and not m.startswith(FRONT)]
    edge = sum(cell["inside"] is False for cell in trained)
    of = sum(cell["inside"] is not None for cell in trained)
    rises = [rise for cell in trained for at_largest, rise in [stats.at_the_end(cell, PATIENCE)] if at_largest]
    versions = [
        f"{package} {' and '.join(sorted({cell['machine'][package] for cell in trained}))}"
        for package in ("torch", "functional_jd")
    ]
    return (
        f"Of {len(todo)} cells (a method on a problem), {len(todo)} have been trained; the others are left out of "
        f"all tables. The best rate lies at an edge of the extended grid for {edge} of {of} cells (searches, whose "
        f"rates are not extended, are not among these). {len(rises)} of {len(trained)} went on to the largest number "
        f"of steps with their best rate, and {sum(rise >= RISE for rise in rises)} of these rose by {RISE} or more in "
        f"the last third of it. {bold} Measured with {', '.join(versions)}; one thread, on a "
        "machine with two cores that was not idle."
    )


def made(cells: Cells) -> str:
    """All that stands between the marks."""
    whole, ready = cells, [name for name, entry in PROBLEMS.items() if not entry.front_only]
    cells = {name: cells[name] for name in ready}
    old, new = ([n for n in ready if PROBLEMS[n].held_out is part] for part in (False, True))
    tables = {
        "By method": summary(cells),
        "Held-out problems": differences(cells, CORE, new),
        "Development problems": differences(cells, CORE, old),
        "When all stop earlier": stopped_earlier(cells, CORE),
        "The worst part": worst_parts(cells, CORE),
        "At equal budget": at_equal_budget(cells),
        "Ranks": ranks(cells),
    }
    paragraphs = [honesty(whole, intervals(cells))]
    for title, found in tables.items():
        paragraphs += [f"### {title}", *([WORDS[title]] if title in WORDS else []), found]
    return "\n\n".join([*paragraphs, *advice(cells, [*new, *old]), *beside_the_peer(cells), *front_tables(whole)])


def write_page(cells: Cells | None = None) -> None:
    """Write tables between the marks, the picture of the report, and the chart of `docs/evidence.md`."""
    cells = load_all() if cells is None else cells
    if missing := [f"{p}/{m}" for p, m in queue() if m not in cells.get(p, {})]:
        raise SystemExit(f"The page needs all cells; {len(missing)} are missing: {', '.join(missing)}.")
    write_between(PAGE, "<!-- begin: made by tests/evidence -->", "<!-- end -->", made(cells))
    draw_fronts(cells, PAGE.parent)
    per_problem = {spelled(m): [100 * d.mean for d in against_all(cells, m).values()] for m in CHART}
    draw_summary(per_problem, DOCS / "evidence.svg")
