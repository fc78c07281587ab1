"""Views of a parameter (transposed, cut, reshaped, cast), and the way from their rows back to the parameter's."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from functional_jd.engines.gramian.factors import Factors

Back: TypeAlias = Callable[[Any], Any]
"""From `Factors` or rows `[m, *part]` to those of what the part was taken from."""


WHOLE, MATRIX, FLAT = range(3)
"""How far a part is from its leaf: the leaf itself; a transpose or some of its rows, so that `Factors` find the way
back; a stretch of its numbers in any shape, so that rows do.
"""


class ParameterView(NamedTuple):
    """A leaf, or a part of it.

    Attributes:
        leaf: which one.
        constant: the same part of the constant that takes the leaf's place.
        distance: WHOLE, MATRIX or FLAT.
        back: the way back to the leaf.
    """

    leaf: int
    constant: Tensor
    distance: int = WHOLE
    back: Back = lambda made: made


def view_of(part: ParameterView, view: Tensor) -> ParameterView | None:
    """The part that a view of another part's constant is; `None` where rows would not find back from it."""
    base = part.constant
    distance, step = _way(base, view)
    if step is None:
        return None
    return ParameterView(part.leaf, view, max(part.distance, distance), lambda made: part.back(step(made)))


def _way(base: Tensor, view: Tensor) -> tuple[int, Back | None]:
    apart = view.untyped_storage().data_ptr() != base.untyped_storage().data_ptr()
    if view.dtype is not base.dtype:
        cast = apart and view.is_floating_point() and view.shape == base.shape and view.device == base.device
        return WHOLE, _same if cast else None
    if apart or not view.numel():
        return FLAT, None
    strides = [stride for size, stride in zip(base.shape, base.stride(), strict=True) if size > 1]
    if len(set(strides)) < len(strides):
        return FLAT, None  # numbers share memory: a transpose would look like the leaf itself
    ahead = int(view.storage_offset() - base.storage_offset())
    if view.shape == base.shape and view.stride() == base.stride():
        return WHOLE, _same
    if view.ndim == 2 and view.shape == base.shape[::-1] and view.stride() == base.stride()[::-1]:
        return MATRIX, _flipped
    if view.ndim and view.shape[1:] == base.shape[1:] and view.stride() == base.stride() and base.stride(0):
        return MATRIX, _padded(ahead // base.stride(0), base.shape[0] - view.shape[0])
    if view.is_contiguous() and base.is_contiguous():
        pad = _padded(ahead, base.numel() - view.numel())
        return FLAT, lambda rows: pad(rows.flatten(1)).reshape(len(rows), *base.shape)
    return FLAT, None


def _same(made: Any) -> Any:
    return made


def _flipped(made: Any) -> Any:
    return Factors(made.right, made.left) if isinstance(made, Factors) else made.mT


def _padded(before: int, missing: int) -> Back:
    """Zeros where the rest of the leaf is: along the first dimension of a row."""

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
"""Ops whose outcome may be a part of what they are given first."""


VIEWS |= {Tensor.T.__get__, Tensor.mT.__get__}  # pyright: ignore
