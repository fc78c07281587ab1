"""Losses outside a rule's domain: the direction is not finite, and no exception tells so."""

import pytest
import torch
from rule_table import RULES, rule_of

from functional_jd.aggregation.aggregate import aggregate


@pytest.mark.parametrize("name", [name for name, entry in RULES.items() if entry.invalid])
def test_losses_outside_the_domain_give_a_direction_that_is_not_finite(name):
    rule = rule_of(name)

    def direction(losses):
        return aggregate(rule, torch.ones(3, 2), losses=losses).direction

    torch.compiler.reset()  # the graphs of other tests count against the limit of this one
    compiled = torch.compile(direction, fullgraph=True, backend="aot_eager")
    for number in RULES[name].invalid:
        one, all_of_them = (torch.tensor(x, dtype=torch.float64) for x in ([1.0, number, 2.0], [number] * 3))
        cosine = (name, number) == ("cosmos", 0.0)  # it has an angle unless all are zero
        for losses in [all_of_them] if cosine else [one, all_of_them]:
            assert not direction(losses).isfinite().any()
            assert not compiled(losses).isfinite().any()
    assert direction(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)).isfinite().all()  # not for another reason


def test_the_rules_that_take_logarithms_name_their_domain():
    assert {name for name, entry in RULES.items() if -1.0 in entry.invalid} >= {"famo", "geometric_mean"}
