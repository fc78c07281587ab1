"""The cases of `as run` and `compiled`: the whole step as users call it. These figures are the bench's verdict."""

from collections.abc import Callable
from functools import partial
from itertools import product

import torch
from burgers import burgers
from models import TOYS, TRUNKS, examples, tasks, trunk_and_batch
from races import Goal, Race, Side
from steps import PRECISIONS, Make, limit, ours, peer, plain

import functional_jd as jd

_EXAMPLES = 64
# The ratio to the peer that a step shall reach: eager, compiled.
_TASKS: dict[str, dict[int, tuple[float, float]]] = {
    "tiny MLP": {2: (0.7, 0.25)},
    "MLP": {2: (0.7, 0.45), 8: (0.5, 0.35), 32: (0.4, 0.3)},
    "wide MLP": {8: (0.25, 0.2)},
    "conv": {2: (0.9, 0.75), 8: (0.85, 0.7)},
    "transformer": {2: (0.9, 0.75), 8: (0.85, 0.7), 32: (0.7, 0.6)},
}
_EACH: dict[str, tuple[float, float]] = {"MLP": (0.06, 0.04), "conv": (0.6, 0.5), "transformer": (0.7, 0.5)}
# Of a step with `mean` to plain training, eager; and compiled, where that is timed.
_MEAN, _MEAN_COMPILED = 1.05, {("tiny MLP", 2): 0.6, ("conv", 2): 0.9}
# To the limit, which for linear layers is far from what inner products without rows reach.
_LIMIT, _LIMITED = (1.15, 1.05), ("conv", "transformer")

# Directions may be so far apart, relatively. The peer adds a ridge of 1e-4 to the Gramian, and multiplies that of
# examples in half precision. A wrong direction is apart by a half and more.
_APART = {"float32": 0.05, "bfloat16": 0.3, "float16": 0.3}


def races_of(table: str, toy: bool = False) -> list[Race]:
    """Every case in every precision, "as run" or "compiled": our step in one graph; the peer does not compile."""
    races = []
    for precision, (name, size, make, goals) in product(PRECISIONS, cases(toy, int(table == "compiled"))):
        # In half precision a form of the losses costs the same as in float32, and `mean` is a matter of float32.
        judged = tuple(goal for goal in goals if precision == "float32" or goal.ours == "ours")
        written = ("operators",) if table == "as run" and precision == "float32" else ()
        forms = tuple(dict.fromkeys(["ours", *(goal.ours for goal in judged), *written]))
        called = size if precision == "float32" else f"{size} {precision}"
        build = partial(_sides, table, make, precision, forms)
        races.append(Race(table, name, called, build, judged, _APART[precision]))
    return races


Case = tuple[str, str, Make, tuple[Goal, ...]]


def cases(toy: bool, form: int) -> list[Case]:
    """Name, size, model and goals; `form` 0: eager, 1: compiled."""
    trunks, m = (TOYS, 4) if toy else (TRUNKS, _EXAMPLES)
    found: list[Case] = []
    for name, sizes in _TASKS.items():
        trunk, batch = trunk_and_batch(name, toy)
        for n, goals in sizes.items():
            close = (Goal("ours", "limit", _LIMIT[form]),) if name in _LIMITED else ()
            mean = _MEAN_COMPILED.get((name, n)) if form else _MEAN
            means = () if mean is None else (Goal("mean", "plain", mean),)
            stacked = () if form else (Goal("stacked", "JD", goals[form]),)
            own = (Goal("ours", "JD", goals[form]), *stacked, *means, *close)
            found.append((name, f"T={n}", partial(tasks, trunk, n, batch), own))
    for name, goals in _EACH.items():
        goal = Goal("ours", "JD", goals[form])
        found.append((f"{name}, each", f"m={_EXAMPLES}", partial(examples, trunks[name], m), (goal,)))
    points, width = (4, 4) if toy else (256, 32)
    return [*found, ("Burgers", "m=3", partial(burgers, points, width), ())]


def _sides(table: str, make: Make, precision: str, forms: tuple[str, ...]) -> dict[str, Side]:
    sides = {"JD": peer(make, precision), "plain": plain(make, precision), "limit": limit(make, precision)}
    step = jd.step
    if table == "compiled":
        torch._dynamo.reset()  # sizes of the last case would make those of this one dynamic
        sides["plain compiled"] = plain(make, precision, partial(torch.compile, fullgraph=True))
        step = jd.compiled(jd.step)
    return {name: side for name, side in sides.items() if side is not None} | _ours(make, precision, forms, step)


def _ours(make: Make, precision: str, forms: tuple[str, ...], step: Callable[..., object]) -> dict[str, Side]:
    """Our step with losses as they come; with the losses of tasks in one tensor; with `mean`; without Python."""
    sides = {
        "ours": lambda: ours(make, precision, step=step),
        "operators": lambda: ours(make, precision, step=jd.compiled(step, backend="eager")),
        "stacked": lambda: ours(make, precision, step=step, stacked=True),
        "mean": lambda: ours(make, precision, jd.mean(), step)._replace(direction=None),
    }
    return {name: sides[name]() for name in forms}
