"""Ops that torch gets wrong under vmap or in second derivatives: in a form that is right, or raised for."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from functional_jd.torch_compat.autograd_graph import graph_nodes
from functional_jd.torch_compat.callers import here
from functional_jd.torch_compat.recomputation import RecomputedMode
from functional_jd.torch_compat.torch_internals import function_name, is_hidden, traceable, under_transform

_FEW_POINTS = 25  # up to this number, torch takes no matrix products by itself


def refuse_wrong_rows(outputs: list[Tensor]) -> None:
    """Raise RuntimeError if an op made some of these outputs whose derivative by plain autograd is wrong under vmap."""
    for node in () if under_transform() else graph_nodes(outputs):
        op, is_wrong = _WRONG_ROWS.get(node.name(), ("", _ALWAYS))
        if op and is_wrong(node):
            raise RuntimeError(f"the derivative of torch.{op} is wrong under torch.vmap. {_WRONG[op][1]}.")


def cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: str = "use_mm_for_euclid_dist_if_necessary") -> Tensor:
    """`torch.cdist` for transforms, in a form that they differentiate rightly: to rounding, if it takes no products."""
    many = max(x1.shape[-2:-1] + x2.shape[-2:-1], default=0) > _FEW_POINTS
    products = compute_mode == "use_mm_for_euclid_dist" or (many and compute_mode.endswith("_if_necessary"))
    if not under_transform() or min(x1.ndim, x2.ndim) < 2 or (p == 2 and products):
        return torch.cdist(x1, x2, p, compute_mode)
    return torch.linalg.vector_norm(x1.unsqueeze(-2) - x2.unsqueeze(-3), p, -1)


def one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    """The one of `torch.nn.functional`, in a form that torch.compile traces under vmap."""
    if num_classes >= 0 and under_transform():
        one = tensor.new_ones(()).expand(*tensor.shape, 1)
        return tensor.new_zeros(*tensor.shape, num_classes).scatter(-1, tensor.unsqueeze(-1), one)
    return nn.functional.one_hot(tensor, num_classes)


def embedding(input: Tensor, weight: Tensor, padding_idx: int | None = None, *how: Any, **named: Any) -> Tensor:
    """The one of `torch.nn.functional`. A vmap of its weight keeps the `padding_idx` of the first example alone."""
    found = nn.functional.embedding(input, weight, padding_idx, *how, **named)
    if padding_idx is None or not is_hidden(weight):
        return found
    return torch.where((input == padding_idx % weight.shape[0]).unsqueeze(-1), found.detach(), found)


def prelu(input: Tensor, weight: Tensor) -> Tensor:
    """The one of `torch.nn.functional`, whose derivative is wrong in two vmaps of the same size."""
    return torch.where(input > 0, input, weight.reshape([-1, *[1] * (input.ndim - 2)] if input.ndim else []) * input)


def _refusing(op: Any, is_wrong: Callable[[list[Any]], Any], cure: str) -> Callable[..., Any]:
    def form(*args: Any, **kwargs: Any) -> Any:  # where it raises, engines go one by one
        if under_transform() and is_wrong([*args, *kwargs.values()]):
            raise RuntimeError(f"torch has wrong values or derivatives of {op.__name__} under torch.vmap. {cure}.")
        return op(*args, **kwargs)

    return form


_ALWAYS, _OPTIONS = (lambda _: True), getattr(nn, "LinearCrossEntropyOptions", ())
_BATCHED: Any = lambda x: any(is_hidden(y) for y in x if isinstance(y, Tensor))
_WITH_OTHER_BATCH: Any = lambda x: x[0].ndim != x[1].ndim and x[1].shape != x[0].shape[:-1] and _BATCHED(x)
_WRONG: dict[str, tuple[Callable[[Any], Any], str]] = {  # by name: for which arguments, and what is right
    "cdist": (_ALWAYS, "Take (x[:, None] - y).norm(dim=-1)"),
    **dict.fromkeys(("solve", "solve_ex"), (_WITH_OTHER_BATCH, "Expand both to one batch")),
    "conv2d": (lambda x: _BATCHED(x) and any(isinstance(y, tuple | list) and len(y) == 1 for y in x), "Write stride=2"),
    "lu_solve": (_BATCHED, "Take torch.linalg.solve"),
    "lstsq": (lambda x: x[1].ndim < x[0].ndim and is_hidden(x[1]), "Pass b.unsqueeze(-1)"),
    "as_strided_": (_BATCHED, "Take torch.as_strided"),
    **dict.fromkeys(("index_copy", "index_copy_"), (lambda x: not x[3].ndim, "Pass source.reshape(1)")),
    "index_fill": (lambda x: isinstance(x[3], Tensor) and is_hidden(x[3]), "Take torch.where"),
    "masked_select": (lambda x: x[0].ndim < x[1].ndim, "Expand the input to the mask"),
    "roll": (lambda x: not x[0].ndim, "Leave out what has no dimension"),
    "select_scatter": (_BATCHED, "Take torch.slice_scatter(x, y.unsqueeze(dim), dim, index, index + 1)"),
    "linear_cross_entropy": (lambda x: any(isinstance(y, _OPTIONS) for y in x), "Pass options=None"),
}
_WRONG_ROWS: dict[str, tuple[str, Callable[[Any], Any]]] = {  # by node of plain autograd: the op, and for which nodes
    "CdistBackward0": ("cdist", _ALWAYS),
    "IndexCopyBackward0": ("index_copy", lambda x: not x._saved_source_dim),
    "MaskedSelectBackward0": ("masked_select", lambda x: x._saved_self.ndim < x._saved_mask.ndim),
    "RollBackward0": ("roll", lambda x: not x._input_metadata[0].shape),
}
REPAIRED: dict[Any, Any] = {
    torch.cdist: cdist,
    nn.functional.embedding: embedding,
    torch.embedding: lambda weight, indices, padding_idx=-1, *how, **named: embedding(
        indices, weight, padding_idx if padding_idx >= 0 else None, None, 2.0, *how, **named
    ),
    **dict.fromkeys((nn.functional.prelu, torch.prelu, Tensor.prelu), prelu),
    nn.functional.one_hot: one_hot,
}
"""By op, what computes the same, or raises what sends an engine another way."""
for _home in (torch, torch.linalg, nn.functional, Tensor):
    _forms = {op: _refusing(op, *how) for name, how in _WRONG.items() if (op := getattr(_home, name, None))}
    REPAIRED.update(_forms | REPAIRED)

BATCH_NORMS: frozenset[Any] = frozenset([nn.functional.batch_norm, torch.batch_norm, torch.native_batch_norm])
"""The ops that normalize by the statistics of a batch. `training` is their sixth argument, `momentum` the next."""


def refuse_statistics_of_one(args: Any, kwargs: Any) -> None:
    """Raise ValueError for the statistics of a batch of one, but not where convolutions standardize their weights."""
    given = dict(zip(_BATCH_NORM.split(), args, strict=False)) | kwargs
    standardizes = given.get("momentum") == 0 and given.get("running_mean") is None
    x = given.get("input")
    if given.get("training") and not standardizes and isinstance(x, Tensor) and x.ndim and x.shape[0] == 1:
        raise ValueError(
            f"{here()}: expected a loss of one example without BatchNorm in training mode, found batch_norm of a batch "
            "of one, which has no statistics. Use eval mode, GroupNorm, or plain losses without per_example."
        )


class SeparateNormAffine(RecomputedMode):
    """Runs norm layers with weight and bias by separate ops, and `weight_norm` as plain ops: if rows are differentiated
    together, torch takes saved means, deviations and norms for constants (functorch#534).
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.note_checkpoints()
        func = traceable(func)
        form: Any = _weight_norm if function_name(func) == "_weight_norm" else _NORMS.get(func, func)
        return form(*args, **(kwargs or {}))


def _apart(norm: Callable[..., Tensor], names: str, *, by_channel: bool = True) -> Callable[..., Tensor]:
    """A norm layer with these arguments, whose weight and bias separate ops apply."""

    def run(*args: Any, **kwargs: Any) -> Tensor:
        given = dict(zip(names.split(), args, strict=False)) | kwargs
        weight, bias = given.get("weight"), given.get("bias")
        plain = norm(**given | {"weight": None, "bias": None})
        ones = [1] * (plain.ndim - 2 if by_channel else 0)
        y = plain if weight is None else plain * weight.reshape(*weight.shape, *ones)
        return (y if bias is None else y + bias.reshape(*bias.shape, *ones)).to(plain.dtype)

    return run


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    return v * (g / torch.norm_except_dim(v, 2, dim))


_F = nn.functional
_BATCH_NORM = "input running_mean running_var weight bias training momentum eps"
_OF_TORCH = "input weight bias running_mean running_var training momentum eps cudnn_enabled"
_NORMS: dict[Any, Callable[..., Tensor]] = {
    _F.layer_norm: _apart(_F.layer_norm, "input normalized_shape weight bias eps", by_channel=False),
    torch.layer_norm: _apart(torch.layer_norm, "input normalized_shape weight bias eps cudnn_enable", by_channel=False),
    torch.batch_norm: _apart(torch.batch_norm, _OF_TORCH),
    torch.instance_norm: _apart(torch.instance_norm, _OF_TORCH.replace("training", "use_input_stats")),
    _F.batch_norm: _apart(_F.batch_norm, _BATCH_NORM),
    _F.instance_norm: _apart(_F.instance_norm, _BATCH_NORM.replace("training", "use_input_stats")),
}
