"""A rank that hangs, raises or dies: the others get an error in time, with replicas and with shards."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What the first rank saw, by the others' kind and by what they did."""
    store = (tmp_path_factory.mktemp("failures") / "store").as_uri()
    command = [sys.executable, str(HERE / "failing_ranks.py"), store]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=HERE.parents[1])
    assert done.returncode == 0, done.stderr[-4000:]
    lines = map(json.loads, done.stdout.splitlines())
    return {(kind, way): (message, waited) for kind, way, message, waited in lines}


@pytest.mark.parametrize("way", ["hangs", "raises", "dies"])
@pytest.mark.parametrize("kind", ["replicas", "shards"])
def test_a_rank_that_fails_gives_the_others_an_error_in_time(told, kind, way):
    message, waited = told[kind, way]
    assert message.startswith("distributed: expected an answer of all 2 replicas, found ")
    assert "A replica stopped, fell out of step or hangs" in message
    if way == "hangs":
        assert waited > 0.5, "the group's time-out is 1 s"
    assert waited < 200, "the time-out of the others is 10 min: an end is heard of at once"
