"""The cases of `steps`: the whole step in mixed precision, and that of a rule which needs no rows."""

from collections.abc import Callable
from typing import Any

import torch
from measure import Case, Contest, apart
from models import TOYS, TRUNKS, Tasks, Trunk, flat, tasks, values
from torch.func import functional_call
from torchjd.aggregation import UPGrad
from torchjd.autojac import jac_to_grad, mtl_backward

import functional_jd as jd


def _step(model: Tasks, dtype: torch.dtype) -> Contest:
    """Autocast, scale, Jacobian, upgrad, AdamW, scale update, against the peer's loop, `GradScaler` and `AdamW`."""
    device, plain = model.x.device.type, model.losses()

    def low(f: Callable[..., Any]) -> Callable[..., Any]:
        def inside(*args: Any) -> Any:
            with torch.autocast(device, dtype):
                return f(*args)

        return inside

    losses = jd.multitask(low(plain.features), low(plain.heads))
    how: dict[str, Any] = {"losses": losses, "aggregator": jd.upgrad(), "optimizer": jd.adamw(lr=1e-3)}
    scale = jd.scale_state(2.0**10, device=device)
    start = jd.train_state(model.params, model.x, model.y, scale=scale, **how)
    weights = [*model.trunk.parameters(), *model.heads.parameters()]
    scaler, torch_optimizer = torch.amp.GradScaler(device, init_scale=2.0**10), torch.optim.AdamW(weights, lr=1e-3)
    peer_rule = UPGrad()

    def ours(_: int) -> Any:
        return jd.step(start, model.x, model.y, **how)[0].params

    def peer(_: int) -> None:
        with torch.autocast(device, dtype):
            losses, h = model.forward()
        mtl_backward([scaler.scale(loss) for loss in losses], features=h)
        jac_to_grad(model.trunk.parameters(), peer_rule)
        scaler.step(torch_optimizer)
        scaler.update()
        torch_optimizer.zero_grad()

    def compare(params: Any, _: None) -> float:
        return apart(*(flat(after) - flat(start.params) for after in (params, model.params)))

    return Contest(ours, peer, compare)


def _mean_step(trunk: Callable[[], Trunk], device: str) -> Contest:
    """The step of `mean`, against the one that `torch.func.grad` and the same optimizer make, written by hand."""
    model, optimizer = tasks(trunk, 1, 32, device), jd.adamw(lr=1e-3)
    params, x = values(model.trunk), model.x
    losses = lambda params, x: functional_call(model.trunk, params, (x,)).square().mean(0)
    how: dict[str, Any] = {"losses": losses, "aggregator": jd.mean(), "optimizer": optimizer}
    start = jd.train_state(params, x, **how)

    def by_hand(_: int) -> Any:
        direction, value = torch.func.grad_and_value(lambda params: losses(params, x).mean())(params)
        return optimizer.update(direction, start.optimizer, params)[0], value

    def compare(ours: Any, peer: Any) -> float:
        return apart(*(flat(after) - flat(params) for after in (ours[0].params, peer[0])))

    return Contest(lambda _: jd.step(start, x, **how), by_hand, compare)


_SIZES = (("MLP", 2, "bfloat16"), ("MLP", 8, "bfloat16"), ("MLP", 8, "float16"), ("plain conv", 8, "bfloat16"))


def step_cases(toy: bool = False, device: str = "cpu") -> list[Case]:
    """The whole step in two precisions, and the step of a rule that needs no rows."""
    trunks = TOYS if toy else TRUNKS
    steps = [
        Case(
            "steps",
            f"{name}, {dtype}",
            f"T={n}",
            0.8,
            lambda trunk=trunks[name], n=n, dtype=dtype: _step(tasks(trunk, n, 64, device), getattr(torch, dtype)),
            device,
        )
        for name, n, dtype in _SIZES
    ]
    return steps + [
        Case(
            "steps",
            f"mean, {name}",
            "m=32",
            1.1,
            lambda trunk=trunks[name]: _mean_step(trunk, device),
            device,
            against="by hand",
        )
        for name in ("tiny MLP", "MLP", "plain conv")
    ]
