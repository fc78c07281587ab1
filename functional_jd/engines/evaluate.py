"""Evaluate losses: what the engines check and convert before they differentiate."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from functional_jd.core.arguments import check_flag, check_function, described, here, refuse
from functional_jd.core.tree import TENSORS, named_nodes, own_containers, tree_flatten, tree_leaves, tree_names
from functional_jd.core.types import Declared, Losses, LossFunction, Tree
from functional_jd.engines.plan import Plan
from functional_jd.objectives.functional import run_traced
from functional_jd.precision.autocast import without_cache
from functional_jd.torch_compat.slow_path import refuse_export
from functional_jd.torch_compat.torch_internals import under_transform
from functional_jd.torch_compat.watching import watched


def is_differentiable(values: Any) -> bool:
    """Whether a derivative through this pytree may be taken: under a transform, or as a tensor requires grad."""
    if under_transform():
        return True
    if torch.is_grad_enabled():
        for x in tree_leaves(values):
            if isinstance(x, Tensor) and x.requires_grad:  # pyright: ignore[reportUnnecessaryIsInstance]
                return True
    return False


def evaluate_losses(
    losses: LossFunction, args: tuple[Any, ...], plan: Plan, recorder: TorchFunctionMode | None = None
) -> tuple[list[Tensor], Any]:
    """The losses in at least float32, so that cotangents do not overflow; then `(losses, aux)` as returned.

    Losses that add to the dicts of their batch what they have computed do not find it there when they are evaluated
    again: it was computed with other parameters.
    """
    has_aux = plan.has_aux
    if torch.compiler.is_exporting():
        refuse_export()
    if not TENSORS.issuperset(map(type, args[1:])):
        args = (*args[:1], *map(own_containers, args[1:]))
    result = called(losses, args, plan, recorder)
    if has_aux and not (isinstance(result, tuple) and len(cast(tuple[Any, ...], result)) == 2):
        refuse("the result of losses", "a pair (losses, aux), as has_aux=True", result, "Or leave has_aux out.")
    values, aux = result if has_aux else (result, ())
    leaves = tree_leaves(values)
    for part in values.values() if type(values) is dict else values if type(values) is list else (values,):
        if type(part) is not Tensor:  # seldom, and no call where all are
            _refuse_none(values)
            break
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or leaf.layout != torch.strided:
            found = described(leaf)
            raise TypeError(
                f"{here()}: losses must be floating-point tensors, found {found} in {tree_names(values)[index]!r}. "
                "Return the tensors themselves, without .item(); for further values use has_aux=True."
            )
    if not element_count(leaves):
        raise ValueError(f"{here()}: expected at least one objective, found none. Return one element per objective.")
    return [leaf if leaf.dtype.itemsize >= 4 else leaf.float() for leaf in leaves], (values, aux)


def called(f: Callable[..., Any], args: tuple[Any, ...], plan: Plan, recorder: TorchFunctionMode | None = None) -> Any:
    """Call losses, or a part of them, under the modes that must see their ops."""
    compiling = torch.compiler.is_compiling()
    # In eager mode, losses of examples watch the loss of one example themselves.
    examples = plan.examples and (compiling or not isinstance(cast(Any, f), Declared))
    with without_cache():
        run = watched(f, plan.journal, examples=examples, recorder=recorder)
        return run_traced(run, *args) if compiling else run(*args)


def _refuse_none(values: Losses) -> None:
    """Refuse None instead of a loss: other losses would move to its row."""
    for name, kind in named_nodes(tree_flatten(values)[1]):
        if kind is type(None):
            raise TypeError(
                f"{here()}: losses must be floating-point tensors, found None in {name or 'value'!r}. Return the same "
                "losses for every batch: where a batch has nothing to say, 0 * other_loss."
            )


def check_example_losses(outputs: list[Tensor], *counts: int) -> None:
    """The losses of examples must be scalars: `[m]` for each count m, without one those of a single example."""
    n, expected = min(len(counts), 1), [(m,) for m in counts] or [()]
    if [tuple(y.shape) for y in outputs] != expected:
        raise ValueError(
            "per_example: the loss of one example must be one scalar, found "
            f"{[list(y.shape)[n:] for y in outputs]}. For several residuals per point, give each a name of "
            "its own, or take a plain function: .mean() is for losses, as the signs of residuals cancel. For shape "
            "[1], return loss[0]."
        )


def row_scales(plan: Plan, m: int, like: Tensor) -> Tensor:
    """The scale of every row, float32 `[m]`."""
    if plan.scale is None:
        return torch.ones(m, device=like.device)
    if plan.scale.ndim and plan.scale.shape != (m,):
        raise ValueError(
            f"{here()}: the scale must be of shape [] or [{m}], one per objective, found "
            f"{list(plan.scale.shape)}. Start it with scale_state(shape=({m},)). For an objective that this batch does "
            "not have, return 0 * another loss."
        )
    return plan.scale.expand(m)


def objective_count(values: Losses) -> int:
    """The number m of objectives."""
    return element_count(tree_leaves(values))


def element_count(tensors: list[Tensor]) -> int:
    """The number of elements of all tensors together."""
    return sum(map(Tensor.numel, tensors))


def check_losses(losses: Any, argnums: Any, has_aux: Any) -> None:
    """Refuse other things than a function, a position of an argument, and a flag."""
    check_function("losses", losses, "Pass losses(params, ...).")
    check_flag("has_aux", has_aux)
    several = isinstance(argnums, Sequence) and not isinstance(argnums, str)
    for position in argnums if several else [argnums]:
        if isinstance(position, bool) or not isinstance(position, int):
            refuse("argnums", "a position, or several in a tuple", argnums, "Count from 0: 0 is params.")


def check_weights(weights: Any, m: int) -> None:
    """Refuse what is not one number per objective."""
    if not isinstance(weights, Tensor) or weights.shape != (m,) or weights.is_complex():
        cure = "Rules that weigh entry by entry need the Jacobian."
        refuse("weights", f"one tensor [{m}], one per objective", weights, cure, ValueError)


def select_arguments(
    argnums: int | Sequence[int], args: tuple[Any, ...]
) -> tuple[Tree, Callable[[Tree], tuple[Any, ...]]]:
    """The arguments to differentiate, and a function that puts others in their place."""
    if argnums == 0 and args:  # as nearly always
        return args[0], lambda chosen: (chosen, *args[1:])
    positions = [argnums] if isinstance(argnums, int) else list(argnums)
    known = all(-len(args) <= position < len(args) for position in positions)
    if not positions or not known or len({position % len(args) for position in positions}) < len(positions):
        raise ValueError(
            f"{here()}: argnums must name some of the {len(args)} arguments, each once, found {argnums}. Count from 0."
        )

    def rebuild(chosen: Tree) -> tuple[Any, ...]:
        replaced = list(args)
        for position, value in zip(positions, [chosen] if isinstance(argnums, int) else chosen, strict=True):
            replaced[position] = value
        return tuple(replaced)

    return (args[argnums] if isinstance(argnums, int) else tuple(args[p] for p in positions)), rebuild
