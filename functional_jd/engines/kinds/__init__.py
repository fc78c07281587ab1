"""Kinds of objectives: the one place that tells them apart. A new kind is one file here, and a line in the table."""

from collections.abc import Sequence
from typing import Any

from functional_jd.core.tree import any_sharded, tree_leaves
from functional_jd.engines.evaluate import select_arguments
from functional_jd.engines.kinds.examples import EXAMPLE_SETS, PER_EXAMPLE
from functional_jd.engines.kinds.kind import Kind
from functional_jd.engines.kinds.multitask import MULTITASK
from functional_jd.engines.kinds.plain import PLAIN
from functional_jd.engines.kinds.shards import sharded
from functional_jd.objectives import ExampleSets, Multitask, PerExample, Sharded

KINDS: dict[type, Kind] = {PerExample: PER_EXAMPLE, ExampleSets: EXAMPLE_SETS, Multitask: MULTITASK}


def kind_of(losses: Any, argnums: int | Sequence[int] = 0) -> Kind:
    """Return the kind of losses: the attribute `kind` of their class if it is a `Kind`; else the entry of the class, or
    of its first base that has one, in `KINDS`; else `PLAIN`. If they are differentiated with respect to other arguments
    than the first, they are plain too: only parameters have a structure.
    """
    if isinstance(losses, Sharded):
        return sharded(kind_of(losses.losses))
    if argnums != 0:
        return PLAIN
    said = getattr(type(losses), "kind", None)
    if isinstance(said, Kind):
        return said
    for base in type(losses).__mro__:
        if base in KINDS:
            return KINDS[base]
    return PLAIN


def losses_of_shards(losses: Any) -> Any:
    """The losses, as those of sharded parameters: some of the leaves to differentiate are `DTensor`s."""
    return losses if isinstance(losses, Sharded) else Sharded(losses, None)


def found_kind(losses: Any, argnums: int | Sequence[int], args: tuple[Any, ...]) -> tuple[Any, Kind]:
    """The losses, as those of sharded parameters if they are, and their kind. Raises ValueError for wrong `argnums`."""
    chosen, _ = select_arguments(argnums, args)
    whole = losses_of_shards(losses) if any_sharded(tree_leaves(chosen)) else losses
    return whole, kind_of(whole, argnums)
