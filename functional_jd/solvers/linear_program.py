"""Small linear programs, by the simplex method, and the projection on the simplex."""

import torch
from torch import Tensor

from functional_jd.core.safe import nan_unless, with_nan_of
from functional_jd.solvers.search import Solver, empty, matvec, opaque

# Reduced costs and pivots below this, of entries of order one, count as zero.
_TOLERANCE = 1e-11
# Quotients that differ by less are ties: the largest of the pivots in question is taken.
_TIES = 1e-13


def linear_program(objectives: Tensor, rows: Tensor, limits: Tensor, solver: Solver = "host") -> Tensor:
    """Maximise `c_1'x`, among its maximisers `c_2'x`, and so on, subject to `x >= 0` and `A x <= b`, with `b >= 0`.

    Derivatives are those of the equations that hold at the vertex, as many as there are rows.

    Args:
        objectives: c, float64 `[*, k, n]`, entries at most of order one, the first before the others.
        rows: A, float64 `[*, r, n]`, the same; the x that it allows are bounded.
        limits: b, float64 `[*, r]`, not negative: so `x = 0` is allowed, where the search starts.
        solver: `"host"`, or `"device"`: where its inputs stand, without a synchronization, in `4 (n + r)` pivots.

    Returns:
        float64 `[*, n]`, non-negative up to rounding: one of the vertices where several are best. NaN where an input is
        not finite, and where the search did not end in so many pivots.

    Guarantees:
        Pure; composes with vmap, grad, jvp, compile. Derivatives are correct where the best vertex is unique and as
        many constraints are active there as x has entries.

    Source:
        Dantzig, Linear programming and extensions, 1963; Bland, New finite pivoting rules, 1977, ends cycles.
    """
    r, n = rows.shape[-2:]
    basis = _opaque_vertex(objectives.detach(), rows.detach(), limits.detach(), solver=solver)
    found = (basis >= 0).all(-1, keepdim=True)
    basis = basis.clamp(min=0)
    columns = torch.cat([rows, _identity_like(rows).expand(*rows.shape[:-1], r)], -1)
    active = columns.gather(-1, basis.unsqueeze(-2).expand(*rows.shape[:-1], r))
    # Derivatives by an inverse: the factor that `solve` keeps is constant to the derivatives of its own jvp.
    start = torch.linalg.solve_ex(active.detach(), limits.detach().unsqueeze(-1))[0].squeeze(-1)
    values = start + matvec(torch.linalg.inv_ex(active)[0], limits - matvec(active, start))
    x = values.new_zeros(*values.shape[:-1], n + r).scatter(-1, basis, values)[..., :n]
    return with_nan_of(nan_unless(found, x), (objectives.sum((-2, -1)) + rows.sum((-2, -1))).unsqueeze(-1).detach())


def _identity_like(rows: Tensor) -> Tensor:
    return torch.eye(rows.shape[-2], dtype=rows.dtype, device=rows.device)


def _vertex(objectives: Tensor, rows: Tensor, limits: Tensor, fixed: bool) -> Tensor:
    """The basic variables `[*, r]` of the best vertex, slacks from n on; -1 where the search did not end."""
    (r, n), k = rows.shape[-2:], objectives.shape[-2]
    A, c = rows.reshape(-1, r, n), objectives.reshape(-1, k, n)
    # The rows of a tableau: one for each constraint, then one for each objective; its last column has the limits.
    tableau = A.new_zeros(len(A), r + k, n + r + 1)
    tableau[:, :r, :n], tableau[:, r:, :n] = A, -c
    tableau[:, :r, n:-1], tableau[:, :r, -1] = _identity_like(rows), limits.reshape(-1, r)
    places = torch.arange(n + r, device=rows.device)
    basis = places[n:].expand(len(A), r)
    limit = (4 if fixed else 50) * (n + r)
    moving = places.new_ones(len(A), dtype=torch.bool)
    current = places.new_zeros(len(A), 1)  # the objective that is improved: by rounding, one that is done may seem not
    for count in range(limit + 1):
        reduced = tableau[:, r:, :-1]
        improving = (reduced < -_TOLERANCE) & (current <= places[:k]).unsqueeze(-1)
        # What improves the next objective must leave those before as they are.
        candidates, gains = improving[:, 0], -reduced[:, 0]
        for level in range(1, k):
            done = ~candidates.any(-1, keepdim=True)
            kept = (reduced[:, :level] <= _TOLERANCE).all(1)
            candidates = torch.where(done, improving[:, level] & kept, candidates)
            gains = torch.where(done, -reduced[:, level], gains)
            current = torch.where(done, level, current)
        moving = candidates.any(-1)
        if count == limit or not (fixed or moving.any()):
            break
        by_place = count >= 4 * (n + r)
        entering = torch.where(candidates, -places.to(gains) if by_place else gains, -torch.inf).argmax(-1)
        tableau, basis = _pivoted(tableau, basis, entering, moving, by_place)
    return torch.where(moving.unsqueeze(-1), -1, basis).reshape(limits.shape).contiguous()


