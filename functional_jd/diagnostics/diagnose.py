"""Diagnostics: what the objectives do to one another, and why training stalls."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_jd.aggregation.views import cross_gramian
from functional_jd.aggregation.views import gramian as gramian_of
from functional_jd.aggregators.mgda import mgda
from functional_jd.core.multitask import rows_of, split_heads
from functional_jd.core.names import names_or_indices
from functional_jd.core.record_display import Table, as_text, displayed_as, number, outline, shortened
from functional_jd.core.torch_internals import has_values, under_transform
from functional_jd.core.tree import row_count, tree_flatten, tree_map, tree_names
from functional_jd.core.types import Direction, Gramian, Jacobian, Weights
from functional_jd.precision.autocast import autocast_disabled
from functional_jd.solvers.dual_cone import cosines

# What counts as zero: so many roundings, in units of the dtype that the products came in.
_ROUNDINGS = 16


# A matrix whose cosines contradict each other by more is no Gramian, whatever it was computed in.
_SUSPECT = 1e-2


# As many columns of cosines fit on a line.
_COLUMNS = 8


@displayed_as(lambda record: _table(record, None))
class Diagnosis(NamedTuple):
    """What `diagnose` finds: float64 tensors.

    Attributes:
        norms: `[m]`, the lengths of the rows.
        cosines: `[m, m]`, of the angles between the rows; 0 with a row of zeros, itself included.
        alignment: `[m]`, the cosines of the rows with the direction: below 0, a step makes that loss worse. 0 for a row
            or a direction of zeros.
        conflict: `[]`, the share of the pairs of rows whose cosine is negative: from 0 to 1; 0 for m = 1.
        stationarity: `[]`, the distance to Pareto stationarity: the norm of the shortest convex combination of the
            rows. 0 where no direction improves all objectives.
        rank: `[]`, the effective rank: from 1 (all rows parallel, or one so long that the others vanish beside it) to m
            (orthogonal, of one length); 0 if all is zero.
        condition: `[]`, the ratio of the largest singular value to the smallest; infinite where rows are dependent, as
            they are if there are more objectives than parameters.
    """

    norms: Tensor
    cosines: Tensor
    alignment: Tensor
    conflict: Tensor
    stationarity: Tensor
    rank: Tensor
    condition: Tensor


def diagnose(
    jacobian_or_gramian: Jacobian | Gramian,
    direction_or_weights: Direction | Weights | None = None,
    *,
    gramian: bool | None = None,
) -> Diagnosis:
    """How the objectives relate to each other, and to the direction taken.

    One bare square matrix is read as a Gramian. Of m objectives in one bare tensor of m parameters, two losses on the
    plane for instance, the Jacobian is square: say so, `diagnose(J, direction, gramian=False)`.

    With G = J J', d its diagonal and s the singular values of J, the roots of the eigenvalues of G:
    `cosines_ij = G_ij / sqrt(d_i d_j)`, `alignment_i = <g_i, x> / (|g_i| |x|)` for the direction x,
    `stationarity = min { |J'w| : w >= 0, sum(w) = 1 }`, `rank = exp(-sum_k p_k log p_k)` with `p = s / sum(s)`,
    `condition = max(s) / min(s)`.

    Args:
        jacobian_or_gramian: a Jacobian, as `jacobian_fn` returns it: a pytree with leaves `[m, *p]`, or a
            `MultitaskJacobian`, of which `shared` counts. Or a Gramian, one bare matrix `[m, m]`.
        direction_or_weights: a direction, a pytree like params (beside a Jacobian only). Or weights, one bare tensor
            `[m]`. `None` is the mean of the rows, where ordinary training goes. Beside one bare square Jacobian, where
            both are a bare tensor `[m]`, it is the direction: of weights, hand over `combine(J, weights)`.
        gramian: whether it is a Gramian; `None` means if it is one bare square matrix.

    Returns:
        `Diagnosis(norms, cosines, alignment, conflict, stationarity, rank, condition)`.

    Raises:
        TypeError: a Jacobian whose leaves are no floating-point tensors.
        ValueError: no rows, or leaves that disagree on m; a direction of another structure, or weights of another
            length; a Gramian that is no square matrix, or none by its values (not symmetric, a negative diagonal, a
            cosine beyond 1), where they are known: on a CPU, outside transforms. Elsewhere, under vmap for instance,
            its diagnosis is NaN: see `gramian`.

    Laws:
        Pure; composes with vmap, grad, jvp and compile; only the eigenvalues wait for a device. Norms and cosines are
        differentiable, alignment and stationarity too where they are not 0, rank and condition where the rank stays
        what it is; the share of conflicts is constant to derivatives. Second derivatives of rank and condition are NaN
        where two singular values coincide, as those of orthogonal rows of one length do, and the less exact the closer
        two of them are. Norms and stationarity scale as the Jacobian
        does, all else stays; cosines, conflict, and the alignment with a given direction stay also when each row is
        scaled by itself. A row that is not finite leaves norms and cosines of the others as they are, and makes what is
        said of all rows NaN.

        What the rounding of G does not tell from zero is zero: cosines within 16 eps are no conflict; singular values,
        and lengths of combinations of rows, below about 1e-7 of what they are made of are 0 (of a float32 Gramian,
        2e-3).

    Source:
        Fliege & Svaiter, Steepest descent methods for multicriteria optimization, 2000 (stationarity); Roy & Vetterli,
        The effective rank, EUSIPCO 2007; Senushkin et al., Independent component alignment for multi-task learning,
        CVPR 2023 (condition).
    """
    G, J, eps = _products(jacobian_or_gramian, gramian)
    m = len(G)
    with autocast_disabled(G):
        C, lengths = cosines(G)
        blank = G.diagonal() == 0
        norms = torch.where(blank, 0, lengths)
        opposed = (_ROUNDINGS * eps < -C).to(G.dtype).sum() / max(m * (m - 1), 1)
        rank, condition = _spectral(G, m * _ROUNDINGS * eps)
        return Diagnosis(
            norms=norms,
            cosines=C.clamp(-1, 1),
            alignment=_alignment(J, G, C, lengths, direction_or_weights, eps),
            conflict=torch.where(G.isfinite().all(), opposed, torch.nan),
            stationarity=_length(C, mgda().update(G, ())[0] * lengths, eps),
            rank=rank,
            condition=condition,
        )


def describe(diagnosis: Diagnosis, names: Sequence[str] | None = None) -> str:
    """A diagnosis as a small table, to print.

    Args:
        diagnosis: from `diagnose`; of a batch of them, shapes are told.
        names: m names, for instance `objective_names(losses)`; `None`: the numbers of the rows.

    Returns:
        One line on all rows, and one per row: its norm, its cosine with the direction, its cosines with the others;
        from 9 rows on, the lowest of these and with whom.

    Raises:
        ValueError: more or fewer names than rows.
    """
    return as_text(_table(diagnosis, names))


def _square(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 2 and value.shape[0] == value.shape[1]


def _products(value: Any, gramian: bool | None) -> tuple[Tensor, Jacobian | None, float]:
    """The Gramian in float64, the Jacobian if there is one, and the rounding of the products."""
    if gramian and not _square(value):
        found = f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(
            f"diagnose: with gramian=True, expected one bare square matrix [m, m], found {found}. "
            "Leave gramian out for a Jacobian."
        )
    if not (_square(value) if gramian is None else gramian):
        rows = rows_of(value)
        row_count(rows, "diagnose")
        return gramian_of(rows), value, torch.finfo(torch.float64).eps
    row_count(value, "diagnose")
    G = value.double()
    scale = G.detach().diagonal().clamp(min=0).sqrt()
    bound = scale.unsqueeze(1) * scale
    off = (G.detach() - G.detach().mT).abs() > _SUSPECT * bound
    beyond = G.detach().abs() > (1 + _SUSPECT) * bound
    strange = (off | beyond).any()
    if not under_transform() and value.device.type == "cpu" and strange:
        raise ValueError(
            f"diagnose: one bare square matrix is read as a Gramian, found {list(value.shape)} that is none (not "
            "symmetric, or longer products than rows). Is it a Jacobian? Say so: diagnose(J, direction, gramian=False)."
        )
    return torch.where(strange, torch.nan, G), None, torch.finfo(value.dtype).eps


def _alignment(J: Jacobian | None, G: Tensor, C: Tensor, lengths: Tensor, target: Any, eps: float) -> Tensor:
    """The cosines of the rows with a direction, or with what weights make of the rows."""
    m = len(G)
    middle = target is None
    if middle:
        target = torch.full_like(lengths, 1 / m)
    if middle or (isinstance(target, Tensor) and target.shape == (m,) and not _square(J)):
        parts = target.to(G.dtype) * lengths
        length = _length(C, parts, eps)
        return _ratio(C @ parts, length)
    if J is None:
        found = f"shape {list(target.shape)}" if isinstance(target, Tensor) else type(target).__name__
        raise ValueError(
            f"diagnose: expected weights [{m}] beside a Gramian, found {found}. "
            "For a direction, hand over the Jacobian; of one square matrix, say that it is: gramian=False."
        )
    rows, heads = split_heads(J)
    if heads and isinstance(target, dict):
        target = target.get("shared", ())
    _require_direction(rows, target)
    one = tree_map(lambda leaf: leaf.unsqueeze(0), target)
    along, square = cross_gramian(rows, one).squeeze(1), gramian_of(one).reshape(())
    none = square == 0
    return _ratio(along / lengths, torch.where(none, 0, torch.where(none, 1, square).sqrt()))


def _require_direction(rows: Jacobian, direction: Any) -> None:
    """Of the structure of params: the same names, the same shapes, and bare only beside one bare tensor."""
    leaves, _ = tree_flatten(direction)
    found = {name: getattr(leaf, "shape", None) for name, leaf in zip(tree_names(direction), leaves, strict=True)}
    expected = {name: leaf.shape[1:] for name, leaf in zip(tree_names(rows), tree_flatten(rows)[0], strict=True)}
    if found != expected or isinstance(direction, Tensor) != isinstance(rows, Tensor):
        shapes = {name: None if shape is None else list(shape) for name, shape in found.items()}
        raise ValueError(
            "diagnose: expected weights, one bare tensor [m], or a direction with the structure of params, found "
            f"{shapes or 'no tensors'}. Of weights entry by entry, hand over the direction, combine(jacobian, weights)."
        )


def _ratio(along: Tensor, length: Tensor) -> Tensor:
    none = length == 0
    return torch.where(none, 0, along / torch.where(none, 1, length)).clamp(-1, 1)


def _length(C: Tensor, parts: Tensor, eps: float) -> Tensor:
    """The length of a sum of multiples of the unit rows, 0 where it is only rounding."""
    square = parts @ C @ parts
    none = square <= len(C) * _ROUNDINGS * eps * parts.detach().abs().amax() ** 2
    return torch.where(none, 0, torch.where(none, 1, square).sqrt())


def _spectral(G: Tensor, cut: float) -> tuple[Tensor, Tensor]:
    """Effective rank and condition, by the singular values relative to the longest row, those of rounding left out."""
    sound, unit = G.isfinite().all(), G.detach().diagonal().amax()
    eye = torch.eye(len(G), dtype=G.dtype, device=G.device)
    # The decomposition raises where something is not finite.
    squares = torch.linalg.eigvalsh(torch.where(sound, G / torch.where(unit == 0, 1, unit), eye))
    kept = squares > cut
    values = torch.where(kept, squares, 1).sqrt()
    total = torch.where(kept, values, 0).sum()
    shares = torch.where(kept, values / torch.where(total == 0, 1, total), 1)
    rank = torch.where(total == 0, 0, torch.exp(-(shares * shares.log()).sum()))
    condition = torch.where(kept[0], values[-1] / values[0], torch.inf)
    return torch.where(sound, rank, torch.nan), torch.where(sound, condition, torch.nan)


def _table(diagnosis: Diagnosis, names: Sequence[str] | None) -> Table:
    """One line on all rows, one for each; the outline of what has no numbers to show, or is a batch."""
    if not all(map(has_values, diagnosis)) or diagnosis.norms.ndim != 1:
        return outline(diagnosis)
    m = len(diagnosis.norms)
    names = names_or_indices(names, m, "describe")
    # Each tensor is fetched once.
    norms, cosines, alignment, conflict, stationarity, rank, condition = (x.detach().tolist() for x in diagnosis)
    title = (
        f"Diagnosis: {conflict:.0%} of the pairs conflict, distance to stationarity {number(stationarity)}, "
        f"effective rank {number(rank)} of {m}, condition {number(condition)}"
    )
    few = m <= _COLUMNS
    heads = ["objective", "norm", "direction", *(names if few else ["lowest cosine", "with"])]
    rows: list[list[str]] = []
    for i, (name, others) in enumerate(zip(names, cosines, strict=True)):
        if not few:
            lowest = min((j for j in range(m) if j != i), key=others.__getitem__)
            cells = [_cosine(others[lowest]), names[lowest]]
        else:
            cells = [_cosine(cosine) for cosine in others]
        rows.append([name, number(norms[i]), _cosine(alignment[i]), *cells])
    return title, heads, shortened(rows)


def _cosine(value: float) -> str:
    return f"{value:+.2f}"
