"""Tables of the study, between the marks of `REPORT.md`, made from what is stored."""

from pathlib import Path
from statistics import mean, median

from problems import PROBLEMS
from study_advice import FROZEN
from study_cells import Cell, load_all
from study_format import Cells, named, points, reference_of, signed, spelled, table
from study_front_tables import front_tables
from study_fronts import PREFIX as FRONT
from study_peer_tables import beside_the_peer
from study_peers import PREFIX
from study_pictures import draw, draw_fronts, draw_summary
from study_queue import queue
from study_statistics import (
    REFERENCE,
    SHARES,
    Difference,
    at_the_end,
    complete,
    critical_difference,
    difference,
    friedman,
    joined,
    mean_ranks,
    passes_taken,
    scores,
    signed_ranks,
    spent,
    students_t,
    table_of,
)
from study_training import PATIENCE, RISE
from study_worst import worst_parts

PAGE = Path(__file__).parent / "REPORT.md"
DOCS = Path(__file__).parents[2] / "docs"
BEGIN, END = "<!-- begin: made by tests/evidence -->", "<!-- end -->"
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


def against(cells: Cells, shared: dict[str, bool], problem: str, method: str, share: int = 2) -> Difference | None:
    """A method against the reference on a problem, where both are stored."""
    found, reference = cells[problem], reference_of(problem)
    if method not in found or method == reference:
        return None
    return difference(scores(found[method], share), scores(found[reference], share), shared[problem])


def methods_of(cells: Cells) -> list[str]:
    """All methods that are stored, in the order of the queue, but for the peer's."""
    stored = {method for found in cells.values() for method in found}
    stored = {method for method in stored if not method.startswith((PREFIX, FRONT))}
    return [m for m in dict.fromkeys(method for _, method in queue()) if m in stored and m != "advice"]


def summary(cells: Cells, shared: dict[str, bool]) -> list[str]:
    """A row a method: better, none seen, worse; mean, median and worst difference; what its search costs."""
    rows = []
    for method in methods_of(cells):
        found = {p: d for p in cells if (d := against(cells, shared, p, method)) is not None}
        if not found:
            continue
        counts = []
        for part in (False, True):
            words = [d.word for p, d in found.items() if PROBLEMS[p].held_out is part]
            counts.append(" / ".join(str(words.count(word)) for word in ("better", "none seen", "worse")))
        low = min(found, key=lambda p: found[p].mean)
        costs = [spent(cells[p][method]) for p in found]
        rows.append(
            (
                mean(d.mean for d in found.values()),
                [
                    spelled(method),
                    *counts,
                    signed(mean(d.mean for d in found.values())),
                    signed(median(d.mean for d in found.values())),
                    f"{signed(found[low].mean)} ({low})",
                    f"{median(cost for cost, _ in costs):.0f}",
                    f"{median(cost for _, cost in costs):.0f}",
                ],
            )
        )
    rows.sort(key=lambda row: -row[0])
    counts_of = ["development: better / none seen / worse", "held out: the same"]
    return table(["", *counts_of, "mean", "median", "worst", "passes", "time"], [row for _, row in rows])


def differences(cells: Cells, shared: dict[str, bool], methods: list[str], names: list[str]) -> list[str]:
    """A row a problem, a column a method: points over the reference, with intervals."""
    rows = []
    for name in names:
        found = cells[name]
        reference = scores(found[reference_of(name)])
        cells_of_row = [against(cells, shared, name, method) for method in methods]
        shown = ["-" if d is None else points(d) for d in cells_of_row]
        rows.append([named(name), str(PROBLEMS[name].m), f"{reference.mean():.3f}", *shown])
    return table(["", "m", "*standardised*", *map(spelled, methods)], rows)


def stopped_earlier(cells: Cells, shared: dict[str, bool], methods: list[str]) -> list[str]:
    """A row a method: the mean difference at a quarter, a half and all of the steps, where all have been trained."""
    rows, names = [], complete(cells, [REFERENCE, *methods])
    if not names:
        return ["No problem has all of these methods so far."]
    for method in methods:
        shares = []
        for place in SHARES.values():
            found = [against(cells, shared, name, method, place) for name in names]
            shares.append(signed(mean(d.mean for d in found if d is not None)))
        rows.append([spelled(method), *shares])
    return table(["", *SHARES], rows)


