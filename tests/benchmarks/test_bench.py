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
