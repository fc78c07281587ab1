"""Rules and optimizers that warnings of first values recognise by name: each exists, and is found by it."""

import pytest
import torch

import functional_jd as fj
from functional_jd.core.agreement import function_names
from functional_jd.testing import RULES
from functional_jd.testing.table import rule_of
from functional_jd.training import first_values

NAMES = (*first_values._FOR_RESIDUALS, *first_values._FOR_LOSSES)


@pytest.mark.parametrize("name", NAMES)
def test_a_rule_that_is_known_by_name_has_this_name(name):
    assert name in fj.__all__
    assert name in RULES
    known = [found for found in function_names(rule_of(name)) if found in NAMES]
    assert known[:1] == [name]


@pytest.mark.parametrize(
    "optimizer", [fj.adamw(1e-3), *(fj.from_torch(getattr(torch.optim, name), lr=1e-3) for name in ("Adam", "AdamW"))]
)
def test_adam_is_known_by_its_names(optimizer):
    assert not first_values._ADAM.isdisjoint(function_names(optimizer))
    assert first_values._ADAM.isdisjoint(function_names(fj.sgd(1e-3)))
