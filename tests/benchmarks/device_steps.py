"""Whole steps on the simulated accelerator, counted: ours, the peer's loop, and plain training.

A step of small and middle models costs a GPU what it launches and where it waits, whatever the kernels compute. Both
are counted here exactly, on any machine, after a step that sets up what there is to set up.
"""

import gc
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import steps
import torch
from models import Tasks, tasks, trunk_and_batch

import functional_jd as jd

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the script finds the neighbours of its folder too
from simulated import Device, announce, simulated

announce()

CASES = (("tiny MLP", 2), ("MLP", 2), ("MLP", 8), ("conv", 4), ("transformer", 3))
RULES: dict[str, Callable[[], Any]] = {
    "mean": jd.mean,
    "upgrad": jd.upgrad,
    "config": jd.config,
    "mgda": jd.mgda,
    "cagrad": partial(jd.cagrad, 0.5),
    "nash_mtl": jd.nash_mtl,
}
FORMS = ("one scale", "a scale per objective", "autocast float16")
ONE_SCALE = "one scale that moves"


class Count(NamedTuple):
    """What one warm step does.

    Attributes:
        launches: operations on the device, without views and allocations.
        waits: synchronisations of the host with the device, blocking copies included.
        to_host: copies to the host.
        from_host: copies from the host.
        peak: bytes above those that were alive before the step, at most.
    """

    launches: int
    waits: int
    to_host: int
    from_host: int
    peak: int


def ours(case: tuple[str, int], rule: str, form: str = FORMS[0]) -> Count:
    """`step` with default arguments."""
    shape = {FORMS[0]: None, ONE_SCALE: ()}.get(form, (case[1],))
    with simulated() as device:
        side = steps.ours(partial(_model, case), _precision(form), RULES[rule](), shape=shape)
        return _counted(device, side.call)


def peers(case: tuple[str, int], rule: str, form: str = FORMS[0]) -> Count | None:
    """TorchJD's loop, with torch's fused AdamW and its GradScaler; it has no scale for each objective."""
    from torchjd.aggregation import MGDA, CAGrad, ConFIG, Mean, NashMTL, UPGrad

    rules = {"mean": Mean, "upgrad": UPGrad, "config": ConFIG, "mgda": MGDA, "cagrad": partial(CAGrad, c=0.5)}
    rules |= {"nash_mtl": partial(NashMTL, n_tasks=case[1])}

    return _looped(case, form, lambda model: steps.of_tasks(model, None, rules[rule]()))


def plain(case: tuple[str, int], form: str = FORMS[0]) -> Count | None:
    """Training of the mean loss as everybody writes it."""
    return _looped(case, form, lambda model: steps.of_mean(model.mean))


def _looped(case: tuple[str, int], form: str, way: Callable[[Tasks], Any]) -> Count | None:
    if form == FORMS[1]:
        return None
    with simulated() as device:
        return _counted(device, steps.loop(way, partial(_model, case), _precision(form), fused=True).call)


def _precision(form: str) -> str:
    return "float16" if form == FORMS[2] else "float32"


def _model(case: tuple[str, int]) -> Tasks:
    trunk, batch = trunk_and_batch(case[0])
    return tasks(trunk, case[1], batch, "sim")


def _counted(device: Device, call: Callable[[], Any]) -> Count:
    with torch.autograd.set_multithreading_enabled(False):  # a thread of its own frees memory a moment later
        device.reset()
        call()
        gc.collect()
        gc.disable()  # memory in reference cycles counts, whenever it would have been collected
        try:
            device.reset()
            before = device.bytes
            call()
        finally:
            gc.enable()
    return Count(
        device.launches, device.synchronisations, device.copies_to_host, device.copies_from_host, device.peak - before
    )
