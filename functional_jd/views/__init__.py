"""What a rule may look at: the views, for rules of your own."""

from functional_jd.aggregation.views import (
    View,
    cross_gramian,
    full_jacobian,
    gramian,
    gramian_and_losses,
    jacobian_and_losses,
    losses,
    no_gradients,
    norms,
    norms_and_losses,
    with_losses,
)

__all__ = [
    "View",
    "cross_gramian",
    "full_jacobian",
    "gramian",
    "gramian_and_losses",
    "jacobian_and_losses",
    "losses",
    "no_gradients",
    "norms",
    "norms_and_losses",
    "with_losses",
]
