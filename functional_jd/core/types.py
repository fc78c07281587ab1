"""The names of the values that every file speaks of."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor
from torch.nn import Parameter

PLAIN_TENSORS = (Tensor, Parameter)
"""The classes of tensors that have memory of their own, and operators that no subclass changes."""

Tree: TypeAlias = Any
"""A pytree of tensors: nested dicts, lists, tuples, NamedTuples, registered dataclasses, or one tensor."""

Params: TypeAlias = Tree
"""A pytree of floating-point tensors, leaves `[*p]`."""

Losses: TypeAlias = Tree
"""A tensor or a pytree of tensors with m elements in leaf order: one objective each."""

Jacobian: TypeAlias = Tree
"""A pytree like params with leaves `[m, *p]`: row i is the gradient of objective i. Or a `MultitaskJacobian`."""

Direction: TypeAlias = Tree
"""A pytree like params, leaves `[*p]`: an ascent direction, as a gradient is."""

Gramian: TypeAlias = Tensor
"""`[m, m]`: the inner products of the rows."""

Weights: TypeAlias = Tree
"""`[m]`: the weight of each row. Or a pytree like the Jacobian: the weight of each entry, or `AffineWeights`."""

LossFunction: TypeAlias = Callable[..., Any]
"""`losses(params, *args) -> Losses`."""


class AffineWeights(NamedTuple):
    """In one leaf, weights of the current rows, and a sum of earlier ones: `direction = sum_i weights_i J_i + rest`.

    Attributes:
        weights: float64, `[m]`, or broadcast to the leaf `[m, *p]`, with all its dimensions.
        rest: `[*p]`, at least float32; in float64, the sum is float64 too, as weights that cancel need it.
    """

    weights: Tensor
    rest: Tensor


class Declared:
    """The result of `multitask` and `per_example`: a dataclass of functions and settings, which wrappers must keep."""

    def each(self, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Any:
        """The same structure, with each of its functions wrapped."""
        record: Any = self
        parts = {field.name: getattr(record, field.name) for field in fields(record)}
        return replace(record, **{name: wrap(part) for name, part in parts.items() if callable(part)})
