"""The bench itself: it runs from end to end, and only what is named."""

import json
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest


@pytest.mark.slow
def test_quick_mode_runs_from_end_to_end(tmp_path):
    pytest.importorskip("torchjd")
    file = tmp_path / "bench.json"
    command = [sys.executable, Path(__file__).parent, "--toy", "--quick", "--rounds", "2", "--json", file]
    command += ["--device", "cpu", "--only", "as run", "tiny MLP"]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    record = json.loads(file.read_text())
    races = {(race["table"], race["name"], race["size"]): race for race in record["races"]}
    assert all(not race["refused"] for race in races.values()), {case: race["refused"] for case, race in races.items()}
    half, full = (races["as run", "tiny MLP", size] for size in ("T=2 float16", "T=2"))
    assert half["seconds"].keys() == {"JD", "plain", "limit", "ours"}
    assert full["seconds"].keys() == {"JD", "plain", "limit", "ours", "stacked", "mean", "operators"}
    assert full["memory"].keys() == {"JD", "ours"}
    assert min(half["memory"].values()) > 0
    reached = [figure["reached"] for race in record["races"] for figure in race["figures"]]
    assert f"{sum(reached)} of {len(reached)} goals reached" in done.stdout


def test_only_what_is_named_runs_and_graphs_only_by_name():
    pytest.importorskip("torchjd")
    # By its path: Opacus, a peer, installs a package that is called benchmarks, too.
    spec = spec_from_file_location("bench", Path(__file__).with_name("__main__.py"))
    bench = module_from_spec(spec)
    spec.loader.exec_module(bench)
    _chosen, _options = bench._chosen, bench._options

    def chosen(*names):
        return {(case.table, case.name) for case in _chosen(_options(["--toy", "--device", "cpu", *names]))}

    assert {table for table, _ in chosen()} == {"as run"}
    assert chosen("--only", "compiled", "MLP") == {("compiled", "MLP"), ("compiled", "MLP, each")}
    assert chosen("--only", "as run", "T=32") == {("as run", "MLP"), ("as run", "transformer")}
    assert chosen("--only", "float16", "conv") == {("as run", "conv"), ("as run", "conv, each")}
    with pytest.raises(SystemExit, match=r"unknown names float8.*as run"):
        chosen("--only", "float8")


def test_the_other_tables_are_filled(monkeypatch, capsys, tmp_path):
    """In the least form of each: fronts, rules every few steps, first calls."""
    import every_few_steps
    import fronts_table

    monkeypatch.setattr(fronts_table, "STEPS", 4)
    monkeypatch.setattr(fronts_table, "has_peer", lambda: False)
    *_, line = fronts_table.worth_lines(["VLMOP2"], ["EPO"])
    name, method, gradients, _, steps, *_ = [cell.strip() for cell in line.split("|")[1:-1]]
    assert (name, method) == ("VLMOP2", "EPO")
    assert 0 < float(gradients) < float(steps) < 100  # a step takes the gradients of both losses
    for setting, value in {"SEEDS": 1, "EPOCHS": 1, "BATCH": 200, "EVERY": {"mean": (1,)}}.items():
        monkeypatch.setattr(every_few_steps, setting, value)
    monkeypatch.setattr(every_few_steps, "RULES", {"mean": every_few_steps.jd.mean})
    every_few_steps.main()
    assert capsys.readouterr().out.count("| `mean` | 1 |") == 2
    pytest.importorskip("torchjd")
    import first_call

    monkeypatch.setattr(first_call, "_TIMED", 3)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    found = first_call.measured("tiny MLP", "T=2", "ours", toy=True, backend="eager")
    assert found["graphs"] == 1
    assert found["lines"] == 0  # nothing was written in C++