def _pivoted(tableau: Tensor, basis: Tensor, entering: Tensor, moving: Tensor, by_place: bool) -> tuple[Tensor, Tensor]:
    """Tableaus and bases after one exchange, where it is wanted and some quotient limits it."""
    r = basis.shape[-1]
    column = tableau.gather(-1, entering.view(-1, 1, 1).expand(-1, tableau.shape[1], 1)).squeeze(-1)
    limiting = column[:, :r] > _TOLERANCE
    quotients = torch.where(limiting, tableau[:, :r, -1].clamp(min=0) / column[:, :r], torch.inf)
    ties = limiting & (quotients <= quotients.amin(-1, keepdim=True) + _TIES)
    leaving = torch.where(ties, -basis.to(tableau) if by_place else column[:, :r], -torch.inf).argmax(-1, keepdim=True)
    pivot = column.gather(-1, leaving).unsqueeze(-1)
    row = tableau.gather(1, leaving.unsqueeze(-1).expand(-1, 1, tableau.shape[-1])) / pivot
    changed = tableau - column.unsqueeze(-1) * row
    changed = changed.scatter(1, leaving.unsqueeze(-1).expand_as(row), row)
    moving = (moving & limiting.any(-1)).view(-1, 1)
    exchanged = basis.scatter(-1, leaving, entering.unsqueeze(-1))
    return torch.where(moving.unsqueeze(-1), changed, tableau), torch.where(moving, exchanged, basis)


_opaque_vertex = opaque("functional_jd::linear_program", _vertex, lambda *given: empty(given[2], torch.int64), inputs=3)


def simplex_projection(points: Tensor) -> Tensor:
    """The nearest point of the simplex: `argmin { |w - y| : w >= 0, sum(w) = 1 }`.

    `w = max(y - theta, 0)` with `theta = max_k (y_(1) + ... + y_(k) - 1) / k` over the k largest entries.

    Guarantees:
        Float64 `[*, m]`, NaN in rows that are not finite. Idempotent; invariant to adding one number to all entries.
        Sums to one also where entries are huge. Composes with vmap, grad, jvp, compile; derivatives are correct where
        the set of positive entries does not change.

    Source:
        Held, Wolfe & Crowder, Validation of subgradient optimization, 1974: the algorithm that sorts. The quotients
        increase with k while the k-th entry is positive, then decrease: so theta is their maximum.
    """
    shifted = points - points.amax(-1, keepdim=True)  # keeps entries near the largest exact
    largest = shifted.sort(-1, descending=True).values
    counts = torch.arange(1, points.shape[-1] + 1, dtype=points.dtype, device=points.device)
    # On accelerators sums by a product: torch refuses cumsum where it shall be deterministic.
    sums = largest.cumsum(-1) if largest.is_cpu else largest @ largest.new_ones(len(counts), len(counts)).triu()
    theta = ((sums - 1) / counts).amax(-1, keepdim=True)
    # An entry of minus infinity would otherwise get weight 0.
    return with_nan_of((shifted - theta).clamp(min=0), largest[..., -1:])
