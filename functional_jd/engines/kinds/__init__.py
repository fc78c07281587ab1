"""Kinds of objectives: the one place that tells them apart. A new kind is one file here, and a line in the table."""

from collections.abc import Sequence
from typing import Any

from functional_jd.core.sharding import any_sharded
from functional_jd.engines.kinds.example_sets import EXAMPLE_SETS
from functional_jd.engines.kinds.kind import Kind
from functional_jd.engines.kinds.multitask import MULTITASK
from functional_jd.engines.kinds.per_example import PER_EXAMPLE
from functional_jd.engines.kinds.plain import PLAIN
from functional_jd.engines.kinds.shards import SHARDED
from functional_jd.objectives import ExampleSets, Multitask, PerExample, Sharded

KINDS: dict[type, Kind] = {
    PerExample: PER_EXAMPLE,
    ExampleSets: EXAMPLE_SETS,
    Multitask: MULTITASK,
    Sharded: SHARDED,
}


def kind_of(losses: Any, argnums: int | Sequence[int] = 0) -> Kind:
    """How engines differentiate these losses: what their class, or a base of it, has in the table, or says itself by an
    attribute `kind`. With respect to other arguments than 0, the structure is not used.
    """
    if argnums != 0 and type(losses) is not Sharded:
        return PLAIN
    for base in type(losses).__mro__:
        found = KINDS.get(base) or base.__dict__.get("kind")
        if isinstance(found, Kind):
            return found
    return PLAIN


def of_arguments(losses: Any, leaves: Sequence[Any]) -> Any:
    """The losses, as those of sharded parameters if some leaves of what is differentiated are `DTensor`s."""
    if type(losses) is Sharded or not any_sharded(leaves):
        return losses
    return Sharded(losses, None)
