"""Evenly spread preferences."""

from itertools import combinations
from math import comb

import torch
from torch import Tensor

from functional_jd.core.arguments import check_integer, refuse

_MOST = 2**20


def lattice(m: int, divisions: int) -> Tensor:
    """Return preferences that are spread evenly over the simplex.

    All `u >= 0` with `sum_i u_i = 1` whose entries are multiples of `1 / divisions`, in ascending order.

    Args:
        m: the number of objectives.
        divisions: into how many parts each edge of the simplex is divided.

    Returns:
        float64 `[K, m]`, with `K = (divisions + m - 1)! / (divisions! (m - 1)!)`: `divisions + 1` for two objectives;
        at most 2^20.

    Laws:
        The rows are distinct; a permutation of the columns gives the same set. The corners, which leave all objectives
        but one aside, are among them; those of `divisions >= m` hold points with all entries positive.

    Source:
        Das & Dennis, Normal-boundary intersection: a new method for generating the Pareto surface in nonlinear
        multicriteria optimization problems, SIAM Journal on Optimization 8, 1998, section 3.3.

    Example:
        >>> lattice(2, 4)[:, 0]
        tensor([0.0000, 0.2500, 0.5000, 0.7500, 1.0000], dtype=torch.float64)
    """
    check_integer("lattice", "m", m, 1, "It counts objectives.")
    check_integer("lattice", "divisions", divisions, 1, "For two objectives there are divisions + 1 preferences.")
    count = comb(divisions + m - 1, m - 1)
    if count > _MOST:
        expected = f"such that there are at most 2^20 preferences, not {count},"
        refuse("lattice", "divisions", expected, divisions, "Take fewer.", ValueError)
    # A preference is a row of `divisions` stars that m - 1 bars part: entry i counts the stars before bar i.
    places = list(combinations(range(divisions + m - 1), m - 1))
    bars = torch.tensor(places, dtype=torch.float64).reshape(count, m - 1)
    edges = torch.nn.functional.pad(bars, (1, 0), value=-1.0)
    ends = torch.nn.functional.pad(bars, (0, 1), value=divisions + m - 1.0)
    return (ends - edges - 1) / divisions
