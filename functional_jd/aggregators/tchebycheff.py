"""Tchebycheff: the maximum of the weighted losses."""

from torch import Tensor

from functional_jd.aggregation.aggregate import Aggregator
from functional_jd.aggregation.hyper_parameters import Numbers, per_objective, preferences
from functional_jd.aggregation.lifts import scalarized_with


def tchebycheff(weights: Numbers | None = None, reference: Numbers | None = None) -> Aggregator:
    """Minimise the largest of the weighted losses.

    `s = max_i u_i (L_i - z_i)`, so `weights_i = u_i` for the i of the maximum, 0 for the others

    Args:
        weights: u `[m]`, the importance of each objective; `None` means `1 / m`.
        reference: z `[m]`, the best value of each loss; `None` means 0.

    Returns:
        A rule that needs the losses only: a step costs one weighted backward pass. Weights float64 `[m]`;
        differentiable with respect to `weights`; constant in the losses where the maximum is unique.

    Guarantees:
        s is the limit of `stch` for mu to 0. Where several objectives attain it, each gets an equal part of its weight:
        a subgradient, and the limit of `stch` too. Invariant to multiplying losses and reference by `c > 0`. A NaN loss
        gives NaN weights.

    Source:
        Zhang & Li, MOEA/D: a multiobjective evolutionary algorithm based on decomposition, IEEE Transactions on
        Evolutionary Computation 11, 2007, section II: the Tchebycheff approach.

    Differences:
        The paper takes `|L_i - z_i|`, which is the same if no loss is below its reference.
    """
    u = preferences("weights", weights)
    z = per_objective("reference", reference, default=lambda _: 0.0)
    return scalarized_with(value, u, z)


def value(losses: Tensor, weights: Tensor | float, reference: Tensor | float = 0.0) -> Tensor:
    """The scalarization of the losses."""
    return (weights * (losses - reference)).amax()
