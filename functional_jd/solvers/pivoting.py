"""Linear complementarity by a monotone active-set method on a tableau: exact on dependent and ill-conditioned rows.

With the rows F active, the tableau `T, t` gives s on F, and elsewhere `w = M s + q`: `(s_F, w_other) = T (w_F, s_other)
+ t`. So its block of F is the inverse of `M_FF`, and t has the multipliers at the minimum on F. A step is one of two,
until no sign is wrong:

- An entry of t on F is not positive: walk towards the minimum until the first multiplier is zero, which leaves F.
- Else s is t on F. The entry along which the objective decreases most enters F. If its row depends on those in F, it
  takes the place of the one whose multiplier is the first to vanish as its own grows.

No step increases the objective, so that no set F returns. Nothing needs an interior, which the dual cone of dependent
rows lacks. At the end, chord steps refine s by M itself. If signs are wrong then, or residuals large, the tableau has
lost its digits: it is made again from M, by the largest pivots first, and the method starts again at s.

`one_launch` has the same method for an accelerator.

Source:
    Lawson & Hanson, Solving least squares problems, 1974, chapter 23; Cottle, Pang & Stone, The linear complementarity
    problem, 1992, section 2.3 (principal pivots).
"""

import torch
from torch import Tensor

from functional_jd.solvers.search import matvec

# How far below zero an entry may lie, relative to `1 + sum(s)`: a few hundred roundings.
TOLERANCE = 1e-13
# How often a tableau is made; on a device, where nothing may look, always twice.
_TABLEAUS, _BLIND_TABLEAUS = 4, 2

# Of n problems: T `[n, m, m]`; t, the active rows and the current multipliers, `[n, m]` each.
_Tableau = tuple[Tensor, Tensor, Tensor, Tensor]
_Stepped = tuple[_Tableau, Tensor, Tensor]


def least_pivot(m: int) -> float:
    """The largest pivot, of a matrix of cosines, that counts as zero: its row depends on the active ones."""
    return 12 * m * torch.finfo(torch.float64).eps


def solve_by_pivots(M: Tensor, q: Tensor, free: Tensor, looks: bool = True) -> tuple[Tensor, Tensor]:
    """Solve the problems of `linear_complementarity`, one for each matrix.

    With `looks`, it stops when all problems are solved; else it takes `8 m + 24` steps, looks at no value, and lets no
    row take the place of another. Returns s, `[n, m]`, NaN if none was found; and the inverses of the active
    parts of M, else zero, `[n, m, m]`.
    """
    found, left = _by_one_tableau(M, q, free, torch.zeros_like(q), looks, looks), torch.arange(len(q), device=q.device)
    tableaus = _TABLEAUS if looks else _BLIND_TABLEAUS
    for k in range(1, tableaus + looks):
        again = k < tableaus  # the last one begins anew, and no row takes the place of another
        if looks:
            left = (~found[2] if again else _is_wrong(M, q, free, found[0])).squeeze(-1).nonzero().squeeze(-1)
        if len(left):
            new = _by_one_tableau(M[left], q[left], free[left], found[0][left] * again, looks, looks and again)
            found = [x.index_copy(0, left, y) for x, y in zip(found, new, strict=True)]
    return found[0].masked_fill(_is_wrong(M, q, free, found[0]), torch.nan), found[1]


def _is_wrong(M: Tensor, q: Tensor, free: Tensor, s: Tensor) -> Tensor:
    """Whether signs are wrong to half of the digits, `[n, 1]`."""
    return (free & (q + matvec(M, s) < -(TOLERANCE**0.5) * (1 + s.sum(-1, keepdim=True)))).any(-1, keepdim=True)


