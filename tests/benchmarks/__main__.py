"""`python tests/benchmarks`: how fast and how lean, against TorchJD and plain training, one thread each, in turns."""

import argparse
import json
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from races import Race, Standing


# The table that compiles, and runs only by name.
_GRAPHS = ("compiled",)


def main(arguments: list[str] | None = None) -> None:
    """Run what is asked for: tables on stdout, progress on stderr, JSON where the option says."""
    sys.path.insert(0, str(Path(__file__).parent))  # so that `python -m tests.benchmarks` finds its neighbours too
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    os.environ |= {"TORCH_CPP_LOG_LEVEL": "ERROR", "KINETO_LOG_LEVEL": "99"}  # the profiler's greetings
    # Only now: these read the environment as they are imported, and `--help` needs none of them.
    options = _options(arguments)
    import torch

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")  # the peer's and its solvers'; our own tests turn warnings into errors
    rows: list[Standing] = []
    try:
        rows.extend(_rows(_chosen(options), options))
    finally:  # whoever stops after ten minutes keeps what there is
        _finish(rows, options)


def _rows(chosen: "list[Race]", options: argparse.Namespace) -> "Iterator[Standing]":
    """Measure case by case, and print."""
    from races import run
    from report import TITLES, line

    table, end = "", perf_counter() + options.minutes * 60
    for index, case in enumerate(chosen):
        if perf_counter() > end:
            print(f"\nstopped after {options.minutes:g} minutes: {len(chosen) - index} of {len(chosen)} cases not run")
            return
        _progress(f"{index + 1}/{len(chosen)} {case.table}: {case.name} {case.size}")
        row = run(case, 0.05 if options.toy else 0.5 if options.quick else 2.5, options.rounds)
        _progress("")
        print(line(row) if row.table == table else f"\n{TITLES[row.table]}\n{line(row)}", flush=True)
        table = row.table
        yield row


def _finish(rows: "list[Standing]", options: argparse.Namespace) -> None:
    from report import NOTES, goals, record

    print(f"{NOTES}\n{goals(rows)}")
    if options.json:
        options.json.write_text(json.dumps(record(rows), indent=1) + "\n")


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("tests/benchmarks", description=__doc__)
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="NAME",
        help="these tables, models, sizes (T=2), precisions; default: all but `compiled`",
    )
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after so many no case is begun")
    parser.add_argument("--rounds", type=int, default=200, help="at most so many rounds per case, at least 2")
    parser.add_argument("--quick", action="store_true", help="two minutes instead of fifteen: fewer cases and rounds")
    parser.add_argument("--toy", action="store_true", help="models of a few neurons: seconds, to try the bench itself")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="of models; default: the CPU, and CUDA if there is")
    parser.add_argument("--backend", default="inductor", help="what compiles")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, with versions and machine")
    options = parser.parse_args(arguments)
    if options.rounds < 2:
        parser.error("--rounds must be at least 2")
    if options.json and not options.json.parent.is_dir():
        parser.error(f"--json: there is no folder {options.json.parent}")  # better now than after fifteen minutes
    return options


def _chosen(options: argparse.Namespace) -> "list[Race]":
    cases = _cases(options)
    names = set(options.only or ())
    known = [dict.fromkeys(column) for column in zip(*map(_called, cases), strict=True)]
    if unknown := names.difference(*known):
        all_known = ", ".join(name for column in known for name in column if name)
        sys.exit(f"benchmarks: unknown names {', '.join(sorted(unknown))}. Take some of: {all_known}.")
    wanted = [names & column.keys() or column.keys() for column in known]
    chosen = [case for case in cases if all(name in some for name, some in zip(_called(case), wanted, strict=True))]
    return [case for case in chosen if case.table not in _GRAPHS or case.table in names]


def _called(case: "Race") -> tuple[str, str, str, str]:
    """Its table, its model, its size, its precision: of a kind of which names are given, only those run."""
    size, _, precision = case.size.partition(" ")
    return case.table, case.name.partition(",")[0], size, precision or "float32"


def _cases(options: argparse.Namespace) -> "list[Race]":
    import torch
    from as_run import as_run_races, compiled_races

    devices = [options.device] if options.device else ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    found: list[Race] = []
    for device in devices:
        found += as_run_races(options.toy, device) + compiled_races(options.toy, device, options.backend)
    return [case for case in found if case.quick or not options.quick]


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
    elif text:
        print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
