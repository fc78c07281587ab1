"""`python tests/benchmarks/device_table.py`: what a step launches on an accelerator, and where it waits, as Markdown.

Counted on a simulated device, beside TorchJD's loop and plain training: the same on every machine, in a few minutes.
"""

import argparse
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))  # so that `python -m` finds its neighbours too
from device_steps import CASES, FORMS, RULES, Count, ours, peers, plain
from page import line, publish, table

LAUNCHES = ("plain", "TorchJD", "ours", "to plain", "to TorchJD")
HEAD = ("", "rule", *LAUNCHES, "waits: TorchJD", "ours", "copies: TorchJD", "ours", "peak, kB: TorchJD", "ours")


def main(arguments: Sequence[str] | None = None) -> None:
    """One table for each form of scaling, on stdout, and between the marks of a page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rules", nargs="+", choices=tuple(RULES), default=tuple(RULES))
    parser.add_argument("--models", nargs="+", choices=sorted({name for name, _ in CASES}))
    parser.add_argument("--page", type=Path, help="a Markdown file with marks for the tables")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")  # the peer's and its solvers'
    publish(_lines(options.rules, options.models), options.page, "launches", "device_table.py")


def _lines(rules: Sequence[str], models: Sequence[str] | None) -> Iterator[str]:
    for form in FORMS:
        if form != FORMS[0]:
            yield ""
        yield from table((form, *HEAD[1:]), []).splitlines()
        for case in CASES:
            if models and case[0] not in models:
                continue
            ordinary = plain(case, form)
            for rule in rules:
                cells = _cells(ordinary, peers(case, rule, form), ours(case, rule, form))
                yield line((f"{case[0]}, {case[1]} tasks", f"`{rule}`", *cells))


def _cells(ordinary: Count | None, peer: Count | None, own: Count) -> list[str]:
    cells = [str(side.launches) if side else "-" for side in (ordinary, peer, own)]
    cells += [f"{own.launches / side.launches:.2f}" if side else "-" for side in (ordinary, peer)]
    cells += [str(side.waits) if side else "-" for side in (peer, own)]
    cells += [f"{side.to_host} + {side.from_host}" if side else "-" for side in (peer, own)]
    return cells + [f"{side.peak / 1e3:.0f}" if side else "-" for side in (peer, own)]


if __name__ == "__main__":
    main()
