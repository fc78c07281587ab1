"""The Gramian engine: inner products of the rows without the rows, and the way back for weights."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from functional_jd.aggregation.aggregate import combine
from functional_jd.aggregation.views import gramian as gramian_of
from functional_jd.core.rows import at_least_float32
from functional_jd.core.torch_internals import under_transform
from functional_jd.core.tree import Structure, floating_leaves, tree_flatten, tree_leaves, tree_map, tree_unflatten
from functional_jd.core.types import Direction, Gramian, Jacobian, LossFunction, MultitaskJacobian, Tree
from functional_jd.engines.evaluate import (
    any_requires_grad,
    check_example_losses,
    detach_tree,
    evaluate_losses,
    objective_count,
    row_scales,
)
from functional_jd.engines.gramian.factors import Factors
from functional_jd.engines.gramian.products import gramian_of_leaves
from functional_jd.engines.gramian.recorder import LayerRecorder, LayerUse
from functional_jd.engines.gramian.traced_recorder import TracedUse, layer_uses, recorded_vjp
from functional_jd.engines.jacobian import jacobian_fn
from functional_jd.engines.row_vjps import Rows, jacobian_rows, vjp_rows
from functional_jd.engines.vjp import Cotangent, Vjp, to_dense
from functional_jd.objectives import Multitask, PerExample
from functional_jd.precision.autocast import autocast_disabled, with_op_tables
from functional_jd.precision.loss_scale import ScaleState, multiplier

_HERE = "gramian_fn"


Found: TypeAlias = tuple[Gramian, Any, Callable[[Tensor], Direction]]
"""The Gramian of the scaled rows, what the losses returned, and the pullback of the scaled rows."""


Maybe: TypeAlias = Found | None


class Plan(NamedTuple):
    """How to differentiate: the options of `gramian_fn`."""

    has_aux: bool
    scale: Tensor | None
    functional: bool


def gramian_fn(
    losses: LossFunction,
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    scale: ScaleState | Tensor | None = None,
) -> Callable[..., tuple[Gramian, Any, Callable[[Tensor], Direction]]]:
    """Turn losses into a function that returns their Gramian, their values, and the way back for weights.

    `G = J J'` and `pullback(w) = w' J`, with `J_i = d losses_i / d params`, which is not formed where inner products of
    its factors cost less.

    Args:
        losses: `losses(params, *args)`, as for `jacobian_fn`: plain, or made by `per_example` or `multitask`.
        argnums: the argument to differentiate, or several; with several, the direction is a tuple. Other than 0, the
            structure of `per_example` and `multitask` is not used.
        has_aux: whether `losses` returns `(losses, aux)`, with aux a pytree of tensors.
        scale: a `ScaleState` or tensor, `[]` or `[m]`: the backward pass runs at that scale, Gramian and pullback come
            out unscaled.

    Returns:
        `f(*args) -> (gramian, losses, pullback)`, with `has_aux` `(gramian, (losses, aux), pullback)`. Gramian float64
        `[m, m]`; losses as the function gave them; `pullback(weights) -> direction`: weights `[m]`, direction a pytree
        like params, in their dtypes; with `scale`, as after `unscale`, in at least float32. For `multitask` losses
        Gramian and weights are those of the trunk, and `direction["heads"]` is the gradient of the plain sum, whatever
        the weights.
        A row that overflowed is a row and a column of the Gramian that are not finite. Where the heads' sum is not
        finite and nobody can tell whose it was, that is all of them.

    Raises:
        TypeError, ValueError: what `jacobian_fn` raises.

    Laws:
        The Gramian is that of `jacobian_fn`'s rows, and the pullback theirs, for every model: weights that are shared,
        transposed or used several times included, and whatever has no entry in the table of `taps.py`, whose rows are
        formed leaf by leaf. Linear in the weights. Composes with vmap, grad, jvp and compile, as lean as without them:
        what the table knows is then told by shapes (`tapped.py`), and a derivative of the Gramian is right. What a
        transform cannot do with taps it does with rows; a compiler cannot ask, and takes taps.

    Source:
        Goodfellow, "Efficient per-example gradient computations" (2015); Rochette et al. (2019) for convolutions; Bu et
        al., "Differentially private optimization on large model at small cost" (2023), for the choice layer by layer.

    Differs:
        From these, where the layers are modules with hooks: here a layer is recognised by the parameter it receives, so
        that sharing and functions without modules are no special cases.
    """
    if not callable(losses):
        raise TypeError(
            f"gramian_fn: losses must be a function, found {type(losses).__name__}. Pass losses(params, ...)."
        )
    differentiate = jacobian_fn(losses, argnums=argnums, has_aux=has_aux, scale=scale)
    factor = None if scale is None else multiplier(scale, _HERE)

    def gramian_and_losses(*args: Any) -> tuple[Gramian, Any, Callable[[Tensor], Direction]]:
        functional = under_transform() or any_requires_grad((args, factor))
        found = _by_taps(losses, argnums, args, Plan(has_aux, factor, functional))
        if found is None:
            jacobian, values = differentiate(*args)
            found = _by_rows(jacobian if factor is None else tree_map(at_least_float32, jacobian), values)
        gramian, values, pullback = found
        if factor is None:
            return gramian, values, pullback
        inverse = factor.double().reciprocal()
        rows = inverse.expand(len(gramian))
        return gramian * rows[:, None] * rows, values, lambda weights: pullback(weights.double() * inverse)

    return gramian_and_losses


def _by_rows(jacobian: Jacobian, values: Any) -> Found:
    gramian = gramian_of(jacobian)
    if isinstance(jacobian, MultitaskJacobian):
        gramian = _blamed(gramian, jacobian.heads)
    return gramian, values, partial(combine, jacobian)


def _by_taps(losses: LossFunction, argnums: int | Sequence[int], args: tuple[Any, ...], plan: Plan) -> Found | None:
    def lean() -> Maybe:
        if isinstance(losses, PerExample) and argnums == 0:
            way = _per_example_functional if plan.functional else _per_example
            return way(losses, args[0], args[1:], plan)
        if isinstance(losses, Multitask) and argnums == 0:
            return _multitask(losses, args[0], args[1:], plan)
        return _plain(losses, argnums, args, plan)

    if torch.compiler.is_compiling():  # what taps cannot do then, rows cannot do either
        return lean()
    try:
        return lean()
    except torch.OutOfMemoryError:
        raise  # the rows take more
    except Exception:
        # Whatever it was that taps could not do: an error of the losses themselves comes back from the rows.
        return None


def _per_example(losses: PerExample, params: Tree, batch: tuple[Any, ...], plan: Plan) -> Found:
    leaves, structure = floating_leaves(params, _HERE)
    m = losses.count(batch)
    taps: list[LayerUse] = []
    constants = [x.detach().requires_grad_() for x in leaves]
    # A copy for every example: what reaches it is the rows of all uses that no tap takes.
    points = [x.detach().expand(m, *x.shape).requires_grad_() for x in leaves]

    def one(points: list[Tensor], *example: Any) -> tuple[list[Tensor], Any]:
        def tapped(*given: Any) -> Any:
            with LayerRecorder(points, constants, taps, examples=True):
                return losses.loss(*given)

        return evaluate_losses(tapped, (tree_unflatten(structure, points), *example), plan.has_aux, _HERE)

    # torch has no batched rule for its fused attention on CPUs: it would go example by example.
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH) if leaves[0].is_cpu else nullcontext():
        dims = (0, *losses.dims(batch))
        outputs, (values, aux) = torch.vmap(one, dims, randomness="different")(points, *batch)
    check_example_losses(outputs, (m,))
    edges = list(dict.fromkeys(tap.edge for tap in taps))
    factors = row_scales(plan.scale, m, outputs[0], _HERE).to(outputs[0].dtype)
    with autocast_disabled(leaves):
        # No loss depends on another example: one backward pass from all of them keeps the rows apart.
        gradients = torch.autograd.grad(outputs, _ends(edges, points), [factors], allow_unused=True)
    gramian, pullback = _together(taps, edges, to_dense(gradients), _like(leaves, plan), m)
    return gramian, detach_tree((values, aux) if plan.has_aux else values), _shaped(pullback, structure)


def _per_example_functional(losses: PerExample, params: Tree, batch: tuple[Any, ...], plan: Plan) -> Found:
    leaves, structure = floating_leaves(params, _HERE)
    m = losses.count(batch)
    seen: list[list[TracedUse]] = []
    reached: list[bool] = []

    def one(leaves: list[Tensor], factor: Tensor, *example: Any) -> tuple[list[Tensor], list[Tensor], Any]:
        def f(points: list[Tensor], tapping: LayerRecorder) -> tuple[list[Tensor], Any]:
            def tapped(*given: Any) -> Any:
                with tapping:
                    return losses.loss(*given)

            return evaluate_losses(tapped, (tree_unflatten(structure, points), *example), plan.has_aux, _HERE)

        tapped = recorded_vjp(f, leaves)
        check_example_losses(tapped.point.outputs, ())
        extra, sources = tapped.point.extra
        gradients = tapped.point.pullback([factor.to(tapped.point.outputs[0].dtype)])
        seen[:], reached[:] = [tapped.seen], [g is not None for g in gradients]
        return [g for g in gradients if g is not None], sources, extra

    dims = (None, 0, *losses.dims(batch))
    factors = row_scales(plan.scale, m, leaves[0], _HERE)
    with sdpa_kernel(SDPBackend.MATH) if leaves[0].is_cpu else nullcontext():
        gradients, sources, (values, aux) = torch.vmap(one, dims, randomness="different")(leaves, factors, *batch)
    rest = iter(gradients)
    rows = [next(rest) if yes else None for yes in reached]
    gramian, pullback = _together(layer_uses(seen[0], sources), list(range(len(sources))), rows, _like(leaves, plan), m)
    return gramian, (values, aux) if plan.has_aux else values, _shaped(pullback, structure)


def _plain(losses: LossFunction, argnums: int | Sequence[int], args: tuple[Any, ...], plan: Plan) -> Found:
    positions = [argnums] if isinstance(argnums, int) else list(argnums)
    leaves, structure = floating_leaves(tuple(args[p] for p in positions), _HERE)

    def f(points: list[Tensor], tapping: LayerRecorder) -> tuple[list[Tensor], Any]:
        def tapped(*given: Any) -> Any:
            with tapping:
                return losses(*given)

        given = list(args)
        for position, value in zip(positions, tree_unflatten(structure, points), strict=True):
            given[position] = value
        return evaluate_losses(tapped, tuple(given), plan.has_aux, _HERE)

    point, taps, edges = _linearized(f, leaves, plan)
    m = objective_count(point.outputs)
    rows = jacobian_rows(point, row_scales(plan.scale, m, point.outputs[0], _HERE), _mode(), None)
    gramian, pullback = _together(taps, edges, rows, _like(leaves, plan), m)
    shaped = _shaped(pullback, structure)
    values, aux = point.extra
    direction = (lambda weights: shaped(weights)[0]) if isinstance(argnums, int) else shaped
    return gramian, (values, aux) if plan.has_aux else values, direction


def _multitask(losses: Multitask, params: Tree, args: tuple[Any, ...], plan: Plan) -> Found | None:
    shared, heads = losses.split(params)
    leaves, structure = floating_leaves(shared, f"{_HERE} (shared)")

    def trunk(points: list[Tensor], tapping: LayerRecorder) -> tuple[list[Tensor], Any]:
        def tapped(shared: Tree) -> Any:
            with tapping:
                return losses.features(shared, *args)

        features = with_op_tables(tapped)(tree_unflatten(structure, points))
        return [x for x in tree_leaves(features) if isinstance(x, Tensor) and x.is_floating_point()], features

    point, taps, edges = _linearized(trunk, leaves, plan)
    features, features_structure = tree_flatten(point.extra)
    if any(isinstance(x, Tensor) and x.is_complex() for x in features):
        return None

    def top(heads: Tree, differentiated: list[Tensor], *args: Any) -> Any:
        rest = iter(differentiated)
        filled = [next(rest) if isinstance(x, Tensor) and x.is_floating_point() else x for x in features]
        return losses.heads(heads, tree_unflatten(features_structure, filled), *args)

    # What the heads say about the features is what tasks on a trunk that does nothing say about their parameters.
    cut = (lambda outputs: outputs) if plan.functional else detach_tree
    differentiate = jacobian_fn(Multitask(lambda x, *_: x, top), has_aux=plan.has_aux, scale=plan.scale)
    (between, gradient), values = differentiate({"shared": cut(point.outputs), "heads": heads}, *args)
    rows = vjp_rows(point, between, _mode(), None)
    gramian, pullback = _together(taps, edges, rows, _like(leaves, plan), len(between[0]))
    shaped = _shaped(pullback, structure)
    own = gradient if plan.scale is None else tree_map(at_least_float32, gradient)
    return _blamed(gramian, gradient), values, lambda weights: {"shared": shaped(weights), "heads": own}


def _blamed(gramian: Gramian, heads: Tree) -> Gramian:
    """What is not finite in the heads' gradient belongs to no row, so that it spoils them all."""
    for leaf in tree_leaves(heads):
        gramian = torch.where(leaf.isfinite().all(), gramian, torch.nan)
    return gramian


