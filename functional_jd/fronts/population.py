"""Rules for K solutions together: weights for all their losses at once."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_jd.aggregation.aggregate import Aggregator
from functional_jd.aggregation.lifts import stateless
from functional_jd.aggregation.views import View
from functional_jd.core.arguments import refuse
from functional_jd.core.record_display import displayed_as, outline
from functional_jd.core.tree import tree_leaves, tree_map
from functional_jd.core.types import Weights


@displayed_as(outline)
class Population(NamedTuple):
    """A rule for K solutions together, which `fronts.train` takes as its `rule`.

    Attributes:
        view: what it needs of each solution, such as `views.losses` or `views.gramian_and_losses`.
        weigh: `weigh(seen) -> [K, m]`, pure: the weights of all solutions, from their views, stacked.
    """

    view: View
    weigh: Callable[[Any], Weights]


def member(population: Population, index: Tensor) -> Aggregator:
    """The rule of one solution under a vmap over all; by itself it is a population of one."""
    return stateless(population.view, partial(_weights_of, population, index))


def _weights_of(population: Population, index: Tensor, seen: Any) -> Weights:
    everyone = tree_map(_everyone, seen)
    weights: Any = population.weigh(everyone)
    k = len(tree_leaves(everyone)[0])
    if not isinstance(weights, Tensor) or weights.ndim != 2 or len(weights) != k:
        cure = "Return one weight for each loss of each solution."
        refuse("weights of the population", f"[K, m] with K = {k}", weights, cure, ValueError)
    return weights.index_select(0, index.unsqueeze(0)).squeeze(0)


def _alone(x: Tensor) -> Tensor:
    return x.unsqueeze(0).clone()


_everyone: Any = torch.library.custom_op("functional_jd::everyone", _alone, mutates_args=())
"""The values of all elements of the innermost vmap, stacked, the same for each: an all-gather.

Constant to derivatives inside of that vmap; outside of it, it is a permutation of dimensions.
"""


@_everyone.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty((1, *x.shape))


@_everyone.register_vmap
def _(info: Any, in_dims: tuple[int | None], x: Tensor) -> tuple[Tensor, None]:
    dim = in_dims[0]
    return x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0), None
