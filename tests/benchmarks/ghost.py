"""The peer of private training: Opacus, which clips by norms of factors ("ghost clipping")."""

from functools import partial
from typing import Any

import torch
from models import Examples, flat
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from opacus.layers import DPMultiheadAttention
from opacus.validators import ModuleValidator
from races import Side
from torch import Tensor, nn


def ghost_clipped(model: Examples, max_norm: float) -> Side:
    """The sum of clipped gradients as Opacus computes it, by two backward passes; attention is its own."""
    trained = ModuleValidator.fix(model.model)
    for part in trained.modules():
        if isinstance(part, DPMultiheadAttention) and part.batch_first:
            part.out_proj.register_forward_pre_hook(partial(_heads_side_by_side, part.num_heads))
    hooked = GradSampleModuleFastGradientClipping(trained, max_grad_norm=max_norm, loss_reduction="sum")
    x, y = model.batch

    def call() -> Any:
        hooked.zero_grad()
        losses = nn.functional.cross_entropy(hooked(x), y, reduction="none")
        losses.sum().backward(retain_graph=True)
        weights = hooked.get_clipping_coef()
        hooked.zero_grad()
        hooked.disable_hooks()
        (weights * losses).sum().backward()
        hooked.enable_hooks()

    return Side(call, lambda _: flat(_gradients(trained)))


def _heads_side_by_side(heads: int, module: nn.Module, given: tuple[Tensor]) -> tuple[Tensor]:
    """Opacus 1.6 takes `[batch, heads, positions, width]` for `[batch, positions, heads, width]`."""
    batch, positions, width = given[0].shape
    apart = given[0].reshape(batch, heads, positions, width // heads)
    return (apart.transpose(1, 2).reshape(batch, positions, width),)


def _gradients(module: nn.Module) -> dict[str, Tensor]:
    """By the names that torch's own attention has."""
    found = {name: p.grad for name, p in module.named_parameters()}
    for name, part in module.named_modules():
        if isinstance(part, DPMultiheadAttention):
            for kind in ("weight", "bias"):
                each = [found.pop(f"{name}.{side}linear.{kind}") for side in "qkv"]
                found[f"{name}.in_proj_{kind}"] = torch.cat(each)
    return found
