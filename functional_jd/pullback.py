"""Linearize once, pull back any number of cotangents: plain autograd where nothing else is active, else torch.func."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from functional_jd.precision import full_precision, portable
from functional_jd.transforms import transformed
from functional_jd.tree import (
    Structure,
    floating_leaves,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_names,
    tree_unflatten,
)
from functional_jd.types import Losses, LossFunction, Tree

Cotangent: TypeAlias = list[Tensor | None]
"""One per output; `None` where the cotangent is zero, so that plain autograd never walks that output's graph."""

Rows: TypeAlias = list[Tensor | None]
"""m cotangents or gradients, by tensor: each `[m, *x]`, or `None` where all rows are zero."""


Result = TypeVar("Result")


class Linearized(NamedTuple):
    """A function at a point.

    Attributes:
        outputs: what the function returned first.
        extra: what it returned second.
        pullback: `pullback(cotangent, among=slice(None), last=False) -> gradients`, one per input among those of the
            slice; `None` where an input certainly has no part in it. The last call frees what another would need.
    """

    outputs: list[Tensor]
    extra: Any
    pullback: Callable[..., list[Tensor | None]]


class Tasks(NamedTuple):
    """A trunk and its heads at a point.

    Attributes:
        trunk: from the shared parameters to the differentiable features.
        heads: from the heads' parameters, and behind them those features, to the losses.
        shared: leaves and structure of the shared parameters.
        own: leaves and structure of the heads' parameters.
    """

    trunk: Linearized
    heads: Linearized
    shared: tuple[list[Tensor], Structure]
    own: tuple[list[Tensor], Structure]


def requires_grad(values: Any) -> bool:
    """Whether somebody outside records a graph on one of the tensors of a pytree."""
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in tree_leaves(values))


def detached(tree: Tree) -> Tree:
    """A pytree whose tensors are cut off from any graph; what is no tensor stays."""
    return tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, tree)


def linearize(
    f: Callable[[list[Tensor]], tuple[list[Tensor], Any]], inputs: list[Tensor], *, differentiable: bool
) -> Linearized:
    """Evaluate `f(inputs) -> (outputs, extra)` once, and get the way back.

    Args:
        f: a function of a list of tensors.
        inputs: floating-point tensors.
        differentiable: whether somebody may differentiate the gradients: one of the inputs requires grad, or a
            transform that is not our own is active.
    """
    if transformed():
        return _by_func(f, inputs, differentiable)
    return _by_autograd(f, inputs, differentiable)


def linearize_tasks(
    features: Callable[..., Tree],
    heads: LossFunction,
    params: tuple[Tree, Tree],
    args: tuple[Any, ...],
    *,
    has_aux: bool,
    differentiable: bool,
    where: str,
) -> Tasks:
    """Evaluate the losses of a trunk and its heads once, and get the way back in two stages."""
    shared, shared_structure = floating_leaves(params[0], f"{where} (shared)")
    # Heads may be losses only, without a parameter of their own.
    own, own_structure = (
        floating_leaves(params[1], f"{where} (heads)") if tree_leaves(params[1]) else tree_flatten(params[1])
    )

    def trunk(inputs: list[Tensor]) -> tuple[list[Tensor], Any]:
        found = portable(features)(tree_unflatten(shared_structure, inputs), *args)
        return [x for x in tree_leaves(found) if _is_differentiable(x)], found

    below = linearize(trunk, shared, differentiable=differentiable)
    found, structure = tree_flatten(below.extra)

    def top(inputs: list[Tensor]) -> tuple[list[Tensor], Any]:
        differentiated = iter(inputs[len(own) :])
        filled = tree_unflatten(structure, [next(differentiated) if _is_differentiable(x) else x for x in found])
        mine = tree_unflatten(own_structure, inputs[: len(own)])
        return evaluate(heads, (mine, filled, *args), has_aux, where)

    above = linearize(top, own + below.outputs, differentiable=differentiable)
    return Tasks(below, above, (shared, shared_structure), (own, own_structure))


def evaluate(losses: LossFunction, args: tuple[Any, ...], has_aux: bool, where: str) -> tuple[list[Tensor], Any]:
    """The losses in at least float32, for cotangents that must not overflow; beside them what the function gave."""
    result = portable(losses)(*args)
    if has_aux and not (isinstance(result, tuple) and len(cast(tuple[Any, ...], result)) == 2):
        raise TypeError(
            f"{where}: with has_aux=True the losses must return a pair (losses, aux), found {type(result).__name__}."
        )
    values, aux = result if has_aux else (result, ())
    for index, leaf in enumerate(tree_leaves(values)):
        if not (isinstance(leaf, Tensor) and leaf.is_floating_point()):
            found = str(leaf.dtype) if isinstance(leaf, Tensor) else type(leaf).__name__
            raise TypeError(
                f"{where}: losses must be floating-point tensors, found {found} in {tree_names(values)[index]!r}. "
                "Return the tensors themselves, without .item(); for further values use has_aux=True."
            )
    if count(values) == 0:
        raise ValueError(f"{where}: expected at least one objective, found none. Return one element per objective.")
    return [leaf.float() if leaf.dtype.itemsize < 4 else leaf for leaf in tree_leaves(values)], (values, aux)


