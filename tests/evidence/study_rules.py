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

# By name; in this order they are trained.
RULES: dict[str, Build] = {
    "mean": lambda key: jd.mean(),
    "nash_mtl": lambda key: jd.nash_mtl(),
    "config": lambda key: jd.config(),
    "upgrad": lambda key: jd.upgrad(),
    "aligned_mtl": lambda key: jd.aligned_mtl(),
    "imtl_g": lambda key: jd.imtl_g(),
    "geometric_mean": lambda key: jd.geometric_mean(),
    "famo": lambda key: jd.famo(),
    "mgda": lambda key: jd.mgda(),
    "cagrad": lambda key: jd.cagrad(0.5),
    "fairgrad": lambda key: jd.fairgrad(2.0),
    "pcgrad": jd.pcgrad,
    "gradvac": jd.gradvac,
    "graddrop": jd.graddrop,
    "excess_mtl": lambda key: jd.excess_mtl(),
    "db_mtl": lambda key: jd.db_mtl(),
    "gradnorm": lambda key: jd.gradnorm(),
    "stch": lambda key: jd.stch(),
    "uw": lambda key: jd.uw(),
    "imtl_l": lambda key: jd.imtl_l(),
    "dwa": lambda key: jd.dwa(),
    "random_weights": jd.random_weights,
    "trimmed_mean": lambda key: jd.trimmed_mean(1),
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
    del rules["trimmed_mean"]
    if m > 2:
        trim = max(1, m // 4)
        rules["trimmed_mean"] = Method(lambda key: jd.trimmed_mean(trim))
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
