"""`python tests/benchmarks/first_call.py`: what compiling a step takes, and after how many steps it has paid.

In CPU time, which other work on the machine stretches less. Every case runs in processes of its own, one thread each:
`step`, then plain training, each with an empty cache and then with what that left there.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # so that `python -m` finds its neighbours too
from page import case_name, command, table

_TO_PLAIN = ("plain training", "to plain")
TAKEN = ("first call, CPU s", "torch", "C++", "all", *_TO_PLAIN, "second process", *_TO_PLAIN)
_STEPS = ("eager", "compiled", "plain compiled", "to plain", "pays off after")
GIVEN = ("step, CPU ms", *_STEPS, "kernels", "lines of C++", "graphs")
Found = dict[str, Any]
_TIMED = 60


def lines(options: Any) -> Iterator[str]:
    """The rows as they come on stderr, and both tables in the end; one side alone with `one`."""
    if options.one:
        yield json.dumps(measured(*options.one, options.toy))
        return
    rows: list[tuple[str, ...]] = []
    from as_run import cases

    for name, size, *_ in cases(options.toy, 1):
        rows.append(cells(name, size, *(_twice(name, size, side, options) for side in ("ours", "plain"))))
        print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
    yield tables(rows)


def measured(name: str, size: str, side: str, toy: bool = False, backend: str = "inductor") -> Found:
    """Compile one side in this process, with the cache that there is, and take some steps."""
    import torch
    from as_run import cases
    from steps import ours, plain
    from torch._dynamo.utils import counters
    from torch._inductor import metrics

    import functional_jd as jd

    torch.set_num_threads(1)
    make = next(case[2] for case in cases(toy, 1) if case[:2] == (name, size))
    take = jd.compiled(jd.step, backend=backend)
    if side == "ours":
        compiled, eager = ours(make, "float32", step=take), ours(make, "float32")
    else:
        compile_ = partial(torch.compile, fullgraph=True, backend=backend)
        compiled, eager = plain(make, "float32", compile_), plain(make, "float32")
    eager.call()
    kernels = metrics.generated_kernel_count
    here, others = _cpu()
    compiled.call()
    here, others = (after - before for after, before in zip(_cpu(), (here, others), strict=True))
    files = [*Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).rglob("*.cpp")]
    return {
        "parts": {"torch": here, "C++": others},
        "all": here + others,
        "kernels": metrics.generated_kernel_count - kernels,
        "lines": sum(file.read_text().count("\n") for file in files),
        "compiled": _milliseconds(compiled.call),
        "eager": _milliseconds(eager.call),
        # After all steps: more than one if some step compiled again.
        "graphs": len(take.graphs) or counters["stats"]["unique_graphs"],
    }


def _cpu() -> tuple[float, float]:
    """Seconds of this process, and of those that it has waited for."""
    spent = os.times()
    return spent.user + spent.system, spent.children_user + spent.children_system


def _milliseconds(call: Callable[[], Any]) -> float:
    found = []
    for _ in range(_TIMED):
        start = time.process_time()
        call()
        found.append(time.process_time() - start)
    return median(found) * 1e3


def _twice(name: str, size: str, side: str, options: Any) -> tuple[Found, Found]:
    """In two processes with one cache, which was empty before."""
    with TemporaryDirectory(ignore_cleanup_errors=True) as cache:
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        environment = os.environ | threads | {"TORCHINDUCTOR_CACHE_DIR": cache}
        call = [sys.executable, __file__, "--one", name, size, side]
        call += ["--toy"] if options.toy else []
        runs = [subprocess.run(call, env=environment, check=True, stdout=subprocess.PIPE) for _ in range(2)]
    cold, warm = (json.loads(run.stdout.splitlines()[-1]) for run in runs)
    return cold, warm


def cells(name: str, size: str, ours: tuple[Found, Found], plain: tuple[Found, Found]) -> tuple[str, ...]:
    """What goes into both tables of one case, from its first and its second process."""
    (cold, warm), (plain_cold, plain_warm) = ours, plain
    found = [case_name(name, size), *(f"{seconds:.1f}" for seconds in cold["parts"].values())]
    for mine, beside in ((cold, plain_cold), (warm, plain_warm)):
        found += [f"{mine['all']:.1f}", f"{beside['all']:.1f}", f"{mine['all'] / beside['all']:.2f}"]
    found += [f"{cold['eager']:.1f}", f"{cold['compiled']:.1f}", f"{plain_cold['compiled']:.1f}"]
    found.append(f"{cold['compiled'] / plain_cold['compiled']:.2f}")
    saved = (cold["eager"] - cold["compiled"]) / 1e3
    found.append(f"{cold['all'] / saved:,.0f} steps" if saved > 0 else "never")
    return (*found, *(str(cold[key]) for key in ("kernels", "lines", "graphs")))


def tables(rows: Sequence[tuple[str, ...]]) -> str:
    """What the first call takes, then what later calls give."""
    parts = len(TAKEN)
    taken, given = table(TAKEN, [row[:parts] for row in rows]), table(GIVEN, [row[:1] + row[parts:] for row in rows])
    return f"{taken}\n\n{given}"


if __name__ == "__main__":
    command(
        __file__,
        __doc__,
        {"first calls": lines},
        toy={"action": "store_true", "help": "models of a few neurons"},
        one={"nargs": 3, "metavar": ("MODEL", "SIZE", "SIDE"), "help": "measure this alone, here"},
    )
