"""Test problems: two losses on the plane with a known Pareto set, and the paths of rules on them."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_jd.aggregation.aggregate import Aggregator, aggregate, check_rule, start
from functional_jd.core.arguments import Domain, check_integer, check_number, check_type
from functional_jd.core.types import Tree
from functional_jd.engines.differentiate import jacobian_fn
from functional_jd.optimizers.adamw import adamw
from functional_jd.optimizers.base import Optimizer
from functional_jd.optimizers.sgd import sgd
from functional_jd.plotting.style import check_points


class Problem(NamedTuple):
    """Two losses of a point on the plane.

    Attributes:
        losses: `losses(point [2]) -> [2]`. Its Jacobian is a square matrix: call
            `diagnostics.diagnose(jacobian, gramian=False)`.
        pareto: `[k, 2]`, points of the Pareto set, in order along it.
        window: `[2, 2]`, the lower left and the upper right corner of the region to plot.
        starts: `[s, 2]`, the initial points.
        optimizer: an optimizer that converges.
        steps: the number of steps that it needs.
    """

    losses: Callable[[Tensor], Tensor]
    pareto: Tensor
    window: Tensor
    starts: Tensor
    optimizer: Optimizer
    steps: int


class Path(NamedTuple):
    """The paths of a rule from all starts.

    Attributes:
        points: `[steps + 1, s, 2]`, beginning with the starts.
        losses: `[steps + 1, s, 2]`.
    """

    points: Tensor
    losses: Tensor


def descend(
    problem: Problem,
    rule: Aggregator,
    *,
    optimizer: Optimizer | None = None,
    steps: int | None = None,
    starts: Tensor | None = None,
) -> Path:
    """Run a rule from all starts, in one batch.

    Args:
        problem: two losses on the plane.
        rule: the rule; one that compares batches gets the same Jacobian twice, as the losses are deterministic.
        optimizer: must compose with vmap; `None`: that of the problem.
        steps: `None`: that of the problem.
        starts: `[s, 2]`; `None`: those of the problem.

    Returns:
        `Path(points, losses)`, float64.

    Raises:
        TypeError, ValueError: no problem, rule or optimizer; `starts` is not `[s, 2]`.

    Laws:
        Pure; the paths are independent of each other. A random rule uses the same random numbers for all starts: for
        others, vmap over keys. Only the rule is called: without `dwa_end_epoch`, `dwa` stays in its first epoch, where
        it equals `total`; without `famo_after_step`, `famo` uses the losses of the next call, which here are the same.
    """
    check_type("descend", "problem", problem, Problem, "Call its builder: quadratics().")
    check_rule(rule, "descend")
    if optimizer is not None:
        check_type("descend", "optimizer", optimizer, Optimizer, "Call its builder: sgd(0.1).")
    if steps is not None:
        check_integer("descend", "steps", steps, 0, "None is the number of the problem.")
    if starts is not None:
        cure = "For a single start, pass torch.tensor([[x, y]])."
        check_points("descend", "starts", starts, "[s, 2], points on the plane", lambda _, n: n == 2, cure)
    optimizer = problem.optimizer if optimizer is None else optimizer
    points = (problem.starts if starts is None else starts).double()
    differentiate = jacobian_fn(problem.losses)

    def init(point: Tensor) -> tuple[Tree, Tree]:
        jacobian, losses = differentiate(point)
        return optimizer.init(point), start(rule, jacobian, jacobian, losses=losses)

    def step(point: Tensor, optimizer_state: Tree, rule_state: Tree) -> tuple[Any, ...]:
        jacobian, losses = differentiate(point)
        direction, _, rule_state = aggregate(rule, jacobian, rule_state, jacobian, losses=losses)
        return *optimizer.update(direction, optimizer_state, point), rule_state, losses

    optimizer_state, rule_state = torch.vmap(init)(points)
    path, values = [points], []
    for _ in range(problem.steps if steps is None else steps):
        points, optimizer_state, rule_state, losses = torch.vmap(step)(points, optimizer_state, rule_state)
        path.append(points)
        values.append(losses)
    return Path(torch.stack(path), torch.stack([*values, torch.vmap(problem.losses)(points)]))


def quadratics(condition: float = 10.0) -> Problem:
    """Two convex quadratics, steep in different directions; the Pareto set is a curve between their minima.

    `losses_i = (x - c_i)' A_i (x - c_i) / 2` with `A_0 = diag(1, condition)`, `A_1 = diag(condition, 1)`; at the Pareto
    points `((1 - t) A_0 + t A_1) x = (1 - t) A_0 c_0 + t A_1 c_1` for t in [0, 1].

    Args:
        condition: the condition number of `A_0` and `A_1`; at least 1.

    Returns:
        `Problem`, with five starts.
    """
    domain = Domain(lambda x: 1 <= x < math.inf, "a finite number >= 1")
    check_number("quadratics", "condition", condition, domain, "With 1, the contours are circles.")
    curvatures = torch.tensor([[1.0, condition], [condition, 1.0]], dtype=torch.float64)
    minima = torch.tensor([[-1.0, -0.6], [1.0, 0.6]], dtype=torch.float64)

    def losses(point: Tensor) -> Tensor:
        return (curvatures.to(point) * (point - minima.to(point)).square()).sum(-1) / 2

    # More points at both ends, where the curve bends.
    t = torch.linspace(0, 1, 201, dtype=torch.float64).mul(math.pi).cos().mul(-0.5).add(0.5).unsqueeze(-1)
    weighted = torch.stack([1 - t, t]) * curvatures.unsqueeze(1)
    pareto = (weighted * minima.unsqueeze(1)).sum(0) / weighted.sum(0)
    starts = [[-1.6, 1.5], [1.7, 1.4], [1.7, -1.5], [-1.8, -1.4], [-0.4, 1.7]]
    return _problem(losses, pareto, [[-2.2, -2.0], [2.2, 2.0]], starts, sgd(0.3 / condition), 300)


def two_valleys() -> Problem:
    """Two narrow valleys, in each of which one gradient dominates the other; they lead to a basin with a trade-off.

    With `p = tanh(y / 2)^+`, `q = tanh(-y / 2)^+`: `losses_i = p v_i + q b_i`, valleys
    `v_i = log max(|a_i|, 5e-6) + 6`, basins `b_i = ((x -+ 7)^2 + (y + 8)^2 / 10) / 10 - 20`; the first loss times 0.1.

    The Pareto points are at `x = 7 (2 t - 1)`, where t is the weight of the first basin, and at the y near -8 that
    minimises `q (t b_0 + (1 - t) b_1)`.

    Returns:
        `Problem`, with five starts.

    Source:
        Liu et al., Conflict-averse gradient descent, NeurIPS 2021, appendix; with the factor 0.1 of Navon et al.,
        Multi-task learning as a bargaining game, ICML 2022, appendix.
    """

    def losses(point: Tensor) -> Tensor:
        x, y = point
        bend = torch.tanh(-y)
        arms = torch.stack([(-x - 7) / 2 - bend, (-x + 3) / 2 + bend + 2])
        valleys = arms.abs().clamp(min=5e-6).log() + 6
        basins = _basins(x, y)
        values = (y / 2).tanh().clamp(min=0) * valleys + (-y / 2).tanh().clamp(min=0) * basins
        return values * values.new_tensor([0.1, 1.0])

    t = torch.linspace(0, 1, 101, dtype=torch.float64)
    x = 7 * (2 * t - 1)

    low, high = torch.full_like(x, -12.0), torch.full_like(x, -6.0)
    for _ in range(60):  # bisection of the derivative of q (t b_0 + (1 - t) b_1) by y, which increases
        y = (low + high) / 2
        q, basin = (-y / 2).tanh(), (_basins(x, y) * torch.stack([t, 1 - t])).sum(0)
        above = q * 0.02 * (y + 8) - (1 - q.square()) * basin / 2 > 0
        low, high = torch.where(above, low, y), torch.where(above, y, high)
    starts = [[-8.5, 7.5], [0.0, 0.0], [9.0, 9.0], [-7.5, -0.5], [9.0, -1.0]]
    window = [[-10.5, -10.5], [10.5, 10.5]]
    return _problem(losses, torch.stack([x, (low + high) / 2], 1), window, starts, adamw(0.05, weight_decay=0.0), 800)


def fonseca_fleming() -> Problem:
    """Two smooth losses with a nonconvex front: a mean of the losses is minimal at one of its ends, never between.

    `losses_i = 1 - exp(-|x -+ c|^2)` with `c = (1, 1) / sqrt(2)`; the Pareto set is the segment from c to -c.

    Returns:
        `Problem`, with five starts.

    Source:
        Fonseca & Fleming, An overview of evolutionary algorithms in multiobjective optimization, Evolutionary
        Computation 3, 1995, with two variables.
    """
    corner = math.sqrt(0.5)

    def losses(point: Tensor) -> Tensor:
        return -torch.expm1(-torch.stack([(point - corner).square().sum(), (point + corner).square().sum()]))

    line = torch.linspace(corner, -corner, 101, dtype=torch.float64)
    starts = [[-0.7, 1.3], [1.5, 0.1], [0.4, -1.3], [-1.5, 0.2], [0.9, 1.4]]
    return _problem(losses, torch.stack([line, line], 1), [[-1.9, -1.9], [1.9, 1.9]], starts, sgd(0.1), 200)


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "quadratics": quadratics,
    "two valleys": two_valleys,
    "Fonseca and Fleming": fonseca_fleming,
}
"""The three problems by name."""


def _problem(losses: Callable[[Tensor], Tensor], pareto: Tensor, window: Any, starts: Any, *others: Any) -> Problem:
    corners, points = torch.tensor(window, dtype=torch.float64), torch.tensor(starts, dtype=torch.float64)
    return Problem(losses, pareto, corners, points, *others)


def _basins(x: Tensor, y: Tensor) -> Tensor:
    return (torch.stack([x - 7, x + 7]).square() + 0.1 * (y + 8).square()) / 10 - 20
