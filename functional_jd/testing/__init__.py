"""Tests for your own rules: hypothesis strategies, laws, and a test of a rule in one line. Needs the extra `test`.

Every law is a function `law(rule, jacobian, *others, losses=None)` of the rule, a pytree with leaves `[m, *p]`, and,
for rules that use them, Jacobians on other batches and m losses. It raises `AssertionError` if the rule breaks the law.
"""

from importlib.util import find_spec

if _missing := [name for name in ("hypothesis", "pytest", "scipy") if find_spec(name) is None]:
    raise ImportError(
        f"functional_jd.testing: needs hypothesis, pytest and scipy, found no {_missing[0]}. "
        'Install them: pip install "functional_jd[test]".'
    )

from functional_jd.testing.conformance import Counterexample, Findings, laws_of, obeys
from functional_jd.testing.derivatives import differentiable, hyper_parameters_are_values
from functional_jd.testing.laws import (
    ALWAYS,
    BY_CLAIM,
    batched,
    compiled,
    finite,
    homogeneous,
    linear_under_row_scaling,
    low_precision,
    non_conflicting,
    non_finite,
    on_the_simplex,
    permutation_equivariant,
    pure,
    rotation_blind,
    shaped,
    strongly_stationary,
    tree_equals_flat,
    weakly_stationary,
)
from functional_jd.testing.strategies import Range, jacobians

__all__ = [
    "ALWAYS",
    "BY_CLAIM",
    "Counterexample",
    "Findings",
    "Range",
    "batched",
    "compiled",
    "differentiable",
    "finite",
    "homogeneous",
    "hyper_parameters_are_values",
    "jacobians",
    "laws_of",
    "linear_under_row_scaling",
    "low_precision",
    "non_conflicting",
    "non_finite",
    "obeys",
    "on_the_simplex",
    "permutation_equivariant",
    "pure",
    "rotation_blind",
    "shaped",
    "strongly_stationary",
    "tree_equals_flat",
    "weakly_stationary",
]