def check_scalar(outputs: list[Tensor], shape: tuple[int, ...]) -> None:
    """The losses of examples must be of this shape, one scalar each."""
    if [tuple(y.shape) for y in outputs] != [shape]:
        raise ValueError(
            "per_example: the loss of one example must be one scalar, found "
            f"{[list(y.shape)[len(shape) :] for y in outputs]}. Reduce it, for instance with .mean()."
        )


def count(values: Losses) -> int:
    """The number m of objectives."""
    return sum(leaf.numel() for leaf in tree_leaves(values))


def row_scales(scale: Tensor | None, m: int, like: Tensor, where: str) -> Tensor:
    """The scale of every row, float32 `[m]`."""
    if scale is None:
        return torch.ones(m, device=like.device)
    if scale.ndim and scale.shape != (m,):
        raise ValueError(
            f"{where}: the scale must be of shape [] or [{m}], one per objective, found {list(scale.shape)}. "
            f"Start it with scale_state(shape=({m},))."
        )
    return scale.expand(m)


def in_mode(mode: str, together: Callable[[], Result], one_by_one: Callable[[], Result]) -> Result:
    """Work with vmap, without it, or (`"auto"`) with vmap and, where that cannot go, without."""
    if mode == "loop":
        return one_by_one()
    if mode == "vmap" or torch.compiler.is_compiling():
        return together()
    try:
        return together()
    except Exception:
        # Whatever it was that vmap refused: an error of the losses themselves comes back from the loop.
        return one_by_one()


def pull_rows(point: Linearized, cotangents: Rows, mode: str, chunk_size: int | None) -> Rows:
    """Pull back m cotangents: the vector-Jacobian product of each, stacked."""
    m = next((len(c) for c in cotangents if c is not None), 0)
    if m == 0:
        return [None] * len(point.pullback([None] * len(cotangents)))

    def one_by_one() -> Rows:
        return stacked_rows([point.pullback([None if c is None else c[i] for c in cotangents]) for i in range(m)])

    mode = "loop" if m == 1 and mode == "auto" else mode
    return in_mode(mode, lambda: _together(point, cotangents, chunk_size), one_by_one)


def objective_rows(point: Linearized, factors: Tensor, mode: str, chunk_size: int | None) -> Rows:
    """The rows of the Jacobian: the gradient of every element of the outputs, multiplied by its factor `[m]`."""
    mode = "loop" if len(factors) == 1 and mode == "auto" else mode
    return in_mode(
        mode,
        lambda: _together(point, [*_diagonal(point, factors)], chunk_size),
        lambda: stacked_rows(list(objective_gradients(point, factors))),
    )


def objective_gradients(point: Linearized, factors: Tensor) -> Iterator[list[Tensor | None]]:
    """The same rows one by one, each by itself: zeros sent through the outputs of others would cost time, and turn an
    infinity there into NaN.
    """
    blocks = _diagonal(point, factors)
    i = 0
    for owner, output in enumerate(point.outputs):
        for _ in range(output.numel()):
            yield point.pullback([block[i] if k == owner else None for k, block in enumerate(blocks)])
            i += 1


def stacked_rows(gradients: list[list[Tensor | None]]) -> Rows:
    """Rows by input, from gradients by row."""
    rows: Rows = []
    with full_precision(gradients):
        for column in zip(*gradients, strict=True):
            like = next((g for g in column if g is not None), None)
            filled = [torch.zeros_like(like) if g is None else g for g in column] if like is not None else None
            rows.append(None if filled is None else torch.stack(filled))
    return rows


def _diagonal(point: Linearized, factors: Tensor) -> list[Tensor]:
    """The m cotangents of the objectives, by output `[m, *y]`."""
    matrix = torch.diag(factors)  # eye(m) * factors would turn one infinite factor into a NaN in every row
    blocks = matrix.split([y.numel() for y in point.outputs], dim=1)
    return [block.reshape(len(factors), *y.shape).to(y.dtype) for block, y in zip(blocks, point.outputs, strict=True)]


