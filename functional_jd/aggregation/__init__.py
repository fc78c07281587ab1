"""The protocol of aggregation rules, their views, lifts from plain functions, and all that rules are made of."""

# pyright: reportUnusedImport=false
# The files of rules import from here, more than `__all__` lists.

from functional_jd.aggregation.aggregate import Aggregation, Aggregator, aggregate, check_rule
from functional_jd.aggregation.aggregate import check_within, row_weights
from functional_jd.aggregation.combine import combine, zero_rows
from functional_jd.aggregation.groups import from_part, view_of_groups
from functional_jd.aggregation.hyper_parameters import FINITE, PREFERENCES, Numbers, per_objective, preferences
from functional_jd.aggregation.hyper_parameters import random_visit_orders, runs_on_host
from functional_jd.aggregation.lifts import held, learned_with, remembering, scalarized, scalarized_with, stateless
from functional_jd.aggregation.regularized import of_reached, of_some
from functional_jd.aggregation.observation import Observation
from functional_jd.aggregation.views import View, as_view, cross_gramian, equal_weights, full_jacobian, gramian
from functional_jd.aggregation.views import gramian_and_losses, jacobian_and_losses, jacobian_entries, loss_count
from functional_jd.aggregation.views import beside, divided, loss_vector, losses, narrowed, no_gradients, norms
from functional_jd.aggregation.views import norms_and_losses, places_of, with_losses
from functional_jd.core.heads import MultitaskJacobian
from functional_jd.core.types import AffineWeights, Gramian, Jacobian, Losses, Tree, Weights
from functional_jd.solvers.search import Solver

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
