"""A Jacobian under autocast through a norm layer: with default arguments, and with rows one by one."""

from collections.abc import Callable

import torch
from peer_rules import reason
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torchjd.autojac import backward

import functional_jd as jd

NORMS: dict[str, Callable[[], nn.Module]] = {
    "LayerNorm": lambda: nn.LayerNorm(8),
    "BatchNorm1d": lambda: nn.BatchNorm1d(8),
    "GroupNorm": lambda: nn.GroupNorm(2, 8),
    "RMSNorm": lambda: nn.RMSNorm(8),
}


def _model(norm: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), NORMS[norm](), nn.Linear(8, 2)), torch.randn(6, 5)


def _peer(norm: str, **options: int) -> None:
    model, x = _model(norm)
    with torch.autocast("cpu", torch.bfloat16):
        losses = model(x).float().square().mean(0)
    backward([losses[0], losses[1]], **options)


def _jacrev(norm: str, chunk_size: int | None = None) -> None:
    model, x = _model(norm)

    def losses(params: dict[str, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return functional_call(model, params, x).float().square().mean(0)

    params = {name: value.detach() for name, value in model.named_parameters()}
    jacrev(losses, chunk_size=chunk_size)(params)


def _ours(norm: str) -> None:
    model, x = _model(norm)
    apply = jd.functional(model)
    buffers = dict(model.named_buffers())
    losses = jd.autocast(lambda p: apply(p, buffers, x)[0].float().square().mean(0), dtype=torch.bfloat16)
    jd.jacobian_fn(losses)({name: value.detach() for name, value in model.named_parameters()})


def outcome(attempt: Callable[[], None]) -> str:
    """What an attempt ends in."""
    try:
        attempt()
    except Exception as error:
        return reason(error)
    return "works"


def measure() -> dict[str, str]:
    """The figures of the row `autocast and a norm layer`; bfloat16 on the CPU, two losses."""
    found = {}
    for norm in NORMS:
        found[f"functional_jd, {norm}"] = outcome(lambda norm=norm: _ours(norm))
        found[f"TorchJD backward(), defaults, {norm}"] = outcome(lambda norm=norm: _peer(norm))
        cure = lambda norm=norm: _peer(norm, parallel_chunk_size=1)
        found[f"TorchJD backward(parallel_chunk_size=1), {norm}"] = outcome(cure)
        found[f"jacrev(), defaults, {norm}"] = outcome(lambda norm=norm: _jacrev(norm))
        found[f"jacrev(chunk_size=1), {norm}"] = outcome(lambda norm=norm: _jacrev(norm, 1))
    return found
