"""How training starts: the state that the first step takes."""

import math
from collections.abc import Callable, Collection
from contextlib import nullcontext
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from functional_jd.aggregation.aggregate import Aggregator
from functional_jd.core.arguments import at_least, here, refuse
from functional_jd.core.float64 import widest
from functional_jd.core.tree import all_finite, tree_leaves, tree_map
from functional_jd.core.types import Losses, LossFunction, Params, Tree
from functional_jd.engines.plan import Engine
from functional_jd.optimizers.base import Optimizer
from functional_jd.precision.scale_state import ScaleState
from functional_jd.torch_compat.torch_internals import has_values, under_functorch
from functional_jd.torch_compat.watching import StateJournal
from functional_jd.training.checks import check_buffers, check_learning, check_ranks, detach_parameters, keys_of, undone
from functional_jd.training.driver import check_method, prepare, started
from functional_jd.training.state import TrainState, named_values


def train_state(
    params: Params,
    *batch: Any,
    losses: LossFunction,
    aggregator: Aggregator,
    optimizer: Optimizer,
    scale: ScaleState | None = None,
    buffers: Tree = (),
    engine: str | Engine = "auto",
    has_aux: bool = False,
    constant: Collection[str] = (),
) -> TrainState:
    """Start training: the state that the first `step` takes.

    Args:
        params: pytree of floating-point tensors, such as `dict(model.named_parameters())`. The values of an
            `nn.Parameter` are taken; other tensors keep their graph. Leaves may be `DTensor`s (`distributed.sharded`).
        batch: one batch, to learn what the rule looks at and which parameters the losses reach.
        losses: as for `step`, and so are `aggregator`, `optimizer`, `engine` and `has_aux`.
        scale: from `scale_state()`, or `scale_state(shape=(m,))` for one scale per objective; `None`: no scale.
            It goes where the parameters are, and so do buffers and keys.
        buffers: pytree of tensors that the losses take and return, such as `dict(model.named_buffers())` for
            `functional(model)`, or a key. They are copied. Derivatives reach them under a transform; for plain
            autograd, put them in by `state._replace(buffers=...)`.
        constant: names of losses, as `objective_names` gives them, that may have no gradient on this batch, such as
            those of a task without labels in it.

    Returns:
        `TrainState(params, buffers, optimizer, aggregator, scale)`.

    Raises:
        TypeError: parameters that are not floating-point tensors; what `step` raises.
        ValueError: losses without a gradient (return them as aux, or name them in `constant`); a module that uses a
            parameter of its own as well as those it is given; noise without effect (`noised`); losses that change
            buffers or parameters in place; a frozen `nn.Parameter` (pass it as a constant: `partition`); a scale that
            does not fit m; losses that the rule cannot take, such as negative ones, or that are not finite where it
            remembers them; tied weights at two places; reentrant checkpoints.

    Warns:
        UserWarning: parameters in float16; gradients in float16 without a scale; parameters that no loss reaches; a
            matrix returned with a loss; running statistics of normalization that move and are not returned as
            buffers; buffers other than keys that the losses move under `private` or `noised`.

    Guarantees:
        The losses are evaluated twice. Generators (torch's, Python's and NumPy's) and tensors that they change in place
        or by `.data =` are put back. Attributes that modules set stay.
        Under a transform they are evaluated once, and not checked; under torch.compile nothing is put back.
    """
    check_method(losses, aggregator, optimizer, has_aux)
    check_buffers(buffers)
    # Detached first: a copy for all replicas would keep the graph of what it is given.
    replicate = (engine.replicate if isinstance(engine, Engine) else None) or (lambda tree: tree)
    place = _place(tree_leaves(own := detach_parameters(params)))
    params, tracked = replicate(own), under_functorch()  # what plain autograd recorded is the rest of another call
    kept = lambda x: x if tracked and not isinstance(x, nn.Parameter) else x.detach()
    buffers = tree_map(lambda x: place(kept(x).clone()), buffers)
    placed = tree_map(place, scale) if isinstance(scale, ScaleState) else scale  # `prepare` raises for others
    how: Any = {"buffers": buffers, "has_aux": has_aux, "engine": engine, "starting": True, "optimizer": optimizer}
    plan, chosen, _ = prepare(losses, params, batch, aggregator, scale=placed, **how)
    values = {"parameters": params, "buffers": buffers, "scale": plan.scale_state}
    check_ranks(losses, own, values, {"rule": aggregator, "optimizer": optimizer})
    traced, journal = torch.compiler.is_compiling(), StateJournal()
    with nullcontext() if traced else undone(journal):  # the second evaluation changes what the first one did
        reached = check_learning(plan, buffers, constant, journal=journal)
        noted = journal if plan.kind.rows_are_examples and not plan.differentiable else None  # one was looked at so far
        memory, values = started(plan._replace(journal=noted), chosen, () if chosen.is_replicated else reached)
        _check_losses(aggregator, values, memory)
    check_ranks(losses, own, {"keys": keys_of(memory)})
    state = TrainState(params, buffers, optimizer.init(params), memory, plan.scale_state)
    return replicate(_stored_apart(state, (params, buffers, batch)) if tracked else state)


def _check_losses(aggregator: Aggregator, losses: Losses, memory: Tree) -> None:
    """Raise ValueError for the first loss that the rule cannot take, or remember, where values are known."""
    known = not (torch.compiler.is_compiling() or under_functorch()) and all(map(has_values, tree_leaves(losses)))
    if not known or not (aggregator.takes or tree_leaves(memory)):
        return
    values = named_values(losses)
    lost = [(objective, value) for objective, value in values if not math.isfinite(value)]
    if lost and not all_finite(memory):
        at, cure = f"the loss {lost[0][0]!r}", "Start with another batch."
        refuse(at, "finite for a rule that remembers it", lost[0][1], cure, ValueError)
    name, domain, *some = aggregator.takes or ("", at_least(-math.inf))
    for objective, value in [values[i] for i in some[0](losses)] if some else values:
        if math.isfinite(value) and not domain.contains(value):
            raise ValueError(
                f"{here()}: losses must be {domain.expected} for {name}, found {value:.4g} in {objective!r}. Add a "
                "constant to the loss, or take a rule that needs no losses, such as upgrad."
            )


def _place(leaves: list[Tensor]) -> Callable[[Tensor], Tensor]:
    """A function that moves a tensor to the device of the first leaf, unless it is where some leaf is."""
    places, device = {leaf.device for leaf in leaves}, leaves[0].device
    dtype = lambda x: widest(device) if x.dtype == torch.float64 else x.dtype
    return lambda x: x if x.device in places else x.to(device, dtype(x))


def _stored_apart(state: TrainState, inputs: Tree) -> TrainState:
    """The state with memory for each element of a vmap, as steps return it: torch.compile compiles for strides."""
    tensors = [x for x in tree_leaves(inputs) if isinstance(x, Tensor)]
    chosen = reduce(torch.logical_or, [x.new_zeros((), dtype=torch.bool, device=tensors[0].device) for x in tensors])
    return tree_map(lambda x: torch.where(chosen.to(x.device), x, x), state)
