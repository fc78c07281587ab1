"""`python tests/benchmarks`: how fast and how lean, against TorchJD and plain training, one thread each, in turns."""

import argparse
import json
import os
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # so that `python -m tests.benchmarks` finds its neighbours too
os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
os.environ |= {"TORCH_CPP_LOG_LEVEL": "ERROR", "KINETO_LOG_LEVEL": "99"}  # the profiler's greetings

import torch
from as_run import races_of
from races import Race, Standing, run
from report import NOTES, TITLES, goals, line, record

# The table that compiles, and runs only by name.
_GRAPHS = ("compiled",)


def main(arguments: list[str] | None = None) -> None:
    """Run what is asked for: tables on stdout, progress on stderr, JSON where the option says."""
    options = _options(arguments)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")  # the peer's and its solvers'; our own tests turn warnings into errors
    rows: list[Standing] = []
    chosen = _chosen(options)
    try:
        for index, case in enumerate(chosen):
            print(f"{index + 1}/{len(chosen)} {case.table}: {case.name} {case.size}", file=sys.stderr, flush=True)
            row = run(case, 0.05 if options.toy else 2.5)
            title = "" if rows and rows[-1].table == row.table else f"\n{TITLES[row.table]}\n"
            print(title + line(row), flush=True)
            rows.append(row)
    finally:  # whoever stops after ten minutes keeps what there is
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
    parser.add_argument("--toy", action="store_true", help="models of a few neurons: seconds, to try the bench itself")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, with versions and machine")
    options = parser.parse_args(arguments)
    if options.json and not options.json.parent.is_dir():
        parser.error(f"--json: there is no folder {options.json.parent}")  # better now than after fifteen minutes
    return options


def _chosen(options: argparse.Namespace) -> list[Race]:
    cases = [case for table in TITLES for case in races_of(table, options.toy)]
    names = set(options.only or ())
    known = [dict.fromkeys(column) for column in zip(*map(_called, cases), strict=True)]
    if unknown := names.difference(*known):
        all_known = ", ".join(name for column in known for name in column if name)
        sys.exit(f"benchmarks: unknown names {', '.join(sorted(unknown))}. Take some of: {all_known}.")
    wanted = [names & column.keys() or column.keys() for column in known]
    chosen = [case for case in cases if all(name in some for name, some in zip(_called(case), wanted, strict=True))]
    return [case for case in chosen if case.table not in _GRAPHS or case.table in names]


def _called(case: Race) -> tuple[str, str, str, str]:
    """Its table, its model, its size, its precision: of a kind of which names are given, only those run."""
    size, _, precision = case.size.partition(" ")
    return case.table, case.name.partition(",")[0], size, precision or "float32"


if __name__ == "__main__":
    main()
