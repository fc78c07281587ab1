"""The methods of the study: rules with defaults or the values of their papers, baselines, and grids of weights."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

import functional_jd as jd
from functional_jd import Aggregator

Build = Callable[[Tensor], Aggregator]
"""A rule from a key, which few use."""

KEYED = ("pcgrad", "gradvac", "graddrop", "random_weights")
VALUES = {"cagrad": (0.5,), "fairgrad": (2.0,), "trimmed_mean": (1,)}
# In this order they are trained.
NAMES = (
    "mean nash_mtl config upgrad aligned_mtl imtl_g geometric_mean famo mgda cagrad fairgrad pcgrad gradvac graddrop "
)
NAMES += "excess_mtl db_mtl gradnorm stch uw imtl_l dwa random_weights trimmed_mean"
RULES: dict[str, Build] = {
    name: getattr(jd, name) if name in KEYED else lambda key, name=name: getattr(jd, name)(*VALUES.get(name, ()))
    for name in NAMES.split()
}

# Rules whose direction turns when the unit of one loss changes.
ON_UNITS = ("upgrad", "aligned_mtl", "mgda", "cagrad", "pcgrad", "gradnorm", "stch", "uw", "imtl_l", "dwa")

SPELLED = {
    "alternating": "alternating(config(), m)",
    "cagrad": "cagrad(0.5)",
    "fairgrad": "fairgrad(2)",
    "trimmed_mean": "trimmed_mean(trim)",
}


def unit_sum() -> Aggregator:
    """The sum of the unit gradients; one of length 0 counts 0."""
    weights = lambda squares: torch.where(squares > 0, squares.clamp(min=1e-300).rsqrt(), 0.0)
    return jd.stateless(jd.views.norms, lambda norms: weights(norms.double().square()))


@dataclass(frozen=True)
class Method:
    """A rule, and what the losses are multiplied by before it sees them.

    `scale`: "raw", nothing; "standard", 1 / the loss of the best constant answer; "start", 1 / the loss at the start.
    """

    build: Build
    scale: Literal["raw", "standard", "start"] = "raw"


def methods_for(m: int, exchangeable: bool = False) -> dict[str, Method]:
    """The methods that exist for m objectives, but for searches; the most telling first."""
    baselines = {
        "standardised": Method(RULES["mean"], "standard"),
        "start": Method(RULES["mean"], "start"),
        "unit_sum": Method(lambda key: unit_sum()),
    }
    rules = {name: Method(build) for name, build in RULES.items()}
    if m > 2:
        rules["trimmed_mean"] = Method(lambda key: jd.trimmed_mean(max(1, m // 4)))
    else:
        del rules["trimmed_mean"]
    again = {f"{name}_standardised": Method(RULES[name], "standard") for name in ON_UNITS}
    if exchangeable:  # all weights are equal
        return {"mean": rules.pop("mean"), "unit_sum": baselines["unit_sum"]} | rules
    first = {name: rules.pop(name) for name in ("mean", "nash_mtl", "config", "upgrad")}
    uw = again.pop("uw_standardised")
    return baselines | first | {"uw_standardised": uw} | rules | again


def backward_passes(build: Build, m: int) -> int:
    """How many backward passes a step takes."""
    view = build(torch.zeros(2, dtype=torch.int64)).view
    return 1 if view.products == "none" else m


def grid(base: Tensor) -> Tensor:
    """Fixed weights `[c, m]` to choose from, around weights `base` that make losses comparable.

    Equal ones; `base`; and these with one objective 1/30, 1/5, 5 and 30 times as heavy, for each objective (for two
    objectives, one of them 1/100, 1/30, 1/5, 5, 30 and 100 times).
    """
    m = len(base)
    factors = [1 / 100, 1 / 30, 1 / 5, 5, 30, 100] if m == 2 else [1 / 30, 1 / 5, 5, 30]
    found = [torch.ones(m, dtype=base.dtype), base]
    for i in range(1 if m == 2 else m):
        for factor in factors:
            found.append(base * torch.where(torch.arange(m) == i, factor, 1.0))
    return torch.stack([w / w.max() for w in found])
