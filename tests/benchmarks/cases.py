"""The cases of `tasks`, `examples`, `private` and `growth`: one aggregated direction by each engine, eager."""

from collections.abc import Callable
from functools import partial

from models import TOYS, TRUNKS, Trunk, dense, examples, tasks, trunk_and_batch
from races import Goal, Race, Side
from sides import of_examples, of_private, of_tasks

Sides = dict[str, Side]

# Beyond so many examples the peer's engine that holds all rows takes gigabytes and minutes.
_MOST_ROWS = {"MLP": 64, "conv": 64, "transformer": 16}
_TASKS: dict[str, dict[int, tuple[Goal, ...]]] = {
    "tiny MLP": {2: ()},
    "MLP": {2: (), 8: (), 32: ()},
    "large MLP": {2: (), 8: (Goal("auto", "JD", 0.15, "memory"), Goal("auto", "fb", 2.5, "memory"))},
    "conv": {2: (), 8: (), 32: ()},
    "transformer": {2: (), 8: (), 32: ()},
}
_EXAMPLES: dict[str, dict[int, tuple[Goal, ...]]] = {
    "MLP": {16: (), 64: (Goal("auto", "fb", 3.0, "memory"),), 256: ()},
    "conv": {16: (), 64: (), 256: ()},
    "transformer": {16: (), 64: (), 256: ()},
}
# Of the clipped direction, against one forward and backward pass.
_PRIVATE = {"MLP": 1.3, "conv": 1.6, "transformer": 1.3}
_QUICK = {("tiny MLP", 2), ("MLP", 64)}

# Two points make a slope.
_QUICK_POINTS = 2


def task_races(toy: bool = False, device: str = "cpu") -> list[Race]:
    """Several tasks on a trunk: ours against `mtl_backward` and `jac_to_grad`."""
    return [
        Race("tasks", name, f"T={n}", _of_tasks(trunk, n, batch, device), goals, device, (name, n) in _QUICK)
        for name, sizes in _TASKS.items()
        for trunk, batch in [trunk_and_batch(name, toy)]
        for n, goals in sizes.items()
    ]


def example_races(toy: bool = False, device: str = "cpu") -> list[Race]:
    """One objective per example: ours against the peer's Engine."""
    trunks = TOYS if toy else TRUNKS
    return [
        Race("examples", name, f"m={m}", _of_examples(trunks, name, m, device), goals, device, (name, m) in _QUICK)
        for name, sizes in _EXAMPLES.items()
        for m, goals in sizes.items()
    ]


def private_races(toy: bool = False, device: str = "cpu") -> list[Race]:
    """The sum of clipped gradients of examples, against one forward and backward pass and against `vmap(grad)`."""
    trunks = TOYS if toy else TRUNKS
    return [
        Race("private", name, f"m={m}", partial(of_private, make), goals, device, (name, m) in _QUICK)
        for name, at_most in _PRIVATE.items()
        for goals in [(Goal("ours", "fb", at_most), Goal("ours", "fb", 1.1, "memory"))]
        for m in (16, 64, 256)
        for make in [partial(examples, trunks[name], m, device)]
    ]


def growth_races(toy: bool = False, device: str = "cpu") -> list[Race]:
    """How the cost of several tasks on an MLP grows with one quantity while the others stay."""
    width, batch, n = (4, 4, 2) if toy else (256, 64, 8)
    counts, widths, batches = (2, 4, 8, 16, 32, 64), (64, 128, 256, 512, 1024), (16, 64, 256, 1024)
    if toy:
        counts, widths, batches = (2,), (4,), (2,)
    square = lambda width: lambda: dense(width, width, width, width)
    sweeps = {
        "m": [(k, _of_tasks(square(width), k, batch, device)) for k in counts],
        # The parameters of three such layers, which the curve is drawn over.
        "n": [(3 * w * (w + 1), _of_tasks(square(w), n, batch, device)) for w in widths],
        "batch": [(b, _of_tasks(square(width), n, b, device)) for b in batches],
    }
    return [
        Race("growth", f"with {what}", f"{what}={x}", build, (), device, quick=index < _QUICK_POINTS)
        for what, sweep in sweeps.items()
        for index, (x, build) in enumerate(sweep)
    ]


def _of_tasks(trunk: Callable[[], Trunk], n: int, batch: int, device: str) -> Callable[[], Sides]:
    return lambda: of_tasks(partial(tasks, trunk, n, batch, device))


def _of_examples(trunks: dict[str, Callable[[], Trunk]], name: str, m: int, device: str) -> Callable[[], Sides]:
    return lambda: of_examples(partial(examples, trunks[name], m, device), rows=m <= _MOST_ROWS[name])
