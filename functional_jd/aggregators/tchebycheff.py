"""Tchebycheff: the maximum of the weighted losses."""

from torch import Tensor

from functional_jd.aggregation import Aggregator, Numbers, per_objective, preferences, scalarized_with


def tchebycheff(weights: Numbers | None = None, reference: Numbers | None = None) -> Aggregator:
    """Minimise the largest of the weighted losses.

    `s = max_i u_i (L_i - z_i)`, so `weights_i = u_i` for the i of the maximum, 0 for the others

    Args:
        weights: u `[m]`, the importance of each objective. Default: `1 / m` each.
        reference: z `[m]`, the best value of each loss. Default: 0.

    Returns:
        A rule that needs the losses only. Weights are constant in the losses where the maximum is unique.

    Guarantees:
        The limit of `stch` for mu to 0. If several objectives attain the maximum, each gets an equal part of its
        weight. Invariant to multiplying losses and reference by `c > 0`.

    Source:
        Zhang & Li, MOEA/D, IEEE Transactions on Evolutionary Computation 11, 2007, section II, with `|L_i - z_i|`.
    """
    u = preferences("weights", weights)
    return scalarized_with(value, u, per_objective("reference", reference, default=lambda _: 0.0))


def value(losses: Tensor, weights: Tensor | float, reference: Tensor | float = 0.0) -> Tensor:
    """The scalarization of the losses."""
    return (weights * (losses - reference)).amax()
