"""The site: `make docs`. The README is its front page, and links are those of the repository."""

import inspect
import re
import sys
from functools import partial
from pathlib import Path
from shutil import copyfile
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import formulas
import make_pictures
import make_reference
from sphinx.errors import ExtensionError
from torn import torn_markup

import functional_jd

project = "functional_jd"
PUBLIC = make_reference.public_names()
version = release = functional_jd.__version__
copyright = author = "the authors of functional_jd"

root_doc = "README"
include_patterns = ["README.md", "CHANGELOG.md", "docs/**", "notebooks/*.ipynb"]
exclude_patterns = ["build", ".*", "**/.*", "tests", "functional_jd"]

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "sphinx_copybutton"]
nb_execution_mode = "off"  # they are stored with their outputs, which `make test` checks
myst_heading_anchors = 3
myst_enable_extensions = ["dollarmath"]
suppress_warnings = ["mystnb.unknown_mime_type"]

default_role = "code"
autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_custom_sections = ["Guarantees", "Source", "Differences"]

html_theme = "furo"
html_title = f"functional_jd {version}"
html_copy_source = False
html_show_sphinx = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_math_renderer = "mathml"  # browsers draw it themselves: no script, no network


def setup(app: Any) -> None:
    """Pages of the reference are written before the build, and the front page is copied to index.html after it."""
    folder = Path(app.srcdir) / "docs" / "reference"
    folder.mkdir(exist_ok=True)
    pages = make_reference.write(folder, make_pictures.write(folder))
    app.add_html_math_renderer("mathml", (formulas.visit_inline, None), (formulas.visit_block, None))
    app.connect("source-read", add_contents)
    app.connect("source-read", partial(add_functions, pages))
    app.connect("source-read", link_rules)
    app.connect("source-read", link_reports)
    app.connect("autodoc-process-docstring", name_sections, priority=300)
    app.connect("autodoc-process-docstring", write_formulas, priority=300)
    app.connect("autodoc-process-docstring", link_names, priority=400)
    app.connect("autodoc-process-docstring", keep_returns_whole, priority=400)
    app.connect("build-finished", copy_front_page)
    app.connect("build-finished", find_torn_markup)


# The pages of the site in the order of its sidebar; the README itself, read on its own, needs none.
CONTENTS = {
    "Choose": ["docs/rules", "docs/evidence", "docs/benchmarks", "docs/limits"],
    "Guides": [
        f"docs/guides/{page}"
        for page in (
            "objectives",
            "private",
            "recipes",
            "trainers",
            "compile",
            "devices",
            "fronts",
            "physics",
            "diagnose",
            "own_rule",
        )
    ],
    "Coming from": ["docs/coming_from"],
    "Notebooks": ["notebooks/*"],
    "Reference": ["docs/reference"],
    "Project": ["CHANGELOG", "docs/contributing"],
}


def add_contents(app: Any, page: str, source: list[str]) -> None:
    """Append the sidebar to the front page; whoever reads it there needs no command that makes it."""
    if page == root_doc:
        by_hand = "`make docs`, then open `build/docs/index.html`"
        source[0] = source[0].replace(by_hand, "[all functions](docs/reference.md#all-functions)")
        source[0] = re.sub(r"^make docs .*\n", "", source[0], flags=re.MULTILINE)
        for caption, pages in CONTENTS.items():
            options = f":hidden:\n:glob:\n:caption: {caption}\n:maxdepth: 2"
            source[0] += f"\n```{{toctree}}\n{options}\n\n" + "\n".join(pages) + "\n```\n"


def add_functions(pages: list[str], _app: Any, page: str, source: list[str]) -> None:
    """List the pages of functions at the end of the reference."""
    if page == "docs/reference":
        listed = "\n".join(f"reference/{each}" for each in pages)
        head, heading, _ = source[0].partition("## All functions\n")
        source[0] = f"{head}{heading}\n```{{toctree}}\n:maxdepth: 1\n\n{listed}\n```\n"


def link_rules(_app: Any, page: str, source: list[str]) -> None:
    """Link each rule in the table of all rules to its page; read in the repository, the table has no such pages."""
    if page == "docs/rules":
        before, opening, table = source[0].partition("<!-- rules -->")
        table, closing, after = table.partition("<!-- /rules -->")
        linked = r"| [`\1`](reference/rule_\1.rst) |"
        table = re.sub(r"^\| `(\w+)` \|", linked, table, flags=re.MULTILINE)
        source[0] = before + opening + table + closing + after


def link_reports(_app: Any, _page: str, source: list[str]) -> None:
    """Turn links to Markdown files of tests, which are no pages of the site, into downloads."""
    source[0] = re.sub(r"\[([^\]]+)\]\(((?:\.\./)+tests/\S+\.md)\)", r"{download}`\1 <\2>`", source[0])


def name_sections(_app: Any, _what: str, _name: str, _obj: Any, _options: Any, lines: list[str]) -> None:
    """Give sections of one line the form of others."""
    for i, line in enumerate(lines):
        if line.startswith("Differences: "):
            lines[i : i + 1] = ["Differences:", "    " + line.removeprefix("Differences: ")]


def write_formulas(_app: Any, _what: str, _name: str, _obj: Any, _options: Any, lines: list[str]) -> None:
    """Write the formulas of a docstring as mathematics."""
    lines[:] = formulas.as_mathematics("\n".join(lines)).split("\n")


def keep_returns_whole(_app: Any, _what: str, _name: str, _obj: Any, _options: Any, lines: list[str]) -> None:
    """Give what is returned an empty type: napoleon takes all before the first colon of a sentence for one."""
    for index, line in enumerate(lines[:-1]):
        if line.strip() == "Returns:":
            text = lines[index + 1].lstrip()
            lines[index + 1] = f"{' ' * (len(lines[index + 1]) - len(text))}: {text}"


def link_names(app: Any, what: str, name: str, found: Any, options: Any, lines: list[str]) -> None:
    """Turn the names of public functions in docstrings into links, and other code into RST's code, before napoleon."""
    room, _, own = name.removeprefix("functional_jd.").rpartition(".")

    def linked(found: re.Match[str]) -> str:
        after = "\\ " if found.string[found.end() :][:1].isalnum() else ""  # code ends before a letter: `DTensor`s
        return (_linked(found[1], room, own) if found[1] else found[0]) + after

    for i, line in enumerate(lines):
        lines[i] = re.sub(r":math:`[^`]+`|`([^`]+)`", linked, line)


def _linked(code: str, room: str, own: str) -> str:
    """The link of `step` or `precision.select`; inside a package, of its names alone too."""
    path = next((path for path in (code, f"{room}.{code}") if path in PUBLIC), None)
    if code == own or path is None:
        return f"``{code}``"
    found = PUBLIC[path]
    kind = "class" if inspect.isclass(found) else "func" if callable(found) else "data"
    return f":{kind}:`{code} <functional_jd.{path}>`"


def find_torn_markup(app: Any, error: Exception | None) -> None:
    """Raise an error for markup that is torn on a page of the reference."""
    if error is None and app.builder.format == "html":
        pages = sorted((Path(app.outdir) / "docs" / "reference").glob("*.html"))
        found = [f"{page.name}: {each}" for page in pages for each in torn_markup(page.read_text(encoding="utf-8"))]
        if found:
            raise ExtensionError("torn markup in docstrings\n" + "\n".join(found))


def copy_front_page(app: Any, error: Exception | None) -> None:
    """Browsers open index.html."""
    if error is None and app.builder.format == "html":
        copyfile(Path(app.outdir) / "README.html", Path(app.outdir) / "index.html")
