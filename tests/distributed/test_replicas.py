"""Replicas and shards: several processes on loopback do what one would do; and one that dies is heard of."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest
import torch
from ranks import THOROUGH, checks_in, python, reports_of

import functional_jd as fj
from functional_jd import distributed

HERE = Path(__file__).parent
SHARDS = ("dtypes", "steps", "functions", "disagreements", "layers", "checkpoints")
CHECKS = {
    "replicas": checks_in("replica_steps", "replica_drift", "replica_weights"),
    "shards": checks_in(*(f"shard_{name}" for name in SHARDS)),
}
SLOW = {
    "the_step_compiles_in_a_full_graph",
    "the_digest_of_names_leaves_no_trace_in_a_graph",
    "a_step_of_a_step_can_be_differentiated",
    "more_rows_on_one_replica_are_refused_on_all",
    "weights_of_batches_compose_with_transforms",
}
"""On 2 replicas only: with 4 they would show nothing new."""
ONLY_ON_FOUR = [
    "a_mesh_of_two_dimensions",
    "shards_in_other_places_are_refused_and_gathered",
    "checkpoints_of_another_number_of_ranks_go_on_with_the_same_losses",
]
"""What needs a second dimension of the mesh, or what two ranks wrote."""
ON_FOUR = [
    "float32_steps_of_sgd_equal_those_of_whole_parameters",
    "the_functions_of_a_step_by_hand",
    "gathering_composes_with_transforms",
    "multitask_losses_are_gathered_part_by_part",
    *ONLY_ON_FOUR,
]
"""Four ranks show empty shards, too."""
ONLY_ON_TWO = "checkpoints_are_saved_and_loaded_by_torch"
ON = {
    ("replicas", 2): CHECKS["replicas"],
    ("replicas", 4): [check for check in CHECKS["replicas"] if check not in SLOW],
    ("shards", 2): [check for check in CHECKS["shards"] if check not in ONLY_ON_FOUR],
    ("shards", 4): [check for check in CHECKS["shards"] if check != ONLY_ON_TWO] if THOROUGH else ON_FOUR,
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """What each rank says of each check: one launch for all checks, unless one fails."""

    @cache
    def of(kind, count):
        if (kind, count) == ("shards", 4):
            of("shards", 2)  # its checkpoint is what the others load
        folder = tmp_path_factory.mktemp(f"{kind}{count}")
        worker, patience = (HERE / "worker.py", kind), 3000 if THOROUGH else 900
        return reports_of(count, folder, ON[kind, count], *worker, patience=patience)

    return of


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "count", "check"), [(*on, check) for on, checks in ON.items() for check in checks])
def test_on_ranks(reports, kind, count, check):
    for number, report in enumerate(reports(kind, count)):
        assert report.get(check, "not reached").startswith("passed"), f"rank {number}: {report.get(check)}"


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What the first rank saw, by the others' kind and by what they did."""
    done = python(HERE / "failing_ranks.py", (tmp_path_factory.mktemp("failures") / "store").as_uri())
    lines = map(json.loads, done.stdout.splitlines())
    return {(kind, way): (message, waited) for kind, way, message, waited in lines}


@pytest.mark.parametrize("way", ["hangs", "raises", "dies"])
@pytest.mark.parametrize("kind", ["replicas", "shards"])
def test_a_rank_that_fails_gives_the_others_an_error_in_time(told, kind, way):
    message, waited = told[kind, way]
    assert message != "no error"  # torch's own tells what the other rank did
    if way == "hangs":
        assert waited > 0.5, "the group's time-out is 1 s"
    assert waited < 200, "the time-out of the others is 10 min: an end is heard of at once"


