"""Random orders in which a rule visits the rows of a Jacobian."""

import torch
from torch import Tensor

from functional_jd.random import uniform


def random_visit_orders(key: Tensor, m: int) -> Tensor:
    """For every row, an independent random order of all other rows: int64 `[m, m - 1]`, row i with all indices but i.

    All orders are equally likely, up to ties of 53-bit numbers, which are broken by index. Do not use the key again.
    """
    if m <= 2:
        return torch.arange(m, device=key.device).flip(0).unsqueeze(1)[:, : m - 1]
    numbers = uniform(key, (m, m), dtype=torch.float64)
    # The numbers are below one, so that every row comes last in its own order.
    return (numbers + torch.eye(m, dtype=numbers.dtype, device=numbers.device)).argsort(dim=1, stable=True)[:, :-1]
