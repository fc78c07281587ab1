"""The reference: every public name is on a page and says what it takes and gives."""

import importlib
import inspect
import pydoc
import re
from collections import Counter
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

import functional_jd
from functional_jd.testing import ALWAYS, BY_CLAIM, RULES

PLACE = Path(__file__).parents[1] / "docs" / "make_reference.py"
ORDER = ["Args", "Attributes", "Returns", "Raises", "Laws", "Source", "Differs", "Example"]
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
LAWS = {*ALWAYS, *BY_CLAIM}


def test_every_public_name_has_its_place(tmp_path):
    reference.write(tmp_path)
    pages = {path.stem: path.read_text(encoding="utf-8") for path in tmp_path.glob("*.rst")}
    entries = Counter(
        re.findall(r"^\.\. \w+:\w*:? ?(functional_jd\.\S+)$", "\n".join(pages.values()), flags=re.MULTILINE)
    )
    assert DOCUMENTED.keys() <= entries.keys()
    assert max(entries.values()) == 1
    listed = set(re.findall(r"^   (\w+)$", "\n".join(pages.values()), flags=re.MULTILINE))
    assert listed | {"index"} == pages.keys()
    reference.write(tmp_path)  # what an earlier build left is no trouble


def test_the_changelog_begins_with_this_version():
    changelog = (PLACE.parents[1] / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\S+)", changelog, flags=re.MULTILINE)[0] == functional_jd.__version__


def test_every_section_has_members():
    assert all(SECTIONS.values())


@pytest.mark.parametrize("name", DOCUMENTED)
def test_a_docstring_tells_what_is_taken_and_given(name):
    value, text = DOCUMENTED[name], inspect.getdoc(DOCUMENTED[name]) or ""
    assert re.match(r"[A-Z`].*[.:]\s*($|\n)", text) or "." in text.split("\n\n")[0], "the first line says what it does"
    if inspect.isfunction(value) and value not in LAWS:  # the page of the laws says it once for all
        signature = inspect.signature(value)
        assert ("\nArgs:\n" in text) == bool(signature.parameters)
        assert ("\nReturns:\n" in text) == (signature.return_annotation is not None)
        section = text.partition("\nArgs:\n")[2].partition("\n\n")[0]
        for parameter in signature.parameters:
            assert re.search(rf"\b{parameter}\b", section), parameter


@pytest.mark.parametrize("name", DOCUMENTED)
def test_sections_stand_in_their_order(name):
    found = re.findall(r"^(\w+):", inspect.getdoc(DOCUMENTED[name]) or "", flags=re.MULTILINE)
    places = [ORDER.index(section) for section in found if section in ORDER]
    assert places == sorted(places), found


@pytest.mark.parametrize("name", [name for name in RULES if name not in FOLKLORE])
def test_a_rule_names_its_paper(name):
    builder = getattr(importlib.import_module(f"functional_jd.aggregators.{name}"), name)
    _, found, source = inspect.getdoc(builder).partition("\nSource:\n")
    assert found
    assert re.search(r"\b(19|20)\d\d\b|arXiv \d{4}\.\d{5}", source.partition("\n\n")[0])


def test_help_shows_the_call_and_the_first_line_at_once():
    lines = pydoc.render_doc(PUBLIC["functional_jd.upgrad"], renderer=pydoc.plaintext).splitlines()
    assert lines[2].startswith("upgrad(preference: ")
    assert lines[3].strip().startswith("Project every row")
