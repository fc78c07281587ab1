"""Many complementarity problems of one matrix, solved by products with all of them: no problem has its own factor."""

from typing import NamedTuple

import torch
from torch import Tensor

# Of the alternating direction method: few steps at each of these for matrices of cosines, of whatever rank.
_DAMPING, _RELAXATION = 0.5, 1.8
# Steps for a guess, and after how many of them the active sets are compared; a guess is good if so many have settled.
_GUESSES, _COMPARED, _SETTLED = 60, 5, 0.9
# Corrections in float32, each by so many steps of conjugate gradients: what has not converged then is ill-conditioned.
_CORRECTIONS, _GRADIENTS = 4, 80
# Residual of a correction, relative to what it corrects, below which float32 has nothing to add.
_CORRECTED = 1e-5
# Curvature, relative to the matrix, below which a direction of conjugate gradients is rounding: rows are dependent.
_FLAT = 1e-5
# Multipliers of this norm tell that rows are dependent or nearly so: their residuals say nothing of the signs.
_LARGEST = 100.0
# Rounds of exchanges after the guess, each for the problems with wrong signs.
_EXCHANGES = 4


class Found(NamedTuple):
    """Multipliers, active set and entries of the wrong sign, `[b, k, m]` each; whether solved, `[b, k, 1]`."""

    s: Tensor
    active: Tensor
    wrong: Tensor
    solved: Tensor


def solve_by_products(matrix: Tensor, offset: Tensor, allowed: Tensor, tolerance: float) -> Found:
    """Solve the problems of `linear_complementarity` whose active part is well-conditioned, or consistently singular.

    The active sets are guessed by the alternating direction method. On each, conjugate gradients solve
    `(M s + q)_F = 0`, in float32, as corrections of s, whose residuals are computed in float64 until they are rounding.
    Then entries of the wrong sign enter or leave the active set. All of it is products `[k, m] @ [m, m]`, where a
    factor for each problem would take `k m^3 / 3` multiplications and `k m^2` memory. `[b, m, m]` and `[b, k, m]` are
    the shapes, and the tolerance is relative to `1 + sum(s)`. A solved problem meets the conditions to rounding, or its
    values are not finite.
    """
    rough = matrix.float()
    guess = guessed_multipliers(rough, offset.float(), allowed)
    found = _on_active_set(matrix, rough, offset, allowed, guess.double(), guess > 0, tolerance)
    for _ in range(_EXCHANGES):
        picked = (~found.solved).any(0).squeeze(-1).nonzero().squeeze(-1)
        if not len(picked):
            break
        old = Found(*(x[:, picked] for x in found))
        q, free = offset[:, picked], allowed[:, picked]
        new = _on_active_set(matrix, rough, q, free, old.s, old.active ^ old.wrong, tolerance)
        found = Found(
            *(x.index_copy(1, picked, torch.where(old.solved, y, z)) for x, y, z in zip(found, old, new, strict=True))
        )
    return found


def guessed_multipliers(matrix: Tensor, offset: Tensor, allowed: Tensor) -> Tensor:
    """Multipliers after over-relaxed steps of the alternating direction method: one inverse, then products."""
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    resolvent = torch.linalg.inv_ex(matrix + _DAMPING * eye)[0]
    s = dual = torch.zeros_like(offset)
    active = s > 0
    for step in range(_GUESSES):
        raw = torch.lerp(s, (_DAMPING * (s - dual) - offset) @ resolvent, _RELAXATION) + dual
        s = raw.clamp(min=0) * allowed
        dual = raw - s
        if step % _COMPARED == _COMPARED - 1:
            before, active = active, s > 0
            if (before == active).all(-1).double().mean() >= _SETTLED:
                break
    return s


def _on_active_set(
    M: Tensor, rough: Tensor, q: Tensor, free: Tensor, s: Tensor, active: Tensor, tolerance: float
) -> Found:
    s, mask = torch.where(active, s, 0), active.to(rough.dtype)
    remaining = _CORRECTIONS
    while True:
        w = torch.baddbmm(q, s, M)
        size = 1 + torch.linalg.vector_norm(s, dim=-1, keepdim=True)
        residual = torch.where(active, w, 0)
        running = (residual.abs() > 4 * torch.finfo(w.dtype).eps * size).any(-1, keepdim=True)
        if remaining == 0 or not running.any():
            break
        remaining -= 1
        s = s - _conjugate_gradients(rough, torch.where(running, residual, 0).to(rough.dtype), mask)
    wrong = (torch.where(active, s, w) < -tolerance * size) & free
    return Found(s, active, wrong, ~(running | wrong.any(-1, keepdim=True) | (size > _LARGEST)))


def _conjugate_gradients(matrix: Tensor, right: Tensor, mask: Tensor) -> Tensor:
    """Nearly `x = (M_FF)^-1 right`, for right-hand sides `[b, k, m]` that are zero outside their F."""
    x, residual, direction = torch.zeros_like(right), right, right
    square = torch.linalg.vecdot(right, right).unsqueeze(-1)
    enough = _CORRECTED**2 * square
    flat = _FLAT * matrix.diagonal(dim1=-2, dim2=-1).amax(-1)[:, None, None]
    for _ in range(_GRADIENTS):
        image = (direction @ matrix) * mask
        curvature = torch.linalg.vecdot(direction, image).unsqueeze(-1)
        steep = curvature > flat * torch.linalg.vecdot(direction, direction).unsqueeze(-1)
        length = torch.where(steep, square / curvature, 0)
        x, residual = torch.addcmul(x, length, direction), torch.addcmul(residual, length, image, value=-1)
        before, square = square, torch.linalg.vecdot(residual, residual).unsqueeze(-1)
        if not (square > enough).any():
            break
        direction = torch.addcmul(residual, torch.where(before > 0, square / before, 0), direction)
    return x
