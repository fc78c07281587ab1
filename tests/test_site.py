"""The site: its formulas and its pictures."""

import importlib
import inspect
import sys
from pathlib import Path

import pytest

from functional_jd import plotting

ROOT = Path(__file__).parents[1]


@pytest.fixture
def maker(monkeypatch):
    """Imports a module of docs/."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    yield importlib.import_module
    for name in ("formulas", "make_pictures", "torn"):
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


TORN = {
    "a parameter by one space": "<dl class='field-list'><dd><dl class='simple'><dt>one of these</dt></dl></dd></dl>",
    "a quote": "<dl class='field-list simple'><dd><blockquote><p>its default</p></blockquote></dd></dl>",
    "a plural": "<code>DTensor``s on this mesh, placed ``Shard</code>",
    "a backtick that stays": "<p>of `DTensor`s</p>",
}


@pytest.mark.parametrize("html", TORN.values(), ids=TORN)
def test_torn_markup_is_found(maker, html):
    assert len(maker("torn").torn_markup(f"<main>{html}<br></main>")) == 1


def test_whole_markup_passes(maker):
    html = "<dl class='py'><dd><dl class='field-list'><dd><p>a <code>`x`</code></p></dd></dl></dd></dl><pre>`y`</pre>"
    assert not maker("torn").torn_markup(html)
