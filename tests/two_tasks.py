"""Two tasks on a trunk with a norm layer: the example on which steps are tested."""

import torch
import torch._dynamo.testing
from torch import nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map

import functional_jd as fj


def two_tasks(norm=nn.Identity, dtype=torch.float32):
    """A trunk with a norm layer, two heads, and a batch: the multi-task example of the peer's manual, plus the norm."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        trunk = nn.Sequential(nn.Linear(10, 5), norm(), nn.ReLU(), nn.Linear(5, 3), nn.ReLU())
        heads = {"one": nn.Linear(3, 1), "two": nn.Linear(3, 1)}
        x, y, z = torch.randn(16, 10), torch.randn(16, 1), torch.randn(16, 1)
    tops = {name: dict(head.named_parameters()) for name, head in heads.items()}
    params = {"shared": dict(trunk.named_parameters()), "heads": tops}
    params = tree_map(lambda p: p.detach().to(dtype), params)

    def features(p, x, y, z):
        return functional_call(trunk, p, (x.to(p["0.weight"].dtype),))

    def top(p, h, x, y, z):
        return {
            "one": nn.functional.mse_loss(functional_call(heads["one"], p["one"], (h,)), y.to(h.dtype)),
            "two": nn.functional.mse_loss(functional_call(heads["two"], p["two"], (h,)), z.to(h.dtype)),
        }

    return params, features, top, (x, y, z)


def method(params, features, top, **changes):
    return {"losses": fj.multitask(features, top), "aggregator": fj.upgrad(), "optimizer": fj.adamw(1e-2)} | changes


def same(a, b):
    """Equal bit by bit, NaN to NaN."""
    ours, theirs = (tree_leaves(tree_map(torch.nan_to_num, x)) for x in (a, b))
    assert len(ours) == len(theirs)
    return all(map(torch.equal, ours, theirs))


def close(a, b, **tolerance):
    for u, v in zip(tree_leaves(a), tree_leaves(b), strict=True):
        torch.testing.assert_close(u, v, **tolerance)
