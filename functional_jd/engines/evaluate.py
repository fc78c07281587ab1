"""Evaluate losses: what the engines check and convert before they differentiate."""

from typing import Any, cast

import torch
from torch import Tensor

from functional_jd.core.rows import at_least_float32
from functional_jd.core.tree import tree_leaves, tree_map, tree_names
from functional_jd.core.types import Losses, LossFunction, Tree
from functional_jd.precision.autocast import with_op_tables


def any_requires_grad(values: Any) -> bool:
    """Whether somebody outside records a graph on one of the tensors of a pytree."""
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in tree_leaves(values))


def detach_tree(tree: Tree) -> Tree:
    """A pytree whose tensors are cut off from any graph; what is no tensor stays."""
    return tree_map(lambda x: x.detach() if isinstance(x, Tensor) and x.requires_grad else x, tree)


def evaluate_losses(losses: LossFunction, args: tuple[Any, ...], has_aux: bool, where: str) -> tuple[list[Tensor], Any]:
    """The losses in at least float32, for cotangents that must not overflow; beside them what the function gave."""
    result = with_op_tables(losses)(*args)
    if has_aux and not (isinstance(result, tuple) and len(cast(tuple[Any, ...], result)) == 2):
        raise TypeError(
            f"{where}: with has_aux=True the losses must return a pair (losses, aux), found {type(result).__name__}."
        )
    values, aux = result if has_aux else (result, ())
    leaves = tree_leaves(values)
    for index, leaf in enumerate(leaves):
        if not (isinstance(leaf, Tensor) and leaf.is_floating_point()):
            found = str(leaf.dtype) if isinstance(leaf, Tensor) else type(leaf).__name__
            raise TypeError(
                f"{where}: losses must be floating-point tensors, found {found} in {tree_names(values)[index]!r}. "
                "Return the tensors themselves, without .item(); for further values use has_aux=True."
            )
    if not any(leaf.numel() for leaf in leaves):
        raise ValueError(f"{where}: expected at least one objective, found none. Return one element per objective.")
    return [at_least_float32(leaf) for leaf in leaves], (values, aux)


def check_example_losses(outputs: list[Tensor], shape: tuple[int, ...]) -> None:
    """The losses of examples must be of this shape, one scalar each."""
    if [tuple(y.shape) for y in outputs] != [shape]:
        raise ValueError(
            "per_example: the loss of one example must be one scalar, found "
            f"{[list(y.shape)[len(shape) :] for y in outputs]}. Reduce it, for instance with .mean()."
        )


def objective_count(values: Losses) -> int:
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
