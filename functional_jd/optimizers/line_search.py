"""The best of several learning rates in every step, as an optimizer around another."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_jd.core.arguments import NOT_NEGATIVE, check_function, check_number, described, refuse
from functional_jd.core.record_display import displayed_as, outline
from functional_jd.core.rows import at_least_float32
from functional_jd.core.tree import floating_leaves, tree_leaves, tree_map
from functional_jd.core.types import Direction, Losses, Params, Tree
from functional_jd.optimizers.base import Optimizer, check_inner, in_dtype_of
from functional_jd.torch_compat.slow_path import attempt, random_state, set_random_state
from functional_jd.torch_compat.watching import StateJournal, Watch


@displayed_as(outline)
class LineSearchState(NamedTuple):
    """The state of `line_search`.

    Attributes:
        rate: float64 `[]`, the rate of the last step; 0 before the first.
        inner: the state of the optimizer inside.
    """

    rate: Tensor
    inner: Tree


def line_search(
    optimizer: Optimizer, rates: Sequence[float] | Tensor, *, merit: Callable[[Losses], Tensor] | None = None
) -> Optimizer:
    """Take the step of an optimizer with the one of several rates that leaves the losses smallest.

    With `params'` the parameters after a step of the optimizer inside, the next ones are
    `params + rate (params' - params)`, for the rate of least `merit(losses(params + rate (params' - params)))`.

    Args:
        optimizer: proposes the step, once: rates are multiples of its own. With `sgd(1.0)` they are learning rates.
        rates: not negative, `[k]`: a tensor, or a list or tuple of numbers. With 0 among them, a step that helps
            nowhere is not taken.
        merit: `merit(losses) -> []`, what is to become small, of the losses as the step's losses return them. By
            default the sum of their squares, which is right for residuals (`natural_gradient`) and for losses that
            are not negative. For losses of any sign that are to be small themselves: `torch.sum`.

    Returns:
        An `Optimizer` with the state `LineSearchState(rate, inner)`. Its function `search` receives the losses on the
        batch, which `step` passes to it; its `update`, which does not, raises.

    Raises:
        ValueError: an optimizer inside that compares losses or adds noise; in `step`, replicas, whose batches differ.

    Guarantees:
        The first of the best rates is taken; a merit that is not finite is never best, and if none is finite the
        parameters stay. The losses are evaluated at all rates by one vmap: k forward passes, and k sets of parameters;
        buffers and keys are those of the step, and the search leaves nothing in them. Rate 1 gives the step of the
        optimizer inside. Derivatives are those of the chosen rate.

    Differences:
        From searches that stop at the first rate that is good enough: those read values, which synchronizes.
    """
    at = _checked(optimizer, rates)
    if merit is not None:
        check_function("merit", merit, "Pass merit(losses) -> scalar.")

    def init(params: Params) -> LineSearchState:
        leaves, _ = floating_leaves(params)
        return LineSearchState(torch.zeros((), dtype=torch.float64, device=leaves[0].device), optimizer.init(params))

    def update(direction: Direction, state: LineSearchState, params: Params) -> Any:  # noqa: ARG001
        raise ValueError(
            "line_search: expected the losses, to compare rates, found none. Take functional_jd.step with this "
            "optimizer outermost, or call optimizer.search(losses_at, direction, state, params)."
        )

    def search(
        losses_at: Callable[[Params], Losses], direction: Direction, state: LineSearchState, params: Params
    ) -> tuple[Params, LineSearchState]:
        proposed, inner = optimizer.update(direction, state.inner, params)
        here, there = (tree_map(Tensor.detach, tree) for tree in (params, proposed))
        own = at.to(state.rate.device)
        merits = _at_all(lambda rate: _merit_of(merit, losses_at(_between(here, there, rate))), own.detach())
        merits = torch.where(merits.isfinite(), merits, torch.inf)
        best = own.gather(0, merits.argmin(dim=0, keepdim=True)).squeeze(0)  # an index would be read by torch.compile
        rate = torch.where(merits.isfinite().any(), best, 0)
        return _between(params, proposed, rate), LineSearchState(rate, inner)

    return Optimizer(init, update, search=search)


def _between(params: Params, proposed: Params, rate: Tensor) -> Params:
    """`params + rate (proposed - params)`, exact for the rates 0, also of a step that is not finite, and 1."""

    def leaf(p: Tensor, q: Tensor) -> Tensor:
        wide, end, own = at_least_float32(p), at_least_float32(q), in_dtype_of(rate, at_least_float32(p))
        return torch.lerp(wide, torch.where((own == 0) & ~end.isfinite(), wide, end), own).to(p.dtype)

    return tree_map(leaf, params, proposed)


def _at_all(merit_at: Callable[[Tensor], Tensor], rates: Tensor) -> Tensor:
    """The merit at every rate, `[k]`, without a trace in generators, or in values that the losses change in place."""
    if torch.compiler.is_compiling():
        return torch.vmap(merit_at, randomness="same")(rates)
    journal, draws = StateJournal(), random_state()

    def watched(rate: Tensor) -> Tensor:
        with Watch(journal):
            return merit_at(rate)

    def together() -> Tensor:
        return torch.vmap(watched, randomness="same")(rates)

    def one_by_one() -> Tensor:
        found: list[Tensor] = []
        for rate in rates.unbind():
            set_random_state(draws)
            found.append(watched(rate))
        return torch.stack(found)

    instead = "evaluates the losses at one rate after the other"
    merits = attempt(together, one_by_one, instead=instead, journal=journal)
    journal.undo()
    set_random_state(draws)
    return merits


def _merit_of(merit: Callable[[Losses], Tensor] | None, values: Losses) -> Tensor:
    if merit is None:
        return torch.stack([leaf.double().square().sum() for leaf in tree_leaves(values)]).sum()
    found: Any = merit(values)
    if not isinstance(found, Tensor) or found.ndim or not found.is_floating_point():
        expected = "a function that returns one real number"
        raise ValueError(f"line_search: merit must be {expected}, found {described(found)}. Reduce it: .sum().")
    return found


def _checked(optimizer: Any, rates: Any) -> Tensor:
    """The rates as a tensor."""
    check_inner(optimizer, cure="line_search(sgd(1.0), rates).")
    cure = "Pass for instance rates=[1.0, 0.5, 0.25, 0.1]."
    if isinstance(rates, list | tuple):
        for rate in rates:  # pyright: ignore[reportUnknownVariableType]
            check_number("rates", rate, NOT_NEGATIVE, cure)
        rates = torch.tensor(rates, dtype=torch.float64)
    is_tensor = isinstance(rates, Tensor)
    if not (
        is_tensor and rates.is_floating_point() and rates.layout == torch.strided and rates.ndim == 1 and len(rates)
    ):
        refuse("rates", "a tensor [k] or a list of numbers", rates, cure, ValueError if is_tensor else TypeError)
    return rates.double()
