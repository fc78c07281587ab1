"""Ranks as forks of one process: what all of them need is loaded once."""

import gc
import json
import multiprocessing
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from functional_jd import distributed


def started(main, ranks):
    """A process for each tuple of arguments."""
    # Transforms and collectives load dynamo when they are first used, and compiling for autograd the other.
    import torch._dynamo
    import torch._functorch.partitioners  # noqa: F401

    gc.collect()
    gc.freeze()  # no rank looks again and again at what all have loaded
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=main, args=rank) for rank in ranks]
    for process in processes:
        process.start()
    return processes


def checks_of(*modules):
    """The functions `check_...` of these modules, by what follows."""
    found = {name: f for module in modules for name, f in vars(module).items() if name.startswith("check_")}
    return {name.removeprefix("check_"): f for name, f in found.items()}


def launch(checks, prepare, count, folder, *only):
    """Run checks on ranks that are forks of this process; each rank writes what they gave."""
    torch.set_num_threads(1)
    ranks = [(checks, prepare, me, int(count), Path(folder), only) for me in range(int(count))]
    for process in started(_run, ranks):
        process.join()


def _run(checks, prepare, me, count, folder, only):
    store = (folder / "store").as_uri()
    dist.init_process_group("gloo", init_method=store, rank=me, world_size=count, timeout=timedelta(minutes=5))
    prepare(count, folder)
    results = {}
    for name in only:
        start = time.perf_counter()
        try:
            checks[name]()
            results[name] = f"passed in {time.perf_counter() - start:.1f} s"
        except BaseException:
            results[name] = traceback.format_exc()
            break  # the others wait for an answer in vain: all stop here
    Path(folder, f"{me}.json").write_text(json.dumps(results))
    distributed.leave()
