"""What every rank does in the tests of sharded parameters; `test_sharded.py` starts it and reads what it writes.

All ranks draw the same numbers, take their own part of the batch, and compare with steps on whole parameters and the
whole batch.
"""

import sys
import warnings

import shard_checkpoints
import shard_disagreements
import shard_dtypes
import shard_functions
import shard_layers
import shard_steps
import shard_trainers
from forks import checks_of, launch
from shard_models import MESHES
from torch.distributed.device_mesh import init_device_mesh

MODULES = [shard_dtypes, shard_steps, shard_functions, shard_trainers, shard_disagreements, shard_layers]


def prepare(count, folder):
    shard_checkpoints.FOLDER["here"] = folder
    MESHES["line"] = init_device_mesh("cpu", (count,))
    if count == 4:
        MESHES["square"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "There is a performance drop")  # fused attention under vmap on a CPU
    warnings.filterwarnings("ignore", ".torch.jit")  # torch itself, where it first loads forward mode


if __name__ == "__main__":
    launch(checks_of(*MODULES, shard_checkpoints), prepare, *sys.argv[1:])
