"""`python tests/benchmarks/page.py bench.json bench-compiled.json`: write the tables of the benchmarks.

From what `make bench` and `make bench-compiled` wrote: into `docs/benchmarks.md` and `REPORT.md`. Figures of cases that
these files do not hold are left empty.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from chart import cpu_rows, draw

PAGES = (Path(__file__).parents[2] / "docs" / "benchmarks.md", Path(__file__).parent / "REPORT.md")
BEGIN, END = "<!-- begin: made by tests/benchmarks/page.py, {} -->", "<!-- end: {} -->"

Row = dict[str, Any]
Rows = dict[tuple[str, str], Row]


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the figures, and put tables in the place of those between the marks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, help="what the bench wrote with --json; later files count more")
    parser.add_argument("--pages", nargs="+", type=Path, default=PAGES)
    parser.add_argument("--tables", nargs="+", choices=tuple(TABLES), default=tuple(TABLES))
    options = parser.parse_args(arguments)
    found = [json.loads(file.read_text()) for file in options.files]
    eager, compiled = (_rows(found, table) for table in ("as run", "compiled"))
    texts = {path: path.read_text() for path in options.pages}
    for name in options.tables:
        path = next((path for path, text in texts.items() if BEGIN.format(name) in text), options.pages[0])
        texts[path] = with_table(texts[path], name, TABLES[name](eager, compiled))
    for path, text in texts.items():
        path.write_text(text)
    if "cpu" in options.tables:
        draw(cpu_rows(texts[options.pages[0]]), options.pages[0].with_suffix(".svg"))


def with_table(text: str, name: str, table: str, script: str = "page.py") -> str:
    """The text of a page with the table between its marks replaced."""
    begin, end = BEGIN.replace("page.py", script).format(name), END.format(name)
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    if not after:
        raise SystemExit(f"expected a page with the marks {begin!r} and {end!r}")
    return f"{before}{begin}\n\n{table}\n\n{end}{after}"


def _rows(found: Iterable[Row], table: str) -> Rows:
    races = [race for facts in found for race in facts["races"]]
    return {(race["name"], race["size"]): race for race in races if race["table"] == table and race["device"] == "cpu"}


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


def table(head: Sequence[str], lines: Iterable[Sequence[str]], align: str = "---") -> str:
    return "\n".join(map(line, [head, ["---", *[align] * (len(head) - 1)], *lines]))


def line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def publish(lines: Iterable[str], page: Path | None, name: str, script: str) -> None:
    """Print lines as they come, and put them between the marks of a page, if there is one."""
    found: list[str] = []
    for each in lines:
        print(each, flush=True)
        found.append(each)
    if page:
        page.write_text(with_table(page.read_text(), name, "\n".join(found), script))


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
    # An eager step, and the same bits by the operators of its graph, without a compiler.
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
