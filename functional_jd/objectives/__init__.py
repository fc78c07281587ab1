"""What is differentiated: losses with a declared structure, modules as pure functions, trained and constant parts."""

from functional_jd.objectives.functional import functional
from functional_jd.objectives.over_shards import Sharded
from functional_jd.objectives.partition import merge, partition
from functional_jd.objectives.structured import (
    Dims,
    ExampleSets,
    Multitask,
    PerExample,
    multitask,
    per_example,
    stacked,
)

__all__ = [
    "Dims",
    "ExampleSets",
    "Multitask",
    "PerExample",
    "Sharded",
    "functional",
    "merge",
    "multitask",
    "partition",
    "per_example",
    "stacked",
]
