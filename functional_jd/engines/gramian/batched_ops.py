"""Ops that take all examples at once, in place of `torch.vmap`, which splits them into parts or takes them apart.

`torch.vmap` has no rule for the fused attention of a CPU, and makes many small ops of a biased linear layer, of group
normalization and of cross entropy. One call on the whole batch gives the same numbers to rounding.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from functional_jd.torch_compat.torch_internals import (
    as_batch,
    examples_first,
    is_batched,
    torch_function_disabled,
    without_view,
)

F = nn.functional

Given: TypeAlias = dict[str, Any]
"""The arguments of an op by name. Those that differ from example to example have the examples first."""


def on_batch(func: Any, args: Any, kwargs: Any, level: int | None) -> Any:
    """The result of an op of `BATCHED_OPS` on tensors of examples: from one call for all where the arguments allow it.

    Args:
        func: the op.
        args: its positional arguments.
        kwargs: its other arguments.
        level: that of the `torch.vmap` along which the examples are; None where it is not the innermost transform.
    """
    if level is not None:
        found = _together(func, args, kwargs)
        if found is not None:
            with torch_function_disabled():
                return as_batch(found, level)
    # On a CPU, torch has no rule that batches its fused attention.
    attention = func is F.scaled_dot_product_attention and (args[0] if args else kwargs["query"]).is_cpu
    with sdpa_kernel(SDPBackend.MATH) if attention else nullcontext():
        return func(*args, **kwargs)


def _together(func: Any, args: Any, kwargs: Any) -> Tensor | None:
    names, batched, call = BATCHED_OPS[func]
    given = dict(zip(names, args, strict=False)) | kwargs
    with torch_function_disabled():
        for name, x in given.items():
            if name not in names or is_batched(x) is not (name in batched):
                return None
        for name in batched:
            given[name] = examples_first(given[name])
    return call(given)


def _linear(given: Given) -> Tensor | None:
    x, weight, bias = given["input"], given["weight"], given.get("bias")
    with torch_function_disabled():
        if weight.ndim != 2 or (bias is not None and bias.shape != weight.shape[:1]):
            return None  # torch broadcasts such a bias along the dimensions of one example
        # Of two dimensions, torch adds the bias in the product.
        flat = x if x.ndim == 2 else x.flatten(0, -2)
    found = F.linear(flat, weight, bias)
    with torch_function_disabled():
        return found if x.ndim == 2 else without_view(found, (*x.shape[:-1], *found.shape[1:]))


def _layer_norm(given: Given) -> Tensor | None:
    return F.layer_norm(**given) if given["input"].ndim > len(given["normalized_shape"]) else None


def _group_norm(given: Given) -> Tensor | None:
    x = given.pop("input")
    with torch_function_disabled():
        # Of one value in each group torch tells that it has no deviation.
        flat = x.flatten(0, 1) if x.ndim > 2 and x.shape[1:].numel() > given["num_groups"] else None
    if flat is None:
        return None
    found = F.group_norm(flat, **given)
    with torch_function_disabled():
        return found.reshape(x.shape)


def _attention(given: Given) -> Tensor | None:
    """Without dropout, which draws for every example, and without a mask that has dimensions beside the positions, or
    that torch refuses beside `is_causal`.
    """
    sides, mask = [given.pop(name) for name in ("query", "key", "value")], given.get("attn_mask")
    with torch_function_disabled():
        batch = sides[0].shape[:-3]
        masked = mask is not None and (mask.ndim > 2 or given.get("is_causal"))
        if given.get("dropout_p") or masked or not batch or any(x.shape[:-3] != batch for x in sides):
            return None
        flat = [x.flatten(0, -4) for x in sides]
    found = F.scaled_dot_product_attention(*flat, **given)
    with torch_function_disabled():
        return found.unflatten(0, batch)


def _cross_entropy(given: Given) -> Tensor | None:
    """Of classes, without weights and smoothing."""
    x, target = given["input"], given["target"]
    ignored, reduction = given.get("ignore_index", -100), given.get("reduction", "mean")
    plain = given.get("weight") is given.get("size_average") is given.get("reduce") is None
    with torch_function_disabled():
        alone = x.ndim == 2
        of_classes = target.shape == (x.shape[:1] if alone else (*x.shape[:2], *x.shape[3:]))
        if not plain or given.get("label_smoothing") or not of_classes or reduction not in _REDUCTIONS:
            return None
        flat = (x, target) if alone else (x.flatten(0, 1), target.flatten(0, 1))
    found = F.cross_entropy(*flat, ignore_index=ignored, reduction="none")
    with torch_function_disabled():
        if reduction == "none":
            return found if alone else found.unflatten(0, target.shape[:2])
        total = found if alone else found.unflatten(0, target.shape[:2]).flatten(1).sum(1)
        # As torch: NaN where everything is ignored. As a byte, `ignored` might be another class.
        return total / (target.long() != ignored).reshape(len(x), -1).sum(1) if reduction == "mean" else total


_REDUCTIONS = ("mean", "sum", "none")

_CROSS_ENTROPY = "input target weight size_average ignore_index reduce reduction label_smoothing"

_ATTENTION = "query key value attn_mask dropout_p is_causal scale enable_gqa"


def _op(names: str, batched: str, call: Callable[[Given], Tensor | None]) -> Any:
    return tuple(names.split()), frozenset(batched.split()), call


BATCHED_OPS: dict[Any, tuple[tuple[str, ...], frozenset[str], Callable[[Given], Tensor | None]]] = {
    F.linear: _op("input weight bias", "input", _linear),
    F.layer_norm: _op("input normalized_shape weight bias eps", "input", _layer_norm),
    F.group_norm: _op("input num_groups weight bias eps", "input", _group_norm),
    F.scaled_dot_product_attention: _op(_ATTENTION, "query key value", _attention),
    F.cross_entropy: _op(_CROSS_ENTROPY, "input target", _cross_entropy),
}
"""By op: the names of its arguments, those of them that have a dimension of examples, and the call on the batch."""
