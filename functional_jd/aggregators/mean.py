"""Mean: every row counts the same, and all together count one."""

import torch

from functional_jd.aggregation.aggregate import Aggregator
from functional_jd.aggregation.lifts import stateless
from functional_jd.aggregation.views import no_gradients


def mean() -> Aggregator:
    """The mean of the rows: the direction of ordinary training on the mean of the losses.

    `weights_i = 1 / m`

    Returns:
        A rule that looks at nothing: one weighted backward pass is all it costs.

    Laws:
        Linear in the Jacobian; `mean() = total() / m`. It conflicts with a row whenever the others outweigh it.
    """
    return stateless(no_gradients, lambda seen: torch.full_like(seen, 1 / len(seen)))
