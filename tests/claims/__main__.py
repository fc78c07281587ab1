"""`python tests/claims [NAME ...]`: measure the figures of the table that compares peers.

Each file of this folder measures one row, prints with which arguments, and changes nothing. A claim about default
arguments is printed beside its cure, where there is one.
"""

import importlib
import sys
import warnings
from importlib.metadata import version
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]  # the package of this clone, its tests

# By the first cell of a row of "Comparison" in docs/coming_from.md. None: read in the code of the peers.
ROWS: dict[str, str | None] = {
    "form": None,
    "rules": "count_rules",
    "autocast and a norm layer": "norm_layers",
    "loss scales": "loss_scales",
    "rules under `vmap` and `compile(fullgraph=True)`": "transforms",
    "derivative through the rule": "derivatives",
    "gradients shorter than 1e-2": "short_gradients",
    "an overflow in one loss": "overflow",
    "Gramian with tied weights": "tied_weights",
    "per-example loss by declaration": None,
    "resume a stateful rule": "resume",
    "several processes": "replicas",
}
# Not in the table, but said on the pages of evidence and of what comes from another library.
BESIDE = {"directions beside ours, by lengths of rows": "lengths"}


def main(names: list[str]) -> None:
    """Print what the modules named, or all, measure."""
    warnings.simplefilter("ignore")
    versions = [f"{name} {version(name).partition('+')[0]}" for name in ("torch", "torchjd", "functional_jd")]
    print(", ".join(versions), flush=True)
    for row, name in (ROWS | BESIDE).items():
        if name is None or (names and name not in names):
            continue
        print(f"\n{row} (tests/claims/{name}.py)")
        for what, figure in importlib.import_module(name).measure().items():
            print(f"  {what}: {figure}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
