"""Which derivatives are not finite, where all losses are."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from functional_jd.core.heads import split_heads
from functional_jd.core.names import objective_names
from functional_jd.core.tree import any_sharded, tree_leaves, tree_map, tree_names
from functional_jd.core.types import Tree
from functional_jd.torch_compat.slow_path import is_out_of_memory, random_state, set_random_state
from functional_jd.torch_compat.watching import StateJournal
from functional_jd.training.prepare import prepare
from functional_jd.training.state import StepInfo, TrainState
from functional_jd.training.step import step as step_of_package

# Rows of more elements are not formed for the sake of a message.
_MOST = 1 << 26


def bad_derivatives(step: Callable[..., Any], state: Any, batch: Sequence[Any], info: StepInfo) -> list[str]:
    """Return which rows are not finite without a loss scale, by objective and leaf, in words.

    The losses are differentiated once more, without a trace.

    Args:
        step: `functools.partial(step, **method)`, or that compiled; of other functions nothing is known.
        state: after the step, which was skipped: all but its scale is as before.
        batch: of the step.
        info: of the step.
    """
    take = _uncompiled(step)
    known = isinstance(take, partial) and _uncompiled(take.func) is step_of_package and isinstance(state, TrainState)
    if not known or take.args or any_sharded(tree_leaves(state.params)):
        return []
    if sum(x.numel() for x in tree_leaves(state.params)) * len(objective_names(info.losses)) > _MOST:
        return []
    given = {name: take.keywords.get(name, default) for name, default in (("has_aux", False), ("engine", "auto"))}
    method = take.keywords["losses"], state.params, tuple(batch), take.keywords["aggregator"]
    journal, draws = StateJournal(), random_state()
    try:
        with journal.watch():
            plan, _ = prepare("fit", *method, buffers=state.buffers, **given)
            jacobian, *_ = plan.kind.jacobian(plan.losses, plan.args, plan.options)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return []  # losses that fail eagerly, or without a scale, must not hide why steps were skipped
    finally:
        journal.undo()
        set_random_state(draws)
    rows, heads = split_heads(jacobian)
    found: list[str] = []
    for index, objective in enumerate(objective_names(info.losses)):
        lost = _lost(tree_map(lambda x: x[index], {"shared": rows} if heads else rows))  # noqa: B023
        found += [f"{name!r} of {objective!r}" for name in lost]
    return found + [f"{name!r} of some loss" for name in _lost({"heads": heads[0]} if heads else {})]


def _uncompiled(f: Any) -> Any:
    """What torch.compile was given."""
    while not isinstance(f, partial) and hasattr(f, "__wrapped__"):
        f = f.__wrapped__
    return f


def _lost(tree: Tree) -> list[str]:
    """The names of the leaves that are not finite."""
    return [name for name, x in zip(tree_names(tree), tree_leaves(tree), strict=True) if not x.isfinite().all()]
