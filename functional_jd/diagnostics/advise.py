"""Advice on a rule, from a window of training steps, and a diagnosis as text."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_jd.core.arguments import check_type, refuse
from functional_jd.core.record_display import Table, as_text, displayed_as, number
from functional_jd.core.types import Gramian
from functional_jd.diagnostics.diagnose import Diagnosis, diagnose, diagnosis_table
from functional_jd.torch_compat.torch_internals import has_values

# A pair of objectives conflicts throughout a window if its mean cosine lies so many standard errors below zero: chance
# alone, the noise of batches, puts it there for one pair in forty.
_STANDARD_ERRORS = 2.0


def _table(advice: "Advice") -> Table:
    """Return verdict, rule and reason in one line, and the figures."""
    verdict, rule, reason, *_ = advice
    rows = [[name, number(figure)] for name, figure in advice._asdict().items() if isinstance(figure, float)]
    return f"Advice: {verdict}: {rule}(). {reason}", [], rows


@displayed_as(_table)
class Advice(NamedTuple):
    """The result of `advise`: what to do, and the figures it rests on, as Python values.

    Attributes:
        verdict: `"keep the mean"`, `"rescale"`, `"project"` or `"explore the front"`.
        rule: the name of the rule to try, for one solution: `getattr(functional_jd, advice.rule)()`.
        reason: one sentence.
        conflict: the share of the pairs of objectives that conflict throughout the window, in [0, 1]: their mean cosine
            is more than two standard errors below zero.
        imbalance: the ratio of the longest to the shortest gradient, of their medians over the window; at least 1.
        rank: the median effective rank divided by m, in (0, 1].
        noise: how much a cosine of two gradients varies from step to step: its standard deviation, the mean over pairs.
        given_up: the share of the objectives that rise along the mean throughout the window, and would not if all
            gradients were of one length.
        score: the median alignment score. No verdict rests on it: orthogonal gradients, which do not conflict, bring it
            to 2 / m - 1.
    """

    verdict: str
    rule: str
    reason: str
    conflict: float
    imbalance: float
    rank: float
    noise: float
    given_up: float
    score: float


# From this ratio of lengths on, a rule that does not see lengths is advised; from this share of pairs in conflict, a
# projection: the best of a few in `tests/evidence`.
THRESHOLDS: dict[str, Any] = {"imbalance": 10.0, "conflict": 1.0, "rescale": "nash_mtl", "project": "aligned_mtl"}


def advise(diagnoses: Sequence[Diagnosis] | Sequence[Gramian] | Diagnosis | Gramian) -> Advice:
    """Advise on a rule, from the gradients of a window of training steps under `mean`.

    If the lengths of gradients differ tenfold or more, `"rescale"`: the mean follows the longest. Else, if all pairs of
    objectives conflict throughout the window, `"project"`. Else `"keep the mean"`, which costs one backward pass.
    Instead of the first two, with the same rule, `"explore the front"`, if lengths alone decide which loss rises: which
    of them you want is a preference, and `fronts.train` shows the choices. Ask again later: gradients may grow apart.

    Args:
        diagnoses: from `diagnose`, one for each of k >= 2 steps: a sequence, or a `Diagnosis` of a vmap with k first.
            Or Gramians: `[k, m, m]`, or a sequence such as `[info.gramian for info in history]`. Ten steps or more, on
            different batches; steps that are not finite are left out.

    Returns:
        `Advice`. It reads values, which tensors under vmap and torch.compile do not have.

    Guarantees:
        Pure. Independent of the order of the objectives and of the steps, and of the unit of all losses together. An
        objective whose gradient is zero in most steps has no length and counts as done.

    Example:
        >>> short, long = torch.tensor([1.0, 0.2]), torch.tensor([-30.0, 900.0])
        >>> gramians = torch.stack([J @ J.T for J in (torch.stack([short, long]), torch.stack([short, 2 * long]))])
        >>> diagnostics.advise(gramians).verdict
        'rescale'
    """
    window = _window(diagnoses)
    finite = window.norms.isfinite().all(1) & window.cosines.isfinite().all(2).all(1)
    norms, cosines = window.norms[finite], window.cosines[finite]
    if len(norms) < 2:
        raise ValueError(
            f"advise: diagnoses must be of at least two steps with finite gradients, found {len(norms)} of "
            f"{len(finite)}. Pass ten or more."
        )
    conflict, noise = _conflict_and_noise(cosines)
    given_up = _given_up(norms, cosines)
    medians = norms.quantile(0.5, dim=0)
    medians = medians[medians > 0]
    imbalance = float(medians.max() / medians.min()) if len(medians) else 1.0
    rank, score = (float(x[finite].quantile(0.5)) for x in (window.rank, window.score))
    figures = (conflict, imbalance, rank / norms.shape[1], noise, given_up, score)
    verdict, rule, reason = _verdict(conflict, imbalance)
    if given_up and rule != "mean":
        verdict = "explore the front"
        reason = (
            f"{given_up:.0%} of the losses rise along the mean, and would not if all gradients were of one length: if "
            "they cannot all be small, which of them wins is a preference."
        )
    return Advice(verdict, rule, reason, *figures)


def _verdict(conflict: float, imbalance: float) -> tuple[str, str, str]:
    """Return verdict, rule and reason."""
    if imbalance >= THRESHOLDS["imbalance"]:
        reason = f"The longest gradient is {imbalance:.2g} times the shortest, and the mean follows the longest."
        return "rescale", THRESHOLDS["rescale"], reason
    if conflict >= THRESHOLDS["conflict"]:
        reason = f"{conflict:.0%} of the pairs of objectives conflict throughout the window."
        return "project", THRESHOLDS["project"], reason
    less = "no pairs" if conflict == 0 else f"only {conflict:.0%} of the pairs"
    reason = f"The gradients are of similar lengths ({imbalance:.2g} times), and {less} conflict throughout the window."
    return "keep the mean", "mean", reason


def _window(given: Any) -> Diagnosis:
    """Return the diagnoses as one, with norms `[k, m]`, with values."""
    each: Any = given.unbind() if isinstance(given, Tensor) and given.ndim == 3 else given
    if isinstance(each, Diagnosis):
        each = tuple(map(Diagnosis._make, zip(*each, strict=True))) if each.norms.ndim == 2 else None
    found: list[Diagnosis] = []
    several = isinstance(each, Sequence) and not isinstance(each, str) and len(each)
    for one in each if several else [None]:
        if not (isinstance(one, Diagnosis) or (isinstance(one, Tensor) and one.ndim == 2)):
            cure = "A step has () as Gramian if its rule receives none: take gramian_fn(losses)(params, *batch)[0]."
            expected = "a sequence of Diagnosis or of Gramians [m, m], or Gramians [k, m, m]"
            refuse("diagnoses", expected, one if several else given, cure if one == () else "Pass a list of them.")
        found.append(one if isinstance(one, Diagnosis) else diagnose(_with_values(one), gramian=True))
    if len(counts := sorted({len(one.norms) for one in found})) > 1:
        raise ValueError(f"advise: diagnoses must be of the same objectives, found {counts}. Part the window.")
    return Diagnosis(*(_with_values(torch.stack(x)) for x in zip(*found, strict=True)))


def _with_values(tensor: Any) -> Tensor:
    """The tensor on the CPU, in float64."""
    if not isinstance(tensor, Tensor) or not has_values(tensor):
        cure = "Call advise outside vmap and torch.compile, for instance at the end of an epoch."
        refuse("diagnoses", "tensors with values", tensor, cure)
    return tensor.detach().to("cpu", torch.float64)


def _conflict_and_noise(cosines: Tensor) -> tuple[float, float]:
    """The share of pairs that conflict throughout, and the mean deviation of a pair's cosine; 0 for one objective."""
    m = cosines.shape[1]
    i, j = torch.triu_indices(m, m, 1)
    if not len(i):
        return 0.0, 0.0
    pairs = cosines[:, i, j]
    return float(_below_zero(pairs).double().mean()), float(pairs.std(0).mean())


