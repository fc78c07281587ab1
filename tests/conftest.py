"""One thread per process, deterministic examples."""

import gc
import os
import re
from pathlib import Path

import hypothesis
import pytest
import torch
from simulated import announce

torch.set_num_threads(1)
announce()

hypothesis.settings.register_profile(
    "ci",
    deadline=None,  # the machine is shared: time is not what these tests measure
    derandomize=True,
    print_blob=True,
    max_examples=20,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile("few", parent=hypothesis.settings.get_profile("ci"), max_examples=10)
hypothesis.settings.register_profile("thorough", parent=hypothesis.settings.get_profile("ci"), max_examples=1000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


PAGE = Path(__file__).parent / "NOT_ON_TORCH_2_11.md"


def not_for_torch_2_11():
    """Test and reason, from the table of the page."""
    return re.findall(r"^\| `(\S+)` \| (.+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


def pytest_collection_modifyitems(items):
    """Slow tests first: at the end, one of them would keep a single core busy."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    if torch.__version__.startswith(("2.11.", "2.12.")):
        reasons = dict(not_for_torch_2_11())
        for item in items:
            file, _, name = item.nodeid.rpartition("/")[2].partition("::")
            for key in (name, name.partition("[")[0], f"{file}::{name}"):
                if key in reasons:
                    item.add_marker(pytest.mark.skip(reason=reasons[key]))


def pytest_collection_finish():
    """Torch and ten thousand tests stay: the collector of garbage need not look at them again and again."""
    gc.collect()
    gc.freeze()
