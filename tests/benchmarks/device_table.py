"""`python tests/benchmarks/device_table.py`: what a step launches on an accelerator, and where it waits, as Markdown.

Counted on a simulated device, beside TorchJD's loop and plain training: the same on every machine, in a few minutes.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))  # so that `python -m` finds its neighbours too
from device_steps import CASES, FORMS, RULES, Count, ours, peers, plain
from page import command, line, table

LAUNCHES = ("plain", "TorchJD", "ours", "to plain", "to TorchJD")
HEAD = ("", "rule", *LAUNCHES, "waits: TorchJD", "ours", "copies: TorchJD", "ours", "peak, kB: TorchJD", "ours")


def _lines(_: Any) -> Iterator[str]:
    """One table for each form of scaling."""
    torch.set_num_threads(1)
    for form in FORMS:
        if form != FORMS[0]:
            yield ""
        yield from table((form, *HEAD[1:]), []).splitlines()
        for case in CASES:
            ordinary = plain(case, form)
            for rule in RULES:
                cells = _cells(ordinary, peers(case, rule, form), ours(case, rule, form))
                yield line((f"{case[0]}, {case[1]} tasks", f"`{rule}`", *cells))


def _cells(ordinary: Count | None, peer: Count | None, own: Count) -> list[str]:
    cells = [str(side.launches) if side else "-" for side in (ordinary, peer, own)]
    cells += [f"{own.launches / side.launches:.2f}" if side else "-" for side in (ordinary, peer)]
    cells += [str(side.waits) if side else "-" for side in (peer, own)]
    cells += [f"{side.to_host} + {side.from_host}" if side else "-" for side in (peer, own)]
    return cells + [f"{side.peak / 1e3:.0f}" if side else "-" for side in (peer, own)]


if __name__ == "__main__":
    command(__file__, __doc__, {"launches": _lines})
