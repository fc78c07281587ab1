"""A step of a network that solves Helmholtz' equation: two losses, the rule ConFIG, Adam."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from equations import HELMHOLTZ, Equation, Params, by_autograd, by_func
from models import flat
from races import Goal, Race, Side
from torch import Tensor
from torchjd.aggregation import ConFIG
from torchjd.autojac import backward, jac_to_grad

import functional_jd as jd

_RATE = 1e-3
# The peers' pseudo-inverse is in float32.
_APART = 0.02


def pinn_races(toy: bool = False, device: str = "cpu", backend: str = "inductor") -> list[Race]:
    """Ours in one graph against conflictfree and TorchJD, which do not compile."""
    goals = Goal("ours", "conflictfree", 0.4), Goal("ours", "JD", 0.33)
    widths, counts = ((4,), (8, 8)) if toy else ((32, 32, 32), (480, 120))
    equation = replace(HELMHOLTZ, widths=widths, counts=counts)
    build = partial(pinn_sides, equation, device, backend)
    return [Race("physics", equation.name, "m=2", build, goals, device, tolerance=_APART)]


def pinn_sides(equation: Equation, device: str, backend: str) -> dict[str, Side]:
    """Everybody, each with a network of its own."""
    torch._dynamo.reset()
    ours, peer = partial(_ours, equation, device), partial(_peer, equation, device)
    peers = {"JD": peer(_torchjd)} | ({"conflictfree": peer(_conflictfree)} if find_spec("conflictfree") else {})
    return peers | {"eager": ours(jd.step), "ours": ours(jd.compiled(jd.step, backend=backend))}


def _start(equation: Equation, device: str) -> tuple[Params, tuple[Tensor, ...]]:
    lower = lambda x: x.to(device, torch.float32)
    return [lower(p) for p in equation.network(0)], tuple(map(lower, equation.points()))


def _ours(equation: Equation, device: str, step: Callable[..., Any]) -> Side:
    params, points = _start(equation, device)
    return own_side(lambda params, *points: equation.losses(params, points, by_func), jd.config(), params, points, step)


def own_side(losses: Any, rule: jd.Aggregator, params: Params, batch: tuple[Tensor, ...], step: Any) -> Side:
    """Our step with Adam."""
    optimizer = jd.adamw(lr=_RATE, weight_decay=0.0)
    how: dict[str, Any] = {"losses": losses, "aggregator": rule, "optimizer": optimizer}
    state = [jd.train_state(params, *batch, **how)]

    def call() -> Any:
        state[0], _ = step(state[0], *batch, **how)
        return state[0].optimizer.first

    return Side(call, flat)


def _peer(equation: Equation, device: str, to_grad: Callable[[Params, list[Tensor]], None]) -> Side:
    params, points = _start(equation, device)
    return peer_side(lambda params: [*equation.losses(params, points, by_autograd).values()], params, to_grad)


def peer_side(losses: Callable[[Params], list[Tensor]], params: Params, to_grad: Callable[..., None]) -> Side:
    """A loop around torch's Adam, with gradients by a peer."""
    params = [p.requires_grad_() for p in params]
    optimizer = torch.optim.Adam(params, lr=_RATE)

    def call() -> Any:
        optimizer.zero_grad()
        to_grad(params, losses(params))
        optimizer.step()
        return [optimizer.state[p]["exp_avg"] for p in params]

    return Side(call, flat)


def _torchjd(params: Params, losses: list[Tensor]) -> None:
    backward(losses)
    jac_to_grad(params, ConFIG())


def _conflictfree(params: Params, losses: list[Tensor]) -> None:
    from conflictfree.grad_operator import ConFIG_update

    rows = [torch.autograd.grad(loss, params, retain_graph=True, materialize_grads=True) for loss in losses]
    direction = ConFIG_update([torch.cat([g.flatten() for g in row]) for row in rows])
    for p, part in zip(params, direction.split([p.numel() for p in params]), strict=True):
        p.grad = part.reshape(p.shape)
