"""The peer's rules in the trainings of the study: they are the peer's, with their state, and nothing else differs."""

from types import SimpleNamespace

import pytest
import study_peers
import torch
from study_cells import under_method
from study_peers import ALL, OURS, STANDARDISED, Peer, peer_cell, peer_of, rule_of
from study_rules import RULES, Method, methods_for
from study_training import draws_of, train
from tiny_problem import DRAWS, PROBLEM, RATES

import functional_jd as jd

pytest.importorskip("torchjd")

# Not ours: cvxpy says so of what the peer asks for, and of what ECOS returns.
of_the_peer = [
    pytest.mark.filterwarnings("ignore:You are solving a parameterized problem that is not DPP"),
    pytest.mark.filterwarnings("ignore:Solution may be inaccurate"),
]
pytestmark = of_the_peer


def take_ours_for_the_peers(rule, monkeypatch):
    ours = lambda J: jd.aggregate(RULES[rule_of(rule)](torch.zeros(2)), J).direction
    monkeypatch.setattr(study_peers, "peer_of", lambda name, m: ours)


@pytest.mark.parametrize("rule", STANDARDISED)
def test_standardised_losses_get_the_peers_rule_and_stand_beside_ours_on_such(rule, monkeypatch):
    """The cell of the peer's rule, with ours in its place, is that of our method on the same losses."""
    assert repr(peer_of(rule, 3)) == repr(peer_of(rule.removesuffix("_standardised"), 3))
    take_ours_for_the_peers(rule, monkeypatch)
    theirs = peer_cell(PROBLEM, rule, DRAWS, steps=20, rounds=1)
    ours = under_method(PROBLEM, methods_for(2)[OURS[rule]], DRAWS, steps=20, rounds=1)
    torch.testing.assert_close(torch.tensor(theirs["test"]), torch.tensor(ours["test"]), rtol=1e-2, atol=1e-3)
    assert max(theirs["apart"]["largest"]) < 1e-5


@pytest.mark.parametrize("rule", ALL)
def test_a_training_with_our_rule_in_the_place_of_the_peers_is_ours(rule, monkeypatch):
    take_ours_for_the_peers(rule, monkeypatch)
    given = DRAWS, RATES, torch.ones(2, 2, 2), 30
    found = Peer(rule, 2, 30)
    theirs = train(PROBLEM, Method(lambda key: found.aggregator()), *given)
    ours = train(PROBLEM, Method(RULES[rule_of(rule)]), *given)
    torch.testing.assert_close(theirs.parts, ours.parts, rtol=1e-3, atol=1e-4)
    assert torch.equal(theirs.skipped, ours.skipped)
    assert torch.stack(found.apart[0]).max() < 1e-5


def test_every_training_has_its_own_state():
    """A training among four is the same alone, although `NashMTL` begins with the last solution."""
    built = Peer("nash_mtl", 2, 6)
    method = Method(lambda key: built.aggregator())
    four = train(PROBLEM, method, DRAWS, RATES, torch.ones(2, 2, 2), 6, whole=True)
    assert len({id(one) for one in built.own}) == 4
    second = SimpleNamespace(**{**vars(DRAWS), "numbers": (1,), "data": DRAWS.data[1:]})
    alone = train(PROBLEM, method, second, RATES[1:, 1:], torch.ones(1, 1, 2), 6, whole=True)
    torch.testing.assert_close(alone.parts[:, 0, 0], four.parts[:, 1, 1], rtol=1e-3, atol=1e-4)
    assert len(built.apart) == 2
    assert torch.stack(built.apart[0]).shape == (6, 4)


def test_steps_without_a_direction_are_skipped_and_counted(monkeypatch):
    def refuses(J):
        raise ArithmeticError("no")

    monkeypatch.setattr(study_peers, "peer_of", lambda rule, m: refuses)
    found = Peer("upgrad", 2, 4)
    given = draws_of(PROBLEM, 1), torch.tensor([[0.01]]), torch.ones(1, 1, 2), 4
    trained = train(PROBLEM, Method(lambda key: found.aggregator()), *given)
    assert trained.skipped.item() == 1
    assert found.errors == {"ArithmeticError": trained.steps}
    # A Jacobian that is not finite is not the peer's fault.
    assert found.directions(torch.full((1, 2, 3), torch.nan)).isnan().all()
    assert found.errors == {"ArithmeticError": trained.steps}