def _together(point: Linearized, cotangents: Rows, chunk_size: int | None) -> Rows:
    reached: list[bool] = []

    def row(*given: Tensor) -> list[Tensor]:
        rest = iter(given)
        gradient = point.pullback([None if c is None else next(rest) for c in cotangents])
        reached[:] = [g is not None for g in gradient]
        return [g for g in gradient if g is not None]

    rows = iter(torch.vmap(row, chunk_size=chunk_size)(*[c for c in cotangents if c is not None]))
    return [next(rows) if yes else None for yes in reached]


def _dense(gradients: Iterable[Tensor | None]) -> list[Tensor | None]:
    """An embedding may hand out sparse gradients: rows are dense, whatever layer they come from."""
    return [g.to_dense() if g is not None and g.is_sparse else g for g in gradients]


def _by_func(
    f: Callable[[list[Tensor]], tuple[list[Tensor], Any]], inputs: list[Tensor], differentiable: bool
) -> Linearized:
    # torch.func hands out tensors only: what else `extra` holds, and its structure, goes round by the side.
    beside: list[Any] = []

    def tensors_only(points: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        with _AffineApart() if differentiable else nullcontext():
            outputs, extra = f(points)
        leaves, structure = tree_flatten(extra)
        beside[:] = [structure, [None if isinstance(x, Tensor) else x for x in leaves]]
        return outputs, [x for x in leaves if isinstance(x, Tensor)]

    outputs, pull, tensors = cast(tuple[Any, ...], torch.func.vjp(tensors_only, inputs, has_aux=True))
    structure, others = beside
    rest = iter(tensors)
    extra = tree_unflatten(structure, [next(rest) if x is None else x for x in others])

    def pullback(cotangent: Cotangent, among: slice = slice(None), last: bool = False) -> list[Tensor | None]:  # noqa: ARG001
        filled = [torch.zeros_like(y) if c is None else c for y, c in zip(outputs, cotangent, strict=True)]
        with full_precision(inputs):
            return _dense(pull(filled)[0][among])

    return Linearized(outputs, extra, pullback)


def _by_autograd(
    f: Callable[[list[Tensor]], tuple[list[Tensor], Any]], inputs: list[Tensor], differentiable: bool
) -> Linearized:
    # Aliases, not the tensors themselves: the gradient must stop here, wherever else the caller uses them.
    with torch.enable_grad():
        points = [x.view_as(x) if differentiable and x.requires_grad else x.detach().requires_grad_() for x in inputs]
        with _AffineApart() if differentiable else nullcontext():
            outputs, extra = f(points)

    def pullback(cotangent: Cotangent, among: slice = slice(None), last: bool = False) -> list[Tensor | None]:
        pairs = [(y, c) for y, c in zip(outputs, cotangent, strict=True) if c is not None and y.requires_grad]
        wanted = points[among]
        if not pairs or not wanted:
            return [None] * len(wanted)
        # The weights of a cotangent may be what somebody differentiates, when nothing else is.
        create_graph = differentiable or requires_grad([c for _, c in pairs])
        with full_precision(inputs):
            return _dense(
                torch.autograd.grad(
                    [y for y, _ in pairs],
                    wanted,
                    [c for _, c in pairs],
                    retain_graph=create_graph or not last,
                    create_graph=create_graph,
                    allow_unused=True,
                )
            )

    return Linearized(outputs, extra if differentiable else detached(extra), pullback)


def _is_differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


class _AffineApart(TorchFunctionMode):
    """Runs norms without weight and bias, which are applied apart.

    Where rows are differentiated together, torch takes the mean and deviation that a norm saved for constants as soon
    as its weight asks for a gradient: derivatives of the rows would be wrong (functorch#534).
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        norm = _NORMS.get(func)
        return (func if norm is None else norm)(*args, **(kwargs or {}))


def _layer_norm(
    input: Tensor, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Tensor:
    return _affine(nn.functional.layer_norm(input, normalized_shape, eps=eps), weight, bias)


def _by_channel(norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def apart(
        input: Tensor,
        running_mean: Any = None,
        running_var: Any = None,
        weight: Any = None,
        bias: Any = None,
        *rest: Any,
        **options: Any,
    ) -> Tensor:
        shape = (-1, *[1] * (input.ndim - 2))
        parts = [None if part is None else part.reshape(shape) for part in (weight, bias)]
        return _affine(norm(input, running_mean, running_var, None, None, *rest, **options), *parts)

    return apart


def _affine(plain: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    y = plain if weight is None else plain * weight
    return (y if bias is None else y + bias).to(plain.dtype)


_NORMS: dict[Any, Callable[..., Tensor]] = {
    nn.functional.layer_norm: _layer_norm,
    nn.functional.batch_norm: _by_channel(nn.functional.batch_norm),
    nn.functional.instance_norm: _by_channel(nn.functional.instance_norm),
}
