"""The layout: a package imports only from rows above its own, and a name in the root means one thing."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import functional_jd
from functional_jd.aggregation import views

PACKAGE = Path(functional_jd.__file__).parent

ROWS = [
    ["torch_compat"],
    ["core"],
    ["random", "solvers", "precision"],
    ["objectives", "aggregation", "optimizers"],
    ["engines", "aggregators", "views"],
    ["training"],
    ["distributed", "diagnostics", "fronts"],
    ["__init__"],
    ["testing", "plotting", "__main__"],
]
ROW = {name: row for row, names in enumerate(ROWS) for name in names}
# Rules never import one another; their table of contents does.
APART = {"aggregators"}

VIEWS = {name for name, value in vars(views).items() if isinstance(value, views.View)}
SOURCES = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def home(path):
    """The name in the table of the file or folder that a source belongs to."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def statements(tree):
    """All of a file, however deep; expressions, of which there are many more, import nothing."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield node
            yield from statements(node)


def imports(tree):
    """The modules that a file imports when it runs, wherever in the file; a relative one keeps its dots."""
    for node in statements(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def test_every_import_is_by_the_full_name():
    found = [f"{path} imports {module}" for path in SOURCES for module in imports(SOURCES[path]) if module[0] == "."]
    assert not found, "\n".join(found)


def test_a_package_imports_only_from_rows_above_its_own():
    found = []
    for path, tree in SOURCES.items():
        mine, row = home(path), ROW[home(path)]  # every file stands in the table
        for module in imports(tree):
            top, _, rest = module.partition(".")
            theirs = rest.split(".")[0] or "__init__"
            if top != "functional_jd" or theirs not in ROW:
                continue  # a name that `__init__` exports is checked as `functional_jd` itself
            inside = mine == theirs and (mine not in APART or path.stem == "__init__")
            if not (ROW[theirs] < row or inside):
                found.append(f"{path} (row {row}) imports {module} (row {ROW[theirs]})")
    assert not found, "\n".join(found)


def test_one_thought_fits_a_function():
    """Docstrings do not count."""
    found = {}
    for path, tree in SOURCES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                first = node.body[0] if ast.get_docstring(node, clean=False) else None
                documented = first.end_lineno - first.lineno + 1 if first else 0
                found[f"{path.stem}.{node.name}"] = node.end_lineno - node.lineno + 1 - documented
    long = {name for name, length in found.items() if length > 50}
    assert not long - LONG.keys(), sorted(long - LONG.keys())
    assert long == LONG.keys(), "fits now: leave it out of the table"


LONG = {
    "adamw.adamw": "holds `step`, and all that it needs of the hyper-parameters",
    "train.train": "holds the functions of the population, which share its closure",
}
"""Functions of more than 50 lines, and why they are not parted."""


def test_only_tree_imports_optree():
    found = {path for path, tree in SOURCES.items() for module in imports(tree) if module.split(".")[0] == "optree"}
    assert found == {PACKAGE / "core" / "tree.py"}


def test_no_two_files_have_one_name():
    names = [path.name for path in SOURCES if path.stem not in ("__init__", "__main__")]
    assert not {name for name in names if names.count(name) > 1}


def test_no_imports_inside_the_engines_go_in_a_circle():
    """From file to file, and from folder to folder."""
    folder = PACKAGE / "engines"
    arrows = {}
    for path, tree in SOURCES.items():
        if folder in path.parents and path != folder / "__init__.py":
            mine = path.relative_to(folder).with_suffix("").parts[0]
            theirs = {name.split(".")[2] for name in imports(tree) if name.startswith("functional_jd.engines.")}
            arrows[mine] = arrows.get(mine, set()) | theirs - {mine}
    TopologicalSorter(arrows).prepare()


def test_inner_products_by_layers_know_nothing_of_kinds_of_losses():
    layers = {path: tree for path, tree in SOURCES.items() if path.parent == PACKAGE / "engines" / "gramian"}
    found = [f"{path} imports {name}" for path, tree in layers.items() for name in imports(tree) if ".kinds" in name]
    assert layers
    assert not found, "\n".join(found)


def test_what_a_rule_needs_is_data():
    """No view is recognised by its identity, which a view that is made of it would not have."""
    found = [f"{path}: {asked}" for path, tree in SOURCES.items() for asked in compared_views(tree)]
    assert not found, "\n".join(found)


def compared_views(tree):
    """The comparisons in a file with a view that it imports."""
    known = [node for node in statements(tree) if isinstance(node, ast.ImportFrom) and "views" in (node.module or "")]
    names = {alias.asname or alias.name for node in known for alias in node.names} & VIEWS
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [each for side in (node.left, *node.comparators) for each in getattr(side, "elts", [side])]
            of_module = [ast.unparse(side).rpartition(".") for side in sides if isinstance(side, ast.Attribute)]
            seen = {side.id for side in sides if isinstance(side, ast.Name)} & names
            seen |= {name for module, _, name in of_module if module.rpartition(".")[2] == "views"} & VIEWS
            if seen:
                yield ast.unparse(node)


def private_names(tree):
    """Private modules of torch that a file imports, and private attributes of torch that it reads."""
    modules = [module for module in imports(tree) if module.split(".")[0] == "torch"]
    yield from (module for module in modules if any(part.startswith("_") for part in module.split(".")))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            root = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name) and root.id in ("torch", "nn", "Tensor", "dist"):
                yield ast.unparse(node)


def test_private_names_of_torch_are_used_in_one_folder_only():
    outside = {path: tree for path, tree in SOURCES.items() if home(path) != "torch_compat"}
    found = [f"{path} uses {name}" for path, tree in outside.items() for name in private_names(tree)]
    assert not found, "\n".join(found)


def test_nothing_in_the_root_is_called_like_an_exported_function():
    rooms = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert not {name for name in rooms & set(functional_jd.__all__) if callable(getattr(functional_jd, name))}


def test_no_module_of_tests_imports_another():
    found = [
        f"{path}: {line}"
        for path in Path(__file__).parent.rglob("test_*.py")
        for line in re.findall(r"^\s*((?:from|import) +(?:\.|test_).*)", path.read_text(), flags=re.MULTILINE)
    ]
    assert not found, "\n".join(found)
