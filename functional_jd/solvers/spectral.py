"""Functions of a positive semi-definite matrix, with eigenvalues at rounding level treated as zero."""

import torch
from torch import Tensor

from functional_jd.core.safe import divide, nan_unless, nonzero
from functional_jd.solvers.search import solve
from functional_jd.torch_compat.torch_internals import dispatch_modes, under_transform

# Eigenvalues below this fraction of the largest, times m, are rounding, of the matrix and of its decomposition. Where
# the rank is clear, those that are kept are larger by the second factor.
_CUT, _GAP = 8 * torch.finfo(torch.float64).eps, 1e3
# Traces of inverses, which bound the largest eigenvalue, up to which solving by Cholesky factors is as good as exact.
_WELL_CONDITIONED = 1e6
# How much of `J'x` may be the rounding of a part of x that `J'` maps to zero.
_LOST = 1e-10


def pseudo_inverse(matrix: Tensor, rank: int | None = None) -> tuple[Tensor, Tensor]:
    """The inverse on the range, zero on its complement (Moore and Penrose); and the projection on the range. With a
    `rank`, the range is that of the largest eigenvalues, so many, and of those that equal the least of them.

    In the basis of its eigenvectors V, which are constant to derivatives, the matrix has blocks `S` and `D` of the
    eigenvalues that are kept and dropped, and `B` below S, with derivatives only. The range has the basis `T = [1, X]'`
    with `X S - D X = B` to third order in X. In it, the inverse is `T M (S - X'D X)^-1 M T'` and the projection is
    `T M T'`, with `M = (T'T)^-1 = 1 - X'X`. Two steps give the derivatives of X, and two those of the inverse.

    Guarantees:
        Float64 `[*, m, m]`; NaN where the matrix is not finite. Composes with vmap, grad, jvp, compile. First and
        second derivatives are correct where the rank is constant, also at repeated eigenvalues, unless one of these is
        kept and another dropped. The decomposition synchronizes with the device.
    """
    finite_matrix, finite = _finite_or_identity(matrix)
    spectrum, V, kept, change = _eigenbasis(finite_matrix)
    if rank is not None:
        kept = kept & (spectrum >= spectrum[..., -min(rank, spectrum.shape[-1]), None])
    one, dropped = torch.diag_embed(kept.to(spectrum.dtype)), torch.diag_embed(torch.where(kept, 0, spectrum))
    rotated, border = torch.diag_embed(spectrum) + change, ~kept.unsqueeze(-1) & kept.unsqueeze(-2)
    gaps = torch.where(border, nonzero(spectrum.unsqueeze(-2) - spectrum.unsqueeze(-1)), torch.inf)
    first = change / gaps
    X = first + (change - first @ rotated + rotated @ first) / gaps
    block = rotated - X.mT @ dropped @ X
    inverse = torch.diag_embed(1 / torch.where(kept, spectrum, torch.inf))
    for _ in range(2):
        inverse = inverse + inverse @ (one - block @ inverse)
    T = one + X
    left = T - T @ X.mT @ X
    inverse = V @ left @ inverse @ left.mT @ V.mT
    # From its complement, so that it is the identity exactly where no eigenvalue is dropped.
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    return nan_unless(finite, inverse), nan_unless(finite, eye - V @ (eye - left @ T.mT) @ V.mT)


def has_clear_rank(matrix: Tensor) -> bool:
    """Whether some eigenvalues are at rounding level, and all others far above them. Reads values."""
    spectrum = torch.linalg.eigvalsh(matrix)
    kept = spectrum > _CUT * len(spectrum) * spectrum[-1]
    largest_dropped = torch.where(kept, 0, spectrum.abs()).amax()
    return bool(~kept[0] & (torch.where(kept, spectrum, torch.inf).amin() > _GAP * largest_dropped))


def damped_weights(matrix: Tensor, b: Tensor, damping: Tensor | float) -> Tensor:
    """Solve `(A + damping 1) x = b` for a Gramian `A = J J'`, where only `J'x` counts.

    With `b = b_1 + b_0`, b_0 out of the range of A, x holds `b_0 / damping`, which `J'` maps to zero up to rounding.
    If that rounding is more than 1e-10 of `J'x`, and the rank of A is clear, x is the solution for `b_1`, by the
    pseudo-inverse, without a ridge.

    Otherwise as `damped_solve`, which it is under transforms and off the CPU. The rank is constant to derivatives.
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

    Guarantees:
        Float64 `[m]`; NaN where an input is not finite. Linear in b. Composes with vmap, grad, jvp, compile, without
        synchronization. The ridge is constant to derivatives.
    """
    m = len(b)
    ridge = _CUT * m * nonzero(matrix.detach().diagonal().amax())
    shift = damping + ridge
    factor, info = torch.linalg.cholesky_ex(torch.diagonal_scatter(matrix, matrix.diagonal() + shift))
    # What is not finite stops the decomposition halfway, and leaves numbers that mean nothing.
    return nan_unless((info == 0) & (matrix.sum() + shift).isfinite(), solve(factor, b))


