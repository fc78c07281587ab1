"""Constant: the rows count what the user says."""

from collections.abc import Sequence

import torch
from torch import Tensor

from functional_jd.aggregation import Aggregator, blank, stateless


def constant(weights: Tensor | Sequence[float]) -> Aggregator:
    """The sum of the rows with weights that are given: the direction of ordinary training on weighted losses.

    `weights_i = given_i`

    Args:
        weights: `[m]`, one per objective, floating-point; any sign, not normalised. Copied: what happens to the tensor
            afterwards is not seen. Keep it on the Jacobian's device, else every call copies it there.

    Returns:
        A rule that looks at nothing: one weighted backward pass is all it costs. Its weights are float64 and
        differentiable with respect to those given.

    Raises:
        TypeError: a tensor that is not floating-point.
        ValueError: not one-dimensional, or empty; at the call, not one weight per row.

    Laws:
        Linear in the Jacobian and in the weights; `constant([1/m] * m) = mean()`.
    """
    if isinstance(weights, Tensor) and not weights.is_floating_point():
        raise TypeError(
            f"constant: weights must be a floating-point tensor, found {weights.dtype}. Convert them with .double()."
        )
    given = torch.as_tensor(weights, dtype=torch.float64).clone()
    if given.ndim != 1 or len(given) == 0:
        raise ValueError(
            f"constant: weights must have shape [m], one per objective, found {list(given.shape)}. "
            "Flatten them in the order of the losses."
        )

    def weigh(seen: Tensor) -> Tensor:
        if len(seen) != len(given):
            raise ValueError(
                f"constant: expected one weight per row, found {len(given)} weights and {len(seen)} rows. "
                "Give as many weights as there are losses."
            )
        return given.to(seen.device)

    return stateless(blank, weigh)
