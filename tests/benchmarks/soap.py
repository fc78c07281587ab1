"""SOAP, a baseline: Adam in the eigenbasis of Shampoo's preconditioner (Vyas et al., arXiv 2409.11321, algorithm 3).

Wang et al. (arXiv 2502.00604) train networks that solve equations with it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

# The paper's defaults: of the mean gradient, of its square, and of the two factors; the bases turn in every tenth step.
BETAS = (0.95, 0.95, 0.95)
EVERY = 10
_EPS = 1e-8


class Moments(NamedTuple):
    """What SOAP keeps of a leaf; of a vector no factors and bases, so that it follows Adam.

    Attributes:
        first: the mean gradient, in the eigenbasis: projected with the rounding of `second`, which may be all there is.
        second: the mean square of the gradient in the eigenbasis.
        factors: the mean of G G' and that of G' G.
        bases: orthogonal matrices, near the eigenvectors of the factors.
    """

    first: Tensor
    second: Tensor
    factors: tuple[Tensor, ...]
    bases: tuple[Tensor, ...]


def start(gradient: Tensor) -> Moments:
    """Moments of zero, and the exact eigenbasis for the first gradient."""
    factors = _outer(gradient)
    bases = tuple(torch.linalg.eigh(factor).eigenvectors.flip(1) for factor in factors)
    return Moments(torch.zeros_like(gradient), torch.zeros_like(gradient), factors, bases)


def advance(leaf: Tensor, gradient: Tensor, moments: Moments, rate: Tensor, t: Tensor) -> tuple[Tensor, Moments]:
    """The `t`-th step, counted from 1, without the turn of the bases."""
    of_first, of_second, of_factors = BETAS
    projected = _into(moments.bases, gradient)
    first = of_first * moments.first + (1 - of_first) * projected
    second = of_second * moments.second + (1 - of_second) * projected.square()
    root = (second / (1 - of_second**t)).sqrt() + _EPS
    step = _out_of(moments.bases, first / (1 - of_first**t) / root)
    factors = tuple(
        of_factors * old + (1 - of_factors) * new for old, new in zip(moments.factors, _outer(gradient), strict=True)
    )
    return leaf - rate * step, Moments(first, second, factors, moments.bases)


def turned(moments: Moments) -> Moments:
    """The bases after one orthogonal iteration, a product and a QR decomposition; mean squares keep their vectors.

    The iteration pulls the first columns to the largest eigenvalues, so they are sorted before.
    """
    bases, second = [], moments.second
    for axis, (factor, basis) in enumerate(zip(moments.factors, moments.bases, strict=True)):
        product = factor @ basis
        order = (basis * product).sum(0).argsort(descending=True)
        bases.append(torch.linalg.qr(product[:, order]).Q)
        second = second.index_select(axis, order)
    first = _into(tuple(bases), _out_of(moments.bases, moments.first))
    return Moments(first, second, moments.factors, tuple(bases))


def _outer(gradient: Tensor) -> tuple[Tensor, ...]:
    return (gradient @ gradient.T, gradient.T @ gradient) if gradient.ndim == 2 else ()


def _into(bases: tuple[Tensor, ...], matrix: Tensor) -> Tensor:
    return bases[0].T @ matrix @ bases[1] if bases else matrix


def _out_of(bases: tuple[Tensor, ...], matrix: Tensor) -> Tensor:
    return bases[0] @ matrix @ bases[1].T if bases else matrix
