"""The table of rules in the docs is what the code says."""

from pathlib import Path

import pytest
from rule_table import RULES, rules_table

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
        ("grouped", "as its rules", "as its rules"),
    ],
)
def test_rows_say_what_a_rule_looks_at_and_remembers(name, sees, remembers):
    assert (ROWS[name]["reads"], ROWS[name]["memory"]) == (sees, remembers)


def test_rows_say_what_a_rule_claims():
    assert ROWS["upgrad"]["never conflicts"] == "✓"
    assert ROWS["mean"]["never conflicts"] == ""
    assert [ROWS[name]["stationary"] for name in ("upgrad", "mgda", "constant")] == ["strongly", "weakly", ""]


def test_the_table_of_the_docs_is_up_to_date():
    made = f"<!-- rules -->\n\n{rules_table()}\n\n<!-- /rules -->"
    assert made in PAGE.read_text(encoding="utf-8"), "run: python tests/rule_table.py docs/rules.md"
