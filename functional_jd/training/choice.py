"""Which engine a step takes."""

from typing import Any, NoReturn

from torch import Tensor

from functional_jd.aggregation.aggregate import Aggregator, check_rule
from functional_jd.core.arguments import check_function, refuse
from functional_jd.core.tree import tree_leaves
from functional_jd.core.types import LossFunction
from functional_jd.engines.choose import EngineChoice, choose_engine
from functional_jd.engines.kinds import kind_of
from functional_jd.training.engines import ENGINES, Engine, Problem
from functional_jd.training.state import TrainState, check_state


def chosen_engine(losses: LossFunction, state: TrainState, *batch: Any, aggregator: Aggregator) -> EngineChoice:
    """Which engine `step(engine="auto")` takes, and why.

    Args:
        losses: as for `step`.
        state: from `train_state`.
        batch: what the losses take after the parameters and buffers; only shapes are read, nothing is evaluated.
        aggregator: the rule.

    Returns:
        `EngineChoice(engine, reason)`: a name and a sentence.

    Raises:
        TypeError, ValueError: what is no rule; a batch or parameters that do not fit the losses' structure.

    Laws:
        Shapes and dtypes decide, never values: eager and compiled steps, and steps under vmap, choose alike.

    Example:
        >>> params, x = {"w": torch.ones(3)}, torch.ones(2, 3)
        >>> losses = lambda params, x: x @ params["w"]
        >>> method = {"losses": losses, "aggregator": upgrad(), "optimizer": sgd(0.1)}
        >>> chosen_engine(losses, train_state(params, x, **method), x, aggregator=upgrad()).engine
        'jacobian'
    """
    check_state("chosen_engine", state)
    check_function("chosen_engine", "losses", losses, "Pass losses(params, ...).")
    check_rule(aggregator, "chosen_engine")
    return _choice(losses, state, batch, aggregator)


def _choice(losses: LossFunction, state: TrainState, batch: tuple[Any, ...], aggregator: Aggregator) -> EngineChoice:
    """`chosen_engine` of arguments that were checked."""
    kind, scale = kind_of(losses), state.scale.scale
    m = len(scale) if scale.ndim else kind.objectives(losses, state.params, batch)
    leaves = tree_leaves(kind.row_params(losses, state.params))
    positions, examples = _positions(batch), kind.rows_are_examples
    return choose_engine(aggregator, m, leaves, scale, positions=positions, examples=examples)


def _positions(batch: tuple[Any, ...]) -> int:
    """At how many positions a linear layer would be applied to the first tensor of the batch, mostly the input: as many
    as it has elements, but for the last dimension of features.
    """
    first = next((x for argument in batch for x in tree_leaves(argument) if isinstance(x, Tensor)), None)  # pyright: ignore[reportUnnecessaryIsInstance]
    if first is None:
        return 1
    return first.shape[:-1].numel() if first.ndim > 1 and first.is_floating_point() else first.numel()


def find_engine(
    engine: str | Engine, where: str, problem: Problem, state: TrainState, losses: LossFunction, batch: tuple[Any, ...]
) -> Engine:
    """The engine that the user named or made, if it gives the rule what it needs."""
    if isinstance(engine, str) and engine == "auto":
        return ENGINES[_choice(losses, state, batch, problem.aggregator).engine]
    found = ENGINES.get(engine) if isinstance(engine, str) else engine
    if not isinstance(found, Engine):
        refuse_engine(where, engine)
    found.check(where, problem)
    return found


def refuse_engine(where: str, engine: Any) -> NoReturn:
    """Raise the error of what is neither the name of an engine nor an engine."""
    expected = f"one of auto, {', '.join(ENGINES)}, or made by jacobian_engine(...) and the like"
    refuse(where, "engine", expected, engine, "'auto' takes the cheapest that the rule allows.", ValueError)
