"""The weights alone, of a function or of losses with a graph, for loops that call `.backward()` themselves."""

from collections.abc import Callable, Iterator, ValuesView
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_jd.aggregation.aggregate import Aggregator, check_rule
from functional_jd.aggregation.observation import Observation
from functional_jd.aggregation.views import as_view, loss_count
from functional_jd.core.arguments import check_type, here, refuse
from functional_jd.core.names import objective_names
from functional_jd.core.record_display import displayed_as, outline
from functional_jd.core.rows import as_matrix, magnitudes
from functional_jd.core.safe import nan_unless
from functional_jd.core.sharding import is_sharded
from functional_jd.core.tree import all_finite, detach_tree, tree_leaves, tree_map, tree_names
from functional_jd.core.types import Losses, LossFunction, Params, Tree
from functional_jd.engines.evaluate import check_losses, element_count, row_scales
from functional_jd.engines.plan import Engine, Plan
from functional_jd.engines.replicas import agree, check_alike, group_of_ranks, mean_over_group, replicate, replicated
from functional_jd.engines.row_vjps import dense, gradients_one_by_one, stack_rows
from functional_jd.engines.vjp import Vjp, check_mode
from functional_jd.precision.autocast import autocast_disabled
from functional_jd.precision.loss_scale import select, unscaled_rows
from functional_jd.precision.scale_state import ScaleState, no_scale
from functional_jd.torch_compat.autograd_graph import refuse_reentrant, to_dense
from functional_jd.torch_compat.torch_internals import is_concrete, under_transform
from functional_jd.training.checks import check_learning, check_ranks, detach_parameters, keys_of, nodes_of
from functional_jd.training.driver import observe, prepare, remembered, weighed
from functional_jd.training.state import warn


@displayed_as(outline)
class FoundWeights(NamedTuple):
    """The result of a function made by `weights_fn`.

    Attributes:
        weights: `[m]`, one per loss, in leaf order, in the dtype of the losses, at least float32.
        losses: the values.
        state: what the rule remembers, for the next call.
    """

    weights: Tensor
    losses: Losses
    state: Tree


def weights_fn(losses: LossFunction, aggregator: Aggregator, *, group: Any = None) -> Callable[..., FoundWeights]:
    """Turn losses and a rule into a function that returns the weights of the losses, and no direction.

    For trainers that call `.backward()` themselves: the gradient of `sum_i weights_i losses_i` is the rule's direction.
    With `multitask` losses this holds for the shared parameters; the gradient of each head is multiplied by the weight
    of its loss, where `step` takes it unchanged.

    Args:
        losses: `losses(params, *batch)`, as for `jacobian_fn`, or made by `distributed.sharded`. The values of an
            `nn.Parameter` are taken, so that weights are constants; other tensors keep their graph.
        aggregator: the rule.
        group: the ranks, each with its own part of the batch, such as `torch.distributed.group.WORLD`. The weights are
            those of the whole batch, the same bits on all ranks, for the mean of the ranks' gradients. `False`: those
            of this rank's part alone. `None`: there is one rank, or the losses are made by `distributed.sharded`.

    Returns:
        `f(params, *batch, state=None, scale=None) -> FoundWeights(weights, losses, state)`. `state` is that of the last
        call, None for the rule's initial state. `scale` is a `ScaleState`. The losses are multiplied by it while
        they are differentiated: `scale_state(scaler.get_scale())` with a `GradScaler`. With a group, losses are means
        over the ranks, those of `per_example` all ranks' examples, the first rank's first; so are the weights.

    Raises:
        TypeError, ValueError: an `nn.Parameter` that does not require grad (pass it as a constant: `partition`); a rule
            that weights single entries; several ranks and no group; errors of `aggregate`, `jacobian_fn` and
            `replicated`. In calls without a state, which evaluate the losses once more: losses that do not depend on
            the parameters, tied weights at two places, and ranks that differ.

    Warns:
        UserWarning: in calls without a state, gradients in float16 without a scale, losses or parameters without a
            gradient, or weights that carry a graph to a leaf tensor that is not an `nn.Parameter`.

    Guarantees:
        Below float64, weights that cancel are the smallest that autograd can sum to the direction, zero if it would be
        rounding; under transforms and with `solver="device"` they stay as found.
        If a loss or a weight is not finite, all weights are NaN, so that a `GradScaler` skips the step. The state that
        was given is returned: None in a call without one: the rule starts with the next batch (not under a transform).
        Pure; composes with vmap, grad, jvp and compile.
    """
    check_losses(losses, 0, False)
    check_rule(aggregator)

    def weights_of(params: Params, *batch: Any, state: Tree = None, scale: ScaleState | None = None) -> FoundWeights:
        params = detach_parameters(params)  # raises in every call: trainers freeze and thaw
        ranks = group_of_ranks(group, losses, params)
        how: Any = {"engine": "auto" if ranks is None else replicated(group=ranks), "starting": state is None}
        plan, engine, _ = prepare(losses, params, batch, aggregator, scale=scale, guarded=False, **how)
        if state is None:
            check_ranks(losses, params, {"parameters": params, "scale": plan.scale_state}, {"rule": aggregator})
            check_learning(plan, training=False)
        seen = observe(plan, engine)
        weights, memory = weights_and_memory(plan, seen, state, engine.replicate)
        if state is None:
            check_ranks(losses, params, {"keys": keys_of(memory)})
            if weights.requires_grad and not under_transform():
                _warn_of_graph(params)
        return FoundWeights(weights, seen.losses, memory)

    return weights_of


