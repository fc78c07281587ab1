"""A loss scale beside the peer's backward pass: `GradScaler` has one for all losses."""

import torch
from torch import nn
from torchjd.aggregation import UPGrad
from torchjd.autojac import backward, jac_to_grad


def measure() -> dict[str, str]:
    """The figure of the row `loss scales`; float32 on the CPU, where a scale can only be looked at."""
    torch.manual_seed(0)
    x, plain = torch.randn(6, 5), None
    found = {}
    for name in ("without a scale", "with one GradScaler"):
        torch.manual_seed(0)
        model = nn.Linear(5, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=name != "without a scale")
        losses = model(x).square().mean(0)
        backward([scaler.scale(loss) for loss in losses])
        jac_to_grad(model.parameters(), UPGrad())
        scaler.unscale_(optimizer)
        assert model.weight.grad is not None
        gradient = model.weight.grad.clone()
        plain = gradient if plain is None else plain
        off = float((gradient - plain).norm() / plain.norm())
        scaler.step(optimizer)
        scaler.update()
        found[f"TorchJD {name}"] = f"runs; direction off by {off:.1e}"
    return found