def trials_of(found: dict[str, Cell]) -> int:
    """As many trials of random search as rates and rows of `nash_mtl` cost."""
    return min(round(spent(found["nash_mtl"])[0]), len(found["random_search"]["configurations"]))


def at_equal_budget(cells: Cells, shared: dict[str, bool]) -> list[str]:
    """Searches after as many trials as rates and rows of `nash_mtl` cost, beside it: random search, and one that begins
    with the rates of the reference, which the protocol does not have.
    """
    rows = []
    for name, found in cells.items():
        if any(method not in found for method in ("random_search", "nash_mtl", REFERENCE)):
            continue
        nash, passes, trials = scores(found["nash_mtl"]), round(spent(found["nash_mtl"])[0]), trials_of(found)
        random = scores(found["random_search"], trials=trials)
        begun = scores(joined(found[REFERENCE], found["random_search"], trials))
        rest = max(0, trials - len(found[REFERENCE]["configurations"]))
        taken = [
            passes_taken(found["random_search"], trials),
            passes_taken(found[REFERENCE]) + passes_taken(found["random_search"], rest),
        ]
        of_all = [f"{one / passes_taken(found['nash_mtl']):.1f}" for one in taken]
        rows.append(
            [
                name,
                str(passes),
                str(trials),
                f"{random.mean():.3f}",
                of_all[0],
                f"{nash.mean():.3f}",
                points(difference(nash, random, shared[name])),
                f"{begun.mean():.3f}",
                of_all[1],
                points(difference(nash, begun, shared[name])),
            ]
        )
    titles = ["passes of `nash_mtl()`", "trials", "*random_search*", "by steps", "`nash_mtl()`", "difference"]
    return table(["", *titles, "*standardised*, then random", "by steps", "difference"], rows)


def ranks(cells: Cells) -> list[str]:
    """Mean ranks, the critical difference and mean differences, of the methods of the first stage on the problems that
    have them all.
    """
    methods = [REFERENCE, "mean", "start", "unit_sum", "nash_mtl", "config", "upgrad", "random_search"]
    names = complete(cells, methods)
    if len(names) < 5:
        return [f"Ranks need five problems with all of the first methods; {len(names)} have them so far."]
    found = table_of(cells, names, methods)
    chances = signed_ranks(found, 0)
    order, over = mean_ranks(found), (found - found[:, :1]).mean(0).tolist()
    rows = [
        [spelled(methods[i]), f"{order[i]:.2f}", *(("-", "-") if i == 0 else (signed(over[i]), f"{chances[i]:.3f}"))]
        for i in sorted(range(len(methods)), key=lambda i: float(order[i]))
    ]
    words = (
        f"On the {len(names)} problems with all of these methods. Mean ranks that differ by less than "
        f"{critical_difference(len(methods), len(names)):.2f} are not told apart (Nemenyi, 5 %); Friedman's test: "
        f"p = {friedman(found):.2g}. *Mean*: the difference to *standardised*, in hundredths, here over the same "
        "problems for all. Last column: Wilcoxon's signed ranks against *standardised*, corrected after Holm."
    )
    return [words, "", *table(["", "mean rank", "mean", "p"], rows)]


def advice(cells: Cells, names: list[str]) -> list[str]:
    """What `advise` says in every draw, and the score of the rule that it names; the mean over held-out problems."""
    rows, held_out = [], []
    for name in names:
        found = cells[name]
        said = found["advice"]["rule"] if "advice" in found else [""]
        if any(rule not in found for rule in said):
            continue
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
        "",
        f"Thresholds and rules as they were frozen: {frozen}. Held-out problems first; on the others it was made.",
        "",
        *table(["", "named, in draws", "score", *titles], rows),
    ]


