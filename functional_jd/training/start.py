"""How training starts: the state that the first step takes."""

from collections.abc import Callable, Collection, Mapping
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn

from functional_jd.aggregation.aggregate import Aggregator
from functional_jd.core.agreement import check_alike, description
from functional_jd.core.arguments import described
from functional_jd.core.checksum import checksums
from functional_jd.core.float64 import widest
from functional_jd.core.sharding import is_sharded, over_mesh
from functional_jd.core.tree import described_leaves, floating_leaves, tree_leaves, tree_map, tree_names
from functional_jd.core.types import LossFunction, Params, Tree
from functional_jd.engines.kinds import kind_of
from functional_jd.engines.plan import Engine, Plan
from functional_jd.objectives.over_shards import mesh_of
from functional_jd.optimizers.base import Optimizer
from functional_jd.precision.scale_state import ScaleState, no_scale
from functional_jd.torch_compat.slow_path import random_state, random_state_outside_torch, set_random_state
from functional_jd.torch_compat.torch_internals import under_functorch, under_transform
from functional_jd.torch_compat.watching import StateJournal
from functional_jd.training.checks import check_batch, check_learning, check_noise, refuse_8_bits
from functional_jd.training.driver import started
from functional_jd.training.first_values import warn_of_values
from functional_jd.training.prepare import prepare, refuse_engine
from functional_jd.training.state import TrainState, check_method


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
        params: pytree of floating-point tensors, `dict(model.named_parameters())` for instance. The values of an
            `nn.Parameter` are taken and its graph is left behind; other tensors keep theirs. Leaves may be `DTensor`s,
            placed `Shard` or `Replicate`: see `distributed.sharded`.
        batch: one batch, to learn what the rule looks at and which parameters the losses reach.
        losses: as for `step`.
        aggregator: the rule.
        optimizer: a pair `(init, update)`.
        scale: from `scale_state()`, or `scale_state(shape=(m,))` for one scale per objective; `None` is no scaling. It
            goes where the parameters are, and so do buffers and keys.
        buffers: pytree of tensors that the losses take after the parameters and return beside the losses, such as
            `dict(model.named_buffers())` for `functional(model)`, or a key. They are copied, and do not move yet.
            Derivatives reach them under a transform; for plain autograd, put them in by `state._replace(buffers=...)`.
            `()` for losses without buffers.
        engine: as for `step`.
        has_aux: as for `step`.
        constant: names of losses, as `objective_names` gives them, that may have no gradient on this batch, such as
            those of a task without labels in it.

    Returns:
        `TrainState(params, buffers, optimizer, aggregator, scale)`.

    Raises:
        TypeError: parameters or losses that are none, as `jacobian_fn` says; losses that do not take this batch, or do
            not return what the buffers and `has_aux` ask for.
        ValueError: a scale that does not fit m; a batch without elements; an `nn.Parameter` that does not require grad
            (pass it as a constant: `partition`); `multitask` losses without a trunk to train; losses of which none
            reaches the parameters, or one does not (return it as aux, or name it in `constant`); `multitask` losses of
            which none reaches the trunk; noise that protects nobody (`noised`). The graph of the losses decides, never
            values.

    Warns:
        UserWarning: losses that are not finite; running statistics of normalization, and other buffers of modules, that
            move and are not returned as buffers; numbers of modules that `functional` puts back; a key in the buffers
            that `keyed` draws with and that is returned as it was, or with which all examples draw alike; single losses
            and something larger in one tuple; parameters that no loss reaches; gradients that pass through float16
            without a scale; `levenberg_marquardt` and `natural_gradient` with losses that are squares, or with Adam;
            examples of both signs, as residuals have, under rules for losses, such as `mean`, `upgrad` and `config`;
            buffers other than keys that the losses move under `private` or `noised`.

    Laws:
        Pure. The losses are evaluated twice, without a trace: generators (torch's, Python's and NumPy's), tensors that
        they change in place or by `.data =`, and attributes of modules are put back to what they were. Under a
        transform they are evaluated once, and not checked, and generators alone are put back; under torch.compile
        nothing is. Under vmap, every element of the state has memory of its own.

    Example:
        >>> net = nn.Linear(3, 2)
        >>> apply = functional(net)
        >>> losses = lambda params, x: apply(params, {}, x)[0].square().mean(0)  # two objectives
        >>> method = {"losses": losses, "aggregator": upgrad(), "optimizer": adamw(lr=1e-3)}
        >>> x = torch.ones(4, 3)
        >>> state = train_state(dict(net.named_parameters()), x, scale=scale_state(shape=(2,)), **method)
        >>> state.scale.scale
        tensor([65536., 65536.])
    """
    check_method("train_state", losses, aggregator, optimizer, has_aux)
    _check_kinds(engine, scale)
    leaves, _ = floating_leaves(params, "train_state")
    _refuse_without_trunk(losses, params)
    refuse_frozen("train_state", params)
    refuse_8_bits("train_state", "parameters", params)
    check_batch("train_state", batch)
    check_noise("train_state", losses, aggregator, optimizer)
    # Detached first: a copy for all replicas would keep the graph of what it is given.
    replicate = (engine.replicate if isinstance(engine, Engine) else None) or (lambda tree: tree)
    params = replicate(detach_parameters(params))
    beside_parameters = _beside(leaves)
    buffers = _buffers_at(beside_parameters, buffers)
    placed = no_scale(device=leaves[0].device) if scale is None else tree_map(beside_parameters, scale)
    values = {"parameters": params, "buffers": buffers, "scale": placed}
    check_ranks("train_state", losses, leaves, values, {"rule": aggregator, "optimizer": optimizer})
    plan, chosen = prepare(
        "train_state",
        losses,
        params,
        batch,
        aggregator,
        scale=placed,
        buffers=buffers,
        has_aux=has_aux,
        engine=engine,
        starting=True,
        optimizer=optimizer,
    )
    check = partial(check_learning, optimizer=optimizer, losses=losses, batch=batch, constant=constant)
    rule_state = _started(plan, chosen, check)
    _refuse_no_tensors("the memory of a rule", rule_state, "Let its init return tensors: torch.zeros(()) for a number.")
    check_ranks("train_state", losses, leaves, {"keys": keys_of(rule_state)})
    state = TrainState(params, buffers, optimizer.init(params), rule_state, placed)
    return replicate(_stored_apart(state, (params, buffers, batch)) if under_functorch() else state)


def _check_kinds(engine: Any, scale: Any) -> None:
    """Refuse what is no engine, and what is no scale."""
    if not isinstance(engine, str | Engine):
        refuse_engine("train_state", engine)
    if scale is not None and not isinstance(scale, ScaleState):
        raise TypeError(
            f"train_state: scale must be a ScaleState or None, found {type(scale).__name__}. Start it with "
            "scale_state(2.0**16), or scale_state(shape=(m,)) for one scale per objective; go on from a GradScaler "
            "with precision.scale_state_from_dict(scaler.state_dict())."
        )


def _beside(leaves: list[Tensor]) -> Callable[[Tensor], Tensor]:
    """A function that brings a tensor to the device of the first leaf, unless it stands where some leaf does."""
    places, device = {leaf.device for leaf in leaves}, leaves[0].device

    def placed(x: Tensor) -> Tensor:
        return x if x.device in places else x.to(device, widest(device) if x.dtype == torch.float64 else x.dtype)

    return placed


def _buffers_at(place: Callable[[Tensor], Tensor], buffers: Tree) -> Tree:
    """Copies of the buffers, each where `place` puts it."""
    _refuse_no_tensors("buffers", buffers, "Pass for instance dict(module.named_buffers()), or leave buffers out.")
    return tree_map(lambda x: place((x if _is_tracked(x) else x.detach()).clone()), buffers)


def _started(plan: Plan, engine: Engine, check: Callable[..., None]) -> Tree:
    """The rule's initial state, from losses that leave no trace."""
    if torch.compiler.is_compiling():
        return started(plan, engine)[0]
    journal, draws, put_back = StateJournal(), random_state(), random_state_outside_torch()
    try:
        if not under_transform():
            check(plan, journal)
            put_back()
        state, values = started(plan, engine)
    finally:
        journal.undo()  # the second evaluation changed what the first one did
        set_random_state(draws)
        put_back()
    if not under_transform():
        warn_of_values(plan, values)
    return state


def detach_parameters(params: Params) -> Params:
    """Return the pytree with the values of each `nn.Parameter` in its place; other tensors keep their graph."""
    return tree_map(lambda p: p.detach() if isinstance(p, nn.Parameter) else p, params)


def check_ranks(
    where: str, losses: LossFunction, leaves: list[Any], values: Mapping[str, Tree], method: Mapping[str, Any] = {}
) -> None:
    """Refuse shards of different trainings: what follows would mix them.

    Args:
        where: the function that the user called.
        losses: the losses, and below the leaves of the parameters: their meshes tell the ranks.
        leaves: the leaves.
        values: by name, trees of tensors whose values are the same on all ranks, or shards.
        method: by name, records of functions, such as a rule.
    """
    meshes = dict.fromkeys([mesh_of(losses), *(leaf.device_mesh for leaf in leaves if is_sharded(leaf))])
    meshes.pop(None, None)  # losses that know of no ranks
    if not meshes or under_transform():
        return
    parts: dict[str, Any] = {}
    for name, tree in values.items():
        found: list[Any] = tree_leaves(tree)
        held = [x.placements if is_sharded(x) else f"{int(checksums([x])[0]):x}" for x in found]
        parts[f"the same {name}"] = [f"{x} {y}" for x, y in zip(described_leaves(tree), held, strict=True)]
    for name, record in method.items():
        parts[f"the same {name}"] = [description(record)]
    for mesh in meshes:
        least = partial(over_mesh, "least", mesh=mesh)
        check_alike(where, parts, least, mesh.device_type, "Build them alike everywhere.")


def keys_of(state: Tree) -> list[Tensor]:
    """The keys in a rule's state; those of a user's own rule cannot be seen before."""
    return [x for x in tree_leaves(state) if isinstance(x, Tensor) and x.dtype == torch.int64 and not is_sharded(x)]  # pyright: ignore[reportUnnecessaryIsInstance]


def _stored_apart(state: TrainState, inputs: Tree) -> TrainState:
    """The state with memory of its own for every element of a vmap, as each step returns it.

    What no input enters, such as a count of steps, would be stored once, with a stride of 0: torch.compile would take
    the second step for another function than the first.
    """
    tensors = [x for x in tree_leaves(inputs) if isinstance(x, Tensor)]
    chosen = reduce(torch.logical_or, [x.new_zeros((), dtype=torch.bool, device=tensors[0].device) for x in tensors])
    return tree_map(lambda x: torch.where(chosen.to(x.device), x, x), state)


def _is_tracked(buffer: Tensor) -> bool:
    """Whether a transform may follow a buffer. What plain autograd recorded is mostly the rest of another call."""
    return under_functorch() and not isinstance(buffer, nn.Parameter)


def _refuse_no_tensors(what: str, tree: Tree, cure: str) -> None:
    for index, leaf in enumerate(tree_leaves(tree)):
        if not isinstance(leaf, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            name = tree_names(tree)[index]
            raise TypeError(
                f"train_state: {what} must be a pytree of tensors, found {described(leaf)} in {name!r}. {cure}"
            )


def _refuse_without_trunk(losses: LossFunction, params: Params) -> None:
    """Refuse `multitask` losses whose trunk has no parameters, or only frozen ones: no row is left for a rule."""
    trunk = kind_of(losses).row_params(losses, params)
    if trunk is params:
        return
    leaves = tree_leaves(trunk)
    if not all(isinstance(p, nn.Parameter) and not p.requires_grad for p in leaves):
        return
    found = "that all of them are frozen" if leaves else "none"
    raise ValueError(
        f"train_state: expected parameters of the trunk to train, in params['shared'], found {found}. Where all of the "
        "trunk is constant, take a plain function of {'heads': params['heads']} with total(): every head follows its "
        "own loss, as in multitask. Pass the trunk in the buffers, or close over it."
    )


def refuse_frozen(where: str, params: Params) -> None:
    """Refuse an `nn.Parameter` that is not trained: rows by it would count."""
    leaves, _ = floating_leaves(params, where)
    places = [index for index, p in enumerate(leaves) if isinstance(p, nn.Parameter) and not p.requires_grad]
    if places:
        names = tree_names(params)
        frozen = [names[index] for index in places]
        raise ValueError(
            f"{where}: expected parameters that require grad, since all of them are trained, found frozen "
            f"{', '.join(map(repr, frozen[:3]))}{' and others' * (len(frozen) > 3)}. Keep them apart: "
            "trained, constant = objectives.partition(params, lambda name, p: p.requires_grad), and in the losses "
            "objectives.merge(trained, constant) (of multitask losses in `features`: a function around them would be "
            "plain losses)."
        )
