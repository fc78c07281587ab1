"""Arithmetic in 80 decimal digits: floats are decimals exactly, so that only the code under test rounds."""

from decimal import Decimal, localcontext

import numpy as np
import torch

DIGITS = 80
# What is smaller, for numbers of order one, was zero before it was computed.
ZERO = Decimal(10) ** -50

ONE = Decimal(1)


def precisely():
    """The context that all of this is computed in: `with precisely(): ...`."""
    return localcontext(prec=DIGITS, Emin=-(10**9), Emax=10**9)


def decimals(x):
    """The numbers of a tensor or an array, exactly, as an array of the same shape."""
    values = np.asarray(x.detach().double() if isinstance(x, torch.Tensor) else x, dtype=object)
    return np.array([Decimal(float(v)) for v in values.ravel()], dtype=object).reshape(values.shape)


def floats(x):
    """The nearest float64 numbers, as a tensor."""
    return torch.tensor(np.asarray(x, dtype=object).astype(float))


def root(x):
    """Square roots, entry by entry."""
    return np.vectorize(lambda v: v.sqrt(), otypes=[object])(x)


def exp(x):
    return np.vectorize(lambda v: v.exp(), otypes=[object])(x)


def log(x):
    return np.vectorize(lambda v: v.ln(), otypes=[object])(x)


def length(x):
    return (x @ x).sqrt()


def lengths(J):
    return np.array([length(row) for row in J], dtype=object)


def unit_rows(J):
    """The rows divided by their norms, zeros where they are zero; and the norms, one where they are zero."""
    norms = np.array([norm or ONE for norm in lengths(J)], dtype=object)
    return J / norms[:, None], norms


def solved(A, B):
    """`A^-1 B` by elimination with the largest pivots; None if A, with entries of order one, is singular."""
    m, rows = len(A), np.concatenate([A, B.reshape(len(A), -1)], 1)
    for i in range(m):
        pivot = max(range(i, m), key=lambda k: abs(rows[k, i]))
        if abs(rows[pivot, i]) < ZERO:
            return None
        rows[[i, pivot]] = rows[[pivot, i]]
        rows[i] = rows[i] / rows[i, i]
        for k in range(m):
            if k != i and rows[k, i]:
                rows[k] = rows[k] - rows[k, i] * rows[i]
    return rows[:, m:].reshape(B.shape)


def eigen(A):
    """Eigenvalues and eigenvectors, as columns, of a symmetric matrix, by rotations after Jacobi."""
    A, V = A.copy(), np.array([[ONE * (i == j) for j in range(len(A))] for i in range(len(A))], dtype=object)
    m, size = len(A), sum(abs(x) for x in A.ravel())
    for _ in range(100):
        off = [(abs(A[i, j]), i, j) for i in range(m) for j in range(i)]
        if not off or max(off)[0] <= size * Decimal(10) ** (10 - DIGITS):
            break
        for _, i, j in off:
            if A[i, j]:
                ratio = (A[j, j] - A[i, i]) / (2 * A[i, j])
                t = (ONE if ratio >= 0 else -ONE) / (abs(ratio) + (ratio * ratio + 1).sqrt())
                c = 1 / (t * t + 1).sqrt()
                turn = np.array([[c, t * c], [-t * c, c]], dtype=object)
                for M in (A.T, A, V.T):
                    M[[i, j]] = turn.T @ M[[i, j]]
    return A.diagonal().copy(), V


def subsets(indices):
    """All of them, the empty one first."""
    indices = list(indices)
    return [[i for k, i in enumerate(indices) if bits >> k & 1] for bits in range(2 ** len(indices))]


def softmax(x):
    powers = exp(x - max(x))
    return powers / sum(powers)
