"""Random orders in which the rows of a Jacobian meet each other."""

import torch
from torch import Tensor

from functional_jd.random import uniform


def random_visit_orders(key: Tensor, m: int) -> Tensor:
    """For every row a random order of all other rows, independent of the other orders.

    Args:
        key: int64 `[2]`; do not use it again.
        m: how many rows.

    Returns:
        int64 `[m, m - 1]`, on the key's device: row i holds all indices but i.

    Laws:
        Every order is equally likely, up to ties of 53-bit numbers, which are broken by index.
    """
    chances = uniform(key, (m, m), dtype=torch.float64)
    # Chances lie below one, so that every row comes last in its own order.
    return (chances + torch.eye(m, dtype=chances.dtype, device=chances.device)).argsort(dim=1, stable=True)[:, :-1]
