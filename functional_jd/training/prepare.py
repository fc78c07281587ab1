"""The plan of a step: what is asked of losses, rule and state, once."""

from typing import Any

import torch
from torch import Tensor

from functional_jd.aggregation.aggregate import Aggregator, check_rule
from functional_jd.aggregation.groups import leaf_groups
from functional_jd.aggregation.views import View, as_view
from functional_jd.core.arguments import check_flag, check_function, check_type, here, refuse
from functional_jd.core.tree import any_sharded, tree_leaves
from functional_jd.core.types import LossFunction, Params, Tree
from functional_jd.engines.by_name import ENGINES
from functional_jd.engines.choose import EngineChoice, choose_engine
from functional_jd.engines.evaluate import is_differentiable
from functional_jd.engines.kinds import kind_of, losses_of_shards
from functional_jd.engines.plan import Engine, Plan
from functional_jd.objectives.buffers import Extras
from functional_jd.optimizers.base import Optimizer, check_optimizer
from functional_jd.precision.loss_scale import multiplier
from functional_jd.precision.scale_state import ScaleState
from functional_jd.training.state import START, TrainState


def check_method(losses: Any, aggregator: Aggregator, optimizer: Optimizer, has_aux: Any, *state: Any) -> None:
    """Raise for what is no function, no rule for one batch, no optimizer, no flag, or no state of a step."""
    if state and not isinstance(state[0], TrainState):
        refuse("state", "a TrainState", state[0], START)
    are_fit = isinstance(aggregator, Aggregator) and isinstance(optimizer, Optimizer)
    if not (callable(losses) and are_fit and (has_aux is True or has_aux is False)):
        check_function("losses", losses, "Pass losses(params, ...).")
        check_flag("has_aux", has_aux)
        check_rule(aggregator)
        check_optimizer(optimizer)
    if getattr(aggregator.view, "batches", 1) > 1:
        raise ValueError(
            f"{here()}: the rule must use one batch, found one that compares two. Take its steps by hand: "
            "aggregate(rule, jacobian, memory, other_jacobian)."
        )


def prepare(
    losses: LossFunction,
    params: Params,
    batch: tuple[Any, ...],
    rule: Aggregator,
    *,
    scale: ScaleState,
    buffers: Tree = (),
    has_aux: bool = False,
    engine: str | Engine = "auto",
    **fields: Any,
) -> tuple[Plan, Engine, EngineChoice]:
    """The plan of a step, its engine and why. The arguments are those of `step`, and other fields of `Plan`.

    Raises:
        TypeError: a scale that is no `ScaleState`.
        ValueError: an engine that is unknown, or does not give the rule what it needs.
    """
    if not isinstance(scale, ScaleState):  # pyright: ignore[reportUnnecessaryIsInstance]
        refuse("scale", "a ScaleState", scale, "Start it with scale_state(2.0**16); without one, no_scale().")
    kind, view = kind_of(losses), rule.view if isinstance(rule.view, View) else as_view(rule.view)
    place = engine.place() if isinstance(engine, Engine) and tree_leaves(buffers) else (0, 1)
    carrying = kind.carrying(losses, batch, Extras(buffers, has_aux, *place))
    factor = multiplier(scale) if isinstance(scale.growth_interval, Tensor) else None
    differentiable, leaves = is_differentiable((params, carrying.args, factor)), tree_leaves(params)
    whole = losses_of_shards(carrying.losses) if (sharded := any_sharded(leaves)) else carrying.losses
    plan = Plan(
        True,
        factor,
        differentiable,
        products=view.products,
        groups=None if view.groups is None else leaf_groups(kind.row_params(losses, params), view.groups),
        rule=rule,
        losses=whole,
        args=(params, *carrying.args),
        leaves=leaves,
        kind=kind if whole is carrying.losses else kind_of(whole),
        view=view,
        scale_state=scale,
        next_buffers=carrying.next_buffers,
        **fields,
    )
    if isinstance(engine, str) and engine == "auto":
        with_rows, shape = kind.row_params(losses, params), scale.scale.shape
        # torch 2.11 cannot compile `is` of dicts.
        own = leaves if not torch.compiler.is_compiling() and with_rows is params else tree_leaves(with_rows)
        m = shape[0] if shape else kind.expected_m(losses, batch, len(leaves) - len(own))
        choice = choose_engine(view, m, own, batch, kind, sharded=sharded)
        return plan, ENGINES[choice.engine], choice
    found = ENGINES.get(engine) if isinstance(engine, str) else engine
    if not isinstance(found, Engine):
        expected = f"one of auto, {', '.join(ENGINES)}, or made by jacobian_engine(...) and the like"
        refuse("engine", expected, engine, "'auto' takes the cheapest that the rule allows.", ValueError)
    found.check(plan)
    return plan, found, EngineChoice("", "it was named")


def chosen_engine(state: TrainState, *batch: Any, losses: LossFunction, aggregator: Aggregator) -> EngineChoice:
    """Which engine `step(engine="auto")` takes, and why.

    Args:
        state: from `train_state`.
        batch: what the losses take after the parameters and buffers; only shapes are read, nothing is evaluated.
        losses: as for `step`.
        aggregator: the rule.

    Returns:
        `EngineChoice(engine, reason)`: a name and a sentence.

    Guarantees:
        Shapes and dtypes decide, never values: eager and compiled steps, and steps under vmap, choose alike. A step
        with layers that its engine cannot follow forms all rows, and warns.

    Example:
        >>> params, x = {"w": torch.ones(3)}, torch.ones(2, 3)
        >>> losses = lambda params, x: x @ params["w"]
        >>> state = train_state(params, x, losses=losses, aggregator=upgrad(), optimizer=sgd(0.1))
        >>> chosen_engine(state, x, losses=losses, aggregator=upgrad()).engine
        'jacobian'
    """
    check_type("state", state, TrainState, START)
    check_function("losses", losses, "Pass losses(params, ...).")
    check_rule(aggregator)
    how: Any = {"scale": state.scale, "buffers": state.buffers}
    return prepare(losses, state.params, batch, aggregator, **how)[2]
