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
        help="a table, a model, a size (T=2), a precision; default: all but `compiled`",
    )
    parser.add_argument("--toy", action="store_true", help="models of a few neurons: seconds, to try the bench itself")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, with versions and machine")
    options = parser.parse_args(arguments)
    if options.json and not options.json.parent.is_dir():
        parser.error(f"--json: there is no folder {options.json.parent}")  # better now than after fifteen minutes
    return options


def _chosen(options: argparse.Namespace) -> list[Race]:
    """The cases that have all these words; what compiles, only by name."""
    wanted = options.only or []
    cases = [case for table in TITLES for case in races_of(table, options.toy)]
    chosen = [case for case in cases if {*wanted} <= {*_words(case)}]
    chosen = [case for case in chosen if case.table != "compiled" or "compiled" in wanted]
    if not chosen:
        known = dict.fromkeys(word for case in cases for word in _words(case))
        sys.exit(f"benchmarks: no case has all of {', '.join(wanted)}. Take some of: {', '.join(known)}.")
    return chosen


def _words(case: Race) -> tuple[str, ...]:
    """Its table, its model, its size, its precision."""
    size, _, precision = case.size.partition(" ")
    return case.table, case.name.partition(",")[0], size, precision or "float32"


if __name__ == "__main__":
    main()
