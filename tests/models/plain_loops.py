"""Models in an ordinary PyTorch loop and in ours, in float64, with the same draws: what the two must agree on.

Two ways of computing the same differ by roundings, and training amplifies them as the model does. So the bound is
measured: how far an ordinary loop ends from itself when its start is moved by some roundings.
"""

from functools import partial

import torch
from torch.utils._pytree import tree_flatten

import functional_jd as fj

N_STEPS = 20
# The roundings of one step, with m backward passes and a weighted sum in another order, as one relative error.
_MOVED = 2.0**12 * torch.finfo(torch.float64).eps


class Problem:
    """A model, its losses, batches, and what is trained.

    Args:
        make: makes the module; the numbers that it starts with follow a seed.
        losses: `losses(call, *batch) -> dict of losses`, where `call` takes what the module takes.
        batches: one tuple of tensors for each step.
        trained: `trained(name, parameter) -> bool`.
        draws: whether the module draws random numbers.
    """

    def __init__(self, make, losses, batches, trained=lambda name, p: True, draws=False):
        self.make, self.losses, self.batches, self.trained, self.draws = make, losses, batches, trained, draws

    def module(self, seed=0):
        module = drawn(self.make, seed).double().train()
        for name, p in module.named_parameters():
            p.requires_grad_(self.trained(name, p))
        return module

    def call(self, call, key, *batch):
        return self.losses(partial(fj.random.keyed(call), key) if self.draws else call, *batch)


def drawn(make, seed):
    """The module from a seed, with noise on what starts at zero or one: there gradients vanish or cancel."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = make()
        with torch.no_grad():
            for p in module.parameters():
                if p.is_floating_point() and (p == p.flatten()[0]).all():
                    p += 0.1 * torch.randn(p.shape)
    return module


def keys(n=N_STEPS):
    return fj.random.split(fj.random.key(0), n)


def state_of(module):
    return {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}


def plain_loop(problem, make_optimizer, combine=None, moved=0.0, seed=0):
    """Train the sum of the losses, or what `combine` makes of their rows; return parameters, buffers and losses."""
    module = problem.module(seed)
    trained = [p for p in module.parameters() if p.requires_grad]
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in trained:
            p *= 1 + moved * (2 * torch.randint(2, p.shape, generator=draw) - 1).double()
    optimizer, history = make_optimizer(trained), []
    for key, batch in zip(keys(len(problem.batches)), problem.batches, strict=True):
        values = problem.call(module, key, *batch)
        optimizer.zero_grad()
        if combine is None:
            sum(values.values()).backward()
        else:
            rows = [torch.autograd.grad(x, trained, retain_graph=True, materialize_grads=True) for x in values.values()]
            columns = [torch.stack(column) for column in zip(*rows, strict=True)]
            for p, d in zip(trained, combine(columns), strict=True):
                p.grad = d
        optimizer.step()
        history.append({name: x.detach() for name, x in values.items()})
    return state_of(module), {name: b.clone() for name, b in module.named_buffers()}, history


def functional_losses(problem, module, constant, in_place_of_the_module=False):
    """Losses `(params, buffers, key, *batch) -> (losses, buffers)`, by `torch.func.functional_call` if asked for."""
    apply = fj.functional(module)
    if in_place_of_the_module:  # for modules whose buffers stay
        apply = lambda params, buffers, *args, **kwargs: (
            torch.func.functional_call(module, (params, buffers), args, kwargs),
            buffers,
        )

    def losses(params, buffers, key, *batch):
        moved = {}

        def call(*args, **kwargs):
            output, new = apply(fj.objectives.merge(params, constant), buffers, *args, **kwargs)
            moved.update(new)
            return output

        return problem.call(call, key, *batch), moved

    return losses


def start_of(problem, seed=0, in_place_of_the_module=False, **method):
    """The losses as `step` takes them, and the state that the first step takes."""
    module = problem.module(seed)
    params, constant = fj.objectives.partition(dict(module.named_parameters()), lambda _, p: p.requires_grad)
    constant = {name: p.detach() for name, p in constant.items()}
    method["losses"] = functional_losses(problem, module, constant, in_place_of_the_module)
    buffers = dict(module.named_buffers())
    return method, fj.train_state(params, keys(1)[0], *problem.batches[0], buffers=buffers, **method)


def our_loop(problem, method, state, compiled=False, **options):
    take = partial(fj.step, **method, **options)
    if compiled:
        torch._dynamo.reset()
        take = torch.compile(take, backend="aot_eager", fullgraph=True)
    infos = []
    for key, batch in zip(keys(len(problem.batches)), problem.batches, strict=True):
        state, info = take(state, key, *batch)
        infos.append(info)
    return state, infos


def check_trains_alike(
    problem, optimizers, rule=None, combine=None, compiled=False, in_place_of_the_module=False, **options
):
    """Parameters, buffers and losses of our loop are those of the ordinary loop, to rounding."""
    plain, ours = optimizers
    before = problem.module().state_dict()
    expected = plain_loop(problem, plain, combine)
    bound = distance(plain_loop(problem, plain, combine, moved=_MOVED), expected)
    method, state = start_of(
        problem, in_place_of_the_module=in_place_of_the_module, aggregator=rule or fj.total(), optimizer=ours
    )
    state, infos = our_loop(problem, method, state, compiled, **options)
    assert all(info.moved for info in infos)
    found = (state.params, state.buffers, [info.losses for info in infos])
    errors = distance(found, expected)
    assert all(e <= b for e, b in zip(errors, bound, strict=True)), f"off by {errors}, roundings explain {bound}"
    start = {name: before[name] for name in state.params}
    assert distance([state.params], [start])[0] > 1e3 * bound[0]  # it has moved, by more than roundings
    return state


def distance(found, expected):
    """The largest differences of parameters, of buffers and of losses."""
    return [_largest(x, y) for x, y in zip(found, expected, strict=True)]


def _largest(found, expected):
    left, structure = tree_flatten(_sorted(found))
    right, other = tree_flatten(_sorted(expected))
    assert structure == other
    return max([float((x.double() - y.double()).abs().max()) for x, y in zip(left, right, strict=True)], default=0.0)


def _sorted(tree):
    if isinstance(tree, dict):
        return {name: _sorted(tree[name]) for name in sorted(tree)}
    return [_sorted(x) for x in tree] if isinstance(tree, list) else tree


def by_rule(rule):
    """What the rule makes of rows `[m, *p]` of an ordinary backward pass."""
    return lambda rows: fj.aggregate(rule, rows).direction


SGD = (lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9), fj.sgd(0.02, momentum=0.9))
ADAMW = (lambda p: torch.optim.AdamW(p, lr=1e-3), fj.adamw(1e-3))
