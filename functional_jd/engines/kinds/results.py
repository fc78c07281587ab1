"""What engines find of losses at a point, through their kind."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from functional_jd.core.heads import Heads, direction_with_heads
from functional_jd.core.types import Direction, Jacobian, Losses

Args: TypeAlias = tuple[Any, ...]
"""What the losses are called with: the parameters and the batch."""

FoundJacobian: TypeAlias = tuple[Jacobian, Losses, Any]
"""The Jacobian without the scale, in at least float32 if there is one, the losses, and aux."""

FoundGramian: TypeAlias = tuple[Any, Losses, Any, Callable[[Any], Direction]]
"""The Gramian, or what `plan.products` says; losses, aux, and the pullback of weights to a direction, all without
the scale."""

FoundFeatures: TypeAlias = tuple[Tensor, Losses, Any, Callable[[Tensor], tuple[Direction, Tensor]]]
"""The Gramian of the rows by feature, the losses, aux, and `pullback(weights) -> (direction, finite)`, all unscaled."""

# Names, since torch.compile evaluates what annotates a function inside a function.
PulledRows: TypeAlias = tuple[Direction, Tensor | None]
"""An unscaled direction, and whether it is finite, of the scale's shape; None without a scale."""

PulledHeads: TypeAlias = tuple[Heads, Tensor | None]
"""The gradient of the heads, and whether it is finite."""


class Pullback(NamedTuple):
    """From weights to the direction of all parameters: `pullback(weights, *, last=False) -> (direction, finite)`.

    Weights `[m]`, or a dict of them by top-level key of the parameters that have rows, of which those that are one
    tensor take one pass. `finite` has the scale's shape, and is None without a scale. `last` frees the graph.

    Attributes:
        rows: `rows(weights, last=last)` returns the unscaled direction of the parameters that have rows, and `finite`.
        heads: `heads()` returns the gradient of the other parameters, and whether it is finite; None: there are none.
        agreed: what all ranks say, from what this one says of `finite`.
    """

    rows: Callable[..., PulledRows]
    heads: Callable[[], PulledHeads] | None = None
    agreed: Callable[[Tensor], Tensor] | None = None

    def __call__(self, weights: Any, *, last: bool = False) -> PulledRows:
        # Weights have no say in the heads: they take one pass whatever the groups, before the last one frees the graph.
        heads, finite = ((), None) if self.heads is None else self.heads()
        by_group = None if isinstance(weights, Tensor) else weights
        # Groups that share a tensor share a pass: whether two tensors are equal, only their values would tell.
        passes = {0: weights} if by_group is None else {id(own): own for own in by_group.values()}
        found: dict[int, Direction] = {}
        for left, (key, own) in enumerate(passes.items(), start=1 - len(passes)):
            found[key], flags = self.rows(own, last=last and not left)
            finite = flags if finite is None or flags is None else finite & flags
        if finite is not None and self.agreed is not None:
            finite = self.agreed(finite)
        direction = found[0] if by_group is None else {name: found[id(own)][name] for name, own in by_group.items()}
        return direction_with_heads(direction, heads) if heads else direction, finite


FoundWeighted: TypeAlias = tuple[Losses, Any, Pullback]
"""The losses, aux, and the pullback of weights, unscaled."""
