"""The layout: a package imports only from rows above its own, and a name in the root means one thing."""

import ast
from pathlib import Path

import pytest

import functional_jd

PACKAGE = Path(functional_jd.__file__).parent

ROWS = [
    ["torch_compat"],
    ["core"],
    ["random", "solvers", "precision"],
    ["objectives", "aggregation", "optimizers"],
    ["engines", "aggregators", "views"],
    ["training"],
    ["distributed", "diagnostics"],
    ["__init__"],
    ["testing", "plotting", "__main__"],
]
ROW = {name: row for row, names in enumerate(ROWS) for name in names}
# Rules never import one another.
APART = {"aggregators"}

FILES = sorted(PACKAGE.rglob("*.py"))
each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))


def home(path):
    """The name in the table of the file or folder that a source belongs to."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imports(path):
    """The modules that a file imports, wherever in the file."""
    tree = ast.parse(path.read_text())
    if path == PACKAGE / "__init__.py":  # what loads when it is named: type checkers alone read it here
        tree.body = [node for node in tree.body if not (isinstance(node, ast.If) and node.test.id == "TYPE_CHECKING")]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: import by the full name"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@each_file
def test_a_package_imports_only_from_rows_above_its_own(path):
    mine = home(path)
    for module in imports(path):
        top, _, rest = module.partition(".")
        if top != "functional_jd":
            continue
        theirs = rest.split(".")[0] or "__init__"
        if theirs not in ROW:
            continue  # a name that `__init__` exports, checked as `functional_jd` itself
        inside = mine == theirs and mine not in APART
        assert ROW[theirs] < ROW[mine] or inside, f"{mine} (row {ROW[mine]}) imports {module} (row {ROW[theirs]})"


@each_file
def test_every_file_stands_in_the_table_and_one_idea_fits_a_room(path):
    assert home(path) in ROW
    assert len(path.read_text().splitlines()) <= 400


@each_file
def test_only_tree_imports_optree(path):
    if path != PACKAGE / "core" / "tree.py":
        assert not any(module.split(".")[0] == "optree" for module in imports(path))


@each_file
def test_private_names_of_torch_are_used_in_one_folder_only(path):
    if home(path) == "torch_compat":
        return
    tree = ast.parse(path.read_text())
    modules = [module for module in imports(path) if module.split(".")[0] == "torch"]
    found = [module for module in modules if any(part.startswith("_") for part in module.split("."))]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            root = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name) and root.id in ("torch", "nn", "Tensor", "dist"):
                found.append(ast.unparse(node))
    assert not found


def test_nothing_in_the_root_is_called_like_an_exported_function():
    rooms = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert not {name for name in rooms & set(functional_jd.__all__) if callable(getattr(functional_jd, name))}


def test_no_module_of_tests_imports_another():
    tests = Path(__file__).parent
    for path in tests.rglob("test_*.py"):
        assert not [name for name in imports(path) if name.split(".")[0].startswith("test_")], path
