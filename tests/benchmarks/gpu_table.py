"""`make bench-gpu`: ms, host ms and peak memory of a training step on one GPU, by plain training, TorchJD and ours.

Medians of rounds in turns in one process. A side that cannot run says why in its row.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from gpu_cases import Case, cases
from memory import peak_memory
from models import values
from page import table as markdown
from page import with_table
from steps import loop, of_mean, of_tasks

import functional_jd as jd

ROUNDS, SECONDS, LR = 15, 0.8, 1e-4
Row = dict[str, Any]
Step = Callable[[], Any]
RULES: dict[str, Callable[..., Any]] = {"mean": jd.mean, "upgrad": jd.upgrad, "config": jd.config}


def main(arguments: Sequence[str] | None = None) -> None:
    """Time all sides of all cases, print the table, and write it where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--pages", nargs="+", type=Path, default=[], help="pages whose tables are replaced")
    parser.add_argument("--only", nargs="*", default=[""], help="parts of names of cases")
    parser.add_argument("--sides", nargs="*", default=[""], help="parts of names of sides")
    parser.add_argument("--toy", action="store_true", help="small models, to try the bench")
    parser.add_argument("--seconds", type=float, default=330, help="when to stop")
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    start, rows = time.perf_counter(), []
    for name, make in cases(device, options.toy).items():
        if any(part in name for part in options.only):
            of_case(name, make, device, options, start, rows)
            if options.json:
                options.json.write_text(json.dumps({"machine": machine(device), "rows": rows}, indent=1))
    text = table(rows)
    print(f"\n{machine(device)}\n\n{text}")
    for page in options.pages:
        for name, made in (("gpu", text), ("gpu, in short", summary(rows))):
            if f", {name} -->" in (page_text := page.read_text()):
                page.write_text(with_table(page_text, name, made, "gpu_table.py"))


def sides(case: Case) -> dict[str, Callable[[], Step]]:
    """What makes each side; a side that cannot run raises when it is made or first called."""
    made: dict[str, Callable[[], Step]] = {"plain": partial(plain, case), "plain, captured": partial(captured, case)}
    if find_spec("torchjd"):
        made["TorchJD upgrad"] = partial(peer, case)
    forms = {"eager": None, "by operators": "eager", "captured": "cudagraphs"}
    return made | {f"{rule}, {form}": partial(ours, case, rule, by) for rule in RULES for form, by in forms.items()}


def plain(case: Case, capturable: bool = False) -> Step:
    """The mean of the losses, native autocast, `GradScaler` under float16, the fused AdamW of torch."""
    return loop(lambda model: of_mean(model.mean), lambda: case, case.precision, fused=True, capturable=capturable).call


def captured(case: Case) -> Step:
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


def ours(case: Case, rule: str, backend: str | None) -> Step:
    """`jd.step`, eager or compiled by a backend; captured, the state is donated."""
    losses, buffers = case.losses(), case.buffers
    scale = jd.scale_state(2.0**10, shape=(len(case.heads),)) if case.precision == "float16" else None
    aggregator = RULES[rule](solver="device") if backend == "cudagraphs" and rule == "upgrad" else RULES[rule]()
    method: dict[str, Any] = {"losses": losses, "aggregator": aggregator, "optimizer": jd.adamw(LR)}
    begin: dict[str, Any] = {} if scale is None else {"scale": scale}
    if buffers:
        begin["buffers"] = {name: x.clone() for name, x in buffers.items()}
    held = [jd.train_state(case.tree(values), *case.batch, **method, **begin)]
    take: Callable[..., Any] = partial(jd.step, **method)
    if backend:
        take = jd.compiled(take, backend=backend, **({"donate": True} if backend == "cudagraphs" else {}))

    def step() -> Any:
        held[0], info = take(held[0], *case.batch)
        return info

    return step


