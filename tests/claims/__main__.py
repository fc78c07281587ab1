"""`python tests/claims [NAME ...]`: measure the figures of the table that compares peers.

A function measures one row, tells with which arguments, and changes nothing. A claim about default arguments is printed
beside its cure, where there is one.
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
    "rules": "peer_rules.count",
    "autocast and a norm layer": "peer_training.norm_layers",
    "loss scales": "peer_training.loss_scales",
    "rules under `vmap` and `compile(fullgraph=True)`": "peer_rules.transforms",
    "derivative through the rule": "peer_rules.derivatives",
    "gradients shorter than 1e-2": "peer_rules.short_gradients",
    "an overflow in one loss": "peer_rules.overflow",
    "Gramian with tied weights": "peer_training.tied_weights",
    "per-example loss by declaration": None,
    "resume a stateful rule": "peer_rules.resume",
    "several processes": "peer_training.replicas",
}
# Not in the table, but said on the pages of evidence and of what comes from another library.
BESIDE = {"directions beside ours, by lengths of rows": "lengths.measure"}


def main(names: list[str]) -> None:
    """Print what the functions named, or all, measure."""
    warnings.simplefilter("ignore")
    versions = [f"{name} {version(name).partition('+')[0]}" for name in ("torch", "torchjd", "functional_jd")]
    print(", ".join(versions), flush=True)
    for row, name in (ROWS | BESIDE).items():
        if name is None or (names and name not in names):
            continue
        module, _, function = name.partition(".")
        print(f"\n{row} ({function} of tests/claims/{module}.py)")
        for what, figure in getattr(importlib.import_module(module), function)().items():
            print(f"  {what}: {figure}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
