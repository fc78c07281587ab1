"""The cases of `steps`: the aggregated direction of several tasks, and the whole step in mixed precision."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from measure import Case, Contest, apart
from torch import Tensor, nn
from torch.func import functional_call
from torchjd.aggregation import Mean, UPGrad
from torchjd.autojac import jac_to_grad, mtl_backward

from functional_jd.aggregation import aggregate
from functional_jd.aggregators.mean import mean
from functional_jd.aggregators.upgrad import upgrad
from functional_jd.jacobian import jacobian_fn
from functional_jd.objectives import multitask
from functional_jd.optimizers import adamw
from functional_jd.scaling import scale_state
from functional_jd.step import step, train_state
from functional_jd.tree import tree_leaves


class Model(NamedTuple):
    """A trunk, one head per task, a batch."""

    trunk: nn.Module
    heads: nn.ModuleList
    x: Tensor
    y: Tensor

    @property
    def params(self) -> dict[str, Any]:
        """As `multitask` losses take them."""
        return {"shared": _values(self.trunk), "heads": _values(self.heads)}


def _values(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def _dense(batch: int, *widths: int) -> tuple[nn.Module, int, Tensor]:
    layers = [layer for i, o in pairwise(widths) for layer in (nn.Linear(i, o), nn.ReLU())]
    return nn.Sequential(*layers), widths[-1], torch.randn(batch, widths[0])


def _conv() -> tuple[nn.Module, int, Tensor]:
    blocks = [nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(4)]
    return nn.Sequential(*blocks, nn.Flatten()), 512, torch.randn(32, 3, 16, 16)


def _model(trunk: Callable[[], tuple[nn.Module, int, Tensor]], tasks: int) -> Model:
    with torch.random.fork_rng():
        torch.manual_seed(tasks)
        body, width, x = trunk()
        heads = nn.ModuleList(nn.Linear(width, 1) for _ in range(tasks))
        return Model(body, heads, x, torch.randn(tasks, len(x), 1))


def _losses(model: Model) -> Any:
    def heads(params: Any, h: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        # The heads' own modules, each with its part of the parameters, as the peer calls them.
        outputs = [functional_call(head, _part(params, f"{i}."), h) for i, head in enumerate(model.heads)]
        return tuple(nn.functional.mse_loss(output, target) for output, target in zip(outputs, y, strict=True))

    return multitask(lambda params, x, y: functional_call(model.trunk, params, x), heads)


def _part(params: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): p for name, p in params.items() if name.startswith(prefix)}


def _forward(model: Model) -> tuple[list[Tensor], Tensor]:
    h = model.trunk(model.x)
    return [nn.functional.mse_loss(head(h), y) for head, y in zip(model.heads, model.y, strict=True)], h


def _flat(tensors: Any) -> Tensor:
    return torch.cat([tensor.detach().flatten().double() for tensor in tree_leaves(tensors)])


def _direction(trunk: Callable[[], tuple[nn.Module, int, Tensor]], tasks: int) -> Contest:
    """The Jacobian and the mean of its rows, against `mtl_backward` and `jac_to_grad`."""
    model, rule, peer_rule = _model(trunk, tasks), mean(), Mean()
    params, differentiate = model.params, jacobian_fn(_losses(model))

    def ours(_: int) -> Any:
        jacobian, _losses = differentiate(params, model.x, model.y)
        return aggregate(rule, jacobian).direction

    def peer(_: int) -> None:
        model.trunk.zero_grad()
        model.heads.zero_grad()
        losses, h = _forward(model)
        mtl_backward(losses, features=h)
        jac_to_grad(model.trunk.parameters(), peer_rule)

    def compare(direction: Any, _: None) -> float:
        gradients = [{name: p.grad for name, p in part.named_parameters()} for part in (model.trunk, model.heads)]
        return apart(_flat(direction), _flat(dict(zip(("shared", "heads"), gradients, strict=True))))

    return Contest(ours, peer, compare)


def _step(tasks: int, dtype: torch.dtype) -> Contest:
    """Autocast, scale, Jacobian, upgrad, AdamW, scale update, against the peer's loop, `GradScaler` and `AdamW`."""
    model, optimizer, rule = _model(lambda: _dense(64, 64, 128, 128, 128), tasks), adamw(lr=1e-3), upgrad()
    plain = _losses(model)

    def low(f: Callable[..., Any]) -> Callable[..., Any]:
        def inside(*args: Any) -> Any:
            with torch.autocast("cpu", dtype):
                return f(*args)

        return inside

    losses = multitask(low(plain.features), low(plain.heads))
    how: dict[str, Any] = {"losses": losses, "aggregator": rule, "optimizer": optimizer}
    start = train_state(model.params, model.x, model.y, scale=scale_state(2.0**10), **how)
    weights = [*model.trunk.parameters(), *model.heads.parameters()]
    scaler, torch_optimizer = torch.amp.GradScaler("cpu", init_scale=2.0**10), torch.optim.AdamW(weights, lr=1e-3)
    peer_rule = UPGrad()

    def ours(_: int) -> Any:
        return step(start, model.x, model.y, **how)[0].params

    def peer(_: int) -> None:
        with torch.autocast("cpu", dtype):
            losses, h = _forward(model)
        mtl_backward([scaler.scale(loss) for loss in losses], features=h)
        jac_to_grad(model.trunk.parameters(), peer_rule)
        scaler.step(torch_optimizer)
        scaler.update()
        torch_optimizer.zero_grad()

    def compare(params: Any, _: None) -> float:
        return apart(*(_flat(after) - _flat(start.params) for after in (params, model.params)))

    return Contest(ours, peer, compare)


