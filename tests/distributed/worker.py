"""What every rank does in the tests of `distributed`; `test_replicas.py` starts it and reads what it writes.

Every check runs on all ranks at the same time: they draw the same numbers, take their own part of the batch, and
compare with one process that has the whole batch and, with shards, whole parameters.
"""

import sys
import warnings
from pathlib import Path

import replica_drift
import replica_steps
import replica_weights
import shard_checkpoints
import shard_disagreements
import shard_dtypes
import shard_functions
import shard_layers
import shard_steps
from ranks import on_ranks, run_checks
from shard_models import MESHES
from torch.distributed.device_mesh import init_device_mesh

SHARDS = (shard_dtypes, shard_steps, shard_functions, shard_disagreements, shard_layers, shard_checkpoints)
MODULES = {"replicas": (replica_steps, replica_drift, replica_weights), "shards": SHARDS}


def shards(count, folder):
    shard_checkpoints.FOLDER["here"] = folder
    MESHES["line"] = init_device_mesh("cpu", (count,))
    if count == 4:
        MESHES["square"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "There is a performance drop")  # fused attention under vmap on a CPU
    warnings.filterwarnings("ignore", ".torch.jit")  # torch itself, where it first loads forward mode


if __name__ == "__main__":
    kind, count, folder, *checks = sys.argv[1:]
    prepare = shards if kind == "shards" else lambda count, folder: None
    on_ranks(run_checks, MODULES[kind], prepare, int(count), Path(folder), checks, count=int(count))
