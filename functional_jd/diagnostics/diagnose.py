"""Diagnostics: conflicts between the objectives, and the distance to Pareto stationarity."""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from functional_jd.aggregation.views import cross_gramian
from functional_jd.aggregation.views import gramian as gramian_of
from functional_jd.aggregators.mgda import mgda
from functional_jd.core.arguments import check_flag, refuse
from functional_jd.core.heads import rows_of, split_heads
from functional_jd.core.names import names_or_indices
from functional_jd.core.record_display import Table, displayed_as, number, outline, shortened
from functional_jd.core.rows import row_count
from functional_jd.core.safe import cosines, divide, nonzero, sqrt_or_zero
from functional_jd.core.tree import tree_leaves, tree_map, tree_names
from functional_jd.core.types import Direction, Gramian, Jacobian, Weights
from functional_jd.precision.autocast import autocast_disabled
from functional_jd.torch_compat.torch_internals import has_values, under_transform

# Values below this multiple of the machine epsilon of the products count as zero.
_ROUNDINGS = 16
# The relative asymmetry, and the excess of a cosine over 1, from which a matrix is refused as a Gramian in any dtype.
_NOT_A_GRAMIAN = 1e-2
# The maximum number of columns of cosines in a table.
_MAX_COLUMNS = 8


@displayed_as(lambda record: diagnosis_table(record, None))
class Diagnosis(NamedTuple):
    """The result of `diagnose`: float64 tensors.

    Attributes:
        norms: `[m]`, the norms of the rows.
        cosines: `[m, m]`, the cosine similarities of the rows; 0 if a row is zero, also on the diagonal.
        alignment: `[m]`, the cosines of the rows with the direction; if negative, a step increases that loss. 0 for a
            row or a direction of zeros.
        conflict: `[]`, the share of the pairs of rows with a negative cosine, in [0, 1]; 0 for m = 1.
        stationarity: `[]`, the distance to Pareto stationarity: the norm of the shortest convex combination of the
            rows. 0 if no direction improves all objectives.
        rank: `[]`, the effective rank: from 1 (all rows parallel, or all but one negligible) to m (orthogonal rows of
            equal norm); 0 if all rows are zero.
        condition: `[]`, the ratio of the largest to the smallest singular value; infinite if the rows are dependent,
            and from about 1e7 on (500 for a float32 Gramian), where inner products do not tell.
        score: `[]`, the alignment score of the rows that are not zero, 0 if there are none: 1 if all are parallel, -1
            if their directions cancel; of m orthogonal rows 2 / m - 1. For m = 2, the cosine.
    """

    norms: Tensor
    cosines: Tensor
    alignment: Tensor
    conflict: Tensor
    stationarity: Tensor
    rank: Tensor
    condition: Tensor
    score: Tensor


