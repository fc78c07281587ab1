"""The guide to trainers: each of its loops on one rank and on two, beside our steps with the whole batch."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from inputs import library
from torch import nn
from trainers import BLOCKS, LIBRARIES, START, play, trained_in

HERE = Path(__file__).parent


def run(heading, ranks, folder):
    """What each rank has found."""
    for name in LIBRARIES[heading]:
        library(name)
    folder.mkdir(exist_ok=True)
    command = [sys.executable, str(HERE / "trainers.py"), heading, str(ranks), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=HERE.parents[1])
    assert done.returncode == 0, done.stderr[-4000:]
    return [torch.load(folder / f"{rank}.pt") for rank in range(ranks)]


def test_no_section_is_forgotten():
    assert BLOCKS.keys() == LIBRARIES.keys()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("heading", [heading for heading in LIBRARIES if heading != "Losses that carry a graph"])
def test_a_loop_trains_as_steps_of_one_process_with_the_whole_batch(heading, ranks, tmp_path):
    found = run(heading, ranks, tmp_path)
    for rank in found:
        assert len(rank["seen"]) == len(rank["weights"]) >= 4
        for (weights, *_), expected in zip(rank["seen"], rank["weights"], strict=True):
            torch.testing.assert_close(weights, expected, rtol=1e-7, atol=0)
        assert rank["params"].keys() == rank["expected"].keys()
        torch.testing.assert_close(rank["params"], rank["expected"], rtol=1e-7, atol=1e-9)
    if ranks == 2:
        one, other = (rank["seen"][0] for rank in found)
        assert not torch.equal(one[1], other[1]), "each has its own part of the batch"
        assert torch.equal(one[0], other[0])


@pytest.mark.parametrize("ranks", [1, 2])
def test_losses_that_carry_a_graph_train_as_those_that_are_evaluated_twice(ranks, tmp_path):
    once = run("Losses that carry a graph", ranks, tmp_path / "once")
    twice = run("Lightning", ranks, tmp_path / "twice")
    for own, other in zip(once, twice, strict=True):
        torch.testing.assert_close(own["params"], other["params"], rtol=1e-7, atol=1e-9)


def test_both_rewards_rise(tmp_path):
    (found,) = run("Several rewards", 1, tmp_path)
    first, last = (torch.stack(part).mean(0) for part in (found["history"][:5], found["history"][-5:]))
    even, small = (last / first).tolist()
    assert even > 1.2
    assert small > 1.2


def normed(session):
    """BatchNorm and dropout in the page's module, and the optimizer for it."""
    session["net"] = net = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Dropout(0.5), nn.Linear(7, 2))
    session["optimizer"] = torch.optim.AdamW(net.parameters(), lr=1e-2)


def test_two_evaluations_count_a_batch_once_and_draw_the_same_masks(monkeypatch):
    library("accelerate")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    with torch.random.fork_rng():
        twice = play([*START, *BLOCKS["Accelerate"]], normed)
        once = play([*START, BLOCKS["Losses that carry a graph"][0]], normed)
        net, optimizer, memory = once["net"], once["optimizer"], None
        for x, cost, time in torch.utils.data.DataLoader(once["data"], batch_size=3):
            values = once["losses_of"](net(x), cost, time)
            weights, memory = once["weights_once"](values, [*net.parameters()], memory)
            (weights * values).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert int(twice["net"][1].num_batches_tracked) == int(net[1].num_batches_tracked) == len(once["data"]) // 3
    torch.testing.assert_close(dict(twice["net"].named_buffers()), dict(net.named_buffers()))
    torch.testing.assert_close(trained_in(twice), trained_in(once))


def test_a_checkpoint_of_lightning_keeps_what_the_rule_remembers():
    library("lightning")
    session = play([*START, BLOCKS["Lightning"][0], "rule = jd.nash_mtl()"])
    module, other = (session["Balanced"](session["net"]) for _ in range(2))
    module.log_dict = lambda values: None
    module.training_step([part[:3] for part in session["data"].tensors], 0)
    module.on_save_checkpoint(saved := {})
    other.on_load_checkpoint(saved)
    assert other.memory.calls == 1
    assert torch.equal(other.memory.weights, module.memory.weights)
