"""What `UPGrad` makes of short gradients: with default arguments, and with `norm_eps=0`."""

import torch
from torch import Tensor
from torchjd.aggregation import Mean, UPGrad
from torchjd.linalg import QuadprogProjector

import functional_jd as jd


def apart(one: Tensor, other: Tensor) -> float:
    """The distance of two directions of length one."""
    return float((one / one.norm() - other / other.norm()).norm())


def measure() -> dict[str, str]:
    """The figures of the row `gradients shorter than 1e-2`, for two conflicting rows in float32."""
    J = torch.tensor([[-4.0, 1.0, 1.0], [6.0, 1.0, 1.0]]) / 6
    full, mean = UPGrad()(J), Mean()(J)
    cured = UPGrad(projector=QuadprogProjector(norm_eps=0.0))
    ours = jd.aggregate(jd.upgrad(), J).direction
    found = {"UPGrad() from Mean(), norm 1": f"{apart(full, mean):.3f}"}
    for scale in (1e-1, 1e-2, 5e-3, 1e-3, 1e-6):
        texts = [f"from itself at norm 1 {apart(UPGrad()(scale * J), full):.3f}"]
        texts.append(f"from Mean() {apart(UPGrad()(scale * J), mean):.3f}")
        texts.append(f"norm_eps=0: from itself {apart(cured(scale * J), cured(J)):.3f}")
        texts.append(f"ours: from itself {apart(jd.aggregate(jd.upgrad(), scale * J).direction, ours):.3f}")
        found[f"norm {scale:g}"] = "; ".join(texts)
    return found
