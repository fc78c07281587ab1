"""The table of sharded steps, on layers of a few neurons: what travels is what the design says."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import shard_table

LAYERS, M = 4, shard_table.OBJECTIVES
AGAIN = (LAYERS - 1) / LAYERS  # a backward pass needs the weights of all layers but the first
SENT = {
    "`DistributedDataParallel`, the mean": 2,
    "`fully_shard`, the mean": 3,
    "`sharded`, the mean": 2 + AGAIN,
    "`fully_shard`, `upgrad` by hand": 1 + 2 * M,
    "`sharded`, `upgrad`, loop": 1 + M * (1 + AGAIN),
    "`sharded`, `upgrad`, vmap": 1 + M + AGAIN,
}


@pytest.mark.slow
def test_what_is_sent_is_known_in_units_of_the_parameters():
    script = Path(shard_table.__file__)
    command = [sys.executable, str(script), "96", str(LAYERS), "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "99"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, cwd=script.parents[2], env=environment, check=True
    )
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines()[2:]]
    sent = {name: float(numbers) for name, _, _, numbers, _ in rows}
    # Biases are replicated, a hundredth of the numbers: an all-reduce sends them twice; and figures are rounded.
    assert sent == pytest.approx(SENT, abs=0.05 + 2 * (1 + M) / 97)
    assert all(float(row[2]) > 3 for row in rows), "parameters and two moments at least"
