"""The weights alone, for training loops that call `.backward()` themselves."""

import warnings
from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from functional_jd.aggregation.aggregate import Aggregator, check_rule
from functional_jd.core.arguments import described, refuse
from functional_jd.core.record_display import Table, displayed_as, outline
from functional_jd.core.sharding import meshes_of
from functional_jd.core.tree import floating_leaves, tree_leaves, tree_names
from functional_jd.core.types import Losses, LossFunction, Params, Tree
from functional_jd.engines.evaluate import check_losses
from functional_jd.engines.plan import Engine
from functional_jd.engines.replicas import replicated
from functional_jd.objectives.over_shards import mesh_of
from functional_jd.precision.loss_scale import select
from functional_jd.precision.scale_state import ScaleState
from functional_jd.torch_compat.slow_path import user_level
from functional_jd.torch_compat.torch_internals import under_transform
from functional_jd.training.checks import check_reached
from functional_jd.training.driver import weighed
from functional_jd.training.prepare import prepare
from functional_jd.training.start import check_ranks, detach_parameters, keys_of, refuse_frozen
from functional_jd.training.state import by_objective

_WHERE = "weights_fn"


def _table(found: Any) -> Table:
    """Losses by name, each with its weight; of a batch of them, the outline."""
    weights, losses, _ = found
    rows = by_objective(losses, weights) if isinstance(weights, Tensor) else None
    return outline(found) if rows is None else (type(found).__name__, *rows)


@displayed_as(_table)
class FoundWeights(NamedTuple):
    """What a function made by `weights_fn` returns.

    Attributes:
        weights: `[m]`, one per loss, in leaf order, in the dtype of the losses, at least float32.
        losses: the values.
        state: what the rule remembers, for the next call; None where a first batch was not finite.
    """

    weights: Tensor
    losses: Losses
    state: Tree


