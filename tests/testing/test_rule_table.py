"""The table of rules in the docs is what the code says."""

from pathlib import Path

from rule_table import rules_table

PAGE = Path(__file__).parents[2] / "docs" / "rules.md"


def test_the_table_of_the_docs_is_up_to_date():
    made = f"<!-- rules -->\n\n{rules_table()}\n\n<!-- /rules -->"
    assert made in PAGE.read_text(encoding="utf-8"), "run: python tests/rule_table.py docs/rules.md"
