"""The cases of `compiled`: one objective per example, our direction in one graph, against plain training."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from models import TOYS, TRUNKS, Examples, examples, flat, values
from races import ENGINES, Goal, Race, Side
from sides import by_gramian, by_jacobian, plain
from torch import Tensor

_COMPILED = tuple(f"{name} compiled" for name in ENGINES)
_CASES = (("MLP", 16, 1.2), ("MLP", 64, 1.2), ("transformer", 16, 1.4))


def compiled_races(toy: bool = False, device: str = "cpu", backend: str = "inductor") -> list[Race]:
    """Each model eager and compiled, with the same goal against plain training in both forms."""
    trunks = TOYS if toy else TRUNKS
    return [
        Race(
            "compiled",
            name,
            f"m={m}",
            lambda trunk=trunks[name], m=m: _sides(examples(trunk, m, device), backend),
            tuple(Goal(against, goal, ours=_COMPILED) for against in ("fb", "fb compiled")),
            device,
            quick=(name, m) == ("MLP", 16),
        )
        for name, m, goal in _CASES
    ]


def _sides(model: Examples, backend: str) -> dict[str, Side]:
    torch._dynamo.reset()
    losses, params, batch = model.losses(), values(model.model), (model.x, model.y)
    loss = lambda: model.forward().mean()
    compile_ = partial(torch.compile, fullgraph=True, backend=backend)
    return {
        "fb": Side(partial(plain, [model.model], loss)),
        "fb compiled": Side(partial(plain, [model.model], compile_(loss))),
        "jacobian": Side(partial(by_jacobian, losses, params, *batch), flat),
        "gramian": Side(partial(by_gramian, losses, params, *batch), flat),
        "jacobian compiled": Side(_called(compile_(partial(_direction, by_jacobian, losses)), params, *batch), flat),
        "gramian compiled": Side(_called(compile_(partial(_direction, by_gramian, losses)), params, *batch), flat),
    }


def _direction(engine: Callable[..., Any], losses: Any, params: Any, *batch: Tensor) -> Any:
    return engine(losses, params, *batch)


def _called(direction: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    return lambda: direction(*args)