def _linearized(
    f: Callable[[list[Tensor], LayerRecorder], tuple[list[Tensor], Any]], leaves: list[Tensor], plan: Plan
) -> tuple[Vjp, list[LayerUse], list[Any]]:
    """Evaluate `f(points, tapping) -> (outputs, extra)` once, and get the way back to its taps and its points."""
    if plan.functional:
        point, seen = recorded_vjp(f, leaves)
        extra, sources = point.extra
        taps = layer_uses(seen, [x[None] for x in sources])
        return point._replace(extra=extra), taps, list(range(len(sources)))
    taps: list[LayerUse] = []
    constants = [x.detach().requires_grad_() for x in leaves]
    points = [x.detach().requires_grad_() for x in leaves]
    with torch.enable_grad():
        outputs, extra = f(points, LayerRecorder(points, constants, taps, examples=False))
    edges = list(dict.fromkeys(tap.edge for tap in taps))

    def pullback(cotangent: Cotangent) -> list[Tensor | None]:
        pairs = [(y, c) for y, c in zip(outputs, cotangent, strict=True) if c is not None and y.requires_grad]
        if not pairs:
            return [None] * (len(edges) + len(points))
        outs, given = [y for y, _ in pairs], [c for _, c in pairs]
        with autocast_disabled(leaves):
            return to_dense(
                torch.autograd.grad(outs, _ends(edges, points), given, retain_graph=True, allow_unused=True)
            )

    return Vjp(outputs, detach_tree(extra), pullback), taps, edges


