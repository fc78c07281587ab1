"""The plan of a derivative, each question answered once, and the record of an engine."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from torch import Tensor

from functional_jd.aggregation.observation import Observation
from functional_jd.core.record_display import displayed_as, outline
from functional_jd.core.types import Tree
from functional_jd.torch_compat.callers import here
from functional_jd.torch_compat.watching import StateJournal

LeafGroup: TypeAlias = tuple[str, int, str]
"""A group of leaves that follow one another: its name, how many they are, and what is needed of their products."""


class Plan(NamedTuple):
    """The request of an engine's caller: how to differentiate and, in a step, the losses at a point and the rule.

    Attributes:
        has_aux: whether the losses return `(losses, aux)`; in a step they return `(losses, (buffers, aux))`.
        scale: float32 `[]` or `[m]`, what cotangents are multiplied by, and gradients divided by; or None.
        differentiable: whether a transform is active, or an input requires grad.
        mode: how rows are differentiated: `"auto"`, `"vmap"` or `"loop"`.
        chunk_size: how many rows at once; None: all.
        journal: notes what the losses change in place, where they may have to be evaluated again; or None.
        examples: whether the losses that are evaluated are those of single examples.
        products: the products of rows that are needed: `"gramian"`, squared `"norms"`, or their `"factors"`.
        groups: the groups of leaves whose products are needed one by one; None for those of all leaves.
        on_shards: whether these are rows of shards, which all ranks must differentiate alike.
        argnums: the argument that is differentiated, or several; other than 0 for plain losses only.
        rule: the rule that weighs the losses; None if there is none.
        optimizer: where training starts, the optimizer, which all ranks must have alike.
        starting: whether training starts: several ranks compare what they are about to do.

    In a step only:
        losses: `losses(*args) -> (losses, (buffers, aux))`.
        args: the parameters, and the arguments that follow.
        leaves: the leaves of the parameters.
        kind: the `Kind`: how engines differentiate these losses.
        view: the `View`: what the rule receives.
        scale_state: the `ScaleState`; without scaling `no_scale()`, and then `scale` is None.
        guarded: whether a step is skipped for what is not finite, so that the rule need not see it.
        next_buffers: the buffers of the next step, from those that the losses returned.
    """

    has_aux: bool
    scale: Tensor | None
    differentiable: bool
    mode: str = "auto"
    chunk_size: int | None = None
    journal: StateJournal | None = None
    examples: bool = False
    products: Literal["none", "rows", "gramian", "norms", "factors"] = "gramian"
    groups: Sequence[LeafGroup] | None = None
    on_shards: bool = False
    argnums: int | Sequence[int] = 0
    rule: Any = None
    optimizer: Any = None
    starting: bool = False
    losses: Callable[..., Any] = lambda *_: ()
    args: tuple[Any, ...] = ()
    leaves: Sequence[Tensor] = ()
    kind: Any = None
    view: Any = None
    scale_state: Any = None
    guarded: bool = True
    next_buffers: Callable[[Tree], Tree] = lambda found: found


class RowsNeededError(Exception):
    """The Gramian cannot be found layer by layer: the rows are needed."""


@displayed_as(outline)
class Engine(NamedTuple):
    """How a step differentiates. `jacobian_engine`, `gramian_engine` and `weighted_engine` make one.

    Attributes:
        observe: `observe(plan)` returns an `Observation`: the losses, what the rule needs, and the pullback of weights.
        check: `check(plan)` raises ValueError unless the engine gives the rule what it needs.
        replicate: `replicate(tree)` returns the first replica's tensors on all; None: a single replica.
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
    """Raise ValueError in an engine's `check`, unless it `serves` the rule of `plan`.

    Args:
        plan: what `check` was given.
        name: the engine, as the user names it.
        serves: whether the engine gives the rule what `plan.view` needs.
        rules: what the rules need that it serves, in words.
    """
    if not serves:
        raise ValueError(
            f"{here()}: engine={name!r} serves rules that need {rules}, found a rule that needs {plan.view.needs}. "
            "Use engine='auto' or 'jacobian'."
        )
