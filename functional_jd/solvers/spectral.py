"""Functions of a positive semi-definite matrix, with eigenvalues at rounding level treated as zero."""

import torch
from torch import Tensor

from functional_jd.core.safe import divide, nan_unless

# Eigenvalues below this fraction of the largest, times m, are rounding.
_CUT = 8 * torch.finfo(torch.float64).eps


def pseudo_inverse(matrix: Tensor) -> Tensor:
    """The inverse on the range, zero on its complement (Moore and Penrose).

    Args:
        matrix: float64 `[*, m, m]`, symmetric positive semi-definite.

    Returns:
        float64 `[*, m, m]`; NaN where the matrix is not finite.

    Laws:
        Composes with vmap, grad, jvp, compile; derivatives are correct where the rank is constant, also at repeated
        eigenvalues. The decomposition synchronizes with the device.
    """
    finite_matrix, finite = _finite_or_identity(matrix)
    return nan_unless(finite, torch.linalg.pinv(finite_matrix, hermitian=True, rtol=_CUT * matrix.shape[-1]))


def inverse_root(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse square root on the range, zero on its complement; and the eigenvalues.

    The eigenvectors V are constant to derivatives. In their basis two chord steps solve `X A X = 1` on the range: the
    k-th step makes the k-th derivative correct there, also at repeated eigenvalues, since all denominators are sums of
    roots.

    Args:
        matrix: A, float64 `[*, m, m]`, symmetric positive semi-definite.

    Returns:
        float64 `[*, m, m]` and the eigenvalues `[*, m]`, ascending, 0 for those at rounding level; NaN where the matrix
        is not finite.

    Laws:
        Composes with vmap, grad, jvp, compile. First derivatives are correct where the rank is constant, second ones
        where it is full; those of an eigenvalue where it is simple. The decomposition synchronizes with the device.

    Source:
        Higham, Functions of Matrices, SIAM 2008, theorem 3.11 (divided differences), chapter 6 (roots by Newton).
    """
    finite_matrix, finite = _finite_or_identity(matrix)
    spectrum, V = torch.linalg.eigh(finite_matrix.detach())
    kept = spectrum > _CUT * matrix.shape[-1] * spectrum[..., -1:]
    root = torch.where(kept, spectrum, 1).sqrt()
    rotated = V.mT @ finite_matrix @ V
    change = rotated - rotated.detach()  # zero, except for its derivatives
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


def _finite_or_identity(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The matrix, or the identity if it is not finite, as decompositions raise; and whether it is, `[*, 1, 1]`."""
    finite = matrix.sum((-2, -1), keepdim=True).isfinite()
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    return torch.where(finite, matrix, eye), finite
