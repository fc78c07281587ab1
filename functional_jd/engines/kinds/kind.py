"""What an engine must know of a kind of objectives."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from functional_jd.core.types import Direction, Gramian, Jacobian, Losses, Params, Tree
from functional_jd.objectives.buffers import Form, Threaded

Args: TypeAlias = tuple[Any, ...]
"""What the losses are called with: the parameters and the batch."""

FoundJacobian: TypeAlias = tuple[Jacobian, Losses, Any]
"""The Jacobian of the scaled losses, the losses, and aux."""

FoundGramian: TypeAlias = tuple[Gramian, Losses, Any, Callable[[Tensor], Direction]]
"""The Gramian of the scaled rows, or what `options.products` says; losses, aux, and the pullback of scaled rows."""

FoundWeighted: TypeAlias = tuple[Losses, Any, Callable[..., tuple[Direction, Tensor]]]
"""The losses, aux, and `pullback(weights, *, last=False) -> (direction, finite)`, unscaled."""

FoundFeatures: TypeAlias = tuple[Gramian, Losses, Any, Callable[[Tensor], tuple[Direction, Tensor]]]
"""The Gramian of the rows by feature, the losses, aux, and `pullback(weights) -> (direction, finite)`, all unscaled."""


class Kind(NamedTuple):
    """A kind of objectives, such as one loss per example: how each engine differentiates it. One file a kind.

    Attributes:
        jacobian: `jacobian(losses, args, argnums, options) -> FoundJacobian`, detached unless it is to be
            differentiable.
        gramian: `gramian(losses, args, argnums, options) -> FoundGramian`, without rows where that costs less. May
            raise where it cannot do without; the engine then forms the rows.
        weighted: `weighted(losses, args, options) -> FoundWeighted`, in one backward pass.
        row_params: `row_params(losses, params)`: the parameters that have rows.
        objectives: `objectives(losses, params, batch)`: the number m as far as shapes tell it, else an estimate.
        thread: `thread(losses, batch, form)`: losses with or without buffers and aux, in one form.
        sample: `sample(losses, args) -> (losses, args)`: a plain function and its arguments, for a look at the graph.
        rows_are_examples: whether replicas add their rows to those of others, instead of taking the mean.
    """

    jacobian: Callable[..., FoundJacobian]
    gramian: Callable[..., FoundGramian]
    weighted: Callable[..., FoundWeighted]
    row_params: Callable[[Any, Params], Tree]
    objectives: Callable[[Any, Params, Args], int]
    thread: Callable[[Any, Args, Form], Threaded]
    sample: Callable[[Any, Args], tuple[Callable[..., Any], Args]]
    rows_are_examples: bool = False
