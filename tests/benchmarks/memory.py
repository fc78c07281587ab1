"""Peak memory of a call above what was there before: every block that torch allocates is counted, none is sampled."""

import gc
import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def peak_memory(call: Callable[[], Any], device: str = "cpu") -> int:
    """Bytes at the peak; what the call returns or leaves behind is part of it, what it frees of earlier calls is not.

    On a CPU the allocations come from torch's profiler, so that the figure is the same on every machine and in every
    run; scratch space of libraries that allocate by themselves (oneDNN, BLAS) is not seen.
    """
    call()  # what it keeps from call to call is there from now on
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        call()
    with TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        record.export_chrome_trace(str(file))
        events = [event for event in json.loads(file.read_text())["traceEvents"] if event["name"] == "[memory]"]
    blocks: dict[int, int] = {}
    level = peak = 0
    for event in sorted(events, key=lambda event: event["ts"]):
        address, size = event["args"]["Addr"], event["args"]["Bytes"]
        level -= blocks.pop(address, 0)  # what goes without having come was there before
        if size > 0:
            blocks[address] = size
            level += size
        peak = max(peak, level)
    return peak
