"""The guide to trainers: each of its loops on one rank and on two, beside our steps with the whole batch."""

import re
from pathlib import Path

import pytest
import torch
from bounds import check_same
from distributed.ranks import python
from inputs import library
from torch import nn
from trainers import BLOCKS, LIBRARIES, PAGE, START, play, trained_in

import functional_jd as jd


def run(heading, ranks, folder):
    """What each rank has found."""
    for name in LIBRARIES[heading]:
        library(name)
    folder.mkdir(exist_ok=True)
    python(Path(__file__).with_name("trainers.py"), heading, ranks, folder)
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
            check_same(weights, expected)
        for params in (rank["params"], rank["expected"]):  # Adam divides what is all rounding, as of a bias of keys
            params.pop("transformer.h.0.attn.c_attn.bias", None)
        check_same(rank["params"], rank["expected"])
    if ranks == 2:
        one, other = (rank["seen"][0] for rank in found)
        assert not torch.equal(one[1], other[1]), "each has its own part of the batch"
        assert torch.equal(one[0], other[0])


@pytest.mark.parametrize("ranks", [1, 2])
def test_losses_that_carry_a_graph_train_as_those_that_are_evaluated_twice(ranks, tmp_path):
    once = run("Losses that carry a graph", ranks, tmp_path / "once")
    twice = run("Lightning", ranks, tmp_path / "twice")
    for own, other in zip(once, twice, strict=True):
        check_same(own["params"], other["params"])


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
        once = play(START, normed)
        net, optimizer, memory = once["net"], once["optimizer"], None
        for x, cost, time in torch.utils.data.DataLoader(once["data"], batch_size=3):
            values = once["losses_of"](net(x), cost, time)
            weights, memory, _ = jd.weigh(values, net.parameters(), once["rule"], state=memory)
            (weights * values).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert int(twice["net"][1].num_batches_tracked) == int(net[1].num_batches_tracked) == len(once["data"]) // 3
    torch.testing.assert_close(dict(twice["net"].named_buffers()), dict(net.named_buffers()))
    torch.testing.assert_close(trained_in(twice), trained_in(once))


class TakesKeywords(nn.Module):
    """A model that takes what its loss needs by name, as those of transformers do."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x, **for_its_loss):
        return self.net(x)


@pytest.mark.parametrize("labels", [False, True], ids=["plain", "with labels"])
def test_accumulated_batches_of_transformers_have_the_mean_of_their_directions(labels, tmp_path):
    for name in LIBRARIES["Transformers"]:
        library(name)

    def keywords(session):
        session["net"] = TakesKeywords(session["net"])

    session = play([*START, BLOCKS["Transformers"][0]], keywords)
    net, (x, *targets) = session["net"], session["data"].tensors
    rows = [{"x": a, "cost": b, "time": c} | ({"labels": b} if labels else {}) for a, b, c in session["data"]]
    parts = [[column[i : i + 3] for column in (x, *targets)] for i in (0, 3)]
    found = [session["weights_of"](dict(net.named_parameters()), *part).weights for part in parts]
    sums = [(w * session["losses_of"](net(a), *rest)).sum() for w, (a, *rest) in zip(found, parts, strict=True)]
    expected = torch.autograd.grad(torch.stack(sums).mean(), [*net.parameters()])
    before = [p.detach().clone() for p in net.parameters()]
    how = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, "max_steps": 1, "max_grad_norm": 0}
    quiet = {"use_cpu": True, "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    fixed = {"lr_scheduler_type": "constant", "remove_unused_columns": False}
    settings = session["transformers"].TrainingArguments(output_dir=str(tmp_path), **how, **quiet, **fixed)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    trainer = session["Weighted"](net, settings, train_dataset=rows, optimizers=(optimizer, None))
    trainer._get_train_sampler = lambda *given: torch.utils.data.SequentialSampler(rows)
    trainer.train()
    assert trainer.model_accepts_loss_kwargs
    for p, old, gradient in zip(net.parameters(), before, expected, strict=True):
        torch.testing.assert_close(p.detach(), old - 1e-3 * gradient)


def test_the_sum_of_losses_in_a_dict_is_in_the_order_of_the_weights():
    (code,) = re.findall(r"`(sum\(w \* values\[name\].*?)`", PAGE.read_text(encoding="utf-8"))
    values, weights = {"z": torch.tensor(200.0), "a": torch.tensor(8.0)}, torch.tensor([0.25, 3.0])
    assert eval(code, {"jd": jd, "values": values, "weights": weights}) == 0.25 * 8 + 3 * 200


@pytest.mark.parametrize("around", ["a with", "jd.autocast", "nothing"])
def test_autocast_around_the_losses_gives_the_weights_of_float16(around):
    session = play(START)
    net, batch = session["net"], [column[:6] for column in session["data"].tensors]
    cheap = lambda params, *batch: session["losses"](params, *batch) * torch.tensor([1e-3, 1.0])
    losses = jd.autocast(cheap, torch.float16) if around == "jd.autocast" else cheap
    with torch.autocast("cpu", torch.float16):
        exact = cheap(dict(net.named_parameters()), *batch)
    with torch.autocast("cpu", torch.float16, enabled=around == "a with"):
        weights_of = jd.weights_fn(losses, session["rule"])
        found = weights_of(dict(net.named_parameters()), *batch, scale=jd.scale_state(2.0**8))
    assert torch.equal(found.losses, exact) == (around != "nothing")


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
