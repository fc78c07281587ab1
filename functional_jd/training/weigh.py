"""The weights of losses that carry a graph, for training loops that stay as they are."""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_jd.aggregation.aggregate import Aggregator, check_rule
from functional_jd.aggregation.observation import Observation
from functional_jd.aggregation.views import View, as_view, gramian, loss_count
from functional_jd.core.arguments import check_type, here, refuse
from functional_jd.core.record_display import displayed_as, outline
from functional_jd.core.rows import as_matrix, magnitudes
from functional_jd.core.sharding import is_sharded
from functional_jd.core.tree import tree_leaves, tree_map, tree_names
from functional_jd.core.types import Losses, Tree
from functional_jd.engines.plan import Plan
from functional_jd.engines.replicas import agree, check_alike, mean_over_group, replicate
from functional_jd.engines.row_vjps import dense, gradients_one_by_one, stack_rows, unscaled_rows
from functional_jd.engines.vjp import Vjp
from functional_jd.precision.autocast import autocast_disabled
from functional_jd.precision.scale_state import ScaleState, no_scale
from functional_jd.torch_compat.autograd_graph import to_dense
from functional_jd.torch_compat.torch_internals import under_transform
from functional_jd.training.weights import group_of_batch, weights_and_memory


@displayed_as(outline)
class Weighed(NamedTuple):
    """What `weigh` returns.

    Attributes:
        weights: `[m]`, one per loss, in leaf order; constants, in the dtype of the losses, at least float32.
        state: what the rule remembers, for the next call; what was given, where a loss or a weight is not finite.
        finite: bool with the scale's shape, `[m]` without a scale: which losses and rows are finite, for
            `update_scale`.
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
        parameters: the tensors by which the losses are differentiated, such as `model.parameters()`: an iterable or a
            pytree. Those that do not require grad are left out. Heads of one loss alone need not be among them.
        aggregator: the rule; one that weights rows, not single entries.
        state: what the last call returned; None for the rule's initial state.
        scale: a loss scale `[]` or `[m]`, by which the losses are multiplied while they are differentiated.
        features: tensors in the graph that all losses share, such as the output of the trunk. The rows are then the
            gradients by these, which cost no pass through the trunk; `parameters` is not read, and may be None.
        group: the ranks, each with its own part of the batch, as in `weights_fn`: rows and losses are means over them.
            In calls without a state, losses and rules are compared, and the first rank's initial state serves all.

    Returns:
        `Weighed(weights, state, finite)`. A rule that needs no gradients, such as `mean`, costs no backward pass; any
        other costs one for each loss, and memory for the m rows. The graph is kept for the pass that follows.

    Raises:
        TypeError: `aggregator` is no rule, a loss no floating-point tensor, `scale` no `ScaleState`.
        ValueError: a loss without a graph, by its name; parameters of which none requires grad, or none is reached; a
            `DTensor`; a scale with another number of entries; a rule that weights single entries; a call under a
            transform; several ranks and no group.

    Guarantees:
        The gradient of `(weights * losses).sum()` is the direction that `aggregate` returns for the same rows. A loss
        that is not finite flags itself alone. Nothing outlives the call: no `.grad` is written.

    Example:
        >>> model, x = nn.Linear(2, 2), torch.ones(3, 2)
        >>> losses = model(x).square().mean(0)  # a loss for each output
        >>> weights, memory, _ = weigh(losses, model.parameters(), upgrad())
        >>> (weights * losses).sum().backward()  # then the optimizer takes its step
    """
    check_rule(aggregator)
    if under_transform():
        raise ValueError(f"{here()}: expected a call outside of transforms, found one inside. Use weights_fn there.")
    if scale is not None:
        check_type("scale", scale, ScaleState, "Of a GradScaler: scale=scale_state(scaler.get_scale()).")
    if state is not None and not all(isinstance(leaf, Tensor) for leaf in tree_leaves(state)):
        refuse("state", "what the last call returned, or None", state, "Pass found.state.")
    m = loss_count(losses)
    if not m:
        raise ValueError(f"{here()}: losses must have at least one element, found none. Pass those of a batch.")
    if (group := group_of_batch(group)) is not None and features is not None:  # those of other ranks are others
        refuse("features", "None with a group", features, "Pass parameters: the last shared layer.", ValueError)
    if scale is not None and scale.scale.shape not in ((), (m,)):
        cure = f"Create it with scale_state(shape={m})."
        refuse("scale", f"one scale [] or [{m}], one per loss", scale.scale, cure, ValueError)
    view, points = as_view(aggregator.view), None
    if view.products != "none":
        points = _points(losses, parameters if features is None else features, features is None)
    if group is not None and state is None:
        check_alike(losses, group, "losses", {"rule": aggregator})
    with autocast_disabled():
        seen, finite = _observed(losses, view, points, None if scale is None else scale.scale, m, group)
    how: Any = {"rule": aggregator, "view": view, "leaves": points or [], "guarded": False, "scale_state": no_scale()}
    first = None if group is None else partial(replicate, group=group)
    weights, memory = weights_and_memory(Plan(False, None, False, **how), seen, state, first, finite)
    shared = scale is not None and not scale.scale.ndim
    return Weighed(weights, memory, finite.all() if shared else finite)


