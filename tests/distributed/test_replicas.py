"""Replicas: several processes on loopback do what one would do; and one that dies is heard of."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from launches import assert_passed, checks_in, reports_of

import functional_jd as fj
from functional_jd import distributed

HERE = Path(__file__).parent
WORKER = HERE / "worker.py"
CHECKS = checks_in(WORKER, HERE / "replica_drift.py", HERE / "replica_weights.py")
SLOW = {
    "the_step_compiles_in_a_full_graph",
    "the_digest_of_names_leaves_no_trace_in_a_graph",
    "a_step_of_examples_in_a_graph_is_that_of_an_eager_one",
    "a_step_of_a_step_can_be_differentiated",
    "more_rows_on_one_replica_are_refused_on_all",
    "weights_of_batches_compose_with_transforms",
}
"""On 2 replicas only: with 4 they would show nothing new."""


def run(*command):
    command = [sys.executable, *map(str, command)]
    return subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=HERE.parents[1])


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """What each replica says of each check, by number of replicas: one launch for all, unless one fails."""
    seen = {}

    def of(replicas):
        if replicas not in seen:
            folder = tmp_path_factory.mktemp(f"replicas{replicas}")
            checks = [check for check in CHECKS if replicas == 2 or check not in SLOW]
            seen[replicas] = reports_of(WORKER, replicas, folder, checks)
        return seen[replicas]

    return of


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "check"), [(n, c) for n in (2, 4) for c in CHECKS if n == 2 or c not in SLOW])
def test_on_replicas(reports, replicas, check):
    assert_passed(reports(replicas), check)


def test_the_example_prints_what_it_says():
    source = (HERE / "two_replicas.py").read_text()
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", 2)
    done = run(*torchrun, HERE / "two_replicas.py")
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.strip()
    assert done.stdout.strip() in source


def line(p, x):
    return torch.stack([(p["w"] * x).sum(), p["w"].sum()])


@pytest.mark.parametrize(
    "call",
    [
        lambda: distributed.mean_jacobian({"w": torch.ones(2, 3)}),
        lambda: distributed.agree(torch.tensor(True)),
        lambda: distributed.replicate({"w": torch.ones(2, 3)}),
    ],
)
def test_without_a_process_group_the_error_says_how_to_make_one(call):
    with pytest.raises(ValueError, match=r"expected a process group, found none\. Call .*init_process_group"):
        call()


def test_what_is_no_floating_point_tensor_or_flag_is_named():
    with pytest.raises(TypeError, match=r"mean_jacobian: .*int64 in 'w'"):
        distributed.mean_jacobian({"w": torch.ones(2, 3, dtype=torch.int64)})
    with pytest.raises(TypeError, match=r"agree: finite must be a bool tensor, found torch.float32"):
        distributed.agree(torch.ones(2))


def test_rules_and_optimizers_are_checked_before_anything_is_sent():
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


def test_what_an_engine_does_not_serve_is_refused_before_anything_is_sent():
    params, x = {"w": torch.ones(3)}, torch.ones(3)
    how = {"losses": line, "aggregator": fj.trimmed_mean(0), "optimizer": fj.sgd(0.1)}
    state = fj.train_state(params, x, **how)
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
    dtypes = [torch.float16, torch.bfloat16, None, torch.float16]

    def losses(p, x):
        h = torch.nn.functional.layer_norm(x @ p["w"], (6,)) @ p["w"] + p["b"]
        seen.append((threading.get_ident(), h.dtype))
        return (h.float() ** 2).mean(0)

    def gradient(i):
        f = losses if dtypes[i] is None else fj.autocast(losses, dtypes[i])
        return fj.jacobian_fn(f)(params, batches[i])[0]

    seen = []
    expected = [gradient(i) for i in range(4)]
    found, ready, mistakes = [[] for _ in range(4)], threading.Barrier(4), []

    def replica(i):
        try:
            ready.wait()
            for _ in range(5):
                found[i].append(gradient(i))
            assert not torch.is_autocast_enabled("cpu")
        except BaseException as mistake:
            mistakes.append(mistake)

    with torch.autocast("cpu", torch.bfloat16):  # of this thread only
        threads = [threading.Thread(target=replica, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16
    assert not mistakes
    for i, wanted in enumerate(expected):
        for jacobian in found[i]:
            assert all(torch.equal(jacobian[name], wanted[name]) for name in params)
    by_thread = {}
    for who, dtype in seen:
        by_thread.setdefault(who, set()).add(dtype)
    assert all(len(dtypes) == 1 for who, dtypes in by_thread.items() if who != threading.get_ident())
