"""`python -m functional_jd.testing [docs/rules.md]`: print the table of the rules, or update it in the given files."""

import sys
from pathlib import Path

from functional_jd.testing.table import rules_table, with_rules_table


def main(arguments: list[str]) -> None:
    """Print the table, or update it in the given files."""
    for argument in arguments:
        path = Path(argument)
        path.write_text(with_rules_table(path.read_text(encoding="utf-8")), encoding="utf-8")
    if not arguments:
        print(rules_table())


if __name__ == "__main__":
    main(sys.argv[1:])
