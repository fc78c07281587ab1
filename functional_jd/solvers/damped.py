"""Damped systems: `(A + damping 1) x = b` for a positive semi-definite A, by Cholesky's decomposition."""

import torch
from torch import Tensor

from functional_jd.core.safe import nan_unless, nonzero

# The rounding of A, and of its decomposition, as a fraction of its largest entry, times m.
_ROUNDING = 8 * torch.finfo(torch.float64).eps


def damped_solve(matrix: Tensor, b: Tensor, damping: Tensor | float) -> Tensor:
    """Solve `(A + (damping + ridge) 1) x = b`.

    The ridge, `8 m eps` times the largest entry of the diagonal, keeps the decomposition from breaking down where the
    damping is below the rounding of a singular A. For m = 600 it is at most 1e-12 of the largest eigenvalue.

    Args:
        matrix: A, float64 `[m, m]`, symmetric positive semi-definite.
        b: float64 `[m]`.
        damping: not negative; a number or a tensor `[]`.

    Returns:
        float64 `[m]`; NaN where an input is not finite.

    Laws:
        Linear in b. Composes with vmap, grad, jvp, compile, without synchronization. The ridge is constant to
        derivatives.
    """
    m = len(b)
    ridge = _ROUNDING * m * nonzero(matrix.detach().diagonal().amax())
    shift = damping + ridge
    # Without a matrix of zeros to be added.
    shifted = torch.diagonal_scatter(matrix, matrix.diagonal() + shift)
    factor, info = torch.linalg.cholesky_ex(shifted)
    # Not `cholesky_solve`, which copies the factor: with one right-hand side that takes longer than the rest.
    y = torch.linalg.solve_triangular(factor, b.unsqueeze(1), upper=False)
    x = torch.linalg.solve_triangular(factor.mT, y, upper=True).squeeze(1)
    # What is not finite stops the decomposition halfway, and leaves numbers that mean nothing.
    return nan_unless((info == 0) & (matrix.sum() + shift).isfinite(), x)
