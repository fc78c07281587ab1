"""The laws of derivatives, which are those of differences: in hyper-parameters, values like any other, and in J."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from functional_jd.aggregation.aggregate import Aggregator, aggregate
from functional_jd.core.arguments import at_least, check_function, check_mapping, check_number
from functional_jd.core.rows import as_matrix, per_row
from functional_jd.core.tree import tree_leaves, tree_map
from functional_jd.core.types import Jacobian, Losses
from functional_jd.testing.measures import TOLERANCE, Case, check_case, flat, reach_of, variants

# The relative step of differences. Directions are known to 2^-26 of the reach only, which is divided by the step.
_STEP = 2.0**-10

_Found = tuple[Tensor, Tensor]
"""The directions of three steps `[3, n]`, and the reach of each, `[3, 1]`."""

_Directions = Callable[[float | Tensor], _Found]


def hyper_parameters_are_values(
    build: Callable[..., Aggregator],
    hyper: Mapping[str, float],
    jacobian: Jacobian,
    *others: Jacobian,
    losses: Losses = None,
) -> None:
    """A hyper-parameter may be a tensor: under vmap, and with derivatives that finite differences confirm.

    For every name in `hyper`, of the directions in three steps: a tensor gives what the number gives, `vmap` over
    several values what a loop gives, and forward and reverse derivatives lie between the differences with the next
    smaller and the next larger number, `2^-10 x` away (`2^-10` for `x = 0`), on one side at the end of a range.

    To 2^-26 of the reach for directions. For derivatives, to the same divided by the difference, to 2^-18 of the
    derivative, and to the change of slope from one side to the other: so a kink is allowed, a wrong slope is not.

    Args:
        build: `build(**hyper) -> rule`. At the end of a range it must raise ValueError for the next number, to be
            tested on one side. The law does not test whether all numbers out of range raise, or such
            tensors give NaN weights.
        hyper: the hyper-parameters to test, as numbers.
        jacobian: the Jacobian.
        others: the Jacobians on other batches, for a rule that uses them.
        losses: the losses, for a rule that uses them.

    Source: the definition of a derivative.
    """
    check_function("build", build, "Pass cagrad, not cagrad(0.5).")
    cure = "Pass the numbers by name: {'c': 0.5}."
    check_mapping("hyper", hyper, cure)
    for name, number in hyper.items():
        check_number(name, number, at_least(-math.inf), cure)
    check_case(build(**hyper), jacobian, others, losses)
    cases = variants(jacobian, others, losses)

    for name, number in hyper.items():

        def directions(value: float | Tensor, name: str = name) -> _Found:
            return _three_steps(build(**{**hyper, name: value}), cases)

        known = _neighbours(number, directions)
        _check_slopes(f"{name}={number:.6g}", number, known, _of_third_order(known), directions)


def differentiable(rule: Aggregator, jacobian: Jacobian, *others: Jacobian, losses: Losses = None) -> None:
    """The direction has a derivative by the Jacobian, that of differences: `d/dt A(J + t V)`, of three steps.

    Learning through steps (hyper-parameters, starts, inputs of losses) differentiates the rule by J. At J
    itself, where rows may be zero or tie, forward and reverse derivatives along one V are finite. Away from ties, where
    every entry is moved by up to an eighth of the largest entry of its row, they are the differences from `t = -2^-13`
    to `t = 2^-13`. The entries of V are of the size of the largest entry of their row.

    To 2^-26 of the reach divided by t, to the change of slope from one side to the other, and to the change between
    differences with t and with 2 t.

    Source: the definition of a derivative.
    """
    check_case(rule, jacobian, others, losses)
    cases = variants(jacobian, others, losses)

    def along(start: float) -> _Directions:
        def moved(leaf: Tensor, t: float | Tensor) -> Tensor:
            places = torch.arange(1, leaf.numel() + 1, dtype=leaf.dtype, device=leaf.device).reshape(leaf.shape)
            return leaf + per_row(as_matrix(leaf).abs().amax(1), leaf) * (start * places.sin() + t * places.cos())

        return lambda t: _three_steps(
            rule,
            [
                (*tree_map(lambda leaf: moved(leaf, t), (rows, other_rows)), values)
                for rows, other_rows, values in cases
            ],
        )

    for name, slope in _slopes(0.0, along(0.0), tree_leaves(jacobian)[0].device):
        assert slope.isfinite().all(), f"J: {name} is not finite"
    known = {t: along(1 / 8)(t) for t in (-_STEP / 8, 0.0, _STEP / 8)}
    (first, _), _, (last, _) = known.values()
    # A rule may have a unit of its own, as a temperature, so that its slope changes fast: ask how fast.
    (left, _), (right, _) = (along(1 / 8)(t) for t in (-_STEP / 4, _STEP / 4))
    _check_slopes("J", 0.0, known, ((right - left) / 4 - (last - first) / 2).abs(), along(1 / 8))


def _three_steps(rule: Aggregator, cases: Sequence[Case]) -> _Found:
    state, found, reaches = None, [], []
    for rows, others, numbers in cases:
        result = aggregate(rule, rows, state, *others, losses=None if numbers == () else numbers)
        state = result.state
        found.append(flat(result.direction))
        reaches.append(reach_of(rows, result.weights).max())
    return torch.stack(found), torch.stack(reaches).unsqueeze(1)


def _check_slopes(
    at: str, number: float, known: Mapping[float, _Found], third_order: Tensor, directions: _Directions
) -> None:
    """Compare derivatives at the number with the differences of known values at three numbers at equal distances."""
    values = list(known)
    (first, middle, last), reaches = zip(*known.values(), strict=True)
    reach = torch.stack(reaches).amax(0)
    scale = torch.where(reach > 0, reach, 1)

    def close(found: Tensor, expected: Tensor, message: str, allowed: Tensor | float = 0.0) -> None:
        error = ((found - expected).abs() / scale).amax(1, keepdim=True)
        assert (error - allowed).amax() <= 2 * TOLERANCE, f"{at}: {message}: off by {error.max():.3g} of the reach"

    numbers = torch.tensor(values, dtype=torch.float64, device=reach.device)
    close(directions(numbers[1])[0], middle, "a tensor gives other directions than the number")
    swept = torch.vmap(lambda x: directions(x)[0])(numbers)
    for found, expected in zip(swept, (first, middle, last), strict=True):
        close(found, expected, "vmap over values differs from the loop")

    step = values[2] - values[1]
    # Slopes times the step, so that they compare with directions.
    left, right = middle - first, last - middle
    at_end = values[1] != number
    expected = (left if number == values[0] else right) if at_end else (left + right) / 2
    error = (right - left).abs() + third_order  # the first is of the second order
    allowed = (error / scale).amax(1, keepdim=True)
    for name, slope in _slopes(number, directions, reach.device):
        assert slope.isfinite().all(), f"{at}: {name} is not finite"
        close(step * slope, expected, f"{name} differs from differences", allowed)


def _slopes(number: float, directions: _Directions, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """The forward and the reverse derivative of the directions `[3, n]`, with their names."""
    for transform in (torch.func.jacfwd, torch.func.jacrev):
        x = torch.tensor(number, dtype=torch.float64, device=device)
        yield transform.__name__, transform(lambda value: directions(value)[0])(x)


def _of_third_order(known: Mapping[float, _Found]) -> Tensor:
    """Distances of differences from derivatives, without the change of slope; the scale of a function is its number."""
    (first, _), _, (last, _) = known.values()
    return 2 * _STEP**2 * (last - first).abs()


def _neighbours(number: float, directions: _Directions) -> dict[float, _Found]:
    """The findings at three valid numbers at equal distances, the given one among them."""
    step = _STEP * (abs(number) or 1.0)
    for offset in (-1, 0, -2):
        values = [number + (offset + i) * step for i in range(3)]
        try:
            return {value: directions(value) for value in values}
        except ValueError:
            continue
    raise ValueError(
        f"hyper_parameters_are_values: found no valid numbers next to {number}. Test numbers with valid neighbours at "
        "a distance of 2^-10, on one side at least."
    )