def diagnose(
    jacobian_or_gramian: Jacobian | Gramian,
    direction_or_weights: Direction | Weights | None = None,
    *,
    gramian: bool | None = None,
) -> Diagnosis:
    """Measure how the objectives conflict with each other and with the direction of a step.

    A single square matrix is read as a Gramian. For a Jacobian that is one, pass `gramian=False`.

    With G = J J', d its diagonal and s the singular values of J, the roots of the eigenvalues of G:
    `cosines_ij = G_ij / sqrt(d_i d_j)`, `alignment_i = <g_i, x> / (|g_i| |x|)` for the direction x,
    `stationarity = min { |J'w| : w >= 0, sum(w) = 1 }`, `rank = exp(-sum_k p_k log p_k)` with `p = s / sum(s)`,
    `condition = max(s) / min(s)`, `score = 2 |mean_i g_i / |g_i||^2 - 1`.

    Args:
        jacobian_or_gramian: a Jacobian; of a `MultitaskJacobian`, `shared` is used. Or a Gramian, one matrix `[m, m]`.
        direction_or_weights: a direction, a pytree like params (with a Jacobian only); or weights `[m]`; `None` is the
            mean of the rows. With a single square Jacobian, a tensor `[m]` is the direction.
        gramian: whether the first argument is a Gramian; `None`: if it is a single square matrix.

    Returns:
        `Diagnosis`. A matrix that is not a Gramian, not symmetric or with a cosine beyond 1, raises on a CPU outside of
        transforms; elsewhere, for instance under vmap, its diagnosis is NaN.

    Guarantees:
        Pure; composes with vmap, grad, jvp and compile; only the eigenvalues synchronise with the device. Norms and
        cosines are differentiable, alignment and stationarity if they are not 0, rank and condition if the rank is
        locally constant, and twice if singular values differ. A non-finite row changes no norms and cosines of the
        others; the values for all rows become NaN. Values within the rounding error of G are zero: cosines within 16
        eps, singular values below `sqrt(16 m eps)` of the longest row, and norms of combinations of rows below about
        1e-7 (2e-3 for a float32 Gramian).

    Source:
        Fliege & Svaiter, Steepest descent methods for multicriteria optimization, 2000 (stationarity); Roy & Vetterli,
        The effective rank, EUSIPCO 2007; Senushkin et al., Independent component alignment for multi-task learning,
        CVPR 2023 (condition); Wang, Bhartari, Li & Perdikaris, Gradient alignment in physics-informed neural networks,
        NeurIPS 2025, arXiv 2502.00604 (score).

    Example:
        >>> diagnosis = diagnostics.diagnose(torch.tensor([[2.0, 0.0, 0.0], [-1.0, 1.0, 0.0]]))
        >>> diagnosis.cosines[0, 1]
        tensor(-0.7071, dtype=torch.float64)
    """
    if gramian is not None:
        check_flag("gramian", gramian)
    G, J, eps = _gramian_and_jacobian(jacobian_or_gramian, gramian)
    with autocast_disabled():
        C, lengths = cosines(G)
        norms = torch.where(G.diagonal() == 0, 0, lengths)
        rank, condition = _rank_and_condition(G, len(G) * _ROUNDINGS * eps)
        return Diagnosis(
            norms=norms,
            cosines=C.clamp(-1, 1),
            alignment=_alignment(J, G, C, lengths, direction_or_weights, eps),
            conflict=torch.where(G.isfinite().all(), share_in_conflict(C, eps), torch.nan),
            stationarity=_norm_of_combination(C, mgda().update(G, ())[0] * lengths, eps),
            rank=rank,
            condition=condition,
            score=_alignment_score(C),
        )


def share_in_conflict(C: Tensor, eps: float) -> Tensor:
    """The share of the pairs of rows with a negative cosine, of their cosines `[m, m]` with this rounding error."""
    m = len(C)
    return (_ROUNDINGS * eps < -C).to(C.dtype).sum() / max(m * (m - 1), 1)


def _alignment_score(C: Tensor) -> Tensor:
    """`2 |mean of the unit rows|^2 - 1`, of the rows that are not zero."""
    count = (C.diagonal() != 0).sum()
    return torch.where(count > 0, 2 * C.sum().clamp(min=0) / nonzero(count.to(C.dtype)) ** 2 - 1, 0 * C.sum())


