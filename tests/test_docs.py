"""The reference: every public name is on a page and says what it takes and gives."""

import importlib
import inspect
import pydoc
import re
from collections import Counter
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from conftest import not_for_torch_2_11
from rule_table import RULES, rules_table

import functional_jd
from functional_jd.testing import ALWAYS, BY_CLAIM, differentiable

PLACE = Path(__file__).parents[1] / "docs" / "make_reference.py"
ORDER = ["Args", "Attributes", "Returns", "Raises", "Guarantees", "Source", "Differences", "Example"]
# Their weights are no paper's idea.
FOLKLORE = {"mean", "total", "constant"}


def load():
    spec = spec_from_file_location("make_reference", PLACE)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


reference = load()
SECTIONS = reference.sections()
PUBLIC = {f"functional_jd.{name}": value for name, value in reference.public_names().items()} | {
    f"functional_jd.{page}.{name}": getattr(importlib.import_module(f"functional_jd.{page}"), name)
    for page in reference.MODULES
    for name in reference.members_of(page)
}
DOCUMENTED = {name: value for name, value in PUBLIC.items() if inspect.isfunction(value) or inspect.isclass(value)}
PACKAGE = Path(functional_jd.__file__).parent
LAWS = {*ALWAYS, *BY_CLAIM, differentiable}


def exported():
    """The names in the `__all__` of every room, by where a reader finds them; those of the top level stand there."""
    yield from (f"functional_jd.{name}" for name in functional_jd.__all__ if name not in reference.MODULES)
    for path in PACKAGE.glob("*/__init__.py"):
        room = importlib.import_module(f"functional_jd.{path.parent.name}")
        for name in getattr(room, "__all__", ()):
            if vars(functional_jd).get(name) is not getattr(room, name):
                yield f"{room.__name__}.{name}"


def test_every_public_name_has_its_place(tmp_path):
    top = reference.write(tmp_path)
    pages = {path.stem: path.read_text(encoding="utf-8") for path in tmp_path.glob("*.rst")}
    entries = Counter(
        re.findall(r"^\.\. [\w:]+:: (functional_jd\.\S+)$", "\n".join(pages.values()), flags=re.MULTILINE)
    )
    missing = sorted(set(exported()) - entries.keys())
    assert not missing, missing
    assert DOCUMENTED.keys() <= entries.keys()
    assert max(entries.values()) == 1
    listed = set(re.findall(r"^   (\w+)$", "\n".join(pages.values()), flags=re.MULTILINE))
    assert listed | set(top) == pages.keys()
    reference.write(tmp_path)  # what an earlier build left is no trouble


def test_the_changelog_begins_with_this_version():
    """Below what is marked "(unreleased)"."""
    changelog = (PLACE.parents[1] / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\S+)$", changelog, flags=re.MULTILINE)[0] == functional_jd.__version__


def test_every_section_has_members():
    assert all(SECTIONS.values())


def missing(value):
    """What the docstring of a function or class does not tell."""
    text = inspect.getdoc(value) or ""
    if not (re.match(r"[A-Z`].*[.:]\s*($|\n)", text) or "." in text.split("\n\n")[0]):
        yield "a first line that says what it does"
    if inspect.isfunction(value) and value not in LAWS:  # the page of the laws says it once for all
        signature = inspect.signature(value)
        if ("\nArgs:\n" in text) != bool(signature.parameters):
            yield "Args, if and only if it has parameters"
        if ("\nReturns:\n" in text) != (signature.return_annotation is not None):
            yield "Returns, if and only if it returns anything"
        section = text.partition("\nArgs:\n")[2].partition("\n\n")[0]
        yield from (f"its parameter {name}" for name in signature.parameters if not re.search(rf"\b{name}\b", section))
    found = re.findall(r"^(\w+):", text, flags=re.MULTILINE)
    places = [ORDER.index(section) for section in found if section in ORDER]
    if places != sorted(places):
        yield f"its sections in the order of {ORDER}"


def test_a_docstring_tells_what_is_taken_and_given_in_sections_in_their_order():
    found = [f"{name}: expected {each}" for name, value in DOCUMENTED.items() for each in missing(value)]
    assert not found, "\n".join(found)


def test_the_table_of_rules_is_what_the_code_says():
    made = f"<!-- rules -->\n\n{rules_table()}\n\n<!-- /rules -->"
    page = (PLACE.parent / "rules.md").read_text(encoding="utf-8")
    assert made in page, "run: python tests/rule_table.py docs/rules.md"


def test_a_rule_names_its_paper():
    found = []
    for name in sorted(RULES.keys() - FOLKLORE):
        builder = getattr(importlib.import_module(f"functional_jd.aggregators.{name}"), name)
        source = inspect.getdoc(builder).partition("\nSource:\n")[2].partition("\n\n")[0]
        if not re.search(r"\b(19|20)\d\d\b|arXiv \d{4}\.\d{5}", source):
            found.append(name)
    assert not found, ", ".join(found)


def test_help_shows_the_call_and_the_first_line_at_once():
    lines = pydoc.render_doc(PUBLIC["functional_jd.upgrad"], renderer=pydoc.plaintext).splitlines()
    assert lines[2].startswith("upgrad(preference: ")
    assert lines[3].strip().startswith("Average the gradients")


def test_what_is_skipped_on_torch_2_11_are_tests():
    names = {name.partition("[")[0].rpartition("::")[2] for name, _ in not_for_torch_2_11()}
    sources = "".join(path.read_text() for path in Path(__file__).parent.rglob("test_*.py"))
    assert names
    assert names <= set(re.findall(r"def (test_\w+)\(", sources))
