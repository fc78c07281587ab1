"""What every rule that looks at the losses must show, beside the laws of the kit.

`check_direction` compares with plain autograd.
"""

import torch
from torch.utils._pytree import tree_leaves, tree_map

from functional_jd import jacobian_fn
from functional_jd.aggregation.aggregate import aggregate
from functional_jd.objectives import multitask, per_example

# What the peer was shown, too: one row per call.
LOSSES = torch.tensor([[1, 2, 4], [0.5, 3, 1], [2, 0.25, 1.5], [1, 1, 0.125]], dtype=torch.float64)
# Losses after each of these steps, on its batch.
AFTER = torch.tensor([[0.9, 1.8, 4.2], [0.6, 2.5, 0.5], [1, 0.5, 1.25], [0.8, 0.9, 0.1]], dtype=torch.float64)
# Rows that tell weights apart: the direction is the weights.
ROWS = torch.eye(3, dtype=torch.float64)


def number(*shape):
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.float64) * 7 % 11 - 4).div(5).reshape(shape)


def plain():
    def losses(params, x):
        return {"a": (x @ params["w"]).square()[:2] + 1, "b": [(params["w"] - params["b"]).square().sum()]}

    return {"w": number(3), "b": number(1)[0]}, losses, (number(2, 3),)


def by_example():
    def loss(params, x, y):
        return (torch.tanh(x @ params["w"]) - y).square().sum() + params["b"].exp()

    return {"w": number(3, 2), "b": number(1)[0]}, per_example(loss), (number(3, 3), number(3, 2).flip(0))


def tasks():
    def features(shared, x):
        return torch.tanh(x @ shared["w"])

    def heads(heads, h, x):
        return {name: (h @ head - x[:, :1]).square().mean() for name, head in heads.items()}

    params = {"shared": {"w": number(3, 2)}, "heads": {name: number(k, 2, 1)[k - 1] for k, name in enumerate("abc", 1)}}
    return params, multitask(features, heads), (number(4, 3),)


def flat(losses):
    return torch.cat([leaf.reshape(-1) for leaf in tree_leaves(losses)])


def check_direction(rule, s, state=None):
    """The direction is the gradient of `s(losses(params))`; for `multitask` on the trunk, heads follow their own."""
    for params, losses, args in (plain(), by_example(), tasks()):
        jacobian, values = jacobian_fn(losses)(params, *args)
        found = aggregate(rule, jacobian, state, losses=values).direction
        leaves = tree_map(lambda p: p.clone().requires_grad_(), params)
        values = flat(losses(leaves, *args))
        if "shared" in params:
            own = torch.autograd.grad(values.sum(), tree_leaves(leaves["heads"]), retain_graph=True)
            torch.testing.assert_close(tree_leaves(found["heads"]), list(own))
            found, leaves = found["shared"], leaves["shared"]
        expected = torch.autograd.grad(s(values), tree_leaves(leaves))
        torch.testing.assert_close(tree_leaves(found), list(expected))


def calls(rule, sequence, state=None):
    """The weights of every call, and the last state."""
    weights = []
    for losses in sequence:
        _, found, state = aggregate(rule, ROWS, state, losses=losses)
        weights.append(found)
    return torch.stack(weights), state


def compiled(f):
    torch.compiler.reset()  # the graphs of other tests count against the limit of this one
    return torch.compile(f, fullgraph=True, backend="aot_eager")