def weights_and_memory(plan: Plan, seen: Observation, state: Tree, replicate: Any) -> tuple[Tensor, Tree]:
    """The weights of an observation, on the device of the losses, and the memory of the rule after a finite batch."""
    found: Any
    with autocast_disabled():
        before = remembered(plan, seen, state, replicate)
        found, memory, *_ = weighed(plan, seen, before)
    leaves = tree_leaves(seen.losses)
    m = element_count(leaves)
    if not isinstance(found, Tensor) or found.shape != (m,):
        entries = "Use step, or aggregate, for weights of single entries."
        refuse("aggregator", f"a rule that weights rows, {m} of them", found, entries, ValueError)
    # `weights @ losses` takes no float64 with float32. In float16 a small weight would be zero.
    weights = found.to(leaves[0].device, reduce(torch.promote_types, (x.dtype for x in leaves), torch.float32))
    taken = all_finite((weights, leaves)) & (True if seen.finite is None else seen.finite.all())
    memory = memory_after(taken, memory, before, given=state)
    return nan_unless(taken, weights), memory  # a loss may be NaN where its gradient is finite


def memory_after(taken: Tensor, memory: Tree, before: Tree, *, given: Tree) -> Tree:
    """The memory of a rule; if a batch is not taken, the one that was given, such as None."""
    if given is None and tree_leaves(memory) and not under_transform() and is_concrete(taken) and not taken:
        return None
    return select(taken, memory, before) if tree_leaves(memory) else memory


def _warn_of_graph(params: Params) -> None:
    """Warn of a leaf tensor to which weights carry a graph: a trainer's backward pass would go through the rule."""
    pairs = zip(tree_names(params), tree_leaves(params), strict=True)
    if names := [name for name, p in pairs if p.requires_grad and p.is_leaf]:
        warn(
            f"{here()}: the weights carry a graph to {names[0]!r}, a tensor that requires grad and is no nn.Parameter: "
            "the gradient of (weights * losses).sum() is not the direction. Pass parameters of a module or tensors "
            "without grad, or take weights.detach()."
        )


@displayed_as(outline)
class Weighed(NamedTuple):
    """The result of `weigh`.

    Attributes:
        weights: as in `FoundWeights`, and constants.
        state: what the rule remembers, for the next call; what was given, where a loss or a weight is not finite.
        finite: bool like the scale, `[m]` without one: which losses and rows are finite, for `update_scale`.
    """

    weights: Tensor
    state: Tree
    finite: Tensor


