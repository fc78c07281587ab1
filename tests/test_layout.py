"""The order of imports: a file imports only from rows above its own."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "functional_jd"

ROWS = [
    ["summary"],
    ["types"],
    ["tree", "random", "transforms", "rows"],
    ["solvers", "given", "averages", "orders", "precision", "norms", "graphs", "naming", "affine", "parts"],
    ["objectives", "scaling", "aggregation", "optimizers", "pullback", "clipping", "taps", "custom", "policy"],
    ["jacobian", "weighted", "factors", "tapped", "aggregators", "scaler_dict", "adapters"],
    ["gramian", "cost"],
    ["step"],
    ["distributed", "diagnostics", "fit"],
    ["__init__"],
    ["testing", "plotting", "__main__"],
]
ROW = {name: row for row, names in enumerate(ROWS) for name in names}
# One solver may build on another; the kit and the subpackages' tables of contents gather what stands beside them.
WITHIN = {"solvers", "testing", "plotting"}

FILES = sorted(PACKAGE.rglob("*.py"))


def home(path):
    """The name in the table of the file or folder that a source belongs to."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imports(path):
    """The modules that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: import by the full name"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_imports_only_from_rows_above_its_own(path):
    mine = home(path)
    for module in imports(path):
        top, _, rest = module.partition(".")
        if top != "functional_jd":
            continue
        theirs = rest.split(".")[0] or "__init__"
        if theirs not in ROW:
            continue  # a name that `__init__` exports, checked as `functional_jd` itself
        inside = mine == theirs and (mine in WITHIN or path.name == "__init__.py")
        assert ROW[theirs] < ROW[mine] or inside, f"{mine} (row {ROW[mine]}) imports {module} (row {ROW[theirs]})"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_tree_imports_optree(path):
    if home(path) != "tree":
        assert not any(module.split(".")[0] == "optree" for module in imports(path))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_file_stands_in_the_table_and_one_idea_fits_a_room(path):
    assert home(path) in ROW
    assert len(path.read_text().splitlines()) <= 400