def _below_zero(cosines: Tensor) -> Tensor:
    """Which cosines, `[k, ...]` of k steps, are negative by more than chance, bool `[...]`."""
    return cosines.mean(0) + _STANDARD_ERRORS * (cosines.std(0) / len(cosines) ** 0.5) < -_ROUNDING


def _given_up(norms: Tensor, cosines: Tensor) -> float:
    """The share of the objectives that rise along the sum of the gradients, but not along that of unit gradients."""

    def rising_along(lengths: Tensor) -> Tensor:
        gains = (cosines @ lengths.unsqueeze(2)).squeeze(2)  # the inner products of unit gradients and the sum
        squares = (gains * lengths).sum(1, keepdim=True)
        # A sum that vanishes has no direction, and nothing rises.
        least = (_ROUNDING * lengths.sum(1, keepdim=True)).square()
        return _below_zero(torch.where(squares > least, gains / squares.clamp(min=0).sqrt(), 0.0))

    given_up = rising_along(norms) & ~rising_along((norms > 0).double())
    return float(given_up.double().mean())


# Cosines of orthogonal gradients are no conflict, in float32 products either.
_ROUNDING = 16 * torch.finfo(torch.float32).eps


def describe(diagnosis: Diagnosis, names: Sequence[str] | None = None) -> str:
    """Format a diagnosis as a table, to print.

    Args:
        diagnosis: from `diagnose`; for a batch, the table has shapes instead of values.
        names: m names, for instance `objective_names(losses)`; `None`: the row indices.

    Returns:
        One line for all rows, and one per row: its norm, its cosine with the direction, and its cosines with the other
        rows; from 9 rows on, the lowest of these and the name of that row.
    """
    check_type("diagnosis", diagnosis, Diagnosis, "Pass what diagnose returned.")
    return as_text(diagnosis_table(diagnosis, names))
