"""The table of rules in the docs is what the code says."""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import functional_jd as fj
from functional_jd.testing import RULES, jacobians, rules_table, with_rules_table
from functional_jd.testing.__main__ import main

PAGE = Path(__file__).parents[2] / "docs" / "rules.md"
HEADER, _, *LINES = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rules_table().splitlines()]
ROWS = {cells[0].strip("`").partition("(")[0]: dict(zip(HEADER, cells, strict=True)) for cells in LINES}


def test_every_rule_has_a_row():
    assert list(ROWS) == list(RULES)


@pytest.mark.parametrize(
    ("name", "sees", "remembers"),
    [
        ("mean", "nothing", ""),
        ("upgrad", "Gramian", ""),
        ("graddrop", "Jacobian", "key"),
        ("gradvac", "Gramian", "key, targets"),
        ("modo", "Gramian of two batches", "weights"),
        ("grouped", "what its rules look at", "what its rules remember"),
    ],
)
def test_rows_say_what_a_rule_looks_at_and_remembers(name, sees, remembers):
    assert (ROWS[name]["looks at"], ROWS[name]["remembers"]) == (sees, remembers)


def test_rows_say_how_a_rule_is_called_and_what_it_claims():
    assert ROWS["upgrad"]["rule"] == "`upgrad(preference=None)`"
    assert ROWS["upgrad"]["never conflicts"] == "✓"
    assert ROWS["mean"]["never conflicts"] == ""


def test_the_command_rewrites_what_is_between_the_markers_only(tmp_path, capsys):
    path = tmp_path / "README.md"
    path.write_text("before\n<!-- rules -->\nold\n<!-- /rules -->\nafter\n")
    main([str(path)])
    expected = f"before\n<!-- rules -->\n{rules_table()}\n<!-- /rules -->\nafter\n"
    assert path.read_text() == expected
    main([str(path)])
    assert path.read_text() == expected
    main([])
    assert capsys.readouterr().out == rules_table() + "\n"


@pytest.mark.parametrize("text", ["", "<!-- rules -->", "<!-- /rules -->\n<!-- rules -->"])
def test_a_text_without_both_markers_is_refused(text):
    with pytest.raises(ValueError, match="Put them on lines of their own"):
        with_rules_table(text)


def test_the_table_of_the_docs_is_up_to_date():
    text = PAGE.read_text(encoding="utf-8")
    assert text == with_rules_table(text), "run: python -m functional_jd.testing docs/rules.md"


class Norms(NamedTuple):
    squares: torch.Tensor


def patient():
    def update(G, memory):
        return torch.ones_like(memory.squares), Norms(memory.squares + G.diagonal())

    return fj.Aggregator(fj.views.gramian, lambda G: Norms(torch.zeros_like(G.diagonal())), update)


def test_rules_of_ones_own_stand_beside_others_with_what_was_found_of_them():
    squared = fj.stateless(fj.views.gramian.map(torch.diag), lambda squares: squares)
    table = rules_table({"mean": fj.mean(), "mine": patient(), "squared": squared})
    head, _, *lines = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()]
    rows = {cells[0]: dict(zip(head, cells, strict=True)) for cells in lines}
    assert head == HEADER
    assert list(rows) == ["`mean`", "`mine`", "`squared`"]
    assert list(rows["`mean`"].values())[1:] == list(ROWS["mean"].values())[1:]
    assert [rows["`mine`"][x] for x in ("looks at", "remembers", "linear in row scales")] == ["Gramian", "squares", "✓"]
    assert (rows["`squared`"]["looks at"], rows["`squared`"]["homogeneous"]) == ("inner products of rows", "")


def test_rules_that_accept_some_jacobians_only_get_those():
    preferred = fj.constant([1.0, 2.0])
    assert "| `mine` | nothing |  |  | ✓ |" in rules_table({"mine": preferred}, jacobians=jacobians(rows=2))


@pytest.mark.parametrize(
    ("rules", "words"), [([fj.mean()], "a dict by names"), ({"mean": fj.mean}, "must be a rule, found function")]
)
def test_what_are_no_rules_by_name_is_refused(rules, words):
    with pytest.raises(TypeError, match=f"^rules_table: .*{words}"):
        rules_table(rules)
