"""The top level: what it lists, where the names stand that have left it, and what loads only when it is named."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import functional_jd

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
    assert len(functional_jd.__all__) <= 90
    assert len(set(functional_jd.__all__)) == len(functional_jd.__all__)


def test_old_names_are_gone():
    text = (Path(__file__).parents[1] / "CHANGELOG.md").read_text(encoding="utf-8")
    table = text.partition("### Migrating from 0.2")[2].partition("\n\n|")[2].partition("\n\n")[0]
    names = [name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split(" | ")[0])]
    assert len(names) > 40
    assert not [name for name in names if hasattr(functional_jd, name)]


def test_a_name_that_never_was_is_an_error():
    for package in (functional_jd, functional_jd.engines):
        with pytest.raises(AttributeError, match=f"^module '{package.__name__}' has no attribute 'nothing'$"):
            _ = package.nothing


@pytest.mark.parametrize(("name", "own"), [("UPGrad", "upgrad"), ("NashMTL", "nash_mtl"), ("IMTLG", "imtl_g")])
def test_the_name_that_a_rule_has_elsewhere_leads_to_ours(name, own):
    words = rf"^module 'functional_jd' has no attribute '{name}'. Take functional_jd.{own}\.$"
    with pytest.raises(AttributeError, match=words):
        getattr(functional_jd, name)


def test_what_loads_later_loads_when_it_is_named():
    subprocess.run([sys.executable, "-W", "error", "-c", LATER], check=True)
