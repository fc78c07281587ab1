"""The protocol of aggregation rules, their views, lifts from plain functions, and helpers that rules share."""

from functional_jd.aggregation.aggregate import Aggregation, Aggregator, aggregate
from functional_jd.aggregation.combine import combine
from functional_jd.aggregation.groups import from_part
from functional_jd.aggregation.held import held
from functional_jd.aggregation.lifts import scalarized, stateless
from functional_jd.core.heads import MultitaskJacobian
from functional_jd.core.types import AffineWeights

__all__ = [
    "AffineWeights",
    "Aggregation",
    "Aggregator",
    "MultitaskJacobian",
    "aggregate",
    "combine",
    "from_part",
    "held",
    "scalarized",
    "stateless",
]
