"""Normalized: a rule that receives the rows divided by their norms, their losses, or both."""

from functools import reduce
from typing import Any, Literal

import torch
from torch import Tensor

from functional_jd.aggregation import Aggregator, Observation, Tree, check_within, row_weights
from functional_jd.aggregation.views import beside, divided, gramian, loss_vector, narrowed, norms
from functional_jd.core.arguments import POSITIVE, check_option
from functional_jd.core.safe import nan_unless, nonzero


def normalized(rule: Aggregator, by: Literal["norm", "loss", "both"] = "norm") -> Aggregator:
    """Give a rule the rows divided by their norms, by their losses, or by both.

    For rules that follow the longest or the shortest rows, such as `mgda`, and losses in units that cannot be compared.
    `direction = aggregate(rule, diag(1 / n) J).direction`; n is `|g_i|`, `L_i` or their product. Divided by its loss, a
    row is the gradient of the log loss.

    Args:
        rule: a rule with one weight per row.
        by: what rows are divided by: `"norm"`, `"loss"` or `"both"`.

    Returns:
        A rule that needs the norms of the rows or the losses, and all that `rule` does, with its state. It raises
        ValueError for a rule by groups or by entries.

    Guarantees:
        Invariant to the unit of a loss. It conflicts with no row if `rule` never does. Rows of zeros are not divided.
        If losses divide, negative ones give NaN, and 0 divides by 1; `train_state` raises for both.

    Source:
        Li et al., Gradient-adaptive policy optimization, ACL 2025, arXiv 2507.01915, for `mgda`; the choices of Sener &
        Koltun, NeurIPS 2018, whose code gives the weights of the divided rows to the rows themselves.
    """
    inner = check_within(rule)
    check_option("by", by, ("norm", "loss", "both"), 'The default is "norm".')

    def receive(seen: Observation) -> tuple[Any, Tensor]:
        if inner.products in ("gramian", "norms"):  # in float64, as rows that are divided are not
            known = gramian.receive(seen) if inner.products == "gramian" else norms.receive(seen).square()
            seen = seen._replace(products=known)
        n = [] if by == "loss" else [norms.receive(narrowed(seen, "norms"))]
        L = [] if by == "norm" else [loss_vector(seen.losses)]
        sizes = nonzero(reduce(torch.mul, [*n, *(nan_unless(x >= 0, x) for x in L)]))
        return inner.receive(narrowed(divided(seen, sizes), inner.products)), sizes

    def update(received: tuple[Any, Tensor], state: Tree) -> tuple[Tensor, Tree]:
        weights, state = rule.update(received[0], state)
        return row_weights(weights) / received[1], state

    view = beside(inner, "none" if by == "loss" else "norms", receive, losses=by != "norm")
    takes = rule.takes if by == "norm" else ("normalized", POSITIVE)
    return rule._replace(view=view, init=lambda received: rule.init(received[0]), update=update, takes=takes)