def weights_fn(losses: LossFunction, aggregator: Aggregator, *, group: Any = None) -> Callable[..., FoundWeights]:
    """Turn losses and a rule into a function that returns the weights of the losses, and no direction.

    For trainers that call `.backward()` on one loss themselves: the gradient of `sum_i weights_i losses_i` is the
    rule's direction. Of `multitask` losses this holds for the shared parameters only: there the gradient of each head
    is multiplied by the weight of its loss, where `step` takes it as it is.

    Args:
        losses: `losses(params, *batch)`, as for `jacobian_fn`, or made by `distributed.sharded`. The values of an
            `nn.Parameter` are taken and its graph is left behind, so that weights are constants; other tensors keep
            theirs.
        aggregator: the rule; one that weights rows, not single entries.
        group: the ranks, each with its own part of the batch: a `torch.distributed.ProcessGroup`, such as
            `torch.distributed.group.WORLD`. The weights are those of the whole batch, the same bits on all ranks, as
            with `replicated(group=group)`; the mean of the ranks' gradients of `sum_i weights_i losses_i`, which data
            parallel trainers take, is the rule's direction. `False`: those of this rank's part alone. `None`, where
            there is one rank only, or the losses are those of `distributed.sharded`, whose mesh tells.

    Returns:
        `f(params, *batch, state=None, scale=None) -> FoundWeights(weights, losses, state)`. `state` is what the last
        call returned, None for the rule's initial state. `scale` is a `ScaleState`, by which the losses are multiplied
        while they are differentiated, so that float16 keeps their gradients: `scale_state(scaler.get_scale())` beside a
        `GradScaler`. The weights are those of the losses without it. What the rule needs decides what is computed:
        nothing but the losses, their Gramian, or their rows. Of `multitask` losses, the weights are those of the shared
        parameters. With a group, the losses are the means over the ranks, or, of `per_example` losses, those of all
        ranks' examples, and so are the weights: the first rank's come first. The rule starts from the first rank's
        state, keys too.

    Raises:
        TypeError: `losses` is not callable, `aggregator` is not a rule; what `jacobian_fn` raises.
        ValueError: an `nn.Parameter` that does not require grad (pass it as a constant: `partition`); in calls without
            a state, which evaluate the losses once more, losses none of which depends on the parameters, as those of a
            module that is called directly; a rule that weights single entries; several
            ranks and no group; what `aggregate`, `jacobian_fn` and, with a group, `replicated` raise. Losses that
            differ between the ranks in names or shapes, and of shards other values of whole parameters, rules or keys,
            are refused in calls without a state.

    Warns:
        UserWarning: in calls without a state, losses that do not depend on the parameters, parameters that no loss
            reaches, gradients that pass through float16 without a scale, or weights that carry a graph to a leaf tensor
            that is no `nn.Parameter`.

    Laws:
        `combine(jacobian_fn(losses)(params, *batch)[0], weights)` is the direction that `aggregate` returns, and with
        constant weights the gradient of `weights @ losses`, but for the heads of `multitask` losses. A gradient that is
        not finite, or not with the scale, gives weights that are not finite where the rule looks at it, so that a
        `GradScaler` skips the step and backs off. Where weights or a loss are not finite, the state that was given is
        returned, as in a skipped step; in a call without a state None, so that the rule starts with the next batch (in
        a graph or under a transform, which cannot return it, what the rule made of that batch). A rule that does not
        look at gradients, such as `mean`, `constant`, `dwa`, `famo`, `uw` or `random_weights`, gives finite weights
        where they alone are not finite, and its next state: it remembers the batch, whether or not the step is skipped.
        Pure; composes with vmap, grad, jvp and compile.

    Differs:
        From `step`: nothing is skipped or updated, neither parameters nor scale, which is up to the caller.

    Example:
        >>> losses = lambda params, x: torch.stack([(params["w"] - x).square().sum(), (params["w"] + x).square().sum()])
        >>> params, x = {"w": nn.Parameter(torch.tensor([1.0, 0.0]))}, torch.ones(2)
        >>> weights, _, state = weights_fn(losses, upgrad())(params, x)
        >>> (weights * losses(params, x)).sum().backward()  # then the trainer's optimizer takes its step
    """
    check_losses(_WHERE, losses, 0, False)
    check_rule(aggregator, _WHERE)

    def weights_of(params: Params, *batch: Any, state: Tree = None, scale: ScaleState | None = None) -> FoundWeights:
        _check_scale(scale)
        leaves, _ = floating_leaves(params, _WHERE)
        refuse_frozen(_WHERE, params)  # in every call: trainers freeze and thaw
        if state is None:
            check_ranks(_WHERE, losses, leaves, {"parameters": params}, {"rule": aggregator})
        engine = _engine_for(group, losses, params)
        plan, engine = prepare(
            _WHERE,
            losses,
            detach_parameters(params),
            batch,
            aggregator,
            scale=scale,
            engine=engine,
            guarded=False,
            starting=state is None,
        )
        if state is None and not torch.compiler.is_compiling() and not under_transform():
            check_reached(plan)
        seen, decided = weighed(plan, engine, state)
        if state is None:
            check_ranks(_WHERE, losses, leaves, {"keys": keys_of(decided.rule_state)})
        weights = decided.weights
        if not isinstance(weights, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(
                f"{_WHERE}: expected a rule that gives one weight per loss, found {described(weights)}: it "
                "weights single entries. Use step, or aggregate."
            )
        # `weights @ losses` refuses float64 beside float32. In float16 a small weight would be zero.
        if state is None and weights.requires_grad and not under_transform():
            _warn_of_graph(params)
        dtype = reduce(torch.promote_types, (leaf.dtype for leaf in tree_leaves(seen.losses)), torch.float32)
        memory = decided.rule_state
        if tree_leaves(memory):
            memory = _remembered(weights, seen.losses, memory, state)
        return FoundWeights(weights.to(dtype), seen.losses, memory)

    return weights_of


def _warn_of_graph(params: Params) -> None:
    """Warn of a leaf tensor to which weights carry a graph: a trainer's backward pass would go through the rule."""
    for name, p in zip(tree_names(params), tree_leaves(params), strict=True):
        if p.requires_grad and p.is_leaf and not isinstance(p, nn.Parameter):
            warnings.warn(
                f"{_WHERE}: the weights carry a graph to {name!r}, a tensor that requires grad and is no nn.Parameter: "
                "the gradient of (weights * losses).sum() goes through the rule, and is not its direction. Pass the "
                "parameters of the module, or tensors without grad, or take weights.detach(). For derivatives of "
                "weights use torch.func.",
                stacklevel=user_level(),
            )
            return


def _remembered(weights: Tensor, losses: Losses, memory: Tree, state: Tree) -> Tree:
    """The memory, if a batch was finite; else what was given: trainers skip such a batch, and rules must forget it."""
    taken = torch.stack([weights.isfinite().all(), *(x.isfinite().all() for x in tree_leaves(losses))]).all()
    if state is not None:
        return select(taken, memory, state)
    traced = torch.compiler.is_compiling() or under_transform()
    return memory if traced or bool(taken) else None


def _check_scale(scale: Any) -> None:
    if scale is not None and not isinstance(scale, ScaleState):
        refuse(_WHERE, "scale", "a ScaleState", scale, "Of a GradScaler: scale=scale_state(scaler.get_scale()).")


def _engine_for(group: Any, losses: LossFunction, params: Params) -> str | Engine:
    """The engine of the ranks whose batches count."""
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if group is False or (group is None and not several):
        return "auto"
    over_mesh = mesh_of(losses) is not None
    if group is None:
        if over_mesh or any(mesh.size() == dist.get_world_size() for mesh in meshes_of(tree_leaves(params))):
            return "auto"
        raise ValueError(
            f"{_WHERE}: expected a group, since there are {dist.get_world_size()} ranks, each with its part of the "
            "batch, found none. Pass group=torch.distributed.group.WORLD for the weights of the whole batch, or "
            "group=False for those of this rank alone."
        )
    if over_mesh or not isinstance(group, dist.ProcessGroup):
        found = "losses of sharded(losses, mesh), whose mesh tells the ranks" if over_mesh else described(group)
        raise ValueError(
            f"{_WHERE}: expected group to be a ProcessGroup that this process is in, for losses of whole parameters, "
            f"found {found}. Pass group=torch.distributed.group.WORLD, or leave it out for sharded losses."
        )
    return replicated(group=group)
