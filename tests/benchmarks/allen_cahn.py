"""The solution of Allen and Cahn's equation, `u_t = 1e-4 u_xx - 5 u^3 + 5 u`, u(0, x) = x^2 cos(pi x), periodic.

There is no formula: a pseudo-spectral method in x, and in time Runge and Kutta's of fourth order with an exact linear
part (Cox & Matthews 2002; Kassam & Trefethen, Fourth-order time-stepping for stiff PDEs, 2005).
"""

from collections.abc import Callable
from functools import cache
from math import pi
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

DIFFUSION, REACTION = 1e-4, 5.0
# The slope of u jumps by 4 at the edge to begin with: hence more points than the width of its fronts asks for.
_POINTS, _STEPS = 2048, 500


def start(x: Tensor) -> Tensor:
    """The values that u starts with."""
    return x.square() * torch.cos(pi * x)


class Trajectory(NamedTuple):
    """Cosine coefficients of u and of u_t at equal times from 0 to 1, `[times, waves]`, for -1 <= x <= 1."""

    values: Tensor
    speeds: Tensor

    def at(self, points: Tensor) -> Tensor:
        """u at points `[n, 2]` of (t, x): cubic in time between two steps, by values and speeds; cosines in x."""
        spans = len(self.values) - 1
        share = points[:, 0] * spans
        left = share.floor().long().clamp(0, spans - 1)
        s = (share - left)[:, None]
        waves = torch.cos(pi * points[:, 1:] * torch.arange(self.values.shape[1]))
        ends = (1 + 2 * s) * (1 - s) ** 2 * self.values[left] + s**2 * (3 - 2 * s) * self.values[left + 1]
        bends = s * (1 - s) ** 2 * self.speeds[left] - s**2 * (1 - s) * self.speeds[left + 1]
        return ((ends + bends / spans) * waves).sum(-1)


def solution(points: Tensor) -> Tensor:
    """u at points `[n, 2]` of (t, x), to 1e-6 of its norm; at t = 0 exactly, where cosines would round the edge off."""
    return torch.where(points[:, 0] == 0, start(points[:, 1]), solve().at(points))


@cache
def solve(points: int = _POINTS, steps: int = _STEPS) -> Trajectory:
    """March from 0 to 1 on so many equal points and in so many equal steps."""
    waves = np.arange(points // 2 + 1)
    x = -1 + 2 * np.arange(points) / points
    linear = REACTION - DIFFUSION * (pi * waves) ** 2
    cube = lambda v: -REACTION * np.fft.rfft(np.fft.irfft(v, points) ** 3)
    step = _exponential_runge_kutta(linear, 1 / steps)
    v = np.fft.rfft(start(torch.from_numpy(x)).numpy())
    values, speeds = [v], [linear * v + cube(v)]
    for _ in range(steps):
        v = step(v, cube)
        values.append(v)
        speeds.append(linear * v + cube(v))
    # To cosines around x = 0, which lies half a period behind the first point.
    weights = np.where((waves == 0) | (2 * waves == points), 1.0, 2.0) * (-1.0) ** waves / points
    return Trajectory(*(torch.from_numpy(np.stack(each).real * weights) for each in (values, speeds)))


def _exponential_runge_kutta(linear: np.ndarray, h: float) -> Callable[..., np.ndarray]:
    """The step `step(v, nonlinear) -> v`; coefficients by a mean over a circle, since their formulas cancel at 0."""
    circle = np.exp(1j * pi * (np.arange(32) + 0.5) / 32)
    z = h * linear[:, None] + circle
    mean = lambda each: h * each.mean(axis=1).real
    whole, half = np.exp(h * linear), np.exp(h * linear / 2)
    to_half = mean((np.exp(z / 2) - 1) / z)
    first = mean((-4 - z + np.exp(z) * (4 - 3 * z + z**2)) / z**3)
    middle = mean((2 + z + np.exp(z) * (z - 2)) / z**3)
    last = mean((-4 - 3 * z - z**2 + np.exp(z) * (4 - z)) / z**3)

    def step(v: np.ndarray, nonlinear: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        at_v = nonlinear(v)
        a = half * v + to_half * at_v
        at_a = nonlinear(a)
        b = half * v + to_half * at_a
        at_b = nonlinear(b)
        at_c = nonlinear(half * a + to_half * (2 * at_b - at_v))
        return whole * v + first * at_v + 2 * middle * (at_a + at_b) + last * at_c

    return step
