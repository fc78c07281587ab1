"""How far two of the peer's rules are from ours on random rows, as their lengths spread."""

import torch
from torchjd import aggregation as peer

import functional_jd as jd

CASES = 40
LARGEST = (1.0, 1e1, 1e2)
FAR = 0.01
PAIRS = {
    "NashMTL(4)": (lambda: peer.NashMTL(4), jd.nash_mtl()),
    "CAGrad(0.5)": (lambda: peer.CAGrad(0.5), jd.cagrad(0.5)),
}


def apart(name: str, ratio: float, seed: int) -> float:
    """The relative distance of the directions of four rows in 30 dimensions, with lengths from 1 to `ratio`."""
    draw = torch.Generator().manual_seed(seed)
    rows = torch.randn(4, 30, generator=draw, dtype=torch.float64)
    lengths = ratio ** torch.rand(4, 1, generator=draw, dtype=torch.float64)
    rows = rows / rows.norm(dim=1, keepdim=True) * lengths
    theirs, ours = PAIRS[name]
    one, other = theirs()(rows), jd.aggregate(ours, rows).direction
    return float((one - other).norm() / one.norm())


def measure() -> dict[str, str]:
    """By rule and largest length: the median, and how many are far apart, and how far."""
    found = {}
    for name in PAIRS:
        for ratio in LARGEST:
            values = torch.tensor([apart(name, ratio, seed) for seed in range(CASES)])
            far = values[values > FAR]
            text = f"median {values.median():.1g}, largest {values.max():.2g}"
            if len(far):
                text += f", {len(far)} of {CASES} more than {FAR:.0%} apart: {far.min():.0%} to {far.max():.0%}"
            found[f"TorchJD {name} from ours, lengths from 1 to {ratio:g}"] = text
    return found
