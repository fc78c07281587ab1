"""One training step of a case by each side: plain, TorchJD, and ours in each form. Every side trains in place."""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from gpu_cases import Case

import functional_jd as jd
from functional_jd.core.tree import tree_leaves

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


def _optimizer(case: Case, **how: Any) -> torch.optim.Optimizer:
    parameters = [*case.trunk.parameters(), *case.heads.parameters()]
    return torch.optim.AdamW(parameters, lr=LR, fused=True, **how)


def plain(case: Case, capturable: bool = False) -> Step:
    """The mean of the losses, native autocast, `GradScaler` under float16, the fused AdamW of torch."""
    optimizer = _optimizer(case, capturable=capturable)
    scaler = torch.amp.GradScaler(case.batch[0].device.type, 2.0**10, enabled=case.dtype == torch.float16)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        losses, _ = case.forward()
        scaler.scale(torch.stack(losses).mean()).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


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
    return graph.replay


def peer(case: Case) -> Step:
    """TorchJD's loop with its UPGrad."""
    from torchjd.aggregation import UPGrad
    from torchjd.autojac import jac_to_grad, mtl_backward

    optimizer, rule, chunk = _optimizer(case), UPGrad(), 1 if case.dtype == torch.bfloat16 else None
    scaler = torch.amp.GradScaler(case.batch[0].device.type, 2.0**10, enabled=case.dtype == torch.float16)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        losses, h = case.forward()
        # Under vmap, batch normalisation raises for half precision: large models go row by row.
        mtl_backward([scaler.scale(loss) for loss in losses], features=h, parallel_chunk_size=chunk)
        jac_to_grad(case.trunk.parameters(), rule)
        scaler.step(optimizer)
        scaler.update()

    return step


def ours(case: Case, rule: str, form: Any) -> Step:
    """`jd.step`, eager or compiled by a backend; captured, the state is donated."""
    losses, buffers = case.losses(), case.buffers
    scale = jd.scale_state(2.0**10, shape=(len(case.heads),)) if case.dtype == torch.float16 else None
    aggregator = RULES[rule](solver="device") if form == "cudagraphs" and rule == "upgrad" else RULES[rule]()
    method: dict[str, Any] = {"losses": losses, "aggregator": aggregator, "optimizer": jd.adamw(LR)}
    begin: dict[str, Any] = {} if scale is None else {"scale": scale}
    if buffers:
        begin["buffers"] = {name: x.clone() for name, x in buffers.items()}
    held = [jd.train_state(case.params(), *case.batch, **method, **begin)]
    take: Callable[..., Any] = partial(jd.step, **method)
    if isinstance(form, str):
        take = jd.compiled(take, backend=form, **({"donate": True} if form == "cudagraphs" else {}))

    def step() -> Any:
        held[0], info = take(held[0], *case.batch)
        return info

    return step


def numbers(case: Case) -> int:
    """How many parameters are trained."""
    return sum(leaf.numel() for leaf in tree_leaves(case.params()))