def _mode() -> str:
    """A compiler tells the gradients that are zero by vmap."""
    return "vmap" if torch.compiler.is_compiling() else "auto"


def _ends(edges: Sequence[Any], points: list[Tensor]) -> Any:
    """What to differentiate; torch's annotation does not know of a mixture."""
    return [*edges, *points]


def _together(
    taps: list[LayerUse], edges: list[Any], rows: Rows, leaves: list[Tensor], m: int
) -> tuple[Gramian, Callable[[Tensor], list[Tensor]]]:
    """The Gramian of all leaves and their pullback, from the rows by edge, and behind them by leaf."""
    by_edge = dict(zip(edges, rows, strict=False))
    by_leaf: list[list[Factors | Tensor]] = [[] if direct is None else [direct] for direct in rows[len(edges) :]]
    with autocast_disabled(leaves):
        for tap in taps:
            gradient = by_edge[tap.edge]
            if gradient is not None:
                by_leaf[tap.leaf].append(tap.form(gradient))
        gramian, pull = gramian_of_leaves(by_leaf, leaves, m)
        gramian = (gramian + gramian.mT) / 2  # products of factors round differently on either side

    def pullback(weights: Tensor) -> list[Tensor]:
        with autocast_disabled(leaves):
            return pull(weights)

    return gramian, pullback


def _like(leaves: list[Tensor], plan: Plan) -> list[Tensor]:
    """What the direction is like: what was unscaled is at least float32, without a number of its own."""
    return leaves if plan.scale is None else [at_least_float32(x.new_empty(())).expand(x.shape) for x in leaves]


def _shaped(pullback: Callable[[Tensor], list[Tensor]], structure: Structure) -> Callable[[Tensor], Direction]:
    return lambda weights: tree_unflatten(structure, pullback(weights))
