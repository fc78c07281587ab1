"""Hyper-parameters as values: numbers, which are checked when a rule is built, or tensors, which are never read."""

import math
from collections.abc import Callable
from numbers import Real
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from functional_jd.core.arguments import check_integer, check_option, described, is_too_large
from functional_jd.core.safe import nan_unless
from functional_jd.solvers.search import Solver

Number: TypeAlias = float | Tensor
"""A hyper-parameter: a number, or a floating-point tensor `[]`, for instance one that `torch.vmap` maps over."""


class Domain(NamedTuple):
    """The valid numbers: a test of numbers and of tensors, and its description for error messages."""

    contains: Callable[[Any], Any]
    expected: str


POSITIVE = Domain(lambda x: (x > 0) & (x < math.inf), "positive and finite")
NOT_NEGATIVE = Domain(lambda x: (x >= 0) & (x < math.inf), "finite and not negative")
FROM_0_TO_1 = Domain(lambda x: (x >= 0) & (x <= 1), "in [0, 1]")
BELOW_1 = Domain(lambda x: (x >= 0) & (x < 1), "in [0, 1)")
ABOVE_0_TO_1 = Domain(lambda x: (x > 0) & (x <= 1), "in (0, 1]")


def hyper_parameter(given: Number, where: str, domain: Domain, advice: str) -> Number:
    """Check a hyper-parameter: the value of a number, and of a tensor only what is known without its value.

    Args:
        given: a number, or a floating-point tensor `[]`.
        where: the rule and the argument, for errors: "cagrad: c".
        domain: the valid numbers.
        advice: the end of the error message: a sentence that says which number to use.

    Returns:
        The number; or the tensor in float64, NaN outside the domain. Differentiable; nothing is synchronized.

    Raises:
        TypeError: neither a number nor a floating-point tensor.
        ValueError: a number outside the domain; a tensor of another shape.
    """
    if isinstance(given, Tensor):
        if not given.is_floating_point():
            raise TypeError(f"{where} must be a number or a floating-point tensor, found {given.dtype}. Use .double().")
        if given.ndim:
            raise ValueError(
                f"{where} must be a number or a tensor [], found shape {list(given.shape)}. For several values, use "
                "torch.vmap over a function that builds the rule."
            )
        values = given.double()
        return nan_unless(domain.contains(values), values)
    if not isinstance(given, int | float | Real):
        raise TypeError(f"{where} must be a number or a tensor [], found {type(given).__name__}. {advice}")
    if is_too_large(given) or not domain.contains(given):
        raise ValueError(f"{where} must be {domain.expected}, found {described(given)}. {advice}")
    return given


def runs_on_host(solver: Solver, where: str, *given: Any) -> bool:
    """Check where a rule is solved, and whether all of it can go to the host: its tensors `[]` may stand elsewhere."""
    check_option(where, "solver", solver, ("host", "device"), 'The default is "host".')
    return solver == "host" and all(not isinstance(x, Tensor) or x.is_cpu for x in given)


def integer(given: int, where: str, least: int, advice: str) -> int:
    """Check a hyper-parameter that must be a Python integer, because shapes, loops or indices depend on it.

    Args:
        given: the number.
        where: the rule and the argument, for errors: "krum: n_byzantine".
        least: the smallest valid number.
        advice: the end of the error message: a sentence that says what it counts.

    Returns:
        The number.

    Raises:
        TypeError: a tensor.
        ValueError: another number, or a smaller one.
    """
    rule, _, name = where.partition(": ")
    check_integer(rule, name, given, least, advice)
    return given
