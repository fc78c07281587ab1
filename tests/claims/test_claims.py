"""Every row of the table that compares peers is measured by a function here, or said to be read."""

import importlib.util
import re
from pathlib import Path

HERE = Path(__file__).parent
PAGE = (HERE.parents[1] / "docs" / "coming_from.md").read_text(encoding="utf-8")


def rows():
    """`ROWS` of the command; to import it takes no peer."""
    spec = importlib.util.spec_from_file_location("claims", HERE / "__main__.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.ROWS


def test_every_row_of_the_table_has_a_function():
    table = PAGE.split("## Comparison")[1].split("\n\n| |")[1].split("\n\n")[0]
    titles = re.findall(r"^\| (.+?) \|", table, flags=re.MULTILINE)
    assert titles[1:] == list(rows())  # the first is the rule below the names of the columns
    for name in filter(None, rows().values()):
        module, _, function = name.partition(".")
        assert f"\ndef {function}() -> dict[str, str]:" in (HERE / f"{module}.py").read_text(encoding="utf-8")