LEAVING = """
import os, sys
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
import functional_jd as fj
from functional_jd import distributed

def threads():
    names = (open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task"))
    return sorted(name for name in names if "gloo" in name)

dist.init_process_group("gloo", init_method=sys.argv[1], rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
params, x = {"w": distribute_tensor(torch.ones(2, 2), mesh, [Shard(0)])}, torch.ones(2, 2)
losses = distributed.sharded(lambda p, x: (x @ p["w"]).square().mean(0), mesh)
how = dict(losses=losses, aggregator=fj.upgrad(), optimizer=fj.adamw(0.1))
state = fj.step(fj.train_state(params, x, **how), x, **how)[0]
assert threads(), "the threads are called otherwise now"
distributed.leave()
assert not threads(), threads()
assert not dist.is_initialized()
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted as Linux lists them")
def test_no_thread_stays_where_meshes_were_used(tmp_path):
    """Which would race with the end of Python."""
    python("-c", LEAVING, (tmp_path / "store").as_uri())


def test_the_example_prints_what_it_says():
    example = HERE / "two_replicas.py"
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", 2)
    printed = python(*torchrun, example).stdout.strip()
    assert printed
    assert printed in example.read_text()


def line(p, x):
    return torch.stack([(p["w"] * x).sum(), p["w"].sum()])


@pytest.mark.parametrize(
    "call",
    [
        lambda: distributed.mean_jacobian({"w": torch.ones(2, 3)}),
        lambda: distributed.agree(torch.tensor(True)),
        lambda: distributed.replicate({"w": torch.ones(2, 3)}),
        distributed.leave,
    ],
)
def test_without_a_process_group_the_error_says_how_to_make_one(call):
    with pytest.raises(ValueError, match=r"expected a process group, found none\. Call .*init_process_group"):
        call()


def test_rules_optimizers_and_engines_are_checked_before_anything_is_sent():
    params, x = {"w": torch.ones(3)}, torch.ones(3)
    how = {"losses": line, "aggregator": fj.mean(), "optimizer": fj.sgd(0.1)}
    state = fj.train_state(params, x, **how)
    for wrong, words in (
        ({"aggregator": fj.upgrad}, "aggregator must be a rule, found function"),
        ({"aggregator": fj.modo()}, "the rule must use one batch"),
        ({"optimizer": torch.optim.SGD([torch.ones(1)])}, "optimizer must be a pair .*found SGD"),
    ):
        kind = ValueError if "one batch" in words else TypeError
        with pytest.raises(kind, match=f"step: {words}"):
            fj.step(state, x, engine=distributed.replicated(), **(how | wrong))
        with pytest.raises(kind, match=f"train_state: {words}"):
            fj.train_state(params, x, engine=distributed.replicated(), **(how | wrong))
    how["aggregator"] = fj.trimmed_mean(0)
    with pytest.raises(ValueError, match=r"step: replicated\('weighted'\) serves .*needs the rows themselves"):
        fj.step(state, x, engine=distributed.replicated("weighted"), **how)
    for name in ("rows", "columns"):
        with pytest.raises(ValueError, match=rf"replicated: engine must be one of auto, .*found '{name}'"):
            distributed.replicated(name)


def test_autocast_in_threads_is_each_threads_own():
    """As nn.DataParallel runs its replicas: one thread each, at the same time, in one process."""
    draw = torch.Generator().manual_seed(0)
    params = {"w": torch.randn(6, 6, generator=draw), "b": torch.randn(6, generator=draw)}
    batches = [torch.randn(8, 6, generator=draw) for _ in range(4)]
    dtypes, seen, ready = [torch.float16, torch.bfloat16, None, torch.float16], set(), threading.Barrier(4)

    def losses(p, x):
        h = torch.nn.functional.layer_norm(x @ p["w"], (6,)) @ p["w"] + p["b"]
        seen.add((threading.get_ident(), h.dtype))
        return (h.float() ** 2).mean(0)

    def gradient(i):
        f = losses if dtypes[i] is None else fj.autocast(losses, dtypes[i])
        return fj.jacobian_fn(f)(params, batches[i])[0]

    def replica(i):
        ready.wait()
        found = [gradient(i) for _ in range(5)]
        assert not torch.is_autocast_enabled("cpu")
        return found

    expected = [gradient(i) for i in range(4)]
    seen.clear()
    with torch.autocast("cpu", torch.bfloat16), ThreadPoolExecutor(4) as pool:  # autocast of this thread only
        found = list(pool.map(replica, range(4)))
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16
    for jacobians, wanted in zip(found, expected, strict=True):
        assert all(torch.equal(jacobian[name], wanted[name]) for jacobian in jacobians for name in params)
    assert len(seen) == 4, "one dtype in each thread"
