"""What a rule may look at: the views, for rules of your own."""

from functional_jd.aggregation.views import cross_gramian, full_jacobian, gramian, losses, no_gradients, norms

__all__ = ["cross_gramian", "full_jacobian", "gramian", "losses", "no_gradients", "norms"]