def _observed(
    losses: Losses, view: View, points: list[Tensor] | None, scale: Tensor | None, m: int, group: Any
) -> tuple[Observation, Tensor]:
    """The losses, their rows if there are points, and which are finite, of all ranks."""
    known, rows = tree_map(Tensor.detach, losses), None
    finite = torch.cat([leaf.reshape(-1) for leaf in tree_leaves(known)]).isfinite()
    if points is not None:
        rows, of_rows = _rows(tree_leaves(losses), points, scale, m)
        # A loss that is not finite may reach the rows of others.
        finite = torch.where(finite.all(), of_rows, finite)
    if group is not None:
        known, finite = mean_over_group(known, group), agree(finite, group)
        rows = rows if rows is None else mean_over_group(rows, group)
    seen = Observation(known, rows=rows)
    if view.products == "gramian" and view.groups is None:
        seen = seen._replace(products=gramian.receive(seen))
    return seen, finite


def _points(losses: Losses, given: Any, are_parameters: bool) -> list[Tensor]:
    """The tensors by which to differentiate."""
    name = "parameters" if are_parameters else "features"
    leaves = tree_leaves(list(given) if isinstance(given, Iterator) else given)
    for loss, value in zip(tree_names(losses), tree_leaves(losses), strict=True):
        if not value.requires_grad:
            raise ValueError(
                f"{here()}: losses must carry a graph, found none in {loss!r}. Compute it from the model, outside of "
                "torch.no_grad(); for an objective that this batch does not have, pass 0 times another loss."
            )
    if any(is_sharded(leaf) for leaf in leaves):
        raise ValueError(f"{here()}: {name} must be whole, found a DTensor. Use weights_fn with sharded(losses, mesh).")
    points = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not points:
        cure = "Pass model.parameters()." if are_parameters else "Pass the output of the shared part, not detached."
        raise ValueError(f"{here()}: {name} must be tensors that require grad, found none. {cure}")
    return points


def _rows(outputs: list[Tensor], points: list[Tensor], scale: Tensor | None, m: int) -> tuple[list[Tensor], Tensor]:
    """The rows, a tensor `[m, *p]` for each point, without the scale, and which are finite."""

    def pullback(cotangent: list[Tensor | None]) -> list[Tensor | None]:
        pairs = [(y, c) for y, c in zip(outputs, cotangent, strict=True) if c is not None]
        ys, cotangents = zip(*pairs, strict=True)
        return to_dense(torch.autograd.grad(ys, points, cotangents, retain_graph=True, allow_unused=True))

    factors = outputs[0].new_ones(m) if scale is None else scale.expand(m)
    found = stack_rows(gradients_one_by_one(Vjp(outputs, None, pullback), factors), m)
    if all(row is None for row in found):
        raise ValueError(
            f"{here()}: losses must depend on what they are differentiated by, found none that does. Pass the "
            "parameters of the model that computed them, or features in their graph."
        )
    rows = dense(found if scale is None else unscaled_rows(found, factors), points, m)
    return rows, torch.stack([magnitudes(as_matrix(row)) for row in rows]).amax(0) < torch.inf
