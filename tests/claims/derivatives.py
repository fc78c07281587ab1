"""Derivatives through the peer's rules, beside central differences in float64: of matrices in general position, and of
matrices with equal, zero or opposite rows.
"""

from collections.abc import Callable

import torch
from peer_rules import AGGREGATORS, jacobian, reason
from torch import Tensor

import functional_jd as jd

STEP, CLOSE = 1e-6, 1e-4


def degenerate() -> dict[str, Tensor]:
    """Four rows each."""
    J = jacobian().double()
    return {
        "two equal rows": J[[0, 0, 1, 2]],
        "a row of zeros": torch.cat([J[:3], torch.zeros(1, J.shape[1], dtype=J.dtype)]),
        "two opposite rows": torch.stack([J[0], -J[0], J[1], J[2]]),
    }


OURS = {"aligned_mtl()": jd.aligned_mtl(), "mgda()": jd.mgda(), "trimmed_mean(1)": jd.trimmed_mean(1)}


def rule_of(name: str) -> Callable[[Tensor], Tensor]:
    """A rule of the peer, made anew; or one of ours."""
    if name in OURS:
        return lambda J: jd.aggregate(OURS[name], J).direction
    return AGGREGATORS[name](4)


def derivative(name: str, J: Tensor) -> str:
    """`none`, with the error; or how far it is from central differences along one direction."""
    g = torch.Generator().manual_seed(1)
    way = torch.randn(J.shape, generator=g, dtype=J.dtype)
    target = torch.randn(J.shape[1], generator=g, dtype=J.dtype)

    def value(J: Tensor) -> Tensor:
        torch.manual_seed(0)
        return rule_of(name)(J.clone()) @ target

    wanted = J.clone().requires_grad_()
    try:
        (found,) = torch.autograd.grad(value(wanted), wanted)
    except Exception as error:
        return f"none ({reason(error)})"
    expected = (value(J + STEP * way) - value(J - STEP * way)) / (2 * STEP)
    off = float(((found * way).sum() - expected).abs() / expected.abs().clamp(min=1e-3))
    return "right" if off < CLOSE else f"off by {off:.2g}"


def measure() -> dict[str, str]:
    """The figures of the row `derivative through the rule`."""
    torch.set_default_dtype(torch.float64)
    try:
        general = {name: derivative(name, jacobian().double()) for name in AGGREGATORS}
        found = {}
        for word in ("none", "right", "off"):
            names = [name for name, said in general.items() if said.startswith(word)]
            found[f"TorchJD, general position: {word}"] = f"{len(names)}: {', '.join(names)}"
        for case, J in degenerate().items():
            asked = [name for name in AGGREGATORS if not general[name].startswith("none")]
            for who, names in (("TorchJD", asked), ("functional_jd", OURS)):
                said = {name: derivative(name, J) for name in names}
                wrong = [f"{name} {text}" for name, text in said.items() if text != "right"]
                found[f"{who}, {case}: not right"] = ", ".join(wrong) or "none"
    finally:
        torch.set_default_dtype(torch.float32)
    return found
