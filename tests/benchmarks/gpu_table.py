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
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from memory import peak_memory
from models import Tasks, Trunk, dense, tasks, transformer, values
from page import put
from page import table as markdown
from steps import loop, of_mean, of_tasks
from torch import Tensor, nn

import functional_jd as jd


class Bottleneck(nn.Module):
    """The residual block of ResNet-50: 1 x 1, 3 x 3, 1 x 1, and a projection where shapes differ."""

    def __init__(self, inputs: int, width: int, stride: int):
        super().__init__()
        conv = lambda i, o, k, s=1: [nn.Conv2d(i, o, k, s, k // 2, bias=False), nn.BatchNorm2d(o)]
        outputs = 4 * width
        self.path = nn.Sequential(
            *conv(inputs, width, 1), nn.ReLU(), *conv(width, width, 3, stride), nn.ReLU(), *conv(width, outputs, 1)
        )
        self.short = nn.Sequential(*conv(inputs, outputs, 1, stride)) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block."""
        return torch.relu(self.path(x) + self.short(x))


def resnet50() -> Trunk:
    """He et al., "Deep Residual Learning", table 1, column 50-layer; 224 x 224 pixels."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    inputs = 64
    for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for index in range(blocks):
            layers.append(Bottleneck(inputs, width, stride if index == 0 else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()), inputs, (3, 224, 224)


class Block(nn.Module):
    """A block of GPT-2: causal attention, then a layer four times as wide, each after a normalisation."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block to `[batch, positions, width]`."""
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(self.before(x)).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.wide(self.between(x))


class GPT2(nn.Module):
    """GPT-2 small without its output layer: Radford et al., 2019; 124 million parameters."""

    def __init__(self, positions: int, tokens: int = 50257, width: int = 768, heads: int = 12, blocks: int = 12):
        super().__init__()
        self.token, self.place = nn.Embedding(tokens, width), nn.Embedding(positions, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(blocks)])
        self.last = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Features `[batch, positions, width]` of tokens `[batch, positions]`."""
        return self.last(self.blocks(self.token(tokens) + self.place.weight[: tokens.shape[1]]))


@dataclass(frozen=True)
class Case(Tasks):
    """Tasks on a trunk that may have buffers, and the precision of autocast."""

    precision: str = "float32"

    def losses(self) -> Any:
        """The losses as functions of parameters and, if the trunk has any, of buffers."""
        apply = jd.functional(self.trunk)
        heads = [jd.functional(head) for head in self.heads]

        def of_heads(params: Any, h: Tensor, *batch: Tensor) -> Any:
            y = batch[-1]
            return {
                str(i): nn.functional.mse_loss(head(params[str(i)], {}, h)[0], y[i]) for i, head in enumerate(heads)
            }

        if self.buffers:
            features = lambda params, buffers, x, y: apply(params, buffers, x)
            top = lambda params, h, buffers, x, y: (of_heads(params, h, x, y), buffers)
        else:
            features, top = (lambda params, x, y: apply(params, {}, x)[0]), of_heads
        if self.precision == "float32":
            return jd.multitask(features, top)
        return jd.multitask(*(jd.autocast(f, getattr(torch, self.precision)) for f in (features, top)))

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The buffers of the trunk."""
        return dict(self.trunk.named_buffers())


def _case(trunk: Trunk, n: int, batch: int, precision: str, device: str) -> Case:
    made = tasks(lambda: trunk, n, batch, device)
    return Case(made.trunk, made.heads, made.batch, precision)


def _gpt2(batch: int, positions: int, n: int, toy: bool, device: str) -> Case:
    torch.manual_seed(n)
    sizes = {"tokens": 50, "width": 16, "heads": 2, "blocks": 1} if toy else {}
    trunk = GPT2(positions, **sizes)
    width = trunk.place.embedding_dim
    heads = nn.ModuleList(nn.Linear(width, 1) for _ in range(n))
    x = torch.randint(trunk.token.num_embeddings, (batch, positions))
    y = torch.randn(n, batch, positions, 1)
    return Case(trunk.to(device), heads.to(device), (x.to(device), y.to(device)), "bfloat16")


def cases(device: str, toy: bool = False) -> dict[str, Callable[[], Case]]:
    """What makes each case; `toy`: so small that a CPU runs all of them in seconds."""
    small = "bfloat16" if device == "cpu" else "float16"
    wide, layers = (dense(6, 16, 16), transformer(8, 4)) if toy else (dense(96, 200, 160), transformer(64, 16))
    tiny = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(32, 8)), 8, (3, 2, 2)
    image, images, text = (lambda: tiny, 4, (2, 4)) if toy else (resnet50, 64, (16, 256))
    return {
        "MLP, T = 8, float32": partial(_case, wide, 8, 64, "float32", device),
        "2 transformer layers, T = 3, float16": partial(_case, layers, 3, 16, small, device),
        "ResNet-50, 64 x 224 x 224, T = 3, bfloat16": lambda: _case(image(), 3, images, "bfloat16", device),
        "GPT-2 small, 16 x 256, T = 4, bfloat16": partial(_gpt2, *text, 4, toy, device),
    }


ROUNDS, SECONDS, LR = 15, 0.8, 1e-4
Row = dict[str, Any]
Step = Callable[[], Any]
RULES: dict[str, Callable[..., Any]] = {"mean": jd.mean, "upgrad": jd.upgrad, "config": jd.config}


def main(arguments: Sequence[str] | None = None) -> None:
    """Time all sides of all cases, print the table, and write it where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--pages", nargs="+", type=Path, default=[], help="pages whose tables are replaced")
    parser.add_argument("--toy", action="store_true", help="small models, to try the bench")
    parser.add_argument("--seconds", type=float, default=330, help="when to stop")
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    start, rows = time.perf_counter(), []
    for name, make in cases(device, options.toy).items():
        of_case(name, make, device, start + options.seconds, rows)
        if options.json:
            options.json.write_text(json.dumps({"machine": machine(device), "rows": rows}, indent=1))
    text = table(rows)
    print(f"\n{machine(device)}\n\n{text}")
    for page in options.pages:
        for name, made in (("gpu", text), ("gpu, in short", summary(rows))):
            if f", {name} -->" in page.read_text():
                put(page, name, made, "gpu_table.py")


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
    shape = () if rule == "mean" else (len(case.heads),)  # plain training has one scale too
    scale = jd.scale_state(2.0**10, shape=shape) if case.precision == "float16" else None
    method: dict[str, Any] = {"losses": losses, "aggregator": RULES[rule](), "optimizer": jd.adamw(LR)}
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


def of_case(name: str, make: Callable[[], Any], device: str, end: float, rows: list[Row]) -> None:
    """Append the rows of one case: all sides are built, then timed in turns, so that all meet the same machine."""
    steps: dict[str, Callable[[], Any]] = {}
    found: dict[str, Row] = {}
    late = lambda: time.perf_counter() > end
    for side, build in sides(make()).items():
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
    """One line per case: our forms of `upgrad` to TorchJD's loop, `upgrad` and `mean` to plain training."""
    peer, sides = "TorchJD upgrad", ("upgrad, eager", "upgrad, by operators", "upgrad, captured")
    titles = ["case", "TorchJD, ms", "`upgrad`, eager", "by operators", "captured", "memory, eager"]
    titles += ["`upgrad`, eager, to plain", "`mean`, eager, to plain", "`mean`, captured, to plain captured"]
    lines = []
    for case in dict.fromkeys(row["case"] for row in rows):
        found = {row["side"]: row for row in rows if row["case"] == case and "ms" in row}
        ratio = lambda a, b, key="ms", found=found: (
            f"{found[a][key] / found[b][key]:.2f}" if {a, b} <= {*found} else "-"
        )
        cells = [f"{found[peer]['ms']:.3g}" if peer in found else "-", *(ratio(side, peer) for side in sides)]
        cells += [ratio("upgrad, eager", peer, "peak MB") if case.startswith(_LARGE) else "-"]
        cells += [ratio(f"{rule}, eager", "plain") for rule in ("upgrad", "mean")]
        lines.append([case, *cells, ratio("mean, captured", "plain, captured")])
    return markdown(titles, lines, "--:")


_LARGE = ("ResNet", "GPT")  # memory of small models is rounding


if __name__ == "__main__":
    main()
