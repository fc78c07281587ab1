"""What a step is to do, each question answered once; and what an engine is."""

from collections.abc import Callable
from typing import Any, NamedTuple

from functional_jd.aggregation.aggregate import Aggregator
from functional_jd.aggregation.observation import Observation
from functional_jd.aggregation.views import View
from functional_jd.core.record_display import displayed_as, outline
from functional_jd.core.types import Tree
from functional_jd.engines.evaluate import Options
from functional_jd.engines.kinds.kind import Kind
from functional_jd.precision.scale_state import ScaleState


class Plan(NamedTuple):
    """Losses at a point, and the rule.

    Attributes:
        where: the function that the user called, for errors and warnings.
        losses: `losses(*args) -> (losses, (buffers, aux))`.
        args: the parameters, and what follows them.
        kind: how engines differentiate these losses.
        rule: the rule.
        view: what the rule receives.
        scale: the loss scale.
        options: how to differentiate; its scale is None where nothing is scaled.
        guarded: whether a step is skipped for what is not finite, so that the rule need not see it.
        next_buffers: the buffers of the next step, from those that the losses returned.
        optimizer: where training starts, the optimizer, which all ranks must have alike.
    """

    where: str
    losses: Callable[..., Any]
    args: tuple[Any, ...]
    kind: Kind
    rule: Aggregator
    view: View
    scale: ScaleState
    options: Options
    guarded: bool
    next_buffers: Callable[[Tree], Tree]
    optimizer: Any = None


@displayed_as(outline)
class Engine(NamedTuple):
    """How a step differentiates. `jacobian_engine`, `gramian_engine` and `weighted_engine` make one.

    Attributes:
        observe: `observe(plan)` returns an `Observation`: the losses, what the rule needs, and the pullback of weights.
        check: `check(plan)` raises ValueError unless the engine gives the rule what it needs.
        replicate: `replicate(tree)` returns the tensors that must be equal on all replicas, equal; None: there are no
            replicas.
        place: `place()` returns the rank of this process among the replicas, and how many they are.
    """

    observe: Callable[[Plan], Observation]
    check: Callable[[Plan], None] = lambda _plan: None
    replicate: Callable[[Tree], Tree] | None = None
    place: Callable[[], tuple[int, int]] = lambda: (0, 1)

    @property
    def is_replicated(self) -> bool:
        """Whether several replicas differentiate, each with a batch of its own."""
        return self.replicate is not None


def require(plan: Plan, name: str, *, serves: bool, rules: str) -> None:
    """Refuse a rule that an engine does not serve, in the engine's `check`.

    Args:
        plan: what `check` was given.
        name: the engine, as the user names it.
        serves: whether the engine gives the rule what `plan.view` says.
        rules: what the rules need that it serves, in words.

    Raises:
        ValueError: unless `serves`.
    """
    if not serves:
        raise ValueError(
            f"{plan.where}: engine={name!r} serves rules that need {rules}, found one that needs {plan.view.needs}. "
            "Use engine='auto' or 'jacobian'."
        )
