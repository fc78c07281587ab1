"""The study from end to end on a tiny problem, and the numbers of its page on results made by hand."""

from pathlib import Path

import pytest
import study_advice
import study_page
import study_pictures
import torch
from study_problem import Problem, always, explained, network
from study_problem import apply as network_values
from study_problems import PROBLEMS
from study_results import best, load, near_best, overall, run, share_to_grid, store
from study_rules import RULES, grid, rules_for

from functional_jd.diagnostics.advise import Thresholds


def tiny():
    """Two columns of a line, one in a unit of 1e-6; the same twenty points everywhere."""
    x = torch.linspace(-1, 1, 20)[:, None]
    y = torch.cat([x, 1 - x], dim=1)

    def losses(params, x, y):
        return (network_values(params, x) - y).square().mean(0) * torch.tensor([1.0, 1e-6])

    return Problem(
        "tiny",
        "A line.",
        losses,
        lambda g: network(g, 1, 4, 2),
        always(x, y),
        lambda params, split: explained(network_values(params, x), y),
        ("first", "second"),
        m=2,
        steps=20,
        rates=(1e-3, 1e-2, 1e-1),
    )


def test_a_tiny_problem_from_end_to_end(tmp_path, capsys):
    found = run(tiny(), seeds=2, steps=20, rounds=1, rules=["mean", "config", "dwa"])
    store(tmp_path / "study.json", {"problems": {"tiny": {"name": "tiny", **found}}})
    stored = load(tmp_path / "study.json")
    problem = stored["problems"]["tiny"]
    assert problem["rules"].keys() == {"mean", "config", "dwa"}
    assert len(problem["grid"]["test"]) == 2  # seeds
    assert all(len(scores) == 2 for rule in problem["rules"].values() for scores in rule["test"])
    assert all(0 <= score <= 1 for rule in problem["rules"].values() for scores in rule["test"] for score in scores)
    assert overall(problem["rules"]["config"]) > 0.5  # twenty steps learn a line
    assert [problem["rules"][name]["passes"] for name in ("mean", "config", "dwa")] == [1, 2, 1]
    assert capsys.readouterr().out.count("tiny") == 4
    assert [line.count("|") for line in study_page.summary(stored)] == [
        5
    ] * 6  # a line for titles, marks, weights, rules
    assert all(path.exists() for path in study_pictures.draw(stored, tmp_path))


def result(*scores, curve=(0.5,), time=1.0):
    """A result of two seeds that agree."""
    base = {"rate": 0.1, "passes": 1, "trainings": 3, "skipped": 0.0, "validation": list(curve), "time": time}
    return base | {"test": [list(scores)] * 2}


def problem(grid_score, **rules):
    return {"name": "made", "grid": result(grid_score, curve=(0.1, 0.5)), "rules": rules}


def test_rules_near_the_best_and_the_way_to_the_tuned_weights():
    made = problem(0.5, mean=result(0.4), config=result(0.8), imtl_g=result(0.79), mgda=result(0.6, 1.0))
    assert best(made) == pytest.approx(0.8)
    assert near_best(made) == ["config", "mgda", "imtl_g"]
    assert share_to_grid(made, result(0.9, curve=(0.1, 0.2, 0.6, 0.4))) == 0.75
    assert share_to_grid(made, result(0.9, curve=(0.1, 0.2))) is None


def test_weights_of_the_grid():
    found = grid(torch.tensor([1e3, 1e-6]), False)
    assert found.shape == (8, 2)
    assert found[0].tolist() == [1, 1]
    assert torch.equal(found.amax(1), torch.ones(8, dtype=torch.float64))
    ratios = found[1:, 0] / found[1:, 1] * 1e9
    expected = torch.tensor([1, 1 / 100, 1 / 30, 1 / 5, 5, 30, 100], dtype=torch.float64)
    torch.testing.assert_close(ratios, expected, rtol=torch.finfo(torch.float32).eps, atol=0)  # losses are float32
    assert grid(torch.ones(5), False).shape == (22, 5)
    assert grid(torch.ones(5), True).tolist() == [[1] * 5]


def test_every_rule_of_the_study_is_one_of_the_library():
    assert len(RULES) >= 14
    key = torch.zeros(2, dtype=torch.int64)
    assert all(hasattr(build(key), "update") for build in rules_for(4).values())
    assert "trimmed_mean" not in rules_for(2)


def test_thresholds_are_chosen_on_other_problems():
    def made(best_rule):
        names = ("mean", "config", "imtl_g", "nash_mtl", "geometric_mean", "famo", *("upgrad", "pcgrad", "cagrad"))
        return problem(0.5, **{name: result(0.9 if name == best_rule else 0.5) for name in (*names, "aligned_mtl")})

    problems = {"far": made("imtl_g"), "farther": made("imtl_g"), "near": made("mean")}
    seen = {"far": 20.0, "farther": 50.0, "near": 5.0}
    figures = {name: {"conflict": 0.0, "imbalance": value} for name, value in seen.items()}
    found = study_advice.fitted(list(problems), problems, figures)
    assert (found.imbalance, found.rescale) == (10, "imtl_g")
    assert all(study_advice.outcome(problems[name], figures[name], found)["hit"] for name in problems)
    assert study_advice.outcome(problems["far"], figures["far"], Thresholds(imbalance=100))["share"] == 0.5556


STORED = load(Path(study_page.__file__).with_name("study.json"))


def test_what_is_stored_is_whole():
    """Every problem, every rule that exists for it, every seed; and no name of a machine."""
    assert STORED["problems"].keys() == STORED["advice"]["problems"].keys() == PROBLEMS.keys()
    for name, found in STORED["problems"].items():
        assert found["rules"].keys() == rules_for(found["m"]).keys(), name
        assert {len(rule["test"]) for rule in found["rules"].values()} == {5}
    assert STORED["machine"].keys() == {"cores", "threads", "torch", "functional_jd"}


def test_advise_has_the_thresholds_that_the_study_chose():
    assert Thresholds()._asdict() == STORED["advice"]["best"]


def test_the_page_has_the_tables_of_what_is_stored():
    page = study_page.PAGE.read_text(encoding="utf-8")
    assert "\n".join(study_page.summary(STORED)) in page
    assert STORED["advice"]["words"] in page
    for name in STORED["problems"]:
        assert "\n".join(study_page.of_problem(STORED["problems"][name])) in page
