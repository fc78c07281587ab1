"""Rules of TorchJD in the trainings of the study, in the place of ours, and how far from ours their directions are."""

from collections.abc import Callable
from typing import Any

import torch
from study_cells import Cell, digits, under_method
from study_problem import Problem
from study_rules import RULES, Method
from study_training import LOOKS, Draws
from torch import Tensor

import functional_jd as jd
from functional_jd import Aggregator
from functional_jd.aggregation import AffineWeights

PREFIX = "peer_"
# What is trained, as the page calls it, and the rule of ours that stands beside it.
NAMES = {
    "upgrad": "UPGrad()",
    "nash_mtl": "NashMTL(m)",
    "cagrad": "CAGrad(0.5)",
    "config": "ConFIG()",
    "imtl_g": "IMTLG()",
    "upgrad_cured": "UPGrad(projector)",
}
ENDING = "_standardised"
STANDARDISED = {rule + ENDING: NAMES[rule] for rule in ("upgrad", "nash_mtl", "cagrad")}
ALL = NAMES | STANDARDISED
OURS = {name: name.removesuffix("_cured") for name in ALL} | {"nash_mtl" + ENDING: "nash_mtl"}  # has no units


def rule_of(name: str) -> str:
    """The rule of ours by itself, whatever it is trained on."""
    return name.removesuffix(ENDING).removesuffix("_cured")


def peer_of(rule: str, m: int) -> Callable[[Tensor], Tensor]:
    """The peer's rule of this name, a fresh one: of a Jacobian `[m, n]` its direction `[n]`."""
    from torchjd import aggregation as peer
    from torchjd.linalg import QuadprogProjector

    return {
        "upgrad": peer.UPGrad,
        "nash_mtl": lambda: peer.NashMTL(m),
        "cagrad": lambda: peer.CAGrad(0.5),
        "config": peer.ConFIG,
        "imtl_g": peer.IMTLG,
        "upgrad_cured": lambda: peer.UPGrad(projector=QuadprogProjector(norm_eps=0.0, reg_eps=1e-14)),
    }[rule.removesuffix(ENDING)]()


class Peer:
    """A rule of the peer in all trainings of a vmap at once, one object for each; a new training begins with new ones.

    Attributes:
        apart: a list a call of `train`: at every look, `[trainings]`, how far the peer's directions were from ours.
        errors: how many directions it did not return, by what it raised.
    """

    def __init__(self, rule: str, m: int, steps: int):
        self.rule, self.m, self.every = rule, m, max(1, steps // LOOKS)
        self.apart: list[list[Tensor]] = []
        self.errors: dict[str, int] = {}
        self.own: list[Callable[[Tensor], Tensor]] = []
        self.calls = 0

    def aggregator(self) -> Aggregator:
        return Aggregator(jd.views.full_jacobian, self.begin, self.update)

    def begin(self, jacobian: Any) -> tuple[()]:
        self.own, self.calls = [], 0
        self.apart.append([])
        return ()

    def update(self, jacobian: dict[str, Tensor], state: tuple[()]) -> tuple[Any, tuple[()]]:
        """Weights of zero, and the direction as what is added to the weighted rows."""
        rows = torch.cat([leaf.flatten(1) for leaf in jacobian.values()], dim=1)
        parts = Directions.apply(rows, self).split([leaf[0].numel() for leaf in jacobian.values()])
        pairs = zip(jacobian.items(), parts, strict=True)
        return {
            name: AffineWeights(torch.zeros_like(leaf), part.reshape(leaf.shape[1:])) for (name, leaf), part in pairs
        }, state

    def directions(self, rows: Tensor) -> Tensor:
        """Of Jacobians `[trainings, m, n]` the directions, one after the other."""
        if not self.own:
            self.own = [peer_of(self.rule, self.m) for _ in rows]
        found = torch.stack([self.direction(peer, J) for peer, J in zip(self.own, rows, strict=True)])
        self.calls += 1
        if self.calls % self.every == 0:
            self.apart[-1].append(distances(self.rule, rows, found))
        return found

    def direction(self, peer: Callable[[Tensor], Tensor], J: Tensor) -> Tensor:
        """Not a number where the step is to be skipped."""
        if not J.isfinite().all():
            return torch.full_like(J[0], torch.nan)
        try:
            return peer(J)
        except Exception as error:  # whatever it is, it would end a training
            name = type(error).__name__
            self.errors[name] = self.errors.get(name, 0) + 1
            return torch.full_like(J[0], torch.nan)


class Directions(torch.autograd.Function):
    """What leaves vmap, so that the peer sees one Jacobian at a time, with values."""

    @staticmethod
    def forward(rows: Tensor, peer: Peer) -> Tensor:
        return peer.directions(rows.detach()[None])[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept: directions are not differentiated."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, None], rows: Tensor, peer: Peer) -> tuple[Tensor, int]:
        return peer.directions(rows.detach().movedim(in_dims[0], 0)), 0


def distances(rule: str, rows: Tensor, found: Tensor) -> Tensor:
    """How far directions `[k, n]`, made as long as 1, are from our rule's for rows `[k, m, n]`; NaN if not finite."""
    ours = torch.stack([jd.aggregate(RULES[rule_of(rule)](torch.zeros(2)), J.double()).direction for J in rows])
    unit = lambda d: d / torch.where(d.norm(dim=1, keepdim=True) > 0, d.norm(dim=1, keepdim=True), 1)
    return (unit(found.double()) - unit(ours)).norm(dim=1)


def peer_cell(problem: Problem, rule: str, draws: Draws, steps: int, rounds: int = 10) -> Cell:
    """A cell of the peer's rule; `apart`: of the chosen training of each draw, the mean and largest distance."""
    from importlib.metadata import version

    peer = Peer(rule, problem.m, steps)
    method = Method(lambda key: peer.aggregator(), "standard" if rule.endswith(ENDING) else "raw")
    found = under_method(problem, method, draws, steps, rounds)
    runs = [torch.stack(apart) for apart in peer.apart[: len(found["steps"])]]  # [looks, trainings]; then timing begins
    count = len(draws.data)
    means = torch.cat([run.nanmean(0).reshape(-1, count) for run in runs])
    largest = torch.cat([run.nan_to_num(0).amax(0).reshape(-1, count) for run in runs])
    chosen = list(enumerate(found["chosen"]))
    apart = {
        "mean": digits([float(means[c, d]) for d, c in chosen]),
        "largest": digits([float(largest[c, d]) for d, c in chosen]),
    }
    machine = found["machine"] | {"torchjd": version("torchjd")}
    return found | {"apart": apart, "errors": peer.errors, "machine": machine}