def solve_well_conditioned(matrix: Tensor, right: Tensor) -> Tensor | None:
    """`A^-1 b` by a Cholesky factor, in a tenth of the time of `pseudo_inverse`. A is `[m, m]`, such as cosines; b
    is `[m]`. The result is differentiable. It is `None` where A is ill-conditioned or may not be read.
    """
    if not may_be_read(matrix):
        return None
    factor, failed = torch.linalg.cholesky_ex(matrix)
    if failed.item() or not torch.cholesky_inverse(factor.detach()).trace().item() < _WELL_CONDITIONED:
        return None
    return solve(factor, right)


def may_be_read(matrix: Tensor) -> bool:
    """Whether values can be looked at for nothing: on a CPU, and under no transform or mode."""
    return matrix.is_cpu and type(matrix) is Tensor and not under_transform() and not dispatch_modes()


def largest_eigenvalue(matrix: Tensor) -> Tensor:
    """The largest eigenvalue of float64 `[*, m, m]`, symmetric; NaN where the matrix is not finite. Composes with vmap,
    grad, jvp, compile; derivatives are correct where it is simple. Synchronizes with the device.
    """
    finite_matrix, finite = _finite_or_identity(matrix)
    return nan_unless(finite[..., 0, 0], torch.linalg.eigvalsh(finite_matrix)[..., -1])


def inverse_root(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse square root on the range, zero on its complement; and the eigenvalues.

    The eigenvectors V are constant to derivatives. In their basis two chord steps solve `X A X = 1` on the range: the
    k-th step makes the k-th derivative correct there, also at repeated eigenvalues.

    Returns:
        Float64 `[*, m, m]`; the eigenvalues `[*, m]`, ascending, 0 at rounding level. NaN where A is not finite.

    Guarantees:
        Composes with vmap, grad, jvp, compile. First derivatives are correct where the rank is constant, second ones
        where it is full; those of an eigenvalue where it is simple. The decomposition synchronizes with the device.

    Source:
        Higham, Functions of Matrices, SIAM 2008, theorem 3.11 (divided differences), chapter 6 (roots by Newton).
    """
    finite_matrix, finite = _finite_or_identity(matrix)
    spectrum, V, kept, change = _eigenbasis(finite_matrix)
    root = torch.where(kept, spectrum, 1).sqrt()
    rotated = V.mT @ finite_matrix @ V
    inverse_roots = torch.where(kept, spectrum, torch.inf).rsqrt()
    sums = root.unsqueeze(-1) + root.unsqueeze(-2)
    one = torch.diag_embed(kept.to(root.dtype))
    inverse = torch.diag_embed(inverse_roots)
    # The range rotates too: between kept and dropped eigenvalues the divided difference is that of a^(-1/2) and 0.
    border = inverse_roots.unsqueeze(-1) ** 3 * ~kept.unsqueeze(-2)
    for _ in range(2):
        inverse = inverse + (one - inverse @ rotated @ inverse) / sums
    gaps = spectrum.unsqueeze(-1) - spectrum.unsqueeze(-2)
    second_order = (change**2 * divide(1, gaps)).sum(-1)
    eigenvalues = torch.where(kept, rotated.diagonal(dim1=-2, dim2=-1) + second_order, 0)
    inverse = V @ (inverse + (border + border.mT) * change) @ V.mT
    return nan_unless(finite, inverse), nan_unless(finite.squeeze(-1), eigenvalues)


def _eigenbasis(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Eigenvalues and eigenvectors, constant to derivatives; which are kept; zero with the derivatives of `V'A V`."""
    spectrum, V = torch.linalg.eigh(matrix.detach())
    rotated = V.mT @ matrix @ V
    return spectrum, V, spectrum > _CUT * matrix.shape[-1] * spectrum[..., -1:], rotated - rotated.detach()


def _finite_or_identity(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The matrix, or the identity if it is not finite, as decompositions raise; and whether it is, `[*, 1, 1]`."""
    finite = matrix.sum((-2, -1), keepdim=True).isfinite()
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    return torch.where(finite, matrix, eye), finite
