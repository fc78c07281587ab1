"""Differential equations with known solutions, and the residuals of networks that shall solve them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise, product
from math import pi
from typing import Any

import numpy as np
import torch
from scipy.integrate import solve_ivp
from torch import Tensor
from torch.nn.functional import linear

Params = list[Tensor]
"""Weight and bias of each layer, one after the other."""
Points = tuple[Tensor, Tensor, Tensor]
"""Points inside `[n, d]`, points at the edge `[k, d]`, and the solution there `[k]`."""
Slopes = tuple[Tensor, dict[int, Tensor]]
"""First derivatives `[..., d]`, and second ones `[...]` by axis."""


@dataclass(frozen=True)
class Equation:
    """An equation on a box, with its solution; one point `[d]` and many `[n, d]` are handled alike.

    `left(u, first, second, points)` is zero for the solution. Second derivatives are needed along `axes`; values are
    known at `sides`, pairs of an axis and an end of it, 0 or 1. `counts` are the numbers of points inside and at the
    edge, and `weight` is that of the edge in the sum of the mean squares. `inputs` are what the network is told of a
    point.
    """

    name: str
    left: Callable[[Tensor, Tensor, dict[int, Tensor], Tensor], Tensor]
    solution: Callable[[Tensor], Tensor]
    low: tuple[float, ...]
    high: tuple[float, ...]
    axes: tuple[int, ...]
    sides: tuple[tuple[int, int], ...]
    widths: tuple[int, ...]
    counts: tuple[int, int]
    weight: float = 100.0
    inputs: Callable[[Tensor], Tensor] = lambda x: x

    def points(self, seed: int = 0) -> Points:
        """Those that are trained with, always the same ones, float64."""
        inside, edge = (self.inside(count, seed + i) for i, count in enumerate(self.counts))
        for index, (axis, end) in enumerate(self.sides):
            edge[index :: len(self.sides), axis] = (self.low, self.high)[end][axis]
        return inside, edge, self.solution(edge)

    def inside(self, count: int, seed: int) -> Tensor:
        """So many points, uniformly."""
        low, high = (torch.tensor(corner, dtype=torch.float64) for corner in (self.low, self.high))
        generator = torch.Generator().manual_seed(seed)
        return low + (high - low) * torch.rand(count, len(low), generator=generator, dtype=torch.float64)

    def network(self, seed: int) -> Params:
        """Weights of variance 1 / inputs, biases of zero, float64."""
        generator = torch.Generator().manual_seed(seed)
        params: Params = []
        count = len(self.inputs(torch.tensor(self.low)))
        for i, o in pairwise((count, *self.widths, 1)):
            params += [torch.randn(o, i, generator=generator, dtype=torch.float64) / i**0.5, torch.zeros(o).double()]
        return params

    def value(self, params: Params, x: Tensor) -> Tensor:
        """The network, with tanh between its layers."""
        x = self.inputs(x)
        *hidden, (weight, bias) = zip(params[::2], params[1::2], strict=True)
        for w, b in hidden:
            x = torch.tanh(linear(x, w, b))
        return linear(x, weight, bias)[..., 0]

    def inside_residual(self, params: Params, x: Tensor, slopes: Callable[..., Slopes]) -> Tensor:
        """What is left of the equation."""
        u = partial(self.value, params)
        return self.left(u(x), *slopes(u, x, self.axes), x)

    def losses(self, params: Params, points: Points, slopes: Callable[..., Slopes]) -> dict[str, Tensor]:
        """The two losses of a network: mean squares, that of the edge weighted."""
        inside, edge, known = points
        left = self.inside_residual(params, inside, slopes)
        return {
            "edge": self.weight * (self.value(params, edge) - known).square().mean(),
            "equation": left.square().mean(),
        }

    def error(self, params: Params, split: str = "test") -> float:
        """The relative L2 distance to the solution, at points that are not trained with."""
        x, true = _points_to_test(self, split)
        found = self.value([p.detach().double() for p in params], x)
        return float((found - true).norm() / true.norm())


@cache
def _points_to_test(equation: Equation, split: str) -> tuple[Tensor, Tensor]:
    x = equation.inside(2000, seed={"test": 99, "validation": 98}[split])
    return x, equation.solution(x)


def by_func(u: Callable[[Tensor], Tensor], x: Tensor, axes: tuple[int, ...]) -> Slopes:
    """By `torch.func.grad`, which compiles, and which vmap takes."""
    slope = torch.func.grad(lambda x: u(x).sum())
    return slope(x), {i: torch.func.grad(lambda x, i=i: slope(x)[..., i].sum())(x)[..., i] for i in axes}


def by_autograd(u: Callable[[Tensor], Tensor], x: Tensor, axes: tuple[int, ...]) -> Slopes:
    """By `torch.autograd.grad`, the fastest way in eager mode."""
    x = x.detach().requires_grad_()
    (first,) = torch.autograd.grad(u(x).sum(), x, create_graph=True)
    second = {i: torch.autograd.grad(first[:, i].sum(), x, create_graph=True)[0][:, i] for i in axes}
    return first, second


def _box(*axes: int) -> tuple[tuple[int, int], ...]:
    return tuple(product(axes, (0, 1)))


_WAVES = torch.tensor([pi, 4 * pi], dtype=torch.float64)


def _helmholtz(u: Tensor, first: Tensor, second: dict[int, Tensor], x: Tensor) -> Tensor:
    return second[0] + second[1] + u - (1 - float(_WAVES.square().sum())) * _sines(x)


def _sines(x: Tensor) -> Tensor:
    return torch.sin(_WAVES.to(x) * x).prod(-1)


def _poisson(u: Tensor, first: Tensor, second: dict[int, Tensor], x: Tensor) -> Tensor:
    return sum(second.values()) + pi**2 * _cosines(x)


def _cosines(x: Tensor) -> Tensor:
    return torch.cos(pi * x).sum(-1)


_VISCOSITY = 0.01 / pi


def _burgers(u: Tensor, first: Tensor, second: dict[int, Tensor], x: Tensor) -> Tensor:
    return first[..., 0] + u * first[..., 1] - _VISCOSITY * second[1]


def _shock(x: Tensor) -> Tensor:
    """By the transformation of Cole and Hopf, with the quadrature of Gauss and Hermite."""
    nodes, weights = (torch.tensor(part) for part in np.polynomial.hermite.hermgauss(100))
    at = x[..., 1:] - (4 * _VISCOSITY * x[..., :1]).sqrt() * nodes
    heights = weights * torch.exp(-(torch.cos(pi * at) + 1) / (2 * pi * _VISCOSITY))
    return -(torch.sin(pi * at) * heights).sum(-1) / heights.sum(-1)


DIFFUSION, REACTION = 1e-4, 5.0
# The slope of u jumps by 4 at the edge to begin with: hence more points than the width of its fronts asks for.
_POINTS = 2048


def allen_cahn_start(x: Tensor) -> Tensor:
    """The values that u starts with."""
    return x.square() * torch.cos(pi * x)


@cache
def _allen_cahn_values(points: int = _POINTS) -> Any:
    """The function from times `[k]` to values `[points, k]` at equal points from -1."""
    waves, x = pi * np.arange(points // 2 + 1), -1 + 2 * np.arange(points) / points

    def speed(_: float, u: np.ndarray) -> np.ndarray:
        return REACTION * (u - u**3) - DIFFUSION * np.fft.irfft(waves**2 * np.fft.rfft(u), points)

    u = allen_cahn_start(torch.from_numpy(x)).numpy()
    return solve_ivp(speed, (0, 1), u, method="DOP853", rtol=1e-9, atol=1e-9, dense_output=True).sol


def allen_cahn_solution(points: Tensor) -> Tensor:
    """u at points `[n, 2]` of (t, x), to 1e-6 of its norm; at t = 0 exactly, where the sum would round the edge off.

    SciPy integrates values on equal points, whose second derivatives are those of their Fourier sum.
    """
    t, x = points.numpy().T
    waves = np.arange(_POINTS // 2 + 1)
    shares = np.where((waves == 0) | (2 * waves == _POINTS), 1, 2) / _POINTS
    sums = np.fft.rfft(_allen_cahn_values()(t), axis=0).T * shares
    found = torch.from_numpy((sums * np.exp(1j * pi * waves * (x[:, None] + 1))).real.sum(1))
    return torch.where(points[:, 0] == 0, allen_cahn_start(points[:, 1]), found)


def _allen_cahn(u: Tensor, first: Tensor, second: dict[int, Tensor], x: Tensor) -> Tensor:
    return first[..., 0] - DIFFUSION * second[1] + REACTION * (u**3 - u)


def _periodic(x: Tensor) -> Tensor:
    """The time, and the place on a circle: every function of them has the period 2 in x."""
    return torch.cat([x[..., :1], torch.cos(pi * x[..., 1:]), torch.sin(pi * x[..., 1:])], dim=-1)


_SQUARE, _CUBE = ((-1.0, -1.0), (1.0, 1.0)), ((0.0,) * 5, (1.0,) * 5)

HELMHOLTZ = Equation("Helmholtz", _helmholtz, _sines, *_SQUARE, (0, 1), _box(0, 1), (24, 24), (640, 160))
POISSON = Equation("Poisson 5-d", _poisson, _cosines, *_CUBE, tuple(range(5)), _box(*range(5)), (32,), (480, 120))
_STRIP = (0.0, -1.0), (1.0, 1.0)
BURGERS = Equation("Burgers", _burgers, _shock, *_STRIP, (1,), ((0, 0), *_box(1)), (20, 20, 20), (500, 100))
ALLEN_CAHN = Equation(
    "Allen-Cahn", _allen_cahn, allen_cahn_solution, *_STRIP, (1,), ((0, 0),), (20, 20, 20), (500, 100), inputs=_periodic
)
EQUATIONS = (HELMHOLTZ, POISSON, BURGERS, ALLEN_CAHN)
