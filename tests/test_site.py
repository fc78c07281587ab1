"""The site: its formulas, its pictures, and how its pages look in a browser."""

import importlib
import inspect
import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import site_pages

from functional_jd import plotting

ROOT = Path(__file__).parents[1]


@pytest.fixture
def maker(monkeypatch):
    """Imports a module of docs/."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    yield importlib.import_module
    for name in ("formulas", "make_pictures"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("b_t = beta / t^beta_sigma", r"b_{t} = \beta / t ^{\beta_{\sigma}}"),
        ("<n_i, N^+ u> = (C a)_i", r"\langle n_{i} , N ^{+} u \rangle = ( C \ a ) _ i"),
        ("w_i = |g_i|^(-2 alpha / (1 + alpha))", r"w_{i} = | g_{i} | ^{- 2 \ \alpha / ( 1 + \alpha ) }"),
        ("sqrt(s) G^(-1/2) J", r"\sqrt{ s } \ G ^{- 1 / 2 } \ J"),
        ("a <- max_norm A'b", r"a \ \leftarrow \mathrm{max\_norm} \ A ^\top b"),
        ("x + rate (params' - J1)", r"x + \mathrm{rate} \ ( \mathrm{params} ' - J_1 )"),
    ],
)
def test_formulas_are_mathematics(maker, code, expected):
    pytest.importorskip("docutils.utils.math.latex2mathml")
    formulas = maker("formulas")
    assert " ".join(formulas.as_mathematics(f"`{code}`").split()) == f":math:`{expected}`"
    assert "<math" in formulas.mathml(formulas.latex(code))


@pytest.mark.parametrize(
    "code", ["weights, state = update(view(J), state)", 'f(x, kind="a") = 1', "losses[0] + 1", "u"]
)
def test_python_stays_code(maker, code):
    pytest.importorskip("docutils.utils.math.latex2mathml")
    assert maker("formulas").as_mathematics(f"`{code}`") == f"`{code}`"


def test_every_function_that_draws_has_a_picture_in_both_themes(maker, tmp_path):
    def draws(value):
        return inspect.isfunction(value) and "ax" in inspect.signature(value).parameters

    names = {name for name in plotting.__all__ if draws(getattr(plotting, name))} - {"legend", "quiet"}
    assert set(maker("make_pictures").write(tmp_path)) == names
    stored = {path.stem.removeprefix("plot_") for path in tmp_path.glob("*.png")}
    assert stored == {f"{name}_{theme}" for name in names for theme in ("light", "dark")}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built from a copy of what it is made of."""
    if not (site_pages.CHROMIUM and all(map(find_spec, ("sphinx", "furo", "myst_nb", "sphinx_copybutton")))):
        pytest.skip("needs Chromium and the extra docs")
    return site_pages.build(ROOT, tmp_path_factory.mktemp("site"))


@pytest.mark.slow
def test_nothing_overflows_or_is_cut_on_a_phone_and_on_a_desk(site):
    assert site_pages.faults(site, site_pages.pages_of(site)) == []


@pytest.mark.slow
def test_what_readers_look_for_is_found(site):
    text = (site / "searchindex.js").read_text(encoding="utf-8")
    terms = json.loads(text[text.index("(") + 1 : text.rindex(")")])["terms"]
    assert {"lightn", "tensorboard", "csv", "resum"} <= terms.keys()
    assert "make docs" not in (site / "index.html").read_text(encoding="utf-8")
    rules = (site / "docs" / "rules.html").read_text(encoding="utf-8")
    assert 'href="reference/rule_upgrad.html"' in rules
    assert "<math" in (site / "docs" / "reference" / "rule_upgrad.html").read_text(encoding="utf-8")


@pytest.mark.skipif(not site_pages.CHROMIUM, reason="needs Chromium")
def test_what_is_wrong_is_seen(tmp_path):
    page = "<!doctype html><body><article>{}</article></body>"
    (tmp_path / "wide.html").write_text(page.format("<p style='width: 500px'>wide</p>"))
    (tmp_path / "cut.html").write_text(page.format("<pre style='overflow: hidden'>" + "cut " * 500 + "</pre>"))
    (tmp_path / "fine.html").write_text(page.format("<p>fine</p>"))
    found = "\n".join(site_pages.faults(tmp_path, ["wide.html", "cut.html", "fine.html"], [390]))
    assert "wide.html at 390 px, light: P ends at" in found
    assert "cut.html at 390 px, dark: code is cut: cut cut" in found
    assert "fine.html" not in found
