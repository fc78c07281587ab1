"""The plan of a step: what is asked of losses, rule and state, once."""

from typing import Any, NoReturn

import torch
from torch import Tensor

from functional_jd.aggregation.aggregate import Aggregator, check_rule
from functional_jd.aggregation.groups import leaf_groups
from functional_jd.aggregation.views import View, as_view
from functional_jd.core.arguments import check_function, refuse
from functional_jd.core.tree import any_sharded, tree_leaves
from functional_jd.core.types import LossFunction, Params, Tree
from functional_jd.engines.by_name import ENGINES
from functional_jd.engines.choose import EngineChoice, choose_engine
from functional_jd.engines.evaluate import is_differentiable
from functional_jd.engines.kinds import kind_of, losses_of_shards
from functional_jd.engines.kinds.kind import Kind
from functional_jd.engines.plan import Engine, Plan
from functional_jd.objectives.buffers import Extras
from functional_jd.precision.loss_scale import multiplier
from functional_jd.precision.scale_state import ScaleState, is_scaled, no_scale
from functional_jd.torch_compat.control_flow import refuse_control_flow
from functional_jd.training.state import TrainState, check_state


def prepare(
    where: str,
    losses: LossFunction,
    params: Params,
    batch: tuple[Any, ...],
    rule: Aggregator,
    *,
    scale: ScaleState | None = None,
    buffers: Tree = (),
    has_aux: bool = False,
    engine: str | Engine = "auto",
    guarded: bool = True,
    starting: bool = False,
    optimizer: Any = None,
) -> tuple[Plan, Engine]:
    """What is to be done, and the engine that does it: the arguments are those of `step`, and fields of `Plan`.

    Raises:
        ValueError: an engine that is unknown, or does not give the rule what it needs.
    """
    if torch.compiler.is_compiling():
        refuse_control_flow(where)
    own_kind, view = kind_of(losses), as_view(rule.view)
    place = engine.place() if isinstance(engine, Engine) and tree_leaves(buffers) else (0, 1)
    carrying = own_kind.carrying(losses, batch, Extras(where, buffers, has_aux, *place))
    scale = no_scale() if scale is None else scale
    factor = multiplier(scale, where) if is_scaled(scale) else None
    leaves = tree_leaves(params)
    sharded = any_sharded(leaves)
    whole = losses_of_shards(carrying.losses) if sharded else carrying.losses
    plan = Plan(
        where,
        True,
        factor,
        is_differentiable((params, carrying.args, factor)),
        products=view.products,
        groups=None if view.groups is None else leaf_groups(own_kind.row_params(losses, params), view.groups),
        rule=rule,
        optimizer=optimizer,
        starting=starting,
        losses=whole,
        args=(params, *carrying.args),
        kind=own_kind if whole is carrying.losses else kind_of(whole),
        view=view,
        scale_state=scale,
        guarded=guarded,
        next_buffers=carrying.next_buffers,
    )
    if isinstance(engine, str) and engine == "auto":
        return plan, ENGINES[_choice(own_kind, losses, params, batch, view, scale.scale, leaves, sharded).engine]
    found = ENGINES.get(engine) if isinstance(engine, str) else engine
    if not isinstance(found, Engine):
        refuse_engine(where, engine)
    found.check(plan)
    return plan, found


def chosen_engine(state: TrainState, *batch: Any, losses: LossFunction, aggregator: Aggregator) -> EngineChoice:
    """Which engine `step(engine="auto")` takes, and why.

    Args:
        state: from `train_state`.
        batch: what the losses take after the parameters and buffers; only shapes are read, nothing is evaluated.
        losses: as for `step`.
        aggregator: the rule.

    Returns:
        `EngineChoice(engine, reason)`: a name and a sentence.

    Raises:
        TypeError, ValueError: what is no state or no rule; a batch or parameters that do not fit the losses' structure.

    Laws:
        Shapes and dtypes decide, never values: eager and compiled steps, and steps under vmap, choose alike. A step
        that then meets what its engine cannot follow forms all rows, and warns.

    Example:
        >>> params, x = {"w": torch.ones(3)}, torch.ones(2, 3)
        >>> losses = lambda params, x: x @ params["w"]
        >>> state = train_state(params, x, losses=losses, aggregator=upgrad(), optimizer=sgd(0.1))
        >>> chosen_engine(state, x, losses=losses, aggregator=upgrad()).engine
        'jacobian'
    """
    check_state("chosen_engine", state)
    check_function("chosen_engine", "losses", losses, "Pass losses(params, ...).")
    check_rule(aggregator, "chosen_engine")
    kind, leaves, view = kind_of(losses), tree_leaves(state.params), as_view(aggregator.view)
    return _choice(kind, losses, state.params, batch, view, state.scale.scale, leaves, any_sharded(leaves))


def _choice(
    kind: Kind,
    losses: LossFunction,
    params: Params,
    batch: tuple[Any, ...],
    view: View,
    scale: Tensor,
    leaves: list[Tensor],
    sharded: bool,
) -> EngineChoice:
    """`chosen_engine` of arguments that were checked."""
    others, positions = len(leaves), _positions(batch)
    if (with_rows := kind.row_params(losses, params)) is not params:
        leaves = tree_leaves(with_rows)
    m = len(scale) if scale.ndim else kind.expected_m(losses, batch, others - len(leaves))
    return choose_engine(
        view,
        m,
        leaves,
        scale,
        positions=positions,
        examples=kind.rows_are_examples,
        several_sets=kind.several_sets,
        sharded=sharded,
    )


def _positions(batch: tuple[Any, ...]) -> int:
    """At how many positions a linear layer would be applied to the first tensor of the batch, mostly the input: as many
    as it has elements, but for the last dimension of features.
    """
    for argument in batch:
        for x in [argument] if isinstance(argument, Tensor) else tree_leaves(argument):
            if isinstance(x, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
                return x.shape[:-1].numel() if x.ndim > 1 and x.is_floating_point() else x.numel()
    return 1


def refuse_engine(where: str, engine: Any) -> NoReturn:
    """Raise the error of what is neither the name of an engine nor an engine."""
    expected = f"one of auto, {', '.join(ENGINES)}, or made by jacobian_engine(...) and the like"
    refuse(where, "engine", expected, engine, "'auto' takes the cheapest that the rule allows.", ValueError)
