"""Differentiable functions: losses with a declared structure, modules as pure functions, trained and constant parts."""

from functional_jd.objectives.functional import functional
from functional_jd.objectives.over_shards import Sharded
from functional_jd.objectives.partition import merge, partition
from functional_jd.objectives.structured import ExampleSets, Multitask, PerExample, multitask, per_example
from functional_jd.objectives.structured import stacked as stacked

__all__ = [
    "ExampleSets",
    "Multitask",
    "PerExample",
    "Sharded",
    "functional",
    "merge",
    "multitask",
    "partition",
    "per_example",
]
