"""Views of a parameter (transposed, cut, reshaped, cast), and the way from their rows back to the parameter's."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from functional_jd.engines.gramian.factors import Factors

Back: TypeAlias = Callable[[Any], Any]
"""From the `Factors` or rows `[m, *view]` of a view to those of the tensor that it is a view of."""

WHOLE, MATRIX, FLAT = range(3)
"""The distance of a view from its leaf. WHOLE: the leaf itself. MATRIX: a transpose, or some rows of the matrix, from
which `Factors` can be mapped back. FLAT: a contiguous range in any shape, from which only rows can be mapped back.
"""


def same(made: Any) -> Any:
    """The way back from a tensor to itself."""
    return made


class ParameterView(NamedTuple):
    """A leaf, or a view of it.

    Attributes:
        leaf: the index of the leaf.
        constant: the same view of the constant that takes the leaf's place.
        distance: WHOLE, MATRIX or FLAT.
        back: maps `Factors` or rows of the view to those of the leaf.
    """

    leaf: int
    constant: Tensor
    distance: int = WHOLE
    back: Back = same


def view_of(part: ParameterView, view: Tensor) -> ParameterView | None:
    """What a view of a constant is a view of; None where its rows cannot be mapped back to the leaf."""
    base = part.constant
    distance, step = _distance_and_back(base, view)
    if step is None:
        return None
    return ParameterView(part.leaf, view, max(part.distance, distance), lambda made: part.back(step(made)))


def _distance_and_back(base: Tensor, view: Tensor) -> tuple[int, Back | None]:
    apart = view.untyped_storage().data_ptr() != base.untyped_storage().data_ptr()
    if view.dtype is not base.dtype:
        cast = apart and view.is_floating_point() and view.shape == base.shape and view.device == base.device
        return WHOLE, same if cast else None
    if apart or not view.numel():
        return FLAT, None
    strides = [stride for size, stride in zip(base.shape, base.stride(), strict=True) if size > 1]
    if len(set(strides)) < len(strides):
        return FLAT, None  # elements share memory: a transpose would look like the leaf itself
    ahead = int(view.storage_offset() - base.storage_offset())
    if view.shape == base.shape and view.stride() == base.stride():
        return WHOLE, same
    if view.ndim == 2 and view.shape == base.shape[::-1] and view.stride() == base.stride()[::-1]:
        return MATRIX, transposed
    if view.ndim and view.shape[1:] == base.shape[1:] and view.stride() == base.stride() and base.stride(0):
        return MATRIX, _padded(ahead // base.stride(0), base.shape[0] - view.shape[0])
    if view.is_contiguous() and base.is_contiguous():
        pad = _padded(ahead, base.numel() - view.numel())
        return FLAT, lambda rows: pad(rows.reshape(len(rows), -1)).reshape(len(rows), *base.shape)
    return FLAT, None


def transposed(made: Any) -> Any:
    """`Factors` or rows of the transposed matrix."""
    return Factors(made.right, made.left) if isinstance(made, Factors) else made.mT


def _padded(before: int, missing: int) -> Back:
    """Adds zeros for the rest of the leaf, along the first dimension of a row."""

    def back(made: Any) -> Any:
        if isinstance(made, Factors):
            return made._replace(left=nn.functional.pad(made.left, (before, missing - before)))
        return nn.functional.pad(made, [0, 0] * (made.ndim - 2) + [before, missing - before])

    return back


_WORDS = (
    "t transpose swapaxes swapdims chunk split tensor_split narrow select unbind unsqueeze squeeze view reshape "
    "flatten unflatten ravel contiguous __getitem__ to half bfloat16 float double"
)


VIEWS: set[Any] = {getattr(home, word, None) for home in (torch, Tensor) for word in _WORDS.split()}
"""Ops that may return a view of their first argument."""
VIEWS |= {Tensor.T.__get__, Tensor.mT.__get__}  # pyright: ignore
