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
from pathlib import Path
from typing import Any

import torch
from gpu_cases import cases
from gpu_sides import sides
from memory import peak_memory
from page import table as markdown
from page import with_table

ROUNDS, SECONDS = 15, 0.8
Row = dict[str, Any]


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