def _by_one_tableau(M: Tensor, q: Tensor, free: Tensor, s: Tensor, looks: bool, replaces: bool) -> list[Tensor]:
    """Multipliers, inverses, and whether solved, `[n, 1]`, from a tableau of M, and multipliers s to begin with."""
    m = q.shape[-1]
    found = M, q, torch.zeros_like(free), s.clamp(min=0)
    pending = s > 0
    moving, places = torch.ones_like(pending[:, :1]), torch.arange(m, device=q.device)
    for _ in range(4 * m + 12):
        found, pending, moving = _step(found, pending, free, places, q if replaces else None)
        if looks and not moving.any():
            break
    tableau, _, active, s = found
    inverse = torch.where(active.unsqueeze(-1) & active.unsqueeze(-2), tableau, 0)
    before, w = s, q + matvec(M, s)
    for _ in range(2):
        s = s - matvec(inverse, torch.where(active, w, 0))
        w = q + matvec(M, s)
    limit = TOLERANCE * (1 + s.sum(-1, keepdim=True))
    outside = free & (tableau.diagonal(dim1=-2, dim2=-1) > least_pivot(m))
    wrong = torch.where(active, (s < -limit) | (w.abs() > limit), outside & (w < -limit))
    return [torch.where(moving, before, s), inverse, ~(moving | wrong.any(-1, keepdim=True))]


def _step(found: _Tableau, pending: Tensor, free: Tensor, places: Tensor, q: Tensor | None) -> _Stepped:
    """One step; rows that are pending enter first. Whether there was something to do, `[n, 1]`."""
    tableau, t, active, s = found
    pivots, least = tableau.diagonal(dim1=-2, dim2=-1), least_pivot(t.shape[-1])
    negative, waiting = active & (t <= 0), pending.any(-1, keepdim=True)
    walking = negative.any(-1, keepdim=True) & ~waiting
    s = torch.where(waiting | walking, s, t * active)
    below = free & ~active & (t < -TOLERANCE * (1 + s.sum(-1, keepdim=True)))
    chosen = torch.where(waiting, pending, torch.where(walking, negative, below & (pivots > least)))
    score = torch.where(waiting, -pivots, torch.where(walking, s / (s - t).clamp(min=1e-300), t))
    new, slope = None, t
    # A row that counts as dependent may lie so far below zero, since `M s + q` vanishes on F.
    far = None if q is None else (-least * (q * s).sum(-1, keepdim=True)).clamp(min=0).sqrt()
    if far is not None and (low := below & (t < -far) & ~(waiting | walking | chosen.any(-1, True))).any():
        new = low & (places == t.masked_fill(~low, torch.inf).argmin(-1, keepdim=True))
        slope, replaces = (tableau * new.unsqueeze(-2)).sum(-1) * active, new.any(-1, keepdim=True)
        chosen, score = torch.where(replaces, slope < 0, chosen), torch.where(replaces, -s / slope, score)
    best, r = score.masked_fill(~chosen, torch.inf).min(-1, keepdim=True)
    here = places == r
    s = torch.where(walking, torch.lerp(s, t, best).clamp(min=0) * (active & ~here), s)
    if new is not None:
        new &= best < torch.inf
        s = torch.where(new.any(-1, True), torch.where(new, best, (s + best * slope).clamp(min=0) * ~here), s)
    # A row that depends on those before it waits no longer.
    exchanged = torch.where(waiting, best < -least, best < torch.inf)
    tableau, t = _pivoted(tableau, t, active, r, here, exchanged)
    pending = pending & ~here if new is None else (pending & ~here) | new
    return (tableau, t, active ^ (here & exchanged), s), pending, waiting | exchanged


def _pivoted(
    tableau: Tensor, t: Tensor, active: Tensor, r: Tensor, here: Tensor, exchanged: Tensor
) -> tuple[Tensor, Tensor]:
    """Tableaus after an exchange of entry r, which is here, where it is wanted."""
    row = tableau.gather(1, r.unsqueeze(-1).expand(-1, 1, t.shape[-1])).squeeze(1)
    opposite, pivot = -row, row.gather(1, r)
    right = -t.gather(1, r) / pivot
    # Between active rows and others, a tableau is antisymmetric, else symmetric.
    column = torch.where(active == active.gather(1, r), row, opposite)
    new = opposite.masked_fill(here, 1) / pivot
    changed = torch.addcmul(tableau.masked_fill(here.unsqueeze(-2), 0), column.unsqueeze(-1), new.unsqueeze(-2))
    changed = torch.where(here.unsqueeze(-1), new.unsqueeze(-2), changed)
    tableau = torch.where(exchanged.unsqueeze(-1), changed, tableau)
    return tableau, torch.where(exchanged, torch.where(here, right, torch.addcmul(t, column, right)), t)
