"""What the peer's rules make of an infinite entry: an error, a non-finite direction, or a finite one."""

import torch
from peer_rules import AGGREGATORS, jacobian, reason


def fate(name: str) -> str:
    """What comes of a row with an infinite entry."""
    J = jacobian()
    J[1, 2] = float("inf")
    torch.manual_seed(0)
    try:
        direction = AGGREGATORS[name](4)(J)
    except Exception as error:
        return f"raises ({reason(error)})"
    return "hides it" if direction.isfinite().all() else "shows it"


def measure() -> dict[str, str]:
    """The figures of the row `an overflow in one loss`."""
    found = {name: fate(name) for name in AGGREGATORS}
    result = {}
    for word in ("raises", "hides it", "shows it"):
        names = [name for name, said in found.items() if said.startswith(word)]
        result[f"TorchJD {word}"] = f"{len(names)}: {', '.join(names)}"
    return result | {"of these": "TrimmedMean is made to leave extremes out: hiding one is its purpose"}