def _is_square_matrix(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 2 and value.shape[0] == value.shape[1]


def _gramian_and_jacobian(value: Any, gramian: bool | None) -> tuple[Tensor, Jacobian | None, float]:
    """Return the Gramian in float64, the Jacobian if there is one, and the machine epsilon of the products."""
    if gramian and not _is_square_matrix(value):
        cure = "Omit gramian for a Jacobian."
        refuse("the first argument", "a matrix [m, m] with gramian=True", value, cure, ValueError)
    if isinstance(value, tuple) and not value:
        raise ValueError(
            "diagnose: the first argument must be a Jacobian or a Gramian, found (): the rule of the step needs none. "
            "Call gramian_fn(losses) or jacobian_fn(losses) with (params, *batch); for norms alone squared_norms_fn."
        )
    if not (_is_square_matrix(value) if gramian is None else gramian):
        rows = rows_of(value)
        row_count(rows)
        return gramian_of(rows), value, torch.finfo(torch.float64).eps
    row_count(value)
    value = cast(Tensor, value)
    G = value.double()
    norms = G.detach().diagonal().clamp(min=0).sqrt()
    bound = norms.unsqueeze(1) * norms
    asymmetric = (G.detach() - G.detach().mT).abs() > _NOT_A_GRAMIAN * bound
    too_large = G.detach().abs() > (1 + _NOT_A_GRAMIAN) * bound
    invalid = (asymmetric | too_large).any()
    if not under_transform() and value.device.type == "cpu" and invalid:
        raise ValueError(
            f"diagnose: a single square matrix is read as a Gramian, found {list(value.shape)} that is not one (not "
            "symmetric, or with a cosine beyond 1). For a Jacobian, call diagnose(J, direction, gramian=False)."
        )
    return torch.where(invalid, torch.nan, G), None, torch.finfo(value.dtype).eps


def _alignment(J: Jacobian | None, G: Tensor, C: Tensor, lengths: Tensor, target: Any, eps: float) -> Tensor:
    """Return the cosines of the rows with a direction, or with the weighted sum of the rows."""
    m = len(G)
    mean = target is None
    if mean:
        target = torch.full_like(lengths, 1 / m)
    if mean or (_is_real(target) and target.shape == (m,) and not _is_square_matrix(J)):
        coefficients = torch.where(G.diagonal() == 0, 0, target.to(G.dtype) * lengths)  # a row of zeros has length 1
        return divide(C @ coefficients, _norm_of_combination(C, coefficients, eps)).clamp(-1, 1)
    if J is None:
        cure = "For a direction, pass the Jacobian; if it is a square matrix, with gramian=False."
        refuse("weights", f"[{m}] with a Gramian", target, cure, ValueError)
    rows, heads = split_heads(J)
    if heads and isinstance(target, dict):
        target = target.get("shared", ())
    _require_direction(rows, target)
    one_row = tree_map(lambda leaf: leaf.unsqueeze(0), target)
    products, squared_norm = cross_gramian(rows, one_row).squeeze(1), gramian_of(one_row).reshape(())
    return divide(products / lengths, sqrt_or_zero(squared_norm, squared_norm == 0)).clamp(-1, 1)


def _require_direction(rows: Jacobian, direction: Any) -> None:
    """Raise unless the direction has the names and shapes of params, and is a single tensor only if they are."""

    def shapes(tree: Any, first: int) -> dict[str, list[int] | None]:
        own = [list(leaf.shape[first:]) if _is_real(leaf) else None for leaf in tree_leaves(tree)]
        return dict(zip(tree_names(tree), own, strict=True))

    if (found := shapes(direction, 0)) != shapes(rows, 1) or isinstance(direction, Tensor) != isinstance(rows, Tensor):
        raise ValueError(
            "diagnose: the second argument must be weights [m], or a direction with the structure of params, found "
            f"{found or 'no tensors'}. Instead of entrywise weights, pass aggregation.combine(jacobian, weights)."
        )


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_complex()


def _norm_of_combination(C: Tensor, coefficients: Tensor, eps: float) -> Tensor:
    """Return the norm of a linear combination of the unit rows, 0 within the rounding error."""
    square = coefficients @ C @ coefficients
    zero = square <= len(C) * _ROUNDINGS * eps * coefficients.detach().abs().amax() ** 2
    return sqrt_or_zero(square, zero)


def _rank_and_condition(G: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Effective rank and condition from the eigenvalues of G, relative to its largest diagonal entry."""
    finite, largest = G.isfinite().all(), G.detach().diagonal().amax()
    eye = torch.eye(len(G), dtype=G.dtype, device=G.device)
    # eigvalsh raises an exception for matrices that are not finite.
    eigenvalues = torch.linalg.eigvalsh(torch.where(finite, G / nonzero(largest), eye))
    significant = eigenvalues > threshold
    values = torch.where(significant, eigenvalues, 1).sqrt()
    total = torch.where(significant, values, 0).sum()
    shares = torch.where(significant, values / nonzero(total), 1)
    rank = torch.where(total == 0, 0, torch.exp(-(shares * shares.log()).sum()))
    condition = torch.where(significant[0], values[-1] / values[0], torch.inf)
    return torch.where(finite, rank, torch.nan), torch.where(finite, condition, torch.nan)


def diagnosis_table(diagnosis: Diagnosis, names: Sequence[str] | None) -> Table:
    """Return one line for all rows, and one per row; an outline for a batch, or without values."""
    if not all(map(has_values, diagnosis)) or diagnosis.norms.ndim != 1:
        return outline(diagnosis)
    m = len(diagnosis.norms)
    names = names_or_indices(names, m)
    # Each tensor is copied from the device once.
    norms, cosines, alignment, conflict, stationarity, rank, condition, _ = (x.detach().tolist() for x in diagnosis)
    title = (
        f"Diagnosis: {conflict:.0%} of the pairs conflict, distance to stationarity {number(stationarity)}, "
        f"effective rank {number(rank)} of {m}, condition {number(condition)}"
    )
    few = m <= _MAX_COLUMNS
    headers = ["objective", "norm", "direction", *(names if few else ["lowest cosine", "with"])]
    rows: list[list[str]] = []
    for i, (name, others) in enumerate(zip(names, cosines, strict=True)):
        cells = [f"{cosine:+.2f}" for cosine in others]
        if not few:
            lowest = min((j for j in range(m) if j != i), key=others.__getitem__)
            cells = [cells[lowest], names[lowest]]
        rows.append([name, number(norms[i]), f"{alignment[i]:+.2f}", *cells])
    return title, headers, shortened(rows)