def of_case(name: str, make: Callable[[], Any], device: str, options: Any, start: float, rows: list[Row]) -> None:
    """Append the rows of one case: all sides are built, then timed in turns, so that all meet the same machine."""
    steps: dict[str, Callable[[], Any]] = {}
    found: dict[str, Row] = {}
    late = lambda: time.perf_counter() - start > options.seconds
    for side, build in sides(make()).items():
        if any(part in side for part in options.sides):
            found[side] = {"error": "no time left"} if late() else built(build, device, side, steps)
    times: dict[str, list[tuple[float, float]]] = {side: [] for side in steps}
    until = time.perf_counter() + SECONDS * len(steps)
    while steps and len(times[side := min(times, key=lambda side: len(times[side]))]) < ROUNDS:
        if len(times[side]) >= 3 and (late() or time.perf_counter() > until):
            break
        times[side].append(once(steps[side], device))
    for side, measured in times.items():
        ms, host = (statistics.median(column) for column in zip(*measured, strict=True))
        found[side] |= {"ms": ms, "host ms": host}
    rows += [{"case": name, "side": side} | row for side, row in found.items()]
    print(*rows[-len(found) :], sep="\n", file=sys.stderr, flush=True)
    steps.clear()
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def built(build: Callable[[], Callable[[], Any]], device: str, side: str, steps: dict[str, Callable[[], Any]]) -> Row:
    """Warm a side up, and measure the peak of memory above what stands before a step."""
    try:
        began = time.perf_counter()
        step = build()
        for _ in range(3):
            step()
        wait(device)
        first = time.perf_counter() - began
        peak = peak_memory(step, device)
        steps[side] = step
        return {"peak MB": peak / 2**20, "first s": first}
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return {"error": f"{type(error).__name__}: {lines[0][:200]}"}


def once(step: Callable[[], Any], device: str) -> tuple[float, float]:
    """Milliseconds of a step: until the device has finished, and until the host may go on."""
    wait(device)
    start = time.perf_counter()
    step()
    wait(device)
    calls = max(3, min(50, int(0.04 / (time.perf_counter() - start))))
    start = time.perf_counter()
    for _ in range(calls):
        step()
    host = time.perf_counter() - start
    wait(device)
    return (time.perf_counter() - start) * 1e3 / calls, host * 1e3 / calls


def wait(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def machine(device: str) -> str:
    """What ran."""
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    return f"{name}, torch {torch.__version__}, Python {sys.version.split()[0]}, {time.strftime('%Y-%m-%d')}"


def table(rows: Sequence[Row]) -> str:
    """The table in Markdown: one line per side, with ratios to plain training and to TorchJD."""
    ms = {(row["case"], row["side"]): row["ms"] for row in rows if "ms" in row}
    lines = []
    for row in rows:
        case, side = row["case"], row["side"]
        if "error" in row:
            lines.append([case, side, "raises" if row["error"] != "no time left" else "-", "", "", "", ""])
            continue
        bases = [ms.get((case, base)) for base in ("plain", "TorchJD upgrad")]
        ratios = [f"{row['ms'] / base:.2f}" if base else "-" for base in bases]
        lines.append([case, side, f"{row['ms']:.3g}", f"{row['host ms']:.3g}", f"{row['peak MB']:.0f}", *ratios])
    return markdown(["case", "side", "ms", "host ms", "peak MB", "to plain", "to TorchJD"], lines, "--:")


def summary(rows: Sequence[Row]) -> str:
    """One line per case: our forms of `upgrad` to TorchJD's loop, and `mean` to plain training."""
    peer, sides = "TorchJD upgrad", ("upgrad, eager", "upgrad, by operators", "upgrad, captured")
    titles = ["case", "TorchJD, ms", "`upgrad`, eager", "by operators", "captured", "memory, eager"]
    titles += ["`mean`, eager, to plain", "captured, to plain captured"]
    lines = []
    for case in dict.fromkeys(row["case"] for row in rows):
        found = {row["side"]: row for row in rows if row["case"] == case and "ms" in row}
        ratio = lambda a, b, key="ms", found=found: (
            f"{found[a][key] / found[b][key]:.2f}" if {a, b} <= {*found} else "-"
        )
        cells = [f"{found[peer]['ms']:.3g}" if peer in found else "-", *(ratio(side, peer) for side in sides)]
        cells += [ratio("upgrad, eager", peer, "peak MB") if case.startswith(_LARGE) else "-"]
        lines.append([case, *cells, ratio("mean, eager", "plain"), ratio("mean, captured", "plain, captured")])
    return markdown(titles, lines, "--:")


_LARGE = ("ResNet", "GPT")  # memory of small models is rounding


if __name__ == "__main__":
    main()
