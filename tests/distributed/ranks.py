"""Ranks as forks of one process, which has loaded what all of them need; and how a test starts them.

A process that fails cannot answer the others, so all stop at the first check that fails. The checks after it run in new
processes: each check fails alone.
"""

import gc
import json
import multiprocessing
import os
import subprocess
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from functional_jd import distributed

ROOT = Path(__file__).parents[2]
THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"


def python(*command, ends_well=True, patience=900):
    """What Python prints with these arguments."""
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    how = {"capture_output": True, "text": True, "timeout": patience, "cwd": ROOT, "env": os.environ | own}
    done = subprocess.run([sys.executable, *map(str, command)], **how)
    assert done.returncode == 0 or not ends_well, done.stderr[-4000:]
    return done


def reports_of(count, folder, checks, *worker, patience=900):
    """What each process reports of each check: `[{check: "passed in ..." or a traceback}]`, one dict per process."""
    reports, rest = [{} for _ in range(count)], list(checks)
    files = [folder / f"{number}.json" for number in range(count)]
    while rest:
        for file in [folder / "store", *files]:
            file.unlink(missing_ok=True)
        done = python(*worker, count, folder, *rest, ends_well=False, patience=patience)
        assert all(file.exists() for file in files), done.stderr[-4000:]
        found = [json.loads(file.read_text()) for file in files]
        for report, new in zip(reports, found, strict=True):
            report.update(new)
        failed = [check for check in rest if not all(new.get(check, "").startswith("passed") for new in found)]
        rest = rest[rest.index(failed[0]) + 1 :] if failed else []
    return reports


def checks_in(*names):
    """The names of the functions `check_...` in these files of this folder, without importing them."""
    lines = [line for name in names for line in Path(__file__).with_name(f"{name}.py").read_text().splitlines()]
    return [line[len("def check_") : line.index("(")] for line in lines if line.startswith("def check_")]


def meet(rank, count, folder):
    """Start the group of all ranks."""
    store = Path(folder, "store").as_uri()
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=count, timeout=timedelta(minutes=5))


def started(main, ranks):
    """A process for each tuple of arguments."""
    # Transforms and collectives load dynamo when they are first used, and compiling for autograd the other.
    import torch._dynamo
    import torch._functorch.partitioners

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # no rank looks again and again at what all have loaded
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=main, args=rank) for rank in ranks]
    for process in processes:
        process.start()
    return processes


def on_ranks(main, *arguments, count=2):
    """`main(rank, *arguments)` on each rank, and the end of this process with the worst of their codes."""
    processes = started(main, [(rank, *arguments) for rank in range(count)])
    for process in processes:
        process.join()
    sys.exit(max(abs(process.exitcode) for process in processes))


def run_checks(me, modules, prepare, count, folder, only):
    """Run checks of modules in one rank, and write what they gave."""
    checks = {name: f for module in modules for name, f in vars(module).items() if name.startswith("check_")}
    meet(me, count, folder)
    prepare(count, folder)
    results = {}
    for name in only:
        start = time.perf_counter()
        try:
            checks[f"check_{name}"]()
            results[name] = f"passed in {time.perf_counter() - start:.1f} s"
        except BaseException:
            results[name] = traceback.format_exc()
            break  # the others wait for an answer in vain: all stop here
    Path(folder, f"{me}.json").write_text(json.dumps(results))
    distributed.leave()