def intervals(cells: Cells, shared: dict[str, bool]) -> str:
    """How many intervals against the reference leave out 0, by the bootstrap and by Student's t."""
    pairs = [
        (scores(found[method]), scores(found[reference_of(name)]), shared[name])
        for name, found in cells.items()
        for method in methods_of(cells)
        if method in found and method != reference_of(name)
    ]
    bold = [pair for pair in pairs if difference(*pair).word != "none seen"]
    still = sum(students_t(*pair).word != "none seen" for pair in bold)
    return (
        f"{len(bold)} of {len(pairs)} intervals against *standardised* leave out 0, and {still} of these do by "
        "Student's t, too."
    )


def honesty(cells: Cells, bold: str) -> list[str]:
    """What the protocol asks to report: missing cells, rates at an edge, trainings that were still moving."""
    todo = list(queue())
    stored = [(p, m) for p, m in todo if m in cells.get(p, {})]
    trained = [cells[p][m] for p, m in stored if m != "advice" and not m.startswith(FRONT)]
    edge = sum(cell["inside"] is False for cell in trained)
    of = sum(cell["inside"] is not None for cell in trained)
    rises = [rise for cell in trained for at_largest, rise in [at_the_end(cell, PATIENCE)] if at_largest]
    versions = [
        f"{package} {' and '.join(sorted({cell['machine'][package] for cell in trained}))}"
        for package in ("torch", "functional_jd")
    ]
    return [
        f"Of {len(todo)} cells (a method on a problem), {len(stored)} have been trained; the others are left out of "
        f"all tables. The best rate lies at an edge of the extended grid for {edge} of {of} cells (searches, whose "
        f"rates are not extended, are not among these). {len(rises)} of {len(trained)} went on to the largest number "
        f"of steps with their best rate, and {sum(rise >= RISE for rise in rises)} of these rose by {RISE} or more in "
        f"the last third of it. {bold} Measured with {', '.join(versions)}; one thread, on a "
        "machine with two cores that was not idle."
    ]


def made(cells: Cells) -> list[str]:
    """All that stands between the marks."""
    shared, whole = {name: PROBLEMS[name].shared for name in cells}, cells
    ready = [name for name in PROBLEMS if reference_of(name) in cells.get(name, {})]
    cells = {name: cells[name] for name in ready}
    core = [method for method in CORE if method in methods_of(cells)]
    old, new = ([n for n in ready if PROBLEMS[n].held_out is part] for part in (False, True))
    tables = {
        "By method": summary(cells, shared),
        "Held-out problems": differences(cells, shared, core, new),
        "Development problems": differences(cells, shared, core, old),
        "When all stop earlier": stopped_earlier(cells, shared, core),
        "The worst part": worst_parts(cells, shared, core),
        "At equal budget": at_equal_budget(cells, shared),
        "Ranks": ranks(cells),
    }
    lines = honesty(whole, intervals(cells, shared))
    for title, found in tables.items():
        words = [WORDS[title], ""] if title in WORDS else []
        lines += ["", f"### {title}", "", *words, *found]
    return [*lines, "", *advice(cells, [*new, *old]), "", *beside_the_peer(cells, shared), "", *front_tables(whole)]


def write_page(cells: Cells | None = None) -> None:
    """Write tables between the marks, the pictures of the report, and the chart of `docs/evidence.md`."""
    cells = load_all() if cells is None else cells
    before, begin, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    if not begin:
        raise ValueError(f"write_page: expected the mark {BEGIN!r}, found none in {PAGE.name}. Put it back.")
    text = "\n".join([BEGIN, "", *made(cells), "", ""])
    PAGE.write_text(before + text + END + rest.partition(END)[2], encoding="utf-8")
    shared = {name: PROBLEMS[name].shared for name in cells}
    draw(cells, shared, PAGE.parent)
    draw_fronts(cells, PAGE.parent)
    draw_summary(per_problem(cells, shared), DOCS)


def per_problem(cells: Cells, shared: dict[str, bool]) -> dict[str, list[float]]:
    """The differences of each method of the chart, in hundredths, one per problem."""
    found = {m: [against(cells, shared, problem, m) for problem in cells] for m in CHART}
    return {spelled(m): [100 * d.mean for d in found[m] if d is not None] for m in CHART}
