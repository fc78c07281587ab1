"""`python tests/evidence [--quick] [PROBLEM ...]`: rules beside tuned fixed weights, on problems for one CPU core.

Trains under every rule and under a grid of fixed weights; keeps what is found in `study.json` beside this file,
problem by problem, so that an interrupted study goes on; then writes the tables of `docs/evidence.md` and its pictures.
With `--quick`, three problems at a fifth of the steps, with two seeds: it shows that all works, and stores nothing.
With `--page`, only the page and the pictures, from what is stored; with `--advice`, these and the figures of `advise`.
"""

import sys
from argparse import ArgumentParser
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # the package of this clone

from study_advice import advice_for
from study_page import summary, write_page
from study_problems import PROBLEMS
from study_results import load, machine, run, store

STORED = Path(__file__).with_name("study.json")
QUICK = ("units", "fairness", "helmholtz")


def main(arguments: list[str] | None = None) -> None:
    """Run the study, or the part of it that is asked for."""
    parser = ArgumentParser("python tests/evidence", None, __doc__)
    parser.add_argument("problems", nargs="*", help=f"some of {', '.join(PROBLEMS)}: train these again")
    parser.add_argument("--quick", action="store_true", help="three problems, few steps: stores nothing")
    parser.add_argument("--page", action="store_true", help="only write the page from what is stored")
    parser.add_argument("--advice", action="store_true", help="only the figures of `advise`, and the page")
    given = parser.parse_args(arguments)
    for name in given.problems:
        if name not in PROBLEMS:
            parser.error(f"expected some of {', '.join(PROBLEMS)}, found {name!r}")
    torch.set_num_threads(1)  # networks this small gain nothing from more
    if given.quick:
        quick(given.problems or QUICK)
        return
    stored = load(STORED)
    if not (given.page or given.advice):
        stored["machine"] = machine()
        for name in given.problems or [name for name in PROBLEMS if name not in stored["problems"]]:
            problem = PROBLEMS[name]()
            stored["problems"][name] = {"name": problem.name, **run(problem, 5, problem.steps, rounds=10)}
            store(STORED, stored)
    stored["problems"] = {name: stored["problems"][name] for name in PROBLEMS if name in stored["problems"]}
    if not given.page:
        stored["advice"] = advice_for(stored)
    store(STORED, stored)
    write_page(stored)


def quick(names: tuple[str, ...] | list[str]) -> None:
    """Train shortly, and print the table."""
    found = {}
    for name in names:
        problem = PROBLEMS[name]()
        found[name] = {"name": problem.name, **run(problem, 2, problem.steps // 5, rounds=2)}
    print("\n".join(summary({"problems": found})))


if __name__ == "__main__":
    main()
