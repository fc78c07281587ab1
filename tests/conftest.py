"""One thread per process, deterministic examples."""

import gc
import os

import hypothesis
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


def pytest_collection_modifyitems(items):
    """Slow tests first: at the end, one of them would keep a single core busy."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_collection_finish():
    """Torch and ten thousand tests stay: the collector of garbage need not look at them again and again."""
    gc.collect()
    gc.freeze()
