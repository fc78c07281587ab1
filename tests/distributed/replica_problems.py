"""What replicas train in the tests of `distributed`, each with its part of the same batch, and how values compare."""

import torch
import torch.distributed as dist
from bounds import check_within, eps
from torch.nn.functional import mse_loss
from torch.utils._pytree import tree_leaves, tree_map

import functional_jd as fj
from functional_jd import distributed

EXAMPLES = 16
"""In the whole batch: equally many on 2 and on 4 replicas."""


def rank():
    return dist.get_rank()


def replicas():
    return dist.get_world_size()


def mine(tree):
    """This replica's part of what all know."""
    return tree_map(lambda leaf: leaf.chunk(replicas())[rank()], tree)


def same(a, b):
    return all(torch.equal(u, v) for u, v in zip(tree_leaves(a), tree_leaves(b), strict=True))


def all_same(tree):
    """Whether all replicas hold the same bits, as torch's own gather of objects says."""
    held = [None] * replicas()
    dist.all_gather_object(held, tree_leaves(tree))
    return all(same(held[0], other) for other in held)


def close(a, b, roundings=2**10 * EXAMPLES):
    """Sums over the examples in other orders, of which a rule makes at most a thousand times as much."""
    for u, v in zip(tree_leaves(a), tree_leaves(b), strict=True):
        assert (u.dtype, u.shape) == (v.dtype, v.shape)
        check_within(u, v, roundings * eps(v.dtype) * (1 + v.double().abs()) if v.is_floating_point() else 0)


def problem(dtype=torch.float64):
    """A trunk of odd sizes, so that shards are padded, two heads, and the whole batch."""
    draw = torch.Generator().manual_seed(0)
    shapes = {"w": (5, 3), "b": (3,), "gain": ()}, {"one": (3, 1), "two": (3, 1)}
    shared, heads = (
        {k: torch.randn(s, generator=draw, dtype=torch.float64).to(dtype) for k, s in part.items()} for part in shapes
    )
    batch = tuple(torch.randn(EXAMPLES, n, generator=draw, dtype=torch.float64) for n in (5, 1, 1))
    return {"shared": shared, "heads": heads}, batch


def features(p, x, y, z):
    return torch.tanh(x.to(p["w"].dtype) @ p["w"] + p["b"]) * p["gain"]


def top(p, h, x, y, z):
    return {"one": mse_loss(h @ p["one"], y.to(h.dtype)), "two": mse_loss(h @ p["two"], z.to(h.dtype))}


def plain(p, x, y, z):
    return top(p["heads"], features(p["shared"], x, y, z), x, y, z)


def one_example(p, x, y, z):
    return sum(plain(p, x[None], y[None], z[None]).values())


TASKS, EACH = fj.multitask(features, top), fj.per_example(one_example)


def begin(*args, group=None, **how):
    return fj.train_state(*args, engine=distributed.replicated(group=group), **how)


def step(*args, group=None, **how):
    return fj.step(*args, engine=distributed.replicated(group=group), **how)


def trained(first, next_, method, scale, params, batch, n=3):
    state = first(params, *batch, scale=scale, **method)
    infos = []
    for _ in range(n):
        state, info = next_(state, *batch, **method)
        infos.append(info)
    return state, infos


def begun(losses=plain, rule=None, optimizer=None, dtype=torch.float64, **start):
    """Parameters, this replica's part of the batch, a method, and the state that it starts with."""
    params, batch = problem(dtype)
    how = {"losses": losses, "aggregator": rule or fj.upgrad(), "optimizer": optimizer or fj.sgd(1e-2)}
    return params, mine(batch), how, begin(params, *mine(batch), **start, **how)
