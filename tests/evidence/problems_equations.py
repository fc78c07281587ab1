"""Networks that solve differential equations: two of the development problems, and a held-out one."""

from collections.abc import Callable
from math import pi

import torch
from study_problem import Data, Params, Problem, Split, apply, closeness, generator_of, network
from torch import Tensor

VISCOSITY = 0.05


def with_slopes(params: Params, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A network's values `[n]`, first and second derivatives `[2, n]` along both inputs: layer by layer, no graph."""
    h, first, second = x, torch.eye(2)[:, None].expand(2, *x.shape), torch.zeros(2, *x.shape)
    last = len(params) // 2 - 1
    for i in range(last + 1):
        w = params[f"w{i}"]
        h, first, second = h @ w + params[f"b{i}"], first @ w, second @ w
        if i < last:
            h = torch.tanh(h)
            slope = 1 - h.square()
            first, second = slope * first, slope * second - 2 * h * slope * first.square()
    return h[:, 0], first[..., 0], second[..., 0]


def _equation(
    points: Callable[[torch.Generator], Split],
    exact: Callable[[Tensor], Tensor],
    losses: Callable[..., Tensor],
    constant: Callable[..., Tensor],
    m: int,
    inside: Callable[[int, torch.Generator], Tensor],
) -> Problem:
    """A problem whose draws are points; validation and test are other points, with the solution.

    The score is one minus the relative L2 error at other points.
    """

    def data(draw: int) -> Data:
        g = generator_of(draw, 2)
        train = points(g)
        others = [inside(1000, g) for _ in range(2)]
        return Data(train, *((x, exact(x)) for x in others))

    return Problem(
        data,
        lambda g: network(g, 2, 16, 16, 1),
        losses,
        constant,
        lambda params, x, known: closeness(apply(params, x)[:, 0], known)[None],
        ("closeness",),
        m=m,
        batch=None,
        steps=2000,
    )


def _in_time(n: int, g: torch.Generator) -> Tensor:
    """Points (t, x) of [0, 1] x [-1, 1]."""
    return torch.tensor([0.0, -1.0]) + torch.tensor([1.0, 2.0]) * torch.rand(n, 2, generator=g)


def _with_start_and_edge(g: torch.Generator) -> Split:
    """Points inside, at time 0, and at x = -1 or 1."""
    inside, start, edge = (_in_time(n, g) for n in (80, 32, 24))
    start[:, 0], edge[:, 1] = 0, edge[:, 1].sign()
    return inside, start, edge


def _started(residual: Callable[..., Tensor], exact: Callable[[Tensor], Tensor]) -> Problem:
    """Losses: an equation of a function and its slopes, start from minus a sine, and zeros at the edge."""

    def losses(params: Params, inside: Tensor, start: Tensor, edge: Tensor) -> Tensor:
        begin = apply(params, start)[:, 0] + torch.sin(pi * start[:, 1])
        left = residual(*with_slopes(params, inside))
        return torch.stack([left.square().mean(), begin.square().mean(), apply(params, edge).square().mean()])

    # Zero solves the equation and the edge: there, the unit of the solution, whose mean square at the start is 1/2.
    constant = lambda inside, start, edge: torch.full((3,), 0.5)
    return _equation(_with_start_and_edge, exact, losses, constant, 3, _in_time)


def burgers() -> Problem:
    """`u_t + u u_x = nu u_xx` from minus a sine, with the solution of Cole and Hopf."""
    residual = lambda u, first, second: first[0] + u * first[1] - VISCOSITY * second[1]
    return _started(residual, lambda x: _cole_hopf(x, VISCOSITY))


def heat() -> Problem:
    """`u_t = a u_xx` from minus a sine."""
    a = 0.2
    exact = lambda x: -torch.sin(pi * x[:, 1]) * torch.exp(-a * pi**2 * x[:, 0])
    return _started(lambda _, first, second: first[0] - a * second[1], exact)


def _cole_hopf(x: Tensor, viscosity: float) -> Tensor:
    """The solution at points (t, x), an integral over the line by the trapezoidal rule."""
    t, place = x.double()[:, :1].clamp(min=1e-4), x.double()[:, 1:]
    step = (4 * viscosity * t).sqrt() * torch.linspace(-6, 6, 2001, dtype=torch.float64)
    y = place - step
    log_weight = -torch.cos(pi * y) / (2 * pi * viscosity) - step.square() / (4 * viscosity * t)
    weight = torch.softmax(log_weight, dim=1)
    return -(weight * torch.sin(pi * y)).sum(1).float()


def helmholtz() -> Problem:
    """`u_xx + u_yy + u = q` on a square, with zeros at its edge: the first loss is some 1000 times the second."""

    def square(n: int, g: torch.Generator) -> Tensor:
        return 2 * torch.rand(n, 2, generator=g) - 1

    def exact(x: Tensor) -> Tensor:
        return torch.sin(pi * x[:, 0]) * torch.sin(pi * x[:, 1])

    def points(g: torch.Generator) -> Split:
        inside, edge = square(80, g), square(48, g)
        side = torch.arange(48) % 2
        edge[torch.arange(48), side] = edge[torch.arange(48), side].sign()
        return inside, (1 - 2 * pi**2) * exact(inside), edge

    def losses(params: Params, inside: Tensor, source: Tensor, edge: Tensor) -> Tensor:
        u, _, second = with_slopes(params, inside)
        return torch.stack([(second.sum(0) + u - source).square().mean(), apply(params, edge).square().mean()])

    def constant(inside: Tensor, source: Tensor, edge: Tensor) -> Tensor:
        """Zero leaves the source, and solves the edge: there, the unit of the solution, whose mean square is 1/4."""
        return torch.stack([source.square().mean(), torch.tensor(0.25)])

    return _equation(points, exact, losses, constant, 2, square)
