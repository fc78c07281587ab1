"""`python tests/claims/laws_of_torchjd.py [NAME ...]`: which laws TorchJD's aggregators keep.

Tests the aggregators named, or all, in a few minutes, and prints what is found. The table and the counterexamples of
all go into `LAWS_OF_TORCHJD.md`, between its marks.
"""

import importlib.metadata
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the script finds the neighbours of its folder too

import hypothesis
import torch
from pages import table, write_between
from peer_rules import AGGREGATORS
from torchjd import aggregation as peer

from functional_jd.aggregation import AffineWeights
from functional_jd.aggregation.aggregate import Aggregator
from functional_jd.core.tree import tree_flatten
from functional_jd.testing import ALWAYS, BY_CLAIM, Counterexample, laws_of
from functional_jd.views import full_jacobian

ROOT = Path(__file__).parents[2]
PAGE = Path(__file__).parent / "LAWS_OF_TORCHJD.md"
LAWS = (*ALWAYS, *BY_CLAIM)
BEGIN, END = "<!-- begin: made by tests/claims/laws_of_torchjd.py -->", "<!-- end -->"
SETTINGS = hypothesis.settings(max_examples=40, derandomize=True, database=None, deadline=None)


def black_box(f: Callable[[torch.Tensor], torch.Tensor]) -> Aggregator:
    """A rule whose direction is `f(matrix)`. Its weights are not known: they are zero, with the direction as `rest`."""

    def update(jacobian: Any, _: Any) -> Any:
        leaves, structure = tree_flatten(jacobian)
        rows = [leaf.reshape(len(leaf), leaf.shape[1:].numel()) for leaf in leaves]
        parts = f(torch.cat(rows, dim=1)).split([row.shape[1] for row in rows])
        zeros = [leaf.new_zeros((len(leaf), *[1] * (leaf.ndim - 1)), dtype=torch.float64) for leaf in leaves]
        rests = [
            part.to(torch.promote_types(part.dtype, torch.float32)).reshape(leaf.shape[1:])
            for part, leaf in zip(parts, leaves, strict=True)
        ]
        return structure.unflatten(list(map(AffineWeights, zeros, rests))), ()

    return Aggregator(full_jacobian, lambda _: (), update)


def reset(aggregator: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """An aggregator that forgets its state before every call. Made in the call, it could not be compiled at all."""

    def direction(J: torch.Tensor) -> torch.Tensor:
        aggregator.reset()
        return aggregator(J)

    return direction


LEFT_OUT = ("Krum(1)", "NashMTL(m)", "TrimmedMean(1)")  # the page says why
# Fresh in every call where an aggregator has a state.
RULES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    name.removesuffix("()"): lambda J, make=make: make(len(J))(J)
    for name, make in AGGREGATORS.items()
    if name not in LEFT_OUT
}
RULES["ExcessMTL"] = reset(peer.ExcessMTL())
RULES["Constant(1, 2, ...)"] = lambda J: peer.Constant(torch.arange(1, len(J) + 1, dtype=J.dtype))(J)

SLOW = ("FairGrad(1)",)  # calls a solver of SciPy


def broken(name: str) -> dict[str, dict[str, str]]:
    """By law that is broken, the smallest matrix and the error."""
    torch.manual_seed(0)
    settings = hypothesis.settings(SETTINGS, max_examples=8) if name in SLOW else SETTINGS
    found = laws_of(black_box(RULES[name]), *LAWS, settings=settings)
    return {law: shown(example) for law, example in found.items() if isinstance(example, Counterexample)}


def shown(example: Counterexample) -> dict[str, str]:
    """The matrix and the first line of the error, with its type if it is no `AssertionError`."""
    line = (str(example.error).strip().splitlines() or [""])[0].replace(f"{ROOT}/", "")  # no path of a machine
    kind = "" if isinstance(example.error, AssertionError) else f"{type(example.error).__name__}: "
    return {"matrix": str(example.jacobian.tolist()), "error": kind + line}


def by_law(stored: dict[str, Any]) -> str:
    """A table: rows are laws, in the order of `ALWAYS` and `BY_CLAIM`; columns are aggregators."""
    names = [law.__name__ for law in LAWS]
    rows = [[f"`{law}`", *("**no**" if law in found else "yes" for found in stored.values())] for law in names]
    return table(["", *stored], rows)


def counterexamples(stored: dict[str, Any]) -> list[str]:
    """For every broken law, the smallest matrix and the error."""
    lines = []
    for name, broken_laws in stored.items():
        if broken_laws:
            lines += ["", f"### {name}", "", *(line(law, **found) for law, found in broken_laws.items())]
    return lines


def line(law: str, matrix: str, error: str) -> str:
    """A counterexample on the page. The search makes no small one for `compiled`, which mostly fails for any matrix."""
    where = "" if law == "compiled" else f", `{matrix}`"
    return f"- `{law}`{where}: `{error[:120].replace('`', '')}`"


def write(stored: dict[str, Any]) -> None:
    """Write what was found into the page."""
    versions = f"torch {torch.__version__.partition('+')[0]}, torchjd {importlib.metadata.version('torchjd')}"
    made = [f"Measured with {versions}.", by_law(stored), "## Counterexamples"]
    write_between(PAGE, BEGIN, END, "\n\n".join(made) + "\n" + "\n".join(counterexamples(stored)))


def main(names: list[str]) -> None:
    """Test the aggregators named, or all."""
    warnings.simplefilter("ignore")
    stored = {}
    for name in names or RULES:
        stored[name] = broken(name)
        print(name, *stored[name], file=sys.stderr, flush=True)
    if names:
        print("\n".join(counterexamples(stored)))
    else:
        write(stored)


if __name__ == "__main__":
    main(sys.argv[1:])
