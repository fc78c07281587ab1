"""Tchebycheff: only the worst objective counts."""

from torch import Tensor

from functional_jd.aggregation.aggregate import Aggregator
from functional_jd.aggregation.lifts import scalarized
from functional_jd.aggregation.per_objective import Numbers, per_objective, preferences


def tchebycheff(weights: Numbers | None = None, reference: Numbers | None = None) -> Aggregator:
    """Descend the largest of the weighted losses.

    `s = max_i u_i (L_i - z_i)`, so `weights_i = u_i` for the i of the maximum, 0 for the others

    Args:
        weights: u `[m]`, how much each objective matters; `None` means `1 / m`.
        reference: z `[m]`, the best that each loss could be; `None` means 0.

    Returns:
        A rule that looks at the losses: one weighted backward pass is all it costs. Weights float64 `[m]`;
        differentiable with respect to `weights`; constant in the losses wherever one is the worst.

    Raises:
        TypeError: `weights` or `reference` not floating-point.
        ValueError: `weights` negative or all zero, either not finite or of another shape; at the call, not one per
            loss.

    Laws:
        s is the limit of `stch` for mu to 0. Of several worst objectives each gets an equal part of its weight: a
        subgradient, and the limit of `stch` too. Losses and reference times `c > 0` give the same weights. A loss that
        is NaN gives weights that are NaN.

    Source:
        Zhang & Li, MOEA/D: a multiobjective evolutionary algorithm based on decomposition, IEEE Transactions on
        Evolutionary Computation 11, 2007, section II: the Tchebycheff approach.

    Differs:
        The paper takes `|L_i - z_i|`, which is the same for a reference that no loss is below.
    """
    u = preferences(weights, "tchebycheff", "weights")
    z = per_objective(reference, "tchebycheff", "reference", otherwise=lambda _: 0.0)
    return scalarized(lambda losses: value(losses, u(losses), z(losses)))


def value(losses: Tensor, weights: Tensor | float, reference: Tensor | float = 0.0) -> Tensor:
    """The number that is descended."""
    return (weights * (losses - reference)).amax()
