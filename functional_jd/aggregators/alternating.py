"""Alternating: one objective in each step, and a rule for moving averages of the gradients."""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_jd.aggregation import Aggregator, Weights, aggregate, as_view, no_gradients
from functional_jd.aggregation.aggregate import check_rule, start
from functional_jd.core.arguments import check_integer, refuse
from functional_jd.core.float64 import widest
from functional_jd.core.record_display import displayed_as, outline
from functional_jd.core.rows import at_least_float32, per_row
from functional_jd.core.safe import sqrt_or_zero
from functional_jd.core.tree import all_finite, any_sharded, tree_leaves, tree_map, tree_names
from functional_jd.core.types import Direction, Params, Tree
from functional_jd.optimizers import base
from functional_jd.precision.loss_scale import select


@displayed_as(outline)
class AlternatingState(NamedTuple):
    """The state of the optimizer of `alternating`: pytrees like params, at least float32."""

    steps: Tensor  # int64 `[]`: the number of steps taken
    averages: Tree  # `[m, *p]`: the moving average of the gradient of each objective
    first: Tree  # the last direction, times `1 - b1^t`
    second: Tree  # the moving average of squares
    memory: Tree  # the state of the rule


def alternating(
    rule: Aggregator, objectives: int, *, lr: base.LearningRate = 1e-3, betas: Any = (0.9, 0.999), eps: float = 1e-8
) -> tuple[Aggregator, base.Optimizer]:
    """Differentiate one objective in each step, and give a rule the moving averages of all gradients (M-ConFIG).

    In step k, `i = k mod m`, `a_i <- b1 a_i + (1 - b1) g_i`. With n gradients in each average and t directions so far,
    `d = aggregate(rule, a / (1 - b1^n)).direction`, `f_t = (1 - b1^t) d`, `h = (f_t - b1 f_(t-1)) / (1 - b1)`,
    `s <- b2 s + (1 - b2) h^2`, `params <- params - lr d / (sqrt(s / (1 - b2^t)) + eps)`.

    Args:
        rule: any rule that needs no losses, such as `config()`.
        objectives: m, the number of losses.
        lr: the learning rate: a number, a tensor `[]`, or a schedule of the number of steps taken so far.
        betas, eps: b1 and b2, the shares that averages keep, in [0, 1); a number that is added to the root.

    Returns:
        `(aggregator, optimizer)`, for one another. A step costs one backward pass, and memory for `m + 2` copies of the
        parameters. To evaluate one loss only, let `losses` return that of index `state.aggregator % m`.

    Raises:
        TypeError, ValueError: a rule that needs losses; another number of losses than m or one; sharded parameters;
            those of `multitask` losses, whose heads have gradients of their own: give it the trunk, by `by_label`.

    Guarantees:
        Composes with all transforms. A skipped step takes no turn. Nothing moves before each had one, or by NaN.

    Source:
        Liu, Chu & Thuerey, ICLR 2025, arXiv 2408.11104, algorithm 1.
    """
    check_rule(rule)
    check_integer("objectives", objectives, 1, "It counts losses.")
    base.check_settings(lr=lr, eps=eps)
    m, (b1, b2) = objectives, base.check_betas(betas)
    if as_view(rule.view).losses:
        refuse("rule", "a rule that needs no losses", rule, "Take config() or upgrad().", ValueError)

    def weigh(zeros: Tensor, steps: Tensor) -> tuple[Weights, Tensor]:
        if len(zeros) not in (1, m):
            refuse("objectives", f"{len(zeros)}, the number of losses", m, "Or evaluate one loss.", ValueError)
        return zeros + (torch.arange(len(zeros), device=zeros.device) == steps % len(zeros)), steps + 1

    def init(params: Params) -> AlternatingState:
        if any_sharded(tree_leaves(params)):
            refuse("params", "whole", params, "Take another rule for a DTensor.", ValueError)
        if {name.split(".")[0] for name in tree_names(params)} == {"shared", "heads"}:
            refuse("params", "those of the trunk of multitask losses", params, "Take by_label.", ValueError)
        # Each field is a tensor of its own, as make_fx tells them apart by identity.
        first, second = (tree_map(lambda p: torch.zeros_like(at_least_float32(p)), params) for _ in range(2))
        averages = tree_map(lambda x: torch.stack([x] * m), first)
        return AlternatingState(base.no_steps(params), averages, first, second, start(rule, averages))

    optimizer = base.Optimizer(init, partial(_update, rule, (m, lr, b1, b2, eps)))
    return Aggregator(no_gradients, base.no_steps, weigh), optimizer


def _update(rule: Aggregator, settings: Any, direction: Direction, state: AlternatingState, params: Params) -> Any:
    """A step by the gradient of one objective."""
    m, lr, b1, b2, eps = settings
    steps, places = state.steps, torch.arange(m, device=state.steps.device)
    counts, t = (steps + m - places) // m, (steps + 2 - m).clamp(min=1).to(widest(steps.device))
    rate, own = base.current_rate(lr, steps), lambda number, leaf: number.to(leaf.device, leaf.dtype)

    def average(old: Tensor, d: Tensor) -> Tensor:
        new = torch.lerp(old, d.to(old.dtype).expand_as(old), 1 - b1)
        return torch.where(per_row((places == steps % m).to(old.device), old), new, old)

    def moved(p: Tensor, d: Tensor, s: Tensor) -> Tensor:
        root = sqrt_or_zero(s / own(1 - b2**t, s), s == 0) + eps
        return (at_least_float32(p) - base.in_dtype_of(rate, d) * (d / root)).to(p.dtype)

    averages = tree_map(average, state.averages, direction)
    shares = torch.where(counts > 0, 1 - b1 ** counts.to(t.dtype), 1)
    found = aggregate(rule, tree_map(lambda a: a / per_row(own(shares, a), a), averages), state.memory)
    first = tree_map(lambda d: d * own(1 - b1**t, d), found.direction)
    change = tree_map(lambda new, old: (new - b1 * old) / (1 - b1), first, state.first)
    second = tree_map(lambda s, h: b2 * s + (1 - b2) * h.square(), state.second, change)
    new = tree_map(moved, params, found.direction, second), first, second, found.state
    moves = (steps + 1 >= m) & all_finite(found.direction)
    params, first, second, memory = select(moves, new, (params, state.first, state.second, state.memory))
    return params, AlternatingState(steps + 1, averages, first, second, memory)