def weigh(
    losses: Losses,
    parameters: Any,
    aggregator: Aggregator,
    *,
    state: Tree = None,
    scale: ScaleState | None = None,
    features: Any = None,
    group: Any = None,
) -> Weighed:
    """Weigh losses that carry a graph, so that one backward pass of their weighted sum gives the rule's direction.

    `weights = rule(J)`, with the rows `J_i = d losses_i / d parameters`. The model is evaluated once, by the loop.

    Args:
        losses: a tensor `[m]`, or a pytree of tensors with m elements, each with the graph of the model.
        parameters: the tensors to differentiate by, an iterable such as `model.parameters()`, or a pytree. Tensors
            that do not require grad are left out. Heads of one loss alone need not be among them.
        aggregator: the rule.
        state: what the last call returned; None for the rule's initial state.
        scale: a loss scale `[]` or `[m]`, a factor of the losses while they are differentiated.
        features: tensors in the graph that all losses share, such as the output of the trunk. The rows are then the
            gradients by these, which cost no pass through the trunk; `parameters` is not read, and may be None.
        group: the ranks, each with its own part of the batch, as in `weights_fn`: rows and losses are means over them.

    Returns:
        `Weighed(weights, state, finite)`. Rules that need gradients cost a backward pass and a row of memory per loss.

    Raises:
        TypeError: `aggregator` is not a rule, a loss not a floating-point tensor, `scale` not a `ScaleState`.
        ValueError: a loss without a graph, by its name; no parameter that requires grad or is reached; a `DTensor`; a
            scale of another size; a rule that weights entries; a transform; ranks without a group, or that differ.

    Guarantees:
        The gradient of `(weights * losses).sum()` is the direction that `aggregate` returns for the same rows. A loss
        that is not finite flags itself alone; all weights are NaN. The graph is kept, and no `.grad` is written.

    Example:
        >>> model, x = nn.Linear(2, 2), torch.ones(3, 2)
        >>> losses = model(x).square().mean(0)  # a loss for each output
        >>> weights, memory, _ = weigh(losses, model.parameters(), upgrad())
        >>> (weights * losses).sum().backward()  # then the optimizer takes its step
    """
    check_rule(aggregator)
    check_mode()
    if under_transform():
        raise ValueError(f"{here()}: expected a call outside of transforms, found one inside. Use weights_fn there.")
    if scale is not None:
        check_type("scale", scale, ScaleState, "Of a GradScaler: scale=scale_state(scaler.get_scale()).")
    loss_count(losses)  # raises for others than tensors
    group = group_of_ranks(group, None, ())
    if group is not None and features is not None:  # those of other ranks are others
        refuse("features", "None with a group", features, "Pass parameters: the last shared layer.", ValueError)
    factor = None if scale is None else scale.scale
    view = as_view(aggregator.view)
    given, name = (parameters, "parameters") if features is None else (features, "features")
    points = [] if view.products == "none" else _points(losses, given, name)
    if group is not None and state is None:
        check_alike(losses, group, "losses", {"rule": aggregator})
    with autocast_disabled():
        known, rows, finite = _observed(losses, points, factor)
        if group is not None:
            (known, rows), finite = mean_over_group((known, rows), group), agree(finite, group)
    plan = Plan(False, None, False, rule=aggregator, view=view, leaves=points, guarded=False, scale_state=no_scale())
    seen = observe(plan, Engine(lambda _: Observation(known, rows=rows, finite=finite)))
    weights, memory = weights_and_memory(plan, seen, detach_tree(state), group and partial(replicate, group=group))
    return Weighed(weights, memory, finite if factor is None or factor.ndim else finite.all())


def _observed(losses: Losses, points: Any, scale: Tensor | None) -> tuple[Losses, list[Tensor] | None, Tensor]:
    """The losses, their rows by the points, and which are finite."""
    known = tree_map(Tensor.detach, losses)
    finite = torch.cat([leaf.reshape(-1) for leaf in tree_leaves(known)]).isfinite()
    outputs, m = tree_leaves(losses), len(finite)
    factors = row_scales(Plan(False, scale, False), m, finite)
    if not points:
        return known, None, finite

    def pullback(cotangent: list[Tensor | None]) -> list[Tensor | None]:
        ys, cotangents = zip(*[(y, c) for y, c in zip(outputs, cotangent, strict=True) if c is not None], strict=True)
        return to_dense(torch.autograd.grad(ys, points, cotangents, retain_graph=True, allow_unused=True))

    found = stack_rows(gradients_one_by_one(Vjp(outputs, None, pullback), factors), m)
    refuse_reentrant(outputs if any(row is None for row in found) else (), points)
    if all(row is None for row in found):
        found = "losses must depend on the parameters or features given, found no loss that does"
        raise ValueError(f"{here()}: {found}. Pass parameters of the model that computed them, or features.")
    rows = dense(found if scale is None else unscaled_rows(found, factors), points, m)
    passed = torch.stack([magnitudes(as_matrix(row)) for row in rows]).amax(0) < torch.inf
    return known, rows, torch.where(finite.all(), passed, finite)  # a loss that is not finite may reach others' rows


def _points(losses: Losses, given: Any, name: str) -> list[Tensor]:
    """The tensors to differentiate by: tied weights, which two modules name, once."""
    leaves = tree_leaves(list(given) if isinstance(given, Iterator | ValuesView) else given)
    for loss, node in zip(objective_names(losses), nodes_of(losses), strict=True):
        if node is None:
            raise ValueError(
                f"{here()}: losses must carry a graph, found no graph in {loss!r}. Compute it from the model, outside "
                "of torch.no_grad(); for an objective that this batch does not have, pass 0 times another loss."
            )
    if any(is_sharded(leaf) for leaf in leaves):
        raise ValueError(f"{here()}: {name} must be whole, found a DTensor. Use weights_fn with sharded(losses, mesh).")
    points = [*{id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad}.values()]
    if not points:
        cure = "Pass model.parameters() anew, or features that are not detached."
        raise ValueError(f"{here()}: {name} must be tensors that require grad, found none. {cure}")
    return points
