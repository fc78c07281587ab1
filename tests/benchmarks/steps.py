"""Whole steps, from a batch to new parameters: ours as users call it, the peer's loop, plain training, the limit."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from time import perf_counter
from typing import Any

import torch
from burgers import Burgers
from models import Examples, Tasks, flat, values
from races import Side
from torch import Tensor, nn

import functional_jd as jd

Model = Tasks | Examples | Burgers
Make = Callable[[], Model]
"""Builds the model, always with the same values: every side trains its own."""

PRECISIONS = ("float32", "bfloat16", "float16")
_RATE = 1e-3
_SCALE = 2.0**10


def ours(make: Make, precision: str, rule: Any = None, step: Any = jd.step, shape: Any = None, **form: Any) -> Side:
    """`step` with default arguments, and scales of this shape; float16 with one scale per objective."""
    model = make()
    if shape is None and precision == "float16":
        shape = (_objectives(model),)
    low = {} if precision == "float32" else {"low": partial(jd.autocast, dtype=getattr(torch, precision))}
    losses, rule = model.losses(**low, **form), rule or jd.upgrad()
    how: dict[str, Any] = {"losses": losses, "aggregator": rule, "optimizer": jd.adamw(lr=_RATE)}
    batch, params, device = model.batch, model.tree(values), model.batch[0].device
    scale = None if shape is None else jd.scale_state(_SCALE, shape=shape, device=device)
    state = [jd.train_state(params, *batch, scale=scale, **how)]

    def call() -> Any:
        state[0], _ = step(state[0], *batch, **how)
        return state[0].optimizer.first

    return Side(call, flat)


def peer(make: Make, precision: str) -> Side:
    """The peer's loop: of several ways for examples the fastest; for tasks and losses its default, if that runs."""
    model = make()
    if isinstance(model, Examples):
        return min((partial(loop, way, make, precision) for way in (_engine, _rows)), key=_seconds)()
    way = of_tasks if isinstance(model, Tasks) else _rows
    ways = [partial(loop, partial(way, chunk=chunk), make, precision) for chunk in (None, 1)]
    return next((way for way in ways if _seconds(way) < float("inf")), ways[0])()


def plain(make: Make, precision: str, compile_: Callable[[Any], Any] | None = None) -> Side:
    """Training of the mean loss as everybody writes it, `compile_` around the loss."""
    way = lambda model: of_mean(compile_(model.mean) if compile_ else model.mean)
    return loop(way, make, precision)._replace(direction=None)


def limit(make: Make, precision: str) -> Side | None:
    """What no step that forms rows goes below: one forward pass, the heads once, the trunk once per task.

    Without a trunk one backward pass per loss; none for examples, of which no pass takes all.
    """
    model = make()
    if isinstance(model, Examples):
        return None
    autocast = _autocast(model, precision)
    return Side(partial(_through_trunk if isinstance(model, Tasks) else _through_all, model, autocast))


def _through_trunk(model: Tasks, autocast: Callable[[], AbstractContextManager[Any]]) -> None:
    trunk, heads = list(model.trunk.parameters()), list(model.heads.parameters())
    with autocast():
        h = model.trunk(model.batch[0])
        features = h.detach().requires_grad_()
        losses = model.of_features(features)
    gradients = [torch.autograd.grad(loss, features, retain_graph=True)[0] for loss in losses]
    torch.autograd.grad(sum(losses), heads)
    for gradient in gradients:
        torch.autograd.grad(h, trunk, gradient, retain_graph=True)


def _through_all(model: Burgers, autocast: Callable[[], AbstractContextManager[Any]]) -> None:
    weights = list(model.model.parameters())
    with autocast():
        losses = model.forward()
    for loss in losses:
        torch.autograd.grad(loss, weights, retain_graph=True)


Way = tuple[Callable[[], Any], Callable[[Any, Callable[[Any], Any]], None]]
"""`forward()`, under autocast, and `backward(found, scale)`: what it returned, and what scales; fills `.grad`."""


def loop(way: Callable[[Any], Way], make: Make, precision: str, **how: Any) -> Side:
    """The loop around: gradients to zero, `way(model)`, torch's AdamW, in float16 with torch's GradScaler."""
    model = make()
    weights = [p for module in model.modules for p in module.parameters()]
    optimizer = torch.optim.AdamW(weights, lr=_RATE, **how)
    scaler = torch.amp.GradScaler(model.batch[0].device.type, init_scale=_SCALE, enabled=precision == "float16")
    autocast, (forward, backward) = _autocast(model, precision), way(model)

    def call() -> None:
        optimizer.zero_grad()
        with autocast():
            found = forward()
        backward(found, scaler.scale)
        scaler.step(optimizer)
        scaler.update()

    def averages(module: nn.Module) -> dict[str, Tensor]:
        found = [(name, p, optimizer.state[p]) for name, p in module.named_parameters()]
        return {name: state.get("exp_avg", torch.zeros_like(p)) for name, p, state in found}  # none: a skipped step

    return Side(call, lambda _: flat(model.tree(averages)))


def of_mean(loss: Callable[[], Tensor]) -> Way:
    return loss, lambda value, scale: scale(value).backward()


def of_tasks(model: Tasks, chunk: int | None, rule: Any = None) -> Way:
    from torchjd.aggregation import UPGrad
    from torchjd.autojac import jac_to_grad, mtl_backward

    rule = rule or UPGrad()

    def backward(found: Any, scale: Callable[[Any], Any]) -> None:
        losses, h = found
        mtl_backward([scale(loss) for loss in losses], features=h, parallel_chunk_size=chunk)
        jac_to_grad(model.trunk.parameters(), rule)

    return model.forward, backward


def _rows(model: Examples | Burgers, chunk: int | None = None) -> Way:
    from torchjd.aggregation import UPGrad
    from torchjd.autojac import backward, jac_to_grad

    rule = UPGrad()

    def to_grad(losses: Any, scale: Callable[[Any], Any]) -> None:
        backward([scale(losses)] if isinstance(losses, Tensor) else [*map(scale, losses)], parallel_chunk_size=chunk)
        jac_to_grad(model.model.parameters(), rule)

    return model.forward, to_grad


def _engine(model: Examples) -> Way:
    from torchjd.aggregation import UPGradWeighting
    from torchjd.autogram import Engine

    rule, engine = UPGradWeighting(), Engine(model.model, batch_dim=0)

    def forward() -> tuple[Tensor, Tensor]:
        losses = model.forward()
        return losses, engine.compute_gramian(losses)  # calls the modules again

    # In half precision the rule does not run.
    return forward, lambda found, scale: scale(found[0]).backward(rule(found[1].float()))


def _seconds(way: Callable[[], Side]) -> float:
    """The second call; infinity for what does not run."""
    try:
        side = way()
        side.call()
        start = perf_counter()
        side.call()
    except Exception:
        return float("inf")
    return perf_counter() - start


def _autocast(model: Model, precision: str) -> Callable[[], AbstractContextManager[Any]]:
    low = precision != "float32"
    dtype = getattr(torch, precision) if low else None
    return lambda: torch.autocast(model.batch[0].device.type, dtype, enabled=low)


def _objectives(model: Model) -> int:
    if isinstance(model, Tasks):
        return len(model.heads)
    return len(model.batch[0]) if isinstance(model, Examples) else 3
