"""Functions of a positive semi-definite matrix by its eigenvalues, those that are only rounding left out."""

import torch
from torch import Tensor

from functional_jd.core.safe import divide, nan_unless

# Eigenvalues below this part of the largest one, per row, are rounding.
_CUT = 8 * torch.finfo(torch.float64).eps


def pseudo_inverse(matrix: Tensor) -> Tensor:
    """The inverse on the range, zero on its complement (Moore and Penrose).

    Args:
        matrix: float64 `[*, m, m]`, symmetric positive semi-definite.

    Returns:
        float64 `[*, m, m]`; NaN where the matrix is not finite.

    Laws:
        Composes with vmap, grad, jvp, compile; derivatives are right while the rank stays what it is, whether or not
        eigenvalues coincide. The decomposition waits for a device other than a CPU.
    """
    whole, finite = _finite(matrix)
    return nan_unless(finite, torch.linalg.pinv(whole, hermitian=True, rtol=_CUT * matrix.shape[-1]))


def inverse_root(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse square root on the range, zero on its complement; and the eigenvalues.

    The eigenvectors V are constant to derivatives. In their basis two chord steps solve `X A X = 1` on the range: as
    the k-th of them makes the k-th derivative right, first and second derivatives are right there, whether or not
    eigenvalues coincide, for only sums of roots are divided by.

    Args:
        matrix: A, float64 `[*, m, m]`, symmetric positive semi-definite.

    Returns:
        float64 `[*, m, m]` and the eigenvalues `[*, m]`, ascending, 0 for those that are only rounding; NaN where the
        matrix is not finite.

    Laws:
        Composes with vmap, grad, jvp, compile. First derivatives are right while the rank stays what it is, second ones
        if it is full; those of an eigenvalue where it is simple. The decomposition waits for a device other than a CPU.

    Source:
        Higham, Functions of Matrices, SIAM 2008, theorem 3.11 (divided differences), chapter 6 (roots by Newton).
    """
    whole, finite = _finite(matrix)
    spectrum, V = torch.linalg.eigh(whole.detach())
    kept = spectrum > _CUT * matrix.shape[-1] * spectrum[..., -1:]
    root = torch.where(kept, spectrum, 1).sqrt()
    turned = V.mT @ whole @ V
    change = turned - turned.detach()  # zero, but for its derivatives
    inverse_roots = torch.where(kept, spectrum, torch.inf).rsqrt()
    sums = root.unsqueeze(-1) + root.unsqueeze(-2)
    one = torch.diag_embed(kept.to(root.dtype))
    inverse = torch.diag_embed(inverse_roots)
    # The range turns too: between what is kept and what is not, the divided difference of f is that of a^(-1/2) and 0.
    border = inverse_roots.unsqueeze(-1) ** 3 * ~kept.unsqueeze(-2)
    for _ in range(2):
        inverse = inverse + (one - inverse @ turned @ inverse) / sums
    gaps = spectrum.unsqueeze(-1) - spectrum.unsqueeze(-2)
    bent = (change**2 * divide(1, gaps)).sum(-1)
    eigenvalues = torch.where(kept, turned.diagonal(dim1=-2, dim2=-1) + bent, 0)
    inverse = V @ (inverse + (border + border.mT) * change) @ V.mT
    return nan_unless(finite, inverse), nan_unless(finite.squeeze(-1), eigenvalues)


def _finite(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The matrix, or the identity if it is not finite, as decompositions raise; and whether it is, `[*, 1, 1]`."""
    finite = matrix.sum((-2, -1), keepdim=True).isfinite()
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    return torch.where(finite, matrix, eye), finite
