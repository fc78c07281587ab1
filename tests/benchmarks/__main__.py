"""`python tests/benchmarks`: how fast, against TorchJD, one thread each, in turns in one process."""

import argparse
import json
import os
import platform
import sys
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from measure import Case, Measurement

_NOTES = """
ours, peer: medians, microseconds per call (of a batch: per 64 problems). ratio: the median of the ratios of the rounds,
with their quartiles. apart: the relative distance of the two directions; the peer approximates in upgrad and dualproj
(ridge 1e-4), mgda (100 steps), cagrad, nash_mtl and fairgrad (their solvers' tolerances). No figure: it is drawn by
chance, or depends on earlier calls. No peer: its solver is not installed."""


def main(arguments: list[str] | None = None) -> None:
    """Run what is asked for: a table on stdout, progress on stderr, JSON where `--json` says."""
    sys.path.insert(0, str(Path(__file__).parent))  # so that `python -m tests.benchmarks` finds its neighbours too
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    # Only now: these read the environment as they are imported, and `--help` needs none of them.
    options = _options(arguments)
    import torch
    from measure import measure

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")  # the peer's and its solvers'; our own tests turn warnings into errors
    chosen, measurements = _cases(options), []
    for index, case in enumerate(chosen):
        _progress(f"{index + 1}/{len(chosen)} {case.table}: {case.name} {case.size}")
        row = measure(case, 0.1 if options.quick else 0.6, options.rounds)
        _progress("")
        if not measurements or measurements[-1].table != row.table:
            print(_heading(row.table), flush=True)
        print(_line(row), flush=True)
        measurements.append(row)
    print(_NOTES)
    print(_summary(measurements))
    if options.json:
        options.json.write_text(json.dumps(_record(measurements), indent=1) + "\n")


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("tests/benchmarks", description=__doc__)
    parser.add_argument("--rules", nargs="+", metavar="RULE", help="these rules, `direction`, `step`; default: all")
    parser.add_argument("--rows", nargs="+", type=int, metavar="M", help="numbers of rows; default: 2 4 8 32 128 256")
    parser.add_argument("--rounds", type=int, default=200, help="at most so many rounds per case, at least 2")
    parser.add_argument("--quick", action="store_true", help="a minute instead of five: 2 8 32 rows, fewer rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, with versions and machine")
    options = parser.parse_args(arguments)
    if options.rounds < 2 or any(m < 1 for m in options.rows or ()):
        parser.error("--rounds must be at least 2, --rows at least 1")
    if options.json and not options.json.parent.is_dir():
        parser.error(f"--json: there is no folder {options.json.parent}")  # better now than after five minutes
    return options


def _cases(options: argparse.Namespace) -> "list[Case]":
    from steps import step_cases
    from weights import QUICK_ROWS, ROWS, RULES, batch_cases, weight_cases

    known = [*RULES, "direction", "step"]
    names = options.rules or known
    if unknown := [name for name in names if name not in known]:
        sys.exit(f"benchmarks: unknown rules {', '.join(unknown)}. Take some of: {', '.join(known)}.")
    rows = options.rows or (QUICK_ROWS if options.quick else ROWS)
    rules = [name for name in names if name in RULES]
    return step_cases(names) + weight_cases(rules, rows) + batch_cases(rules, rows)


def _heading(table: str) -> str:
    titles = {
        "weights": "weights of a rule",
        "batches": "weights of a rule, a batch of 64",
        "steps": "direction and whole step of multi-task models",
    }
    names = f"{'':21}{'':>6}{'ours us':>11}{'peer us':>11}  {'ratio':>6} {'quartiles':16}{'goal':>5} {'':8}{'apart':>7}"
    return f"\n{titles[table]}\n{names}"


def _line(row: "Measurement") -> str:
    text = f"{row.name:21}{row.size:>6}{row.ours * 1e6:11.1f}"
    if row.peer is None or row.ratio is None:
        return f"{text}{'-':>11}"
    low, middle, high = row.ratio
    goal = "" if row.goal is None else f"{row.goal:.2f}"
    verdict = {None: "", True: "reached", False: "MISSED"}[row.reached]
    apart = "" if row.difference is None else f"{row.difference:.0e}"
    spread = f"[{low:.3f} {high:.3f}]"
    return f"{text}{row.peer * 1e6:11.1f}  {middle:6.3f} {spread:16}{goal:>5} {verdict:8}{apart:>7}"


def _summary(measurements: "list[Measurement]") -> str:
    judged = [row for row in measurements if row.reached is not None]
    missed = [f"{row.table}: {row.name} {row.size}" for row in judged if not row.reached]
    return f"\n{len(judged) - len(missed)} of {len(judged)} goals reached" + "".join(f"\n  missed {m}" for m in missed)


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
    elif text:
        print(text, file=sys.stderr, flush=True)


def _record(measurements: "list[Measurement]") -> dict[str, object]:
    names = ("torch", "torchjd", "functional_jd", "numpy")
    machine = {"system": platform.system(), "architecture": platform.machine(), "processor": _processor()}
    return {
        "versions": {"python": platform.python_version()} | {name: version(name) for name in names},
        "machine": machine | {"cores": os.cpu_count(), "threads": 1, "load": os.getloadavg()},
        "measurements": [row._asdict() for row in measurements],
    }


def _processor() -> str:
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.exists() else []
    return next((line.split(": ", 1)[1] for line in lines if line.startswith("model name")), platform.processor())


if __name__ == "__main__":
    main()
