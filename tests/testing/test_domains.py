"""Losses outside a rule's domain: the direction is not finite, and no exception tells so."""

import pytest
import torch
from rule_table import RULES, rule_of

from functional_jd.aggregation.aggregate import aggregate

CASES = [(name, number) for name, entry in RULES.items() for number in entry.invalid]


@pytest.mark.parametrize(("name", "number"), CASES)
def test_losses_outside_the_domain_give_a_direction_that_is_not_finite(name, number):
    rule, losses = rule_of(name), torch.full((3,), number, dtype=torch.float64)

    def direction(losses):
        return aggregate(rule, torch.ones(3, 2), losses=losses).direction

    torch.compiler.reset()  # the graphs of other tests count against the limit of this one
    compiled = torch.compile(direction, fullgraph=True, backend="aot_eager")
    assert not direction(losses).isfinite().any()
    assert not compiled(losses).isfinite().any()
    assert direction(losses.abs() + 1).isfinite().all()  # not for another reason


def test_the_rules_that_take_logarithms_name_their_domain():
    assert {name for name, entry in RULES.items() if -1.0 in entry.invalid} >= {"famo", "geometric_mean"}
