"""What an engine must know of a kind of objectives."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from functional_jd.core.declared import Declared
from functional_jd.core.heads import Heads
from functional_jd.core.types import Direction, Jacobian, Losses, Params, Tree
from functional_jd.objectives.buffers import CarryingLosses, Extras, next_as_found, own_buffers, with_carried

Args: TypeAlias = tuple[Any, ...]
"""What the losses are called with: the parameters and the batch."""

FoundJacobian: TypeAlias = tuple[Jacobian, Losses, Any]
"""The Jacobian of the scaled losses, the losses, and aux."""

FoundGramian: TypeAlias = tuple[Any, Losses, Any, Callable[[Any], Direction], Heads]
"""The Gramian of the scaled rows, or what `options.products` says; losses, aux, the pullback of scaled rows, for the
parameters that have rows, and the heads' gradient."""

PulledBack: TypeAlias = tuple[Direction, Heads, Tensor | None]
"""The direction of the parameters that have rows, the heads' gradient, and what is finite; None without a scale."""

FoundWeighted: TypeAlias = tuple[Losses, Any, Callable[..., PulledBack]]
"""The losses, aux, and `pullback(weights, *, last=False) -> (direction, heads, finite)`, unscaled."""

FoundFeatures: TypeAlias = tuple[Tensor, Losses, Any, Callable[[Tensor], tuple[Direction, Tensor]]]
"""The Gramian of the rows by feature, the losses, aux, and `pullback(weights) -> (direction, finite)`, all unscaled."""


def _all_params(losses: Any, params: Params) -> Tree:  # noqa: ARG001
    return params


def _usual_number(losses: Any, batch: Args, others: int) -> int:  # noqa: ARG001
    """Not known before the losses are evaluated: four are usual."""
    return 4


def _carrying(losses: Any, batch: Args, extras: Extras) -> CarryingLosses:
    def adapted(f: Callable[..., Any]) -> Callable[..., Any]:
        return lambda params, *args: with_carried(f(params, *args), extras)

    found = losses.each(adapted) if isinstance(losses, Declared) else adapted(losses)
    return CarryingLosses(
        found, (own_buffers(extras), *batch) if extras.takes_buffers else batch, next_as_found(extras)
    )


def _whole(losses: Any, args: Args) -> tuple[Any, Args]:
    return losses, args


class Kind(NamedTuple):
    """A kind of objectives, such as one loss per example: how each engine differentiates it. One file a kind.

    Attributes:
        jacobian: `jacobian(losses, args, argnums, options) -> FoundJacobian`, detached unless it is to be
            differentiable.
        gramian: `gramian(losses, args, argnums, options) -> FoundGramian`, without rows where that costs less. May
            raise where it cannot do without; the engine then forms the rows. None: from rows, always.
        weighted: `weighted(losses, args, options) -> FoundWeighted`, in one backward pass. None: from rows.
        features: `features(losses, args, options) -> FoundFeatures`; None where there are none.
        row_params: `row_params(losses, params)`: the parameters that have rows.
        expected_m: `expected_m(losses, batch, others)`: the number m as far as shapes tell it, else an estimate; so
            many leaves have no rows.
        carrying: `carrying(losses, batch, extras)`: the losses, with or without buffers and aux, as `CarryingLosses`.
        sample: `sample(losses, args) -> (losses, args)`: a plain function and its arguments, for a look at the graph.
        rows_are_examples: whether replicas add their rows to those of others, instead of taking the mean.
        several_sets: whether these are several sets of examples, one after the other.
    """

    jacobian: Callable[..., FoundJacobian]
    gramian: Callable[..., FoundGramian] | None = None
    weighted: Callable[..., FoundWeighted] | None = None
    features: Callable[..., FoundFeatures] | None = None
    row_params: Callable[[Any, Params], Tree] = _all_params
    expected_m: Callable[[Any, Args, int], int] = _usual_number
    carrying: Callable[[Any, Args, Extras], CarryingLosses] = _carrying
    sample: Callable[[Any, Args], tuple[Callable[..., Any], Args]] = _whole
    rows_are_examples: bool = False
    several_sets: bool = False
