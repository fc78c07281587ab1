"""`python tests/benchmarks/page.py bench.json bench-compiled.json`: write the tables of the benchmarks.

From what `make bench` and `make bench-compiled` wrote: into `docs/benchmarks.md` and `REPORT.md`. Figures of cases that
these files do not hold are left empty.
"""

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from chart import cpu_rows, draw

PAGES = (Path(__file__).parents[2] / "docs" / "benchmarks.md", Path(__file__).parent / "REPORT.md")
BEGIN, END = "<!-- begin: made by tests/benchmarks/page.py, {} -->", "<!-- end: {} -->"
MODELS = {
    "tiny MLP": "tiny MLP",
    "MLP": "MLP",
    "wide MLP": "wide MLP",
    "conv": "convolutions",
    "transformer": "transformer",
}

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


def _cpu(eager: Rows, compiled: Rows) -> str:
    """The whole step to plain training and to the peer's, eager and compiled, and its peak above the model."""
    pairs = {"to plain": "ours/plain", "to TorchJD": "ours/JD"}
    lines: list[Sequence[str]] = []
    for key, row in _float32(eager):
        ratios = [_ratio(rows.get(key), pair) for pair in pairs.values() for rows in (eager, compiled)]
        lines.append([case_name(*key), f"{row['seconds']['ours'] * 1e3:.1f}", *ratios, _memory(row)])
    titles = [title for name in pairs for title in (name, f"{name}, compiled")]
    return table(["step with `upgrad`, float32", "ms", *titles, "memory to TorchJD"], lines, "--:")


def _memory(row: Row) -> str:
    memory = row["memory"].get("ours", 0) / row["memory"].get("JD", 1)
    return f"{memory:.1f}" if memory else "-"


def _steps(eager: Rows, compiled: Rows) -> str:
    """The whole step to the peer's, in every precision and form."""
    head = ("whole step", "ms", "float32", "bfloat16", "float16", "one tensor", "goal", "compiled", "goal", "memory")
    lines: list[Sequence[str]] = []
    for (name, size), row in _float32(eager):
        half = [_ratio(eager.get((name, f"{size} {kind}")), "ours/JD") for kind in ("bfloat16", "float16")]
        graph = compiled.get((name, size))
        ms = f"{row['seconds']['ours'] * 1e3:.1f}"
        floats = [_ratio(row, "ours/JD"), *half, _ratio(row, "stacked/JD"), _goal(row, "ours/JD")]
        graphs = [_ratio(graph, "ours/JD"), _goal(graph, "ours/JD")]
        lines.append([case_name(name, size), ms, *floats, *graphs, _memory(row)])
    return table(head, lines)


def _operators(eager: Rows, _: Rows) -> str:
    """An eager step, and the same bits by the operators of its graph, without a compiler."""
    pairs = {"eager to TorchJD": "ours/JD", "operators to TorchJD": "operators/JD"}
    pairs |= {"eager to plain training": "ours/plain", "operators to plain training": "operators/plain"}
    lines = [[case_name(*key)] + [_ratio(row, pair) for pair in pairs.values()] for key, row in _float32(eager)]
    return table(["float32", *pairs], lines)


def _plain(eager: Rows, compiled: Rows) -> str:
    """To training on the mean, and to the limit."""
    pairs = {"`upgrad` to plain training": "ours/plain", "`mean` to plain training": "mean/plain"}
    pairs |= {"`upgrad` to the limit": "ours/limit"}
    lines = [
        [case_name(*key)] + [_ratio(rows.get(key), pair) for pair in pairs.values() for rows in (eager, compiled)]
        for key, _ in _float32(eager)
    ]
    return table(["float32", *(cell for name in pairs for cell in (name, "compiled"))], lines)


def _goals(eager: Rows, compiled: Rows) -> str:
    """How many goals were reached."""
    counts = []
    for kind, rows in (("eager", eager), ("compiled", compiled)):
        figures = [figure for row in rows.values() for figure in row["figures"]]
        counts.append(f"{sum(figure['reached'] for figure in figures)} of {len(figures)} {kind}")
    return f"Goals reached: {' and '.join(counts)}."


def _float32(rows: Rows) -> list[tuple[tuple[str, str], Row]]:
    return [(key, row) for key, row in rows.items() if " " not in key[1] and "ours" in row["seconds"]]


def case_name(name: str, size: str) -> str:
    if name == "Burgers":
        return f"Burgers' equation, {size[2:]} losses"
    model, _, each = name.partition(",")
    return f"{MODELS[model]}, {size[2:]} {'examples' if each else 'tasks'}"


def _ratio(row: Row | None, pair: str) -> str:
    return f"{row['ratios'][pair][1]:.2f}" if row and pair in row["ratios"] else "-"


def _goal(row: Row | None, pair: str) -> str:
    figures = row["figures"] if row else []
    return next((f"{f['goal']:.2f}" for f in figures if f"{f['ours']}/{f['against']}" == pair), "-")


def table(head: Sequence[str], lines: Iterable[Sequence[str]], align: str = "---") -> str:
    return "\n".join(map(line, [head, ["---", *[align] * (len(head) - 1)], *lines]))


def line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


TABLES = {"cpu": _cpu, "steps": _steps, "operators": _operators, "plain": _plain, "goals": _goals}


if __name__ == "__main__":
    main()
