"""Damped systems: `(A + damping 1) x = b` for a positive semi-definite A, by Cholesky's decomposition."""

import torch
from torch import Tensor

from functional_jd.core.safe import nan_unless, nonzero
from functional_jd.solvers.search import solve
from functional_jd.solvers.spectral import has_clear_rank, may_be_read, pseudo_inverse

# The rounding of A, and of its decomposition, as a fraction of its largest entry, times m.
_ROUNDING = 8 * torch.finfo(torch.float64).eps

# How much of `J'x` may be the rounding of a part of x that `J'` maps to zero.
_LOST = 1e-10


def damped_weights(matrix: Tensor, b: Tensor, damping: Tensor | float) -> Tensor:
    """Solve `(A + damping 1) x = b` for a Gramian `A = J J'`, where `J'x` is what counts.

    With `b = b_1 + b_0`, b_0 out of the range of A, x holds `b_0 / damping`, which `J'` maps to zero but for rounding.
    If that rounding is more than 1e-10 of `J'x`, and the rank of A is clear, x is the solution for `b_1`, by the
    pseudo-inverse, without a ridge.

    Arguments, results and laws are those of `damped_solve`, which it is under transforms and off the CPU, where values
    cannot be looked at for nothing. The rank is constant to derivatives.
    """
    x = damped_solve(matrix, b, damping)
    if not may_be_read(matrix):
        return x
    at, A = x.detach(), matrix.detach()
    lost = torch.finfo(torch.float64).eps ** 2 * A.trace() * (at @ at)
    if not (lost > _LOST**2 * (at @ (A @ at))).item() or not has_clear_rank(A):
        return x
    inverse, _ = pseudo_inverse(matrix)
    # 1 / (a + damping) of every eigenvalue a that is kept, from 1 / a.
    return damped_solve(damping * inverse, inverse @ b, 1.0)


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
    # What is not finite stops the decomposition halfway, and leaves numbers that mean nothing.
    return nan_unless((info == 0) & (matrix.sum() + shift).isfinite(), solve(factor, b))
