"""`python tests/benchmarks/page.py bench.json bench-compiled.json`: write the tables of the benchmarks, and the chart.

From what `make bench` and `make bench-compiled` wrote: into `docs/benchmarks.md` and `REPORT.md`. Figures of cases that
these files do not hold are left empty. Without files, only `docs/benchmarks.svg` is drawn, from the table of the page.
"""

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the script finds the neighbours of its folder too
from pages import line as line
from pages import table, write_between

DOCS = Path(__file__).parents[2] / "docs"
PAGES = (DOCS / "benchmarks.md", Path(__file__).parent / "REPORT.md")
BEGIN, END = "<!-- begin: made by tests/benchmarks/page.py, {} -->", "<!-- end: {} -->"
INK, EAGER, COMPILED = "#777777", "#0072B2", "#E69F00"

Row = dict[str, Any]
Rows = dict[tuple[str, str], Row]


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the figures, and put tables in the place of those between the marks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, help="what the bench wrote with --json; later files count more")
    parser.add_argument("--pages", nargs="+", type=Path, default=PAGES)
    options = parser.parse_args(arguments)
    found = [json.loads(file.read_text()) for file in options.files]
    eager, compiled = (_rows(found, table) for table in ("as run", "compiled"))
    for name in TABLES if found else ():
        path = next((path for path in options.pages if BEGIN.format(name) in path.read_text()), options.pages[0])
        put(path, name, TABLES[name](eager, compiled))
    draw(cpu_rows(options.pages[0].read_text()), options.pages[0].with_suffix(".svg"))


def cpu_rows(text: str) -> dict[str, dict[str, float]]:
    """The figures of the CPU table of the page, by case and column."""
    made = text.partition(", cpu -->")[2].partition("<!-- end")[0]
    head, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in made.strip().splitlines()]
    return {case: dict(zip(head[1:], map(float, cells), strict=True)) for case, *cells in rows}


