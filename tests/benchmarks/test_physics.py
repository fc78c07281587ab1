"""The race of networks that solve equations: validation points choose, test points are shown."""

import itertools

import pytest
from physics import least_error


class Made:
    """An equation whose errors were written down; the network is the number of its step."""

    validation = (0.9, 0.3, 0.2, 0.4)
    test = (0.8, 0.1, 0.5, 0.6)

    def error(self, params, split):
        return getattr(self, split)[params]


def test_the_error_is_that_of_the_moment_that_validation_chooses(monkeypatch):
    monkeypatch.setattr("physics._LOOKS", 4)
    steps, shares = itertools.count(), []

    def advance(share):
        shares.append(share)
        return next(steps)

    ticks = itertools.count()
    found = least_error(Made(), advance, 4.0, clock=lambda: float(next(ticks)))  # every step takes a second
    assert found == (0.2, 0.5)  # not the least test error, 0.1
    assert shares == pytest.approx([0, 0.25, 0.5, 0.75])  # what a rate falls with
