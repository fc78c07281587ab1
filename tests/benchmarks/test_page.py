"""Tables of figures for the docs: made from what the bench wrote, between marks."""

import json
import re

import page
import pytest


def test_the_tables_of_the_page_are_written_between_their_marks(tmp_path):
    times = {"JD": 0.004, "ours": 0.003, "plain": 0.001}
    ratios = {"operators/JD": [0.5, 0.55, 0.6]}
    ratios |= {"ours/JD": [0.7, 0.75, 0.8], "ours/plain": [2.9, 3.0, 3.1], "ours/limit": [1, 1.5, 2]}
    figure = {"ours": "ours", "against": "JD", "goal": 0.7, "reached": False}
    row = {"table": "as run", "name": "MLP", "size": "T=2", "device": "cpu", "seconds": times, "ratios": ratios}
    row |= {"memory": {"JD": 100, "ours": 50}, "figures": [figure]}
    half = row | {
        "size": "T=2 bfloat16",
        "ratios": {"ours/JD": [1, 1.25, 1.5]},
        "figures": [figure | {"reached": True}],
    }
    ratios = {"ours/JD": [0.4, 0.45, 0.5], "ours/plain": [1.1, 1.2, 1.3], "ours/plain compiled": [1, 2, 3]}
    graph = row | {"table": "compiled", "ratios": ratios}
    (tmp_path / "bench.json").write_text(json.dumps({"races": [row, half, graph]}))
    marks = [mark.format(name) for name in page.TABLES for mark in (page.BEGIN, page.END)]
    text = tmp_path / "page.md"
    text.write_text("before\n" + "\nstale\n".join(marks) + "\nafter\n")
    for _ in range(2):  # what was written before is replaced
        page.main([str(tmp_path / "bench.json"), "--pages", str(text)])
    lines = text.read_text().splitlines()
    assert "| MLP, 2 tasks | 3.0 | 0.75 | 1.25 | - | - | 0.70 | 0.45 | 0.70 | 0.5 |" in lines
    assert "| MLP, 2 tasks | 3.0 | 3.00 | 1.20 | 0.75 | 0.45 | 0.5 |" in lines
    assert "| MLP, 2 tasks | 0.75 | 0.55 | 3.00 | - |" in lines
    assert "| MLP, 2 tasks | 3.00 | 1.20 | - | - | 1.50 | - |" in lines
    assert "Goals reached: 1 of 2 eager and 0 of 1 compiled." in lines
    assert (lines[0], lines[-1]) == ("before", "after")
    assert sum(line.startswith("| MLP") for line in lines) == 4


def test_the_chart_shows_the_figures_of_the_table(tmp_path):
    pytest.importorskip("matplotlib")
    text, stored = (page.DOCS / f"benchmarks.{kind}" for kind in ("md", "svg"))
    page.draw(page.cpu_rows(text.read_text(encoding="utf-8")), tmp_path / "fresh.svg")
    bars = [
        [float(n) for n in re.findall(r"-?\d+\.\d+", path.read_text(encoding="utf-8").partition("</metadata>")[2])]
        for path in (stored, tmp_path / "fresh.svg")
    ]
    assert bars[0] == pytest.approx(bars[1], abs=2), "run: python tests/benchmarks/page.py"