def _mean_step(trunk: Callable[[], tuple[nn.Module, int, Tensor]]) -> Contest:
    """The step of `mean`, against the one that `torch.func.grad` and the same optimizer make, written by hand."""
    body, _, x = trunk()
    optimizer, params = adamw(lr=1e-3), _values(body)
    losses = lambda params, x: functional_call(body, params, (x,)).square().mean(0)
    how: dict[str, Any] = {"losses": losses, "aggregator": mean(), "optimizer": optimizer}
    start = train_state(params, x, **how)

    def by_hand(_: int) -> Any:
        direction, value = torch.func.grad_and_value(lambda params: losses(params, x).mean())(params)
        return optimizer.update(direction, start.optimizer, params)[0], value

    def compare(ours: Any, peer: Any) -> float:
        return apart(*(_flat(after) - _flat(params) for after in (ours[0].params, peer[0])))

    return Contest(lambda _: step(start, x, **how), by_hand, compare)


_TRUNKS: dict[str, tuple[Callable[[], tuple[nn.Module, int, Tensor]], dict[int, float]]] = {
    "tiny MLP": (lambda: _dense(16, 16, 32, 32), {2: 1.1}),
    "MLP": (lambda: _dense(64, 256, 512, 512), {2: 0.9, 8: 0.4}),
    "conv": (_conv, {2: 0.9, 8: 0.9}),
}


def step_cases(names: Sequence[str] = ("direction", "step")) -> list[Case]:
    """The direction of several trunks, and the whole step in two precisions."""
    directions = [
        Case("steps", f"direction, {name}", f"T={tasks}", goal, lambda t=trunk, n=tasks: _direction(t, n))
        for name, (trunk, goals) in _TRUNKS.items()
        for tasks, goal in goals.items()
    ]
    steps = [
        Case("steps", f"step, {str(dtype)[6:]}", f"T={tasks}", 0.8, lambda n=tasks, d=dtype: _step(n, d))
        for dtype in (torch.bfloat16, torch.float16)
        for tasks in (2, 8)
    ]
    steps += [
        Case("steps", f"step of mean, {name}", "by hand", 1.1, lambda t=trunk: _mean_step(t))
        for name, (trunk, _) in _TRUNKS.items()
    ]
    return (directions if "direction" in names else []) + (steps if "step" in names else [])
