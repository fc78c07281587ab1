"""One training step of a case by each side: plain, TorchJD, and ours in each form. Every side trains in place."""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from gpu_cases import Case
from models import values
from steps import loop, of_mean, of_tasks

import functional_jd as jd

Step = Callable[[], Any]
LR = 1e-4
RULES: dict[str, Callable[..., Any]] = {"mean": jd.mean, "upgrad": jd.upgrad, "config": jd.config}


def sides(case: Case) -> dict[str, Callable[[], Step]]:
    """What makes each side; a side that cannot run raises when it is made or first called."""
    made: dict[str, Callable[[], Step]] = {
        "plain": partial(plain, case),
        "plain, captured": partial(captured_plain, case),
    }
    if find_spec("torchjd"):
        made["TorchJD upgrad"] = partial(peer, case)
    for name in RULES:
        made[f"{name}, eager"] = partial(ours, case, name, jd.step)
        made[f"{name}, by operators"] = partial(ours, case, name, "eager")
        made[f"{name}, captured"] = partial(ours, case, name, "cudagraphs")
    return made


def plain(case: Case, capturable: bool = False) -> Step:
    """The mean of the losses, native autocast, `GradScaler` under float16, the fused AdamW of torch."""
    return loop(lambda model: of_mean(model.mean), lambda: case, case.precision, fused=True, capturable=capturable).call


def captured_plain(case: Case) -> Step:
    """The same as one CUDA graph."""
    step = plain(case, capturable=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return lambda keeps=step: graph.replay()  # the graph reads memory of the optimizer


def peer(case: Case) -> Step:
    """TorchJD's loop with its UPGrad."""
    # Under vmap, batch normalisation raises for half precision: large models go row by row.
    chunk = 1 if case.precision == "bfloat16" else None
    return loop(lambda model: of_tasks(model, chunk), lambda: case, case.precision, fused=True).call


def ours(case: Case, rule: str, form: Any) -> Step:
    """`jd.step`, eager or compiled by a backend; captured, the state is donated."""
    losses, buffers = case.losses(), case.buffers
    scale = jd.scale_state(2.0**10, shape=(len(case.heads),)) if case.precision == "float16" else None
    aggregator = RULES[rule](solver="device") if form == "cudagraphs" and rule == "upgrad" else RULES[rule]()
    method: dict[str, Any] = {"losses": losses, "aggregator": aggregator, "optimizer": jd.adamw(LR)}
    begin: dict[str, Any] = {} if scale is None else {"scale": scale}
    if buffers:
        begin["buffers"] = {name: x.clone() for name, x in buffers.items()}
    held = [jd.train_state(case.tree(values), *case.batch, **method, **begin)]
    take: Callable[..., Any] = partial(jd.step, **method)
    if isinstance(form, str):
        take = jd.compiled(take, backend=form, **({"donate": True} if form == "cudagraphs" else {}))

    def step() -> Any:
        held[0], info = take(held[0], *case.batch)
        return info

    return step
