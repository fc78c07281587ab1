"""How far the peer's directions are from ours, for rules that both have, as the lengths of the rows grow apart.

Ours are tested beside exact solutions in `tests/aggregators` and `tests/exact`.
"""

import torch
from peer_rules import AGGREGATORS, reason, unit_distance
from torch import Tensor

import functional_jd as jd

OURS = {
    "UPGrad()": jd.upgrad(),
    "NashMTL(m)": jd.nash_mtl(),
    "ConFIG()": jd.config(),
    "CAGrad(0.5)": jd.cagrad(0.5),
    "IMTLG()": jd.imtl_g(),
}
FAR = 0.01


def fixed(ratio: float, seed: int) -> Tensor:
    """Three rows, the longest so many times the shortest."""
    J = torch.randn(3, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return J / J.norm(dim=1, keepdim=True) * torch.tensor([ratio, ratio**0.5, 1.0], dtype=torch.float64)[:, None]


def spread(ratio: float, seed: int) -> Tensor:
    """Four rows in 30 dimensions, with random lengths from 1 to `ratio`."""
    draw = torch.Generator().manual_seed(seed)
    rows = torch.randn(4, 30, generator=draw, dtype=torch.float64)
    return rows / rows.norm(dim=1, keepdim=True) * ratio ** torch.rand(4, 1, generator=draw, dtype=torch.float64)


def apart(name: str, J: Tensor, unit: bool) -> float:
    """The distance of the two directions, of length one or relative to the peer's."""
    one, other = AGGREGATORS[name](len(J))(J), jd.aggregate(OURS[name], J).direction
    return unit_distance(one, other) if unit else float((one - other).norm() / one.norm())


def measure() -> dict[str, str]:
    """Median and largest distance, by rule and ratio; of random lengths also how many are far apart."""
    found = {}
    for name in OURS:
        texts = []
        for ratio in (1.0, 1e1, 1e2, 1e3, 1e4):
            try:
                values = torch.tensor([apart(name, fixed(ratio, seed), True) for seed in range(20)])
            except Exception as error:
                texts.append(f"{ratio:g}: {reason(error)}")
                continue
            texts.append(f"{ratio:g}: {values.median():.1g} ({values.max():.1g})")
        found[f"TorchJD {name} from ours, median (largest) by ratio of lengths"] = "; ".join(texts)
    for name in ("NashMTL(m)", "CAGrad(0.5)"):
        for ratio in (1.0, 1e1, 1e2):
            values = torch.tensor([apart(name, spread(ratio, seed), False) for seed in range(40)])
            far = values[values > FAR]
            text = f"median {values.median():.1g}, largest {values.max():.2g}"
            if len(far):
                text += f", {len(far)} of 40 more than {FAR:.0%} apart: {far.min():.0%} to {far.max():.0%}"
            found[f"TorchJD {name} from ours, lengths from 1 to {ratio:g}"] = text
    return found
