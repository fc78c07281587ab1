"""A step of an interatomic potential: energies, forces and stresses of clusters, three losses, UPGrad, Adam.

The network is small and of the kind of SchNet: filters from distances, two rounds of messages, energies of atoms. The
clusters are drawn, and their energies those of Lennard and Jones.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from pinn import own_side, peer_side
from races import Goal, Race, Side
from torch import Tensor
from torch.nn.functional import linear
from torchjd.aggregation import UPGrad
from torchjd.autojac import backward, jac_to_grad

import functional_jd as jd

_RADIAL, _CUTOFF = 12, 4.0
# The peer adds a ridge of 1e-4 to the Gramian.
_APART = 0.05

Params = list[Tensor]
Derivatives = Callable[[Callable[[Tensor, Tensor], Tensor], Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""`derivatives(energies, positions, strains)`: the energies `[b]`, and their derivatives by both."""


def potential_races(toy: bool = False, device: str = "cpu", backend: str = "inductor") -> list[Race]:
    """Ours in one graph against ours in eager mode, and against TorchJD."""
    goals = Goal("ours", "eager", 0.35), Goal("ours", "JD", 0.33)
    clusters, atoms, width = (2, 3, 4) if toy else (16, 8, 32)
    build = partial(_sides, clusters, atoms, width, device, backend)
    return [Race("physics", "potential", "m=3", build, goals, device, tolerance=_APART)]


def _sides(clusters: int, atoms: int, width: int, device: str, backend: str) -> dict[str, Side]:
    torch._dynamo.reset()
    start = partial(_start, clusters, atoms, width, device)
    compiled = jd.compiled(jd.step, backend=backend)
    return {"JD": _peer(*start()), "eager": _ours(*start(), jd.step), "ours": _ours(*start(), compiled)}


def _start(clusters: int, atoms: int, width: int, device: str) -> tuple[Params, tuple[Tensor, ...]]:
    draws = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=draws)
    shapes = [(width, 1), *2 * [(width, _RADIAL), (width, width), (width, width)], (width, width), (1, width)]
    params = [draw(*shape) / shape[1] ** 0.5 for shape in shapes]
    side = max(2, round(atoms ** (1 / 3)))
    lattice = torch.cartesian_prod(*3 * [torch.arange(float(side + 1))])[:atoms] * 1.15
    positions = lattice + 0.06 * draw(clusters, atoms, 3)
    batch = positions, *_by_func(_lennard_jones, positions, positions.new_zeros(clusters, 3, 3))
    return [p.to(device) for p in params], tuple(x.to(device) for x in batch)


def _distances(positions: Tensor, strains: Tensor) -> tuple[Tensor, Tensor]:
    """The distances `[b, n, n]` after a strain, 1 from an atom to itself, and where there are two atoms."""
    x = positions + positions @ strains
    pairs = 1 - torch.eye(x.shape[-2], device=x.device)
    squares = (x.unsqueeze(-2) - x.unsqueeze(-3)).square().sum(-1)
    return (squares + 1 - pairs).sqrt(), pairs


def _lennard_jones(positions: Tensor, strains: Tensor) -> Tensor:
    r, pairs = _distances(positions, strains)
    return 2 * (pairs * (r**-12 - r**-6)).sum((-1, -2))


def _energies(params: Params, positions: Tensor, strains: Tensor) -> Tensor:
    r, pairs = _distances(positions, strains)
    first, *rounds, hidden, last = params
    centers = torch.linspace(0.5, _CUTOFF, _RADIAL, device=r.device)
    radial = torch.exp(-4 * (r.unsqueeze(-1) - centers).square())
    smooth = (pairs * (0.5 + 0.5 * torch.cos(r.clamp(max=_CUTOFF) * (torch.pi / _CUTOFF)))).unsqueeze(-1)
    atoms = linear(torch.ones_like(r[..., :1]), first)
    for filters, incoming, outgoing in zip(rounds[::3], rounds[1::3], rounds[2::3], strict=True):
        messages = (smooth * linear(radial, filters) * linear(atoms, incoming).unsqueeze(-3)).sum(-2)
        atoms = atoms + linear(torch.tanh(messages), outgoing)
    return linear(torch.tanh(linear(atoms, hidden)), last).sum((-1, -2))


def _by_func(
    energies: Callable[[Tensor, Tensor], Tensor], positions: Tensor, strains: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    def total(positions: Tensor, strains: Tensor) -> tuple[Tensor, Tensor]:
        found = energies(positions, strains)
        return found.sum(), found

    (by_position, by_strain), found = torch.func.grad(total, (0, 1), has_aux=True)(positions, strains)
    return found, by_position, by_strain


def _by_autograd(
    energies: Callable[[Tensor, Tensor], Tensor], positions: Tensor, strains: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    points = [x.detach().requires_grad_() for x in (positions, strains)]
    found = energies(*points)
    return found, *torch.autograd.grad(found.sum(), points, create_graph=True)


def _losses(derivatives: Derivatives, params: Params, positions: Tensor, *targets: Tensor) -> dict[str, Tensor]:
    strains = positions.new_zeros(len(positions), 3, 3)
    found = derivatives(partial(_energies, params), positions, strains)
    named = zip(("energy", "forces", "stress"), found, targets, strict=True)
    return {name: (value - target).square().mean() for name, value, target in named}


def _ours(params: Params, batch: tuple[Tensor, ...], step: Callable[..., Any]) -> Side:
    return own_side(partial(_losses, _by_func), jd.upgrad(), params, batch, step)


def _peer(params: Params, batch: tuple[Tensor, ...]) -> Side:
    return peer_side(lambda params: [*_losses(_by_autograd, params, *batch).values()], params, _torchjd)


def _torchjd(params: Params, losses: list[Tensor]) -> None:
    backward(losses)
    jac_to_grad(params, UPGrad())
