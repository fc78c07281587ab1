"""The top level: what it lists, where the names stand that have left it, and what loads only when it is named."""

import subprocess
import sys
from operator import attrgetter
from pathlib import Path

import pytest

import functional_jd

# The names of version 0.2 that are elsewhere now, until 0.4.
MOVED = {
    "aggregation": "AffineWeights Aggregation MultitaskJacobian combine",
    "diagnostics": "Advice Diagnosis advise describe diagnose",
    "engines": "Engine EngineChoice features_engine gramian_engine jacobian_engine weighted_engine",
    "objectives": "merge partition",
    "optimizers": "clip_by_norm clip_by_value global_norm",
    "precision": "Policy ScaleState custom float32_island no_scale policy scale scaled_grad select "
    "scale_state_from_dict scale_state_to_dict",
    "views": "cross_gramian full_jacobian gramian losses no_gradients norms",
}
OLD = {name: f"{package}.{name}" for package, names in MOVED.items() for name in names.split()} | {
    "after_step": "famo_after_step",
    "end_epoch": "dwa_end_epoch",
}

LATER = """
import sys
import functional_jd as jd

later = {"distributed", "fronts", "plotting", "testing", "views"}
assert not [name for name in sys.modules if name.partition("functional_jd.")[2].split(".")[0] in later]
assert not {"matplotlib", "hypothesis", "pytest", "scipy"} & sys.modules.keys()
assert later < set(dir(jd)) and set(jd.__all__) < set(dir(jd))
assert jd.distributed.replicated and jd.views.losses and jd.fronts.train and jd.testing.obeys and jd.plotting.cone

for name in [name for name in sys.modules if name.startswith("functional_jd.plotting")]:
    del sys.modules[name]
del jd.plotting
sys.modules["matplotlib"] = None
assert not hasattr(jd, "plotting")
try:
    from functional_jd import plotting
except ImportError as error:
    assert 'pip install "functional_jd[plot]"' in str(error)
else:
    raise AssertionError
"""


def test_the_table_of_contents_is_short():
    assert len(functional_jd.__all__) <= 85
    assert len(set(functional_jd.__all__)) == len(functional_jd.__all__)


@pytest.mark.parametrize(("old", "new"), OLD.items())
def test_an_old_name_warns_and_is_what_the_new_one_is(old, new):
    assert old not in functional_jd.__all__
    assert old not in dir(functional_jd)
    with pytest.warns(DeprecationWarning, match=f"^functional_jd.{old} is now functional_jd.{new}.$") as found:
        value = getattr(functional_jd, old)
    assert value is attrgetter(new)(functional_jd)
    assert found[0].filename == __file__


def test_the_changelog_says_where_each_name_has_gone():
    text = (Path(__file__).parents[1] / "CHANGELOG.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in text.partition("### Migrating")[2].splitlines() if line.startswith("| `")]
    for old, new in OLD.items():
        (now,) = [row[1] for row in rows if f"`{old}`" in row[0]]
        assert f"`{new}`" in now or now.strip(" |") == f"`{new.removesuffix(old)}` and the name"


def test_the_names_of_the_first_version_are_gone():
    for old in ("blank", "whole", "Carried"):
        assert not hasattr(functional_jd, old)


def test_a_name_that_never_was_is_an_error():
    for package in (functional_jd, functional_jd.engines):
        with pytest.raises(AttributeError, match=f"^module '{package.__name__}' has no attribute 'nothing'$"):
            _ = package.nothing


@pytest.mark.parametrize(("name", "own"), [("UPGrad", "upgrad"), ("NashMTL", "nash_mtl"), ("IMTLG", "imtl_g")])
def test_the_name_that_a_rule_has_elsewhere_leads_to_ours(name, own):
    with pytest.raises(
        AttributeError, match=rf"^module 'functional_jd' has no attribute '{name}'. Take functional_jd.{own}\.$"
    ):
        getattr(functional_jd, name)


@pytest.mark.parametrize("package", MOVED)
def test_a_package_lists_what_it_has(package):
    package = getattr(functional_jd, package)
    assert all(hasattr(package, name) for name in package.__all__)


def test_what_loads_later_loads_when_it_is_named():
    subprocess.run([sys.executable, "-W", "error", "-c", LATER], check=True)
