"""Steps of an optimizer, ours or torch's, one after the other, and how far apart they may end."""

from bounds import check_within, eps

from functional_jd.core.tree import tree_leaves, tree_map


def run(optimizer, params, directions, state=None):
    """The params after each direction, and the last state."""
    state = optimizer.init(params) if state is None else state
    path = []
    for direction in directions:
        params, state = optimizer.update(direction, state, params)
        path.append(params)
    return path, state


def run_torch(cls, params, directions, after_step=lambda optimizer: None, **hyper):
    """The same path from torch itself; `cls` makes the optimizer of the leaves."""
    params = tree_map(lambda p: p.detach().clone().requires_grad_(), params)
    optimizer = cls(tree_leaves(params), **hyper)
    path = []
    for direction in directions:
        for leaf, towards in zip(tree_leaves(params), tree_leaves(direction), strict=True):
            leaf.grad = towards.clone()
        optimizer.step()
        after_step(optimizer)
        path.append(tree_map(lambda p: p.detach().clone(), params))
    return path


def assert_close(found, expected, roundings=64):
    """Steps of at most one, entry by entry: each rounds numbers of the size of the parameter or of one."""
    for a, b in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        check_within(a, b, roundings * eps(b.dtype) * (1 + b.abs()) if b.is_floating_point() else 0)
