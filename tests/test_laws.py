"""Rule by rule and law by law: what is claimed holds, and what must not hold does not.

The table is `functional_jd.testing.RULES`: a new rule is one entry there.
"""

import pkgutil

import hypothesis
import pytest
import torch

from functional_jd import aggregators
from functional_jd.testing import ALWAYS, BY_CLAIM, RULES
from functional_jd.testing.conformance import counterexample
from functional_jd.testing.table import jacobians_for, rule_of

PROFILE = hypothesis.settings()
CLAIMED = hypothesis.settings(max_examples=max(10, PROFILE.max_examples // 2))
# What must be broken need not be broken in a small way.
BROKEN = hypothesis.settings(max_examples=400, phases=[hypothesis.Phase.generate])

# Broken by Jacobians that chance hardly ever draws.
WITNESSES = {
    ("krum", "strongly_stationary"): [[0.0], [0.0], [1.0], [1.0]],
    ("trimmed_mean", "weakly_stationary"): [[1.0, -2.0, 0.0], [0.0, 1.0, -2.0], [-2.0, 0.0, 1.0]],
}


def cases():
    for name, entry in RULES.items():
        for law in ALWAYS + BY_CLAIM:
            known = f"{name}-{law.__name__}"
            if law in ALWAYS or law in entry.claims:
                yield pytest.param(name, law, id=known)
            elif law in entry.fails:
                broken = pytest.mark.xfail(strict=True, raises=AssertionError, reason=entry.fails[law])
                yield pytest.param(name, law, id=known, marks=broken)


@pytest.mark.parametrize(("name", "law"), list(cases()))
def test_law(name, law):
    rule = rule_of(name)
    if (name, law.__name__) in WITNESSES:
        law(rule, torch.tensor(WITNESSES[name, law.__name__], dtype=torch.float64))
        return
    settings = BROKEN if law in RULES[name].fails else CLAIMED
    found = counterexample(rule, law, jacobians_for(name), settings)
    if found is not None:
        if not isinstance(found.error, AssertionError):
            raise found.error  # a law that does not run shows nothing
        raise AssertionError(f"{name} breaks {law.__name__}: {found.error}\n\n{found}") from found.error


def test_every_rule_of_the_package_stands_in_the_table():
    assert {module.name for module in pkgutil.iter_modules(aggregators.__path__)} == RULES.keys()


@pytest.mark.parametrize("name", RULES)
def test_no_law_is_both_claimed_and_denied_and_all_are_by_claim(name):
    claims, fails = set(RULES[name].claims), set(RULES[name].fails)
    assert not claims & fails
    assert claims | fails <= set(BY_CLAIM)
