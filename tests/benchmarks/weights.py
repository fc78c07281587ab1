"""The cases of `weights` and `batches`: what a rule makes of a Gramian, and of 64 of them at once."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple

import torch
import torchjd.aggregation as peers
from races import Goal, Race, Side
from torch import Tensor
from torchjd import Stateful

import functional_jd as jd
from functional_jd.core.tree import tree_map

ROWS, QUICK_ROWS = (2, 4, 8, 32, 128, 256), (2, 8, 32)
BATCH, BATCHED_ROWS = 64, 8
KEY = jd.random.key(0)
# Several problems in turn: the peer's rules that start from their last answer must not be handed the same one again.
_PROBLEMS = 4


class Problems(NamedTuple):
    """Jacobians `[k, m, 2m]`, and those of the same objectives on another batch."""

    first: Tensor
    second: Tensor


class Entry(NamedTuple):
    """A rule for m rows and the peer's counterpart for m rows, which takes `given`: a direction comes of a Jacobian."""

    ours: Callable[[int], jd.Aggregator]
    peer: Callable[[int], Any]
    given: str = "gramian"  # gramian | cross | rows | jacobian
    random: bool = False
    fewest: int = 1


RULES = {
    "mean": Entry(lambda m: jd.mean(), lambda m: peers.MeanWeighting()),
    "total": Entry(lambda m: jd.total(), lambda m: peers.SumWeighting()),
    "constant": Entry(lambda m: jd.constant(torch.ones(m)), lambda m: peers.ConstantWeighting(torch.ones(m).double())),
    "random_weights": Entry(lambda m: jd.random_weights(KEY), lambda m: peers.RandomWeighting(), random=True),
    "upgrad": Entry(lambda m: jd.upgrad(), lambda m: peers.UPGradWeighting()),
    "dualproj": Entry(lambda m: jd.dualproj(), lambda m: peers.DualProjWeighting()),
    "mgda": Entry(lambda m: jd.mgda(), lambda m: peers.MGDAWeighting()),
    "cagrad": Entry(lambda m: jd.cagrad(0.5), lambda m: peers.CAGradWeighting(0.5)),
    "nash_mtl": Entry(lambda m: jd.nash_mtl(), lambda m: peers.NashMTL(m), "jacobian"),
    "fairgrad": Entry(lambda m: jd.fairgrad(1.0), lambda m: peers.FairGradWeighting(1.0)),
    "aligned_mtl": Entry(lambda m: jd.aligned_mtl(), lambda m: peers.AlignedMTLWeighting()),
    "imtl_g": Entry(lambda m: jd.imtl_g(), lambda m: peers.IMTLGWeighting()),
    "config": Entry(lambda m: jd.config(), lambda m: peers.ConFIG(), "jacobian"),
    "pcgrad": Entry(lambda m: jd.pcgrad(KEY), lambda m: peers.PCGradWeighting(), random=True),
    "gradvac": Entry(lambda m: jd.gradvac(KEY), lambda m: peers.GradVacWeighting(), random=True),
    "graddrop": Entry(lambda m: jd.graddrop(KEY), lambda m: peers.GradDrop(), "jacobian", random=True),
    # With four rows, the best two are each other's only neighbour, and their scores equal: either may win.
    "krum": Entry(lambda m: jd.krum(1), lambda m: peers.KrumWeighting(1), fewest=5),
    "trimmed_mean": Entry(lambda m: jd.trimmed_mean(1), lambda m: peers.TrimmedMean(1), "jacobian", fewest=3),
    "excess_mtl": Entry(lambda m: jd.excess_mtl(), lambda m: peers.ExcessMTLWeighting(), "rows"),
    "modo": Entry(lambda m: jd.modo(), lambda m: peers.MoDoWeighting(), "cross"),
    "sdmgrad": Entry(lambda m: jd.sdmgrad(), lambda m: peers.SDMGradWeighting(), "cross"),
    "pcd": Entry(lambda m: jd.pcd(), lambda m: peers.PCDWeighting()),
    "cr_mogm": Entry(lambda m: jd.cr_mogm(jd.mean()), lambda m: peers.CRMOGMWeighting(peers.MeanWeighting())),
}

_UPGRAD = {2: 1.0, 4: 1.0, 8: 1.0, 32: 0.6, 128: 0.3, 256: 0.3}
_GOALS: dict[str, Callable[[int], float | None]] = {
    "upgrad": _UPGRAD.get,
    "mgda": lambda m: 0.25 if 4 <= m <= 128 else None,
    "cagrad": lambda m: 0.4,
    "nash_mtl": lambda m: 0.1,
}


