"""The loops of the guide to trainers, on one rank or two: the blocks of the page as they stand, in one session.

python tests/models/trainers.py Accelerate 2 folder

runs what stands under that heading, and then the steps of one process with the batches of all ranks. Each rank writes
into the folder what both found, in float64.
"""

import functools
import os
import re
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from distributed.ranks import meet, on_ranks
from inputs import library

import functional_jd as jd

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "trainers.md"
LOOPS = PAGE.read_text(encoding="utf-8").partition("\n## Float16 post-training\n")[0]
SECTIONS = re.split(r"^## ", LOOPS, flags=re.MULTILINE)
START, *REST = [re.findall(r"```python\n(.*?)```", part, flags=re.DOTALL) for part in SECTIONS]
BLOCKS = {part.partition("\n")[0]: blocks for part, blocks in zip(SECTIONS[1:], REST, strict=True)}
LIBRARIES = {
    "Your own loop": [],
    "Accelerate": ["accelerate"],
    "Lightning": ["lightning"],
    "Losses that carry a graph": ["lightning"],
    "Transformers": ["transformers", "accelerate"],
    "PEFT": ["transformers", "peft"],
    "Several rewards": ["transformers"],
}


class Recorder:
    """`weights_fn` and `step`, which keep where training starts, by which method it goes, and this rank's batches."""

    def __init__(self):
        self.start, self.how, self.seen = None, None, []

    def keep(self, params, how):
        self.start = self.start or {name: p.detach().clone() for name, p in params.items()}
        self.how = how

    def weights_fn(self, losses, rule, *, group, given=jd.weights_fn):
        def recorded(params, *batch, state, scale=None):
            self.keep(params, {"losses": losses, "aggregator": rule, "optimizer": jd.adamw(1e-2)})
            found = given(losses, rule, group=group)(params, *batch, state=state, scale=scale)
            self.seen.append((found.weights, *batch))
            return found

        return recorded

    def step(self, state, *batch, engine, given=jd.step, **how):
        self.keep(state.params, how)
        state, info = given(state, *batch, engine=engine, **how)
        self.seen.append((info.weights, *batch))
        return state, info

    def batches(self):
        """The batches of all ranks, one after the other."""
        ranks = [self.seen]
        if dist.is_initialized():
            ranks = [None] * dist.get_world_size()
            dist.all_gather_object(ranks, self.seen)
        for parts in zip(*ranks, strict=True):
            yield [torch.cat(columns) for columns in zip(*(part[1:] for part in parts), strict=True)]

    def again(self):
        """The parameters and the weights of steps of one process, from the start, with the batches of all ranks."""
        state, weights = None, []
        for batch in self.batches():
            state = state or jd.train_state(self.start, *batch, **self.how)
            state, info = jd.step(state, *batch, **self.how)
            weights.append(info.weights)
        return state.params, weights


def settle(ranks):
    """Have the trainers work on the CPU, on as many ranks, and say nothing."""
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    several = ranks > 1
    settings = {
        "accelerate.Accelerator": {"cpu": True},
        "lightning.Trainer": quiet
        | {"accelerator": "cpu", "devices": ranks}
        | ({"strategy": "ddp"} if several else {}),
        "transformers.TrainingArguments": {"use_cpu": True, "save_strategy": "no", "report_to": "none"}
        | {"disable_tqdm": True, **({"ddp_backend": "gloo"} if several else {})},
    }
    for place, own in settings.items():
        module, _, name = place.partition(".")
        if module in sys.modules:
            setattr(sys.modules[module], name, functools.partial(getattr(sys.modules[module], name), **own))


def play(blocks, change=None):
    """Run blocks as one session; `change(session)` after the first one, which makes the module."""
    session = {}
    torch.manual_seed(0)
    for index, block in enumerate(blocks):
        exec(compile(block, f"{PAGE.name}, block {index}", "exec"), session)
        if index == 0 and change is not None:
            change(session)
    return session


def trained_in(session):
    """The parameters that the blocks have trained."""
    trained = {"adapters": "model", "policy": "policy"}
    module = session[next((name for mark, name in trained.items() if mark in session), "net")]
    return {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}


def main(rank, heading, ranks, folder):
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": 1}
    if int(ranks) > 1:
        os.environ |= {name: str(value) for name, value in places.items()} | {"MASTER_ADDR": "127.0.0.1"}  # as torchrun
        meet(rank, int(ranks), folder)
    torch.set_default_dtype(torch.float64)
    settle(int(ranks))
    os.chdir(folder)
    recorder, given = Recorder(), (jd.weights_fn, jd.step)
    jd.weights_fn, jd.step = recorder.weights_fn, recorder.step
    session = play([*START, *BLOCKS[heading]])
    jd.weights_fn, jd.step = given
    found = {"params": trained_in(session), "seen": recorder.seen, "history": session.get("history")}
    expected = recorder.again() if recorder.seen else ({}, [])
    found |= dict(zip(("expected", "weights"), expected, strict=True))
    torch.save(found, Path(folder, f"{rank}.pt"))
    if dist.is_initialized():
        jd.distributed.leave()


if __name__ == "__main__":
    for name in LIBRARIES[sys.argv[1]]:
        getattr(library(name), "Trainer", None)  # imported once, for both forks
    on_ranks(main, *sys.argv[1:], count=int(sys.argv[2]))