def draw(rows: dict[str, dict[str, float]], path: Path) -> None:
    """Two panels, against plain training and against TorchJD: a pair of bars per case, and a line at 1."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    colors = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor"), INK)
    with mpl.rc_context(colors | {"font.size": 12, "svg.hashsalt": "benchmarks", "svg.fonttype": "none"}):
        figure = Figure(figsize=(9, 6), layout="constrained")
        axes: Any = figure.subplots(1, 2, sharey=True)
        for ax, other in zip(axes, ("plain", "TorchJD"), strict=True):
            for column, color, shift in ((f"to {other}", EAGER, -0.2), (f"to {other}, compiled", COMPILED, 0.2)):
                label = column.partition(", ")[2] or "eager"
                places = [place + shift for place in range(len(rows))]
                ax.barh(places, [row[column] for row in rows.values()], 0.38, color=color, label=label)
            ax.axvline(1, color=INK, linewidth=1.5)
            ax.set(title=f"Time / {'plain training' if other == 'plain' else other}")
            ax.spines[["top", "right"]].set_visible(False)
            ax.patch.set_alpha(0)
        axes[0].set_yticks(range(len(rows)), list(rows))
        axes[0].invert_yaxis()
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
        figure.savefig(path, transparent=True, metadata={"Date": None})


def put(path: Path, name: str, table: str, script: str = "page.py") -> None:
    """Replace the table of this name, which a script makes, on a page."""
    write_between(path, BEGIN.replace("page.py", script).format(name), END.format(name), table)


def _rows(found: Iterable[Row], table: str) -> Rows:
    races = [race for facts in found for race in facts["races"]]
    return {(race["name"], race["size"]): race for race in races if race["table"] == table}


def _memory(row: Row) -> str:
    memory = row["memory"].get("ours", 0) / row["memory"].get("JD", 1)
    return f"{memory:.1f}" if memory else "-"


def _goals(eager: Rows, compiled: Rows) -> str:
    """How many goals were reached."""
    counts = []
    for kind, rows in (("eager", eager), ("compiled", compiled)):
        figures = [figure for row in rows.values() for figure in row["figures"]]
        counts.append(f"{sum(figure['reached'] for figure in figures)} of {len(figures)} {kind}")
    return f"Goals reached: {' and '.join(counts)}."


def case_name(name: str, size: str) -> str:
    if name == "Burgers":
        return f"Burgers' equation, {size[2:]} losses"
    model, _, each = name.partition(",")
    return f"{'convolutions' if model == 'conv' else model}, {size[2:]} {'examples' if each else 'tasks'}"


def _goal(row: Row | None, pair: str) -> str:
    figures = row["figures"] if row else []
    return next((f"{f['goal']:.2f}" for f in figures if f"{f['ours']}/{f['against']}" == pair), "-")


def command(file: str, doc: str | None, tables: dict[str, Callable[[Any], Iterable[str]]], **options: Any) -> None:
    """A script: lines of tables by name, printed as they come, and put between the marks of a page if there is one.

    `options` are those of the script, each with the arguments of `add_argument`; the tables take what was given.
    """
    parser = argparse.ArgumentParser(description=doc)
    for name, how in options.items():
        parser.add_argument(f"--{name}", **how)
    parser.add_argument("--only", choices=tuple(tables), help="one of the tables")
    parser.add_argument("--page", type=Path, help="a Markdown file with marks for the tables")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")  # the peer's and its solvers'
    for name, lines in tables.items():
        if given.only in (None, name):
            found: list[str] = []
            for each in lines(given):
                print(each, flush=True)
                found.append(each)
            if given.page:
                put(given.page, name, "\n".join(found), Path(file).name)


Cells = Callable[[Row, Row | None, Callable[[str], Row | None]], Sequence[str]]
"""The cells of a case from its eager and its compiled row, and what finds its row in half precision."""


def _of_float32(head: Sequence[str], cells: Cells, align: str = "---") -> Callable[[Rows, Rows], str]:
    def made(eager: Rows, compiled: Rows) -> str:
        lines = []
        for (name, size), row in eager.items():
            if " " not in size and "ours" in row["seconds"]:
                half = lambda kind, name=name, size=size: eager.get((name, f"{size} {kind}"))
                lines.append([case_name(name, size), *cells(row, compiled.get((name, size)), half)])
        return table(head, lines, align)

    return made


def _ratios(rows: Iterable[Row | None], *pairs: str) -> list[str]:
    rows = list(rows)
    return [f"{row['ratios'][pair][1]:.2f}" if row and pair in row["ratios"] else "-" for pair in pairs for row in rows]


def _ms(row: Row) -> str:
    return f"{row['seconds']['ours'] * 1e3:.1f}"


TABLES = {
    # The whole step to plain training and to the peer's, eager and compiled, and its peak above the model.
    "cpu": _of_float32(
        [
            *("step with `upgrad`, float32", "ms", "to plain", "to plain, compiled"),
            *("to TorchJD", "to TorchJD, compiled", "memory to TorchJD"),
        ],
        lambda row, graph, _: [_ms(row), *_ratios((row, graph), "ours/plain", "ours/JD"), _memory(row)],
        "--:",
    ),
    # The whole step to the peer's, in every precision and form.
    "steps": _of_float32(
        ("whole step", "ms", "float32", "bfloat16", "float16", "one tensor", "goal", "compiled", "goal", "memory"),
        lambda row, graph, half: [
            _ms(row),
            *_ratios((row, half("bfloat16"), half("float16")), "ours/JD"),
            *_ratios([row], "stacked/JD"),
            _goal(row, "ours/JD"),
            *_ratios([graph], "ours/JD"),
            _goal(graph, "ours/JD"),
            _memory(row),
        ],
    ),
    # An eager step, and the same step by the operators of its graph, without a compiler.
    "operators": _of_float32(
        [
            *("float32", "eager to TorchJD", "operators to TorchJD"),
            *("eager to plain training", "operators to plain training"),
        ],
        lambda row, *_: _ratios([row], "ours/JD", "operators/JD", "ours/plain", "operators/plain"),
    ),
    # To training on the mean, and to the limit.
    "plain": _of_float32(
        [
            *("float32", "`upgrad` to plain training", "compiled", "`mean` to plain training", "compiled"),
            *("`upgrad` to the limit", "compiled"),
        ],
        lambda row, graph, _: _ratios((row, graph), "ours/plain", "mean/plain", "ours/limit"),
    ),
    "goals": _goals,
}


if __name__ == "__main__":
    main()