def weight_races(rows: Sequence[int]) -> list[Race]:
    """Each rule at each number of rows, one problem per call."""
    goal = lambda name, m: _GOALS.get(name, lambda m: None)(m)
    return [
        _race("weights", name, m, goal(name, m), _single) for name in RULES for m in rows if m >= RULES[name].fewest
    ]


def batch_races(rows: Sequence[int]) -> list[Race]:
    """64 problems per call: ours by vmap; the peer by vmap where that runs, else one after the other."""
    goal = lambda name: 0.2 if name == "upgrad" else None
    return [
        _race("batches", name, m, goal(name), _batch)
        for name in RULES
        for m in rows
        if RULES[name].fewest <= m <= BATCHED_ROWS
    ]


def _race(table: str, name: str, m: int, goal: float | None, build: Callable[..., dict[str, Side]]) -> Race:
    goals = () if goal is None else (Goal("ours", "JD", goal),)
    # The peer approximates: how far is told, and not judged.
    how: dict[str, Any] = {"quick": True, "tolerance": float("inf"), "weighed": ()}
    return Race(table, name, f"m={m}", partial(build, name, m), goals, **how)


def _problems(m: int, k: int) -> Problems:
    noise = torch.randn(2, k, m, 2 * m, dtype=torch.float64, generator=torch.Generator().manual_seed(m))
    return Problems(noise[0], noise[0] + noise[1] / 2)


def _single(name: str, m: int) -> dict[str, Side]:
    entry, problems = RULES[name], _problems(m, _PROBLEMS)
    solve, views, states = _ours(entry, m, problems)
    ready = cycle([(view, tree_map(lambda leaf, i=i: leaf[i], states)) for i, view in enumerate(views)])
    given, peer = cycle(_given(entry, problems)), _peer(name, m)
    direction = None if entry.random else _direction(entry, problems.first[0])
    return {"JD": Side(lambda: peer(next(given)), direction), "ours": Side(lambda: solve(*next(ready)), direction)}


def _batch(name: str, m: int) -> dict[str, Side]:
    entry, problems = RULES[name], _problems(m, BATCH)
    solve, views, states = _ours(entry, m, problems)
    given, peer = _given(entry, problems), _peer(name, m)
    direction = None if entry.random or isinstance(peer, Stateful) else _direction(entry, problems.first)
    ours = Side(lambda: torch.vmap(solve)(views, states), direction)
    return {"JD": Side(_peer_over_batch(peer, given), direction), "ours": ours}


def _ours(entry: Entry, m: int, problems: Problems) -> tuple[Callable[..., Tensor], Tensor, Any]:
    """What solves a problem, what the problems look like to it, and the state that each starts from."""
    rule = entry.ours(m)
    views = torch.vmap(rule.view)(*problems)
    states = torch.vmap(rule.init, randomness="error")(views)
    if entry.given == "jacobian":
        return lambda J, state: jd.aggregate(rule, J, state).direction, problems.first, states
    return lambda view, state: rule.update(view, state)[0], views, states


def _peer(name: str, m: int) -> Any:
    try:
        return RULES[name].peer(m)
    except ImportError as missing:  # of its solver: the peer is out, by the first call

        def peer(_: Tensor, missing: ImportError = missing) -> Tensor:
            raise missing

        return peer


def _peer_over_batch(peer: Any, given: Tensor) -> Callable[[], Tensor]:
    one_by_one = lambda: torch.stack([peer(problem) for problem in given])
    if isinstance(peer, Stateful):  # its buffers hold one state, not 64
        return one_by_one
    together = torch.vmap(peer, randomness="different")
    try:
        together(given)
    except Exception:
        return one_by_one
    return lambda: together(given)


def _given(entry: Entry, problems: Problems) -> Tensor:
    if entry.given in ("rows", "jacobian"):
        return problems.first
    other = problems.second if entry.given == "cross" else problems.first
    return problems.first @ other.mT


def _direction(entry: Entry, jacobian: Tensor) -> Callable[[Tensor], Tensor]:
    """The direction of an answer; weights may differ where rows depend on each other."""
    if entry.given == "jacobian":
        return lambda answer: answer
    return lambda weights: (weights.unsqueeze(-2) @ jacobian).squeeze(-2)
