"""Pages of the reference, one per section, with a page for each rule, written before the site is built."""

import ast
import inspect
import sys
from collections.abc import Container, Iterable
from importlib import import_module
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any

import functional_jd

# The sections, and the packages or files that their names come from.
SECTIONS = {
    "Train": ["training", "engines.choose"],
    "Objectives": ["objectives"],
    "Differentiate": ["engines", "aggregation.observation", "torch_compat.callers"],
    "Aggregate": ["aggregation", "core.heads", "core.types"],
    "Rules": ["aggregators"],
    "Loss scaling": ["precision.loss_scale", "precision.scale_state"],
    "Precision": ["precision"],
    "Optimizers": ["optimizers"],
    "Diagnose": ["diagnostics", "core.names"],
}
# What a reader looks for first.
FIRST = ["train_state", "step", "jacobian_fn", "aggregate", "scale_state"]
# The packages whose names stand under the headings, beside those of the top level.
ROOMS = ["aggregation", "aggregators", "diagnostics", "engines", "objectives", "optimizers", "precision", "views"]
MODULES = ["random", "distributed", "fronts", "plotting", "testing"]


def public_names() -> dict[str, Any]:
    """What the headings are for, by the shortest name that it has below the package: `step`, `precision.select`."""
    found = {name: getattr(functional_jd, name) for name in functional_jd.__all__ if name not in MODULES}
    for room in ROOMS:
        names = [name for name in members_of(room) if name not in functional_jd.__all__]
        found |= {f"{room}.{name}": getattr(import_module(f"functional_jd.{room}"), name) for name in names}
    return found


def sections() -> dict[str, list[str]]:
    """The public names of the package under the headings of the reference, functions before records."""
    found: dict[str, list[str]] = {title: [] for title in SECTIONS}
    home = {file: title for title, files in SECTIONS.items() for file in files}

    def place(pair: tuple[str, Any]) -> tuple[bool, bool, str]:
        name = pair[0].rpartition(".")[2]
        return inspect.isclass(pair[1]), name not in FIRST, name

    for name, member in sorted(public_names().items(), key=place):
        path = member.__module__.removeprefix("functional_jd.")
        while path and path not in home:
            path = path.rpartition(".")[0]
        assert path, f"no heading for {member.__module__}.{name}"
        found[home[path]].append(name)
    return found


def members_of(module: str) -> list[str]:
    """The public names of a module of the package."""
    found = import_module(f"functional_jd.{module}")
    own = [name for name, value in vars(found).items() if getattr(value, "__module__", None) == found.__name__]
    return list(getattr(found, "__all__", [name for name in own if name[0] != "_"]))


def write(folder: Path, pictures: Iterable[str] = ()) -> list[str]:
    """Write all pages into a folder, which has pictures of these functions of `plotting`; return those of the top."""
    shown = dict.fromkeys(pictures)
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.rst"):
        old.unlink()
    pages: list[str] = []
    for title, names in sections().items():
        page = title.lower().replace(" ", "_")
        pages.append(page)
        if title == "Rules":
            _write_rules(folder, names, shown)
        else:
            blocks = [_entry("functional_jd", name) for name in names]
            _page(folder / f"{page}.rst", title, [*_introduction(title), *blocks])
    for module in MODULES:
        pages.append(module)
        blocks = [_entry(f"functional_jd.{module}", name) for name in members_of(module)]
        if module == "plotting":
            names = members_of(module)
            blocks = [block + _pictures(name, shown) for name, block in zip(names, blocks, strict=True)]
        _page(
            folder / f"{module}.rst", f"functional_jd.{module}", [f".. automodule:: functional_jd.{module}\n", *blocks]
        )
    return pages


def _pictures(name: str, shown: Container[str]) -> str:
    """The directives for the picture of a function, in both themes, if there is one."""
    if name not in shown:
        return ""
    picture = "   .. image:: plot_{0}_{1}.png\n      :alt: What {0} draws\n      :class: only-{1}\n"
    return "\n" + "\n".join(picture.format(name, theme) for theme in ("light", "dark"))


def _introduction(title: str) -> list[str]:
    """What the page of a section begins with."""
    return [".. automodule:: functional_jd.views\n"] if title == "Aggregate" else []


def _write_rules(folder: Path, names: list[str], shown: Container[str]) -> None:
    pages = {name: name.rpartition(".")[2] for name in names}
    for name, page in pages.items():
        picture = _pictures("cone", shown) if name == "upgrad" else ""
        _page(folder / f"rule_{page}.rst", page, [_entry("functional_jd", name) + picture, *_state(name)])
    _page(folder / "rules.rst", "Rules", ["One page a rule.\n", _contents([f"rule_{page}" for page in pages.values()])])


def _state(name: str) -> list[str]:
    """The record of what a rule remembers."""
    module = import_module(attrgetter(name)(functional_jd).__module__)
    if (
        module.__name__.rpartition(".")[2] != name.rpartition(".")[2]
    ):  # what belongs to a rule, such as `famo_after_step`
        return []
    records = [
        value for value in vars(module).values() if inspect.isclass(value) and value.__module__ == module.__name__
    ]
    return [_entry(module.__name__, record.__name__) for record in records]


def _entry(module: str, name: str) -> str:
    value = attrgetter(name)(import_module(module))
    if inspect.isclass(value):
        return f".. autoclass:: {module}.{name}\n"
    if callable(value):  # a function, or a view
        return f".. autofunction:: {module}.{name}\n"
    return f".. py:data:: {module}.{name}\n\n   {_below_assignment(name.rpartition('.')[2], value)}\n"


def _below_assignment(name: str, value: Any) -> str:
    """The string below the line that assigns a value: a tuple or a dict has no docstring of its own."""
    modules = [module for path, module in sys.modules.items() if path.startswith("functional_jd.")]
    for module in modules:
        if vars(module).get(name) is value and module.__file__:
            body = ast.parse(Path(module.__file__).read_text(encoding="utf-8")).body
            for assigned, text in pairwise(body):
                targets = getattr(assigned, "targets", None) or [getattr(assigned, "target", None)]
                if [getattr(target, "id", None) for target in targets] == [name] and isinstance(text, ast.Expr):
                    return inspect.cleandoc(ast.literal_eval(text.value)).replace("\n", "\n   ")
    return ""


def _contents(pages: list[str]) -> str:
    return ".. toctree::\n   :maxdepth: 1\n\n" + "".join(f"   {page}\n" for page in pages)


def _page(path: Path, title: str, blocks: list[str]) -> None:
    path.write_text(f"{title}\n{'=' * len(title)}\n\n" + "\n".join(blocks), encoding="utf-8")
