"""The reference: every public name is on a page and says what it takes and gives; no link of the site is broken."""

import importlib
import inspect
import json
import pydoc
import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from functional_jd.testing import ALWAYS, BY_CLAIM, RULES

PLACE = Path(__file__).parent / "reference" / "__main__.py"
ORDER = ["Args", "Attributes", "Returns", "Raises", "Laws", "Source", "Differs", "Example"]
# Their weights are no paper's idea.
FOLKLORE = {"mean", "total", "constant"}


def load():
    spec = spec_from_file_location("reference", PLACE)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


reference = load()


def members(page):
    """The public names of a page: what `__all__` says, or what its file defines."""
    module = importlib.import_module(page)
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == page]
    names = getattr(module, "__all__", [name for name in own if name[0] != "_"])
    return {f"{page}.{name}": getattr(module, name) for name in names}


PUBLIC = {name: value for page in reference.PAGES for name, value in members(page).items()}
DOCUMENTED = {name: value for name, value in PUBLIC.items() if inspect.isfunction(value) or inspect.isclass(value)}
LAWS = {*ALWAYS, *BY_CLAIM}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    reference.build(folder)
    return folder


def test_no_link_is_broken(site):
    assert reference.broken_links(site) == []


@pytest.mark.parametrize("link", ["nowhere.html", "functional_jd.html#nothing", "#nothing", "missing.png"])
def test_a_broken_link_is_found(tmp_path, link):
    (tmp_path / "functional_jd.html").write_text('<p id="upgrad"></p>')
    good = '<a href="functional_jd.html#upgrad"></a><a href="https://example.org/x#y"></a><a href="#u" id="u"></a>'
    (tmp_path / "index.html").write_text(f'{good}<a href="{link}"></a>')
    assert reference.broken_links(tmp_path) == [f"index.html: {link}"]


def test_every_public_name_has_its_place(site):
    for name in DOCUMENTED:
        page, _, last = name.rpartition(".")
        text = (site / f"{page.replace('.', '/')}.html").read_text(encoding="utf-8")
        assert f'<section id="{last}">' in text, name


def test_names_in_docstrings_are_linked(site):
    text = (site / "functional_jd.html").read_text(encoding="utf-8")
    assert '<a href="#train_state">train_state</a>' in text
    assert "Alias for field number" not in text


def test_the_front_page_is_the_readme_and_leads_to_pages_and_notebooks(site):
    text = (site / "index.html").read_text(encoding="utf-8")
    assert all(f'href="{page.replace(".", "/")}.html"' in text for page in reference.PAGES)
    assert all(f'href="notebooks/{path}.html"' in text for path in reference.titles())
    assert ".ipynb" not in text


def test_notebooks_keep_their_pictures(tmp_path):
    picture = {"output_type": "display_data", "data": {"image/png": "QUJD\n", "text/plain": ["<Figure>"]}}
    text = {"output_type": "stream", "text": ["a <", " b\n"]}
    cells = [
        {"cell_type": "markdown", "source": ["# Title"]},
        {"cell_type": "code", "source": ["1 + 1"], "outputs": [picture, text]},
    ]
    (tmp_path / "x.ipynb").write_text(json.dumps({"cells": cells}))
    title, _, first, second = reference.cells(tmp_path / "x.ipynb")
    assert ">Title</h1>" in title
    assert 'src="data:image/png;base64,QUJD"' in first
    assert "a &lt; b" in second


def test_nothing_of_the_machine_is_published(site):
    for path in site.rglob("*.html"):
        found = re.search(r"/(home|root|tmp|usr|work|Users)/\w|object at 0x\w+", path.read_text(encoding="utf-8"))
        assert found is None, f"{path}: {found}"


def test_the_command_says_where_it_is(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(reference, "build", lambda folder: (folder / "index.html").write_text("<p></p>"))
    reference.main([str(tmp_path)])
    assert capsys.readouterr().out.strip().endswith("index.html")
    monkeypatch.setattr(reference, "build", lambda folder: (folder / "index.html").write_text('<a href="no.html"></a>'))
    with pytest.raises(SystemExit, match=re.escape("index.html: no.html")):
        reference.main([str(tmp_path)])


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
