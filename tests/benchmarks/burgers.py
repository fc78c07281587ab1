"""Burgers' equation, `u_t + u u_x = nu u_xx`, learned by a network: three losses, of which one holds derivatives."""

from collections.abc import Callable
from dataclasses import dataclass
from math import pi
from typing import Any

import torch
from models import OneModel
from torch import Tensor, nn
from torch.func import functional_call

_VISCOSITY = 0.01 / pi
Slope = tuple[Tensor, Any]
"""The gradient `[points, 2]` of a sum over points, and what the function returned beside it."""


@dataclass(frozen=True)
class Burgers(OneModel):
    """A network u(t, x); points inside, at the start with the values of u there, and at the edge, where u is 0."""

    model: nn.Module
    batch: tuple[Tensor, Tensor, Tensor, Tensor]

    def losses(self, low: Callable[[Any], Any] = lambda f: f, stacked: bool = False) -> Any:
        """The losses as functions of the parameters, with `torch.func.grad` inside: a dict, or one tensor."""

        def losses(params: Any, *batch: Tensor) -> Any:
            found = _losses(lambda points: functional_call(self.model, params, (points,)), _slope, *batch)
            return torch.stack(list(found.values())) if stacked else found

        return low(losses)

    def forward(self) -> list[Tensor]:
        """The losses as the module computes them, with `torch.autograd.grad` inside."""
        # torch.compile does not trace `torch.autograd.grad`.
        slope = _slope if torch.compiler.is_compiling() else _slope_in_graph
        return list(_losses(self.model, slope, *self.batch).values())

    def mean(self) -> Tensor:
        """The loss of plain training."""
        return sum(self.forward()) / 3


def burgers(points: int, width: int) -> Burgers:
    """So many points inside and at the start, always the same ones, and three hidden layers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)]
        model = nn.Sequential(*layers, nn.Tanh(), nn.Linear(width, 1))
        inside, start, edge = (
            torch.rand(points, 2) * torch.tensor([1.0, 2.0]) - torch.tensor([0.0, 1.0]) for _ in "123"
        )
    start[:, 0] = 0
    edge[:, 1] = edge[:, 1].sign()
    return Burgers(model, (inside, start, -torch.sin(pi * start[:, 1:]), edge))


def _losses(
    u: Callable[[Tensor], Tensor], slope: Callable[..., Slope], inside: Tensor, start: Tensor, at: Tensor, edge: Tensor
) -> dict[str, Tensor]:
    def with_sum(points: Tensor) -> tuple[Tensor, Tensor]:
        found = u(points)
        return found.sum(), found

    def with_slope(points: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        first, found = slope(with_sum, points)
        return first[:, 1].sum(), (first, found)

    second, (first, found) = slope(with_slope, inside)
    residual = first[:, :1] + found * first[:, 1:] - _VISCOSITY * second[:, 1:]
    return {
        "edge": u(edge).square().mean(),
        "equation": residual.square().mean(),
        "start": (u(start) - at).square().mean(),
    }


def _slope(f: Callable[[Tensor], tuple[Tensor, Any]], points: Tensor) -> Slope:
    return torch.func.grad(f, has_aux=True)(points)


def _slope_in_graph(f: Callable[[Tensor], tuple[Tensor, Any]], points: Tensor) -> Slope:
    points = points if points.requires_grad else points.detach().requires_grad_()
    total, beside = f(points)
    return torch.autograd.grad(total, points, create_graph=True)[0], beside
