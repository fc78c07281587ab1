"""The table of rules every few steps, on little data."""

import every_few_steps as held
import pytest

import functional_jd as jd


@pytest.fixture(autouse=True)
def little(monkeypatch):
    for name, value in {"SEEDS": 1, "EPOCHS": 1, "BATCH": 200}.items():
        monkeypatch.setattr(held, name, value)
    monkeypatch.setattr(held, "RULES", {"mean": jd.mean, "upgrad": jd.upgrad})
    monkeypatch.setattr(held, "EVERY", {"mean": (1,), "upgrad": (1, 2)})


def test_every_rule_has_a_row_in_both_tables(capsys):
    held.main()
    out = capsys.readouterr().out
    assert [out.count(row) for row in ("| `mean` | 1 |", "| `upgrad` | 1 |", "| `upgrad` | 2 |")] == [2, 2, 2]
    assert "nan" not in out


def test_an_interval_of_one_is_the_rule():
    problem = held.digit_and_brightness(0)
    figures, _ = held.trained(problem, "upgrad", 1, 0)
    again, _ = held.trained(problem, "upgrad", 1, 0)
    assert figures == again
    assert held.trained(problem, "upgrad", 3, 0)[0] != figures
