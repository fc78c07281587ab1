"""The rules of the study, with their defaults or the values of their papers, and the grid of fixed weights."""

from collections.abc import Callable

import torch
from torch import Tensor

import functional_jd as jd
from functional_jd import Aggregator

Build = Callable[[Tensor], Aggregator]
"""A rule from what differs between trainings: a key, or fixed weights."""

# By name; each is given a key, which few use.
RULES: dict[str, Build] = {
    "mean": lambda key: jd.mean(),
    "upgrad": lambda key: jd.upgrad(),
    "mgda": lambda key: jd.mgda(),
    "config": lambda key: jd.config(),
    "imtl_g": lambda key: jd.imtl_g(),
    "aligned_mtl": lambda key: jd.aligned_mtl(),
    "nash_mtl": lambda key: jd.nash_mtl(),
    "cagrad": lambda key: jd.cagrad(0.5),
    "fairgrad": lambda key: jd.fairgrad(2.0),
    "pcgrad": jd.pcgrad,
    "gradvac": jd.gradvac,
    "graddrop": jd.graddrop,
    "excess_mtl": lambda key: jd.excess_mtl(),
    "db_mtl": lambda key: jd.db_mtl(),
    "gradnorm": lambda key: jd.gradnorm(),
    "geometric_mean": lambda key: jd.geometric_mean(),
    "stch": lambda key: jd.stch(),
    "uw": lambda key: jd.uw(),
    "imtl_l": lambda key: jd.imtl_l(),
    "dwa": lambda key: jd.dwa(),
    "famo": lambda key: jd.famo(),
    "random_weights": jd.random_weights,
    "trimmed_mean": lambda key: jd.trimmed_mean(1),
}

SPELLED = {"cagrad": "cagrad(0.5)", "fairgrad": "fairgrad(2)", "trimmed_mean": "trimmed_mean(trim)"}


def rules_for(m: int) -> dict[str, Build]:
    """The rules that exist for m objectives: `trimmed_mean` leaves out a quarter at each end, at least one."""
    found = dict(RULES)
    del found["trimmed_mean"]
    if m > 2:
        found["trimmed_mean"] = lambda key: jd.trimmed_mean(max(1, m // 4))
    return found


def backward_passes(build: Build, m: int) -> int:
    """How many backward passes a step takes."""
    view = build(torch.zeros(2, dtype=torch.int64)).view
    return 1 if view.products == "none" else m


def grid(start: Tensor, exchangeable: bool) -> Tensor:
    """Fixed weights `[c, m]` to choose from.

    Equal ones; those that make the losses at the start equal, which is what a careful person does first; and these with
    one objective 1/30, 1/5, 5 and 30 times as heavy, for each objective (for two objectives, one of them 1/100, 1/30,
    1/5, 5, 30 and 100 times). Where objectives are exchangeable, equal weights only.
    """
    m = len(start)
    if exchangeable:
        return torch.ones(1, m, dtype=torch.float64)
    base, ones = 1 / start.double().abs().clamp(min=1e-300), torch.ones(m, dtype=torch.float64)
    factors = [1 / 100, 1 / 30, 1 / 5, 5, 30, 100] if m == 2 else [1 / 30, 1 / 5, 5, 30]
    found = [ones, base]
    for i in range(1 if m == 2 else m):
        for factor in factors:
            found.append(base * torch.where(torch.arange(m) == i, factor, 1.0))
    return torch.stack([w / w.max() for w in found])
