"""What layers and models do with sharded parameters: checkpoints that take them, and bases that are not trained."""

import pytest
import torch
from shard_models import EXAMPLES, close, mesh, mine, placed
from shard_training import trained
from torch.utils.checkpoint import checkpoint

import functional_jd as fj
from functional_jd import distributed


def check_checkpoints_take_parameters_as_arguments():
    draw = torch.Generator().manual_seed(0)
    params = {name: torch.randn(6, 6, generator=draw) for name in "ab"} | {"c": torch.randn(6, generator=draw)}
    x = torch.randn(EXAMPLES, 6, generator=draw)

    def layer(w, x, *, shift):
        return torch.tanh(x @ w.mT + shift)

    def losses(p, x):
        for name in "ab":
            x = checkpoint(layer, p[name], x, use_reentrant=False, shift=p["c"])
        return x.square().mean(0)[:3]

    for rule in (fj.upgrad(), fj.mean()):
        how = {"aggregator": rule, "optimizer": fj.sgd(0.1)}
        expected, _ = trained(params, (x,), how | {"losses": losses}, n=2)
        for reshard in (True, False):
            own = distributed.sharded(losses, mesh(), reshard)
            state, _ = trained(placed(params), (mine(x),), how | {"losses": own}, n=2)
            close(state, expected, 1e-6)


def check_a_frozen_base_that_is_sharded_is_gathered_where_it_is_an_argument():
    """Adapters of low rank beside a base that is not trained, as FSDP shards both."""
    draw = torch.Generator().manual_seed(0)
    base = {"layers": [torch.randn(6, 6, generator=draw) for _ in range(2)], "scale": torch.tensor(0.5)}
    params = {name: torch.randn(2, 6, generator=draw) for name in "ab"}
    x = torch.randn(EXAMPLES, 6, generator=draw)

    def losses(p, base, x):
        for w in base["layers"]:
            x = torch.tanh(x @ (w + base["scale"] * p["a"].mT @ p["b"]).mT)
        return x.square().mean(0)[:3]

    heads = lambda own, h, base, x: {
        name: ((h @ base["layers"][1])[:, :2] @ own[name]).square().mean() for name in "ab"
    }
    tasks = fj.multitask(lambda shared, base, x: torch.tanh(x @ base["layers"][0] @ shared.mT), heads)
    split = {
        "shared": torch.randn(6, 6, generator=draw),
        "heads": {name: torch.randn(2, generator=draw) for name in "ab"},
    }
    sharded_base = {"layers": list(placed(dict(enumerate(base["layers"]))).values()), "scale": base["scale"]}
    for f, start in ((losses, params), (tasks, split)):
        for rule in (fj.upgrad(), fj.mean()):
            how = {"aggregator": rule, "optimizer": fj.sgd(0.1)}
            expected, _ = trained(start, (base, x), how | {"losses": f}, n=2)
            for reshard in (True, False):
                own = distributed.sharded(f, mesh(), reshard)
                state, _ = trained(placed(start), (sharded_base, mine(x)), how | {"losses": own}, n=2)
                close(state, expected, 1e-6)
    captured = distributed.sharded(lambda p, x: losses(p, sharded_base, x), mesh())
    with pytest.raises(ValueError, match=r"train_state: expected sharded.* take every DTensor as an argument"):
        fj.train_state(placed(params), mine(x), losses=captured, **how)
