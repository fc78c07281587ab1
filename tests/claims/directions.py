"""How far the peer's directions are from ours, for rules that both have, as the lengths of the rows grow apart.

Ours are tested beside exact solutions in `tests/aggregators` and `tests/exact`.
"""

import torch
from peer_rules import reason
from torchjd import aggregation as peer

import functional_jd as jd

SEEDS = range(20)
RATIOS = (1.0, 1e1, 1e2, 1e3, 1e4)
PAIRS = {
    "UPGrad()": (lambda: peer.UPGrad(), jd.upgrad()),
    "NashMTL(3)": (lambda: peer.NashMTL(3), jd.nash_mtl()),
    "ConFIG()": (lambda: peer.ConFIG(), jd.config()),
    "CAGrad(0.5)": (lambda: peer.CAGrad(0.5), jd.cagrad(0.5)),
    "IMTLG()": (lambda: peer.IMTLG(), jd.imtl_g()),
}


def apart(name: str, ratio: float, seed: int) -> float:
    """The distance of the two directions of length one; three rows, the longest so many times the shortest."""
    g = torch.Generator().manual_seed(seed)
    J = torch.randn(3, 8, generator=g, dtype=torch.float64)
    J = J / J.norm(dim=1, keepdim=True) * torch.tensor([ratio, ratio**0.5, 1.0], dtype=torch.float64)[:, None]
    theirs, ours = PAIRS[name]
    one, other = theirs()(J), jd.aggregate(ours, J).direction
    return float((one / one.norm() - other / other.norm()).norm())


def measure() -> dict[str, str]:
    """Median and largest distance, by rule and ratio."""
    found = {}
    for name in PAIRS:
        texts = []
        for ratio in RATIOS:
            try:
                values = torch.tensor([apart(name, ratio, seed) for seed in SEEDS])
            except Exception as error:
                texts.append(f"{ratio:g}: {reason(error)}")
                continue
            texts.append(f"{ratio:g}: {values.median():.1g} ({values.max():.1g})")
        found[f"TorchJD {name} from ours, median (largest) by ratio of lengths"] = "; ".join(texts)
    return found
