"""Krum: the mean of the rows that are closest to their neighbours."""

import torch

from functional_jd.aggregation import Aggregator, Gramian, Weights, gramian, stateless
from functional_jd.core.arguments import check_integer
from functional_jd.core.safe import with_nan_of


def krum(n_byzantine: int, n_selected: int = 1) -> Aggregator:
    """The mean of the rows that are closest to their neighbours, robust to some arbitrarily wrong rows.

    `score_i = sum |g_i - g_j|^2` over the `m - n_byzantine - 2` rows g_j, j != i, that are closest to g_i; `weights_i =
    1 / n_selected` for the `n_selected` lowest scores, else 0.

    Args:
        n_byzantine: number of rows that may be wrong, at least 0.
        n_selected: number of rows to average, at least 1; 1 is Krum, more is Multi-Krum.

    Returns:
        A rule that needs the Gramian. Derivatives are 0, which is right where no two scores are equal.

    Guarantees:
        Equivariant under rotation, scaling and translation of all rows: rows are told apart if they differ by more than
        1e-7 of their norms. Equal scores are taken in the order of the rows. The paper's guarantee holds for `m > 2
        n_byzantine + 2`.

    Source:
        Blanchard et al., NeurIPS 2017, section 4; the authors' code adds up distances, not their squares.
    """
    check_integer("n_byzantine", n_byzantine, 0, "It counts rows.")
    check_integer("n_selected", n_selected, 1, "It counts rows.")

    def weigh(G: Gramian) -> Weights:
        m = len(G)
        if m < n_byzantine + 3 or m < n_selected:
            raise ValueError(
                f"krum: expected at least {max(n_byzantine + 3, n_selected)} rows, with n_byzantine={n_byzantine} and "
                f"n_selected={n_selected}, found {m}. Use more objectives, or lower these numbers."
            )
        squares, eye = G.detach().diagonal(), torch.eye(m, dtype=torch.bool, device=G.device)
        distances = squares + squares.unsqueeze(1) - (G + G.mT).detach()  # rounding breaks no tie
        closest = torch.where(eye, torch.inf, distances).sort(dim=1).values[:, : m - n_byzantine - 2]
        selected = closest.sum(1).argsort(stable=True)[:n_selected]
        return with_nan_of(torch.zeros_like(squares).scatter(0, selected, 1 / n_selected), G.sum())

    return stateless(gramian, weigh)
