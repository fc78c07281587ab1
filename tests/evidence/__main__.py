"""`python tests/evidence [--quick] [--page] [PROBLEM ...]`: rules beside plain and tuned sums, for one CPU core.

Trains every method on every problem, as `PROTOCOL.md` says; stores each as soon as it is there in
`results/PROBLEM/METHOD.json.gz`, so that an interrupted study goes on; then writes the tables of `REPORT.md`, its
picture, and the chart of `docs/evidence.md`. A file that is removed is trained again. `--methods NAME ...` trains only
these; `--quick` trains two problems shortly, in two draws, and stores nothing; `--page` writes the report from what is
stored.
"""

import sys
from argparse import ArgumentParser
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))  # the package of this clone

from problems import PROBLEMS
from study_queue import cell_of, lacks_package, queue, run, said
from study_training import draws_of

QUICK = {
    "units": ("mean", "standardised", "nash_mtl", "random_search"),
    "fairness": ("mean", "upgrad", "peer_upgrad", "front_stch", "advice"),
}


def main(arguments: list[str] | None = None) -> None:
    """Run the study, or the part of it that is asked for."""
    parser = ArgumentParser("python tests/evidence", None, __doc__)
    parser.add_argument("problems", nargs="*", help=f"some of {', '.join(PROBLEMS)}")
    parser.add_argument("--quick", action="store_true", help="two problems, few steps: stores nothing")
    parser.add_argument("--page", action="store_true", help="only write the page from what is stored")
    known = sorted({method for _, method in queue()})
    parser.add_argument("--methods", nargs="+", choices=known, default=[], metavar="METHOD", help="such as peer_upgrad")
    given = parser.parse_args(arguments)
    for name in given.problems:
        if name not in PROBLEMS:
            parser.error(f"expected some of {', '.join(PROBLEMS)}, found {name!r}")
    torch.set_num_threads(1)  # networks this small gain nothing from more
    if given.quick:
        quick()
        return
    if not given.page:
        run(given.problems, given.methods)
    from study_page import write_page

    write_page()


def quick() -> None:
    """Train shortly, and print scores."""
    for name, methods in QUICK.items():
        problem = PROBLEMS[name].build()
        draws = draws_of(problem, 2)
        for method in methods:
            if lacks_package(method):
                continue
            print(f"{name:14} {method:26} {said(cell_of(problem, method, draws, 80))}", flush=True)


if __name__ == "__main__":
    main()
