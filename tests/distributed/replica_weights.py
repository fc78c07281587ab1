"""The weights alone on several ranks, and one training step of a data parallel trainer that takes them."""

import warnings
from itertools import product

import pytest
import torch
import torch.distributed as dist
from replica_problems import EACH, TASKS, all_same, close, mine, plain, problem, rank, replicas
from torch.nn.parallel import DistributedDataParallel

import functional_jd as fj
from functional_jd.aggregators.stch import stch
from functional_jd.core.tree import tree_map


def check_weights_are_those_of_the_whole_batch():
    params, batch = problem()
    rules = fj.upgrad(), fj.nash_mtl(), fj.mean(), stch(), fj.config(), fj.random_weights(fj.random.key(1))
    for losses, rule in product((plain, TASKS, EACH), rules):
        expected, state = fj.weights_fn(losses, rule, group=False), None
        found, own = fj.weights_fn(losses, rule, group=dist.group.WORLD), None
        for _ in range(2):
            wanted, result = expected(params, *batch, state=state), found(params, *mine(batch), state=own)
            assert all_same(result)
            close(result, wanted)
            state, own = wanted.state, result.state
    alone = fj.weights_fn(plain, fj.nash_mtl(), group=False)(params, *mine(batch))
    assert not all_same(alone.weights), "each rank's own part asks for other weights"


def check_losses_with_a_graph_are_weighed_for_the_whole_batch():
    params, batch = problem()
    points = tree_map(lambda p: p.detach().clone().requires_grad_(), params)
    for rule in (fj.upgrad(), fj.nash_mtl(), fj.mean(), fj.uw()):
        expected = fj.weigh(plain(points, *batch), points, rule, group=False)
        found = fj.weigh(plain(points, *mine(batch)), points, rule, group=dist.group.WORLD)
        assert all_same(found)
        close(found, expected)
    keyed = fj.random_weights(fj.random.key(7 + rank()))
    assert all_same(fj.weigh(plain(points, *mine(batch)), points, keyed, group=dist.group.WORLD).weights)
    losses = plain(points, *mine(batch))
    with pytest.raises(ValueError, match="weigh: expected losses with the same names"):
        fj.weigh([*losses.values()][: None if rank() else 1], points, fj.upgrad(), group=dist.group.WORLD)
    first = sorted(losses)[0]
    spoiled = losses | {first: losses[first] * torch.inf} if rank() == 0 else losses
    found = fj.weigh(spoiled, points, fj.upgrad(), scale=fj.scale_state(shape=len(losses)), group=dist.group.WORLD)
    assert found.finite.tolist() == [False] + [True] * (len(losses) - 1)
    with pytest.raises(ValueError, match="weigh: group must be a ProcessGroup"):
        fj.weigh(losses, points, fj.upgrad())
    with pytest.raises(ValueError, match="weigh: features must be None with a group"):
        fj.weigh(losses, points, fj.upgrad(), features=[*points.values()], group=dist.group.WORLD)


def check_parts_on_all_ranks_give_the_direction_of_the_whole_batch():
    params, batch = problem()
    parts = lambda batch: [tuple(x[i::2] for x in batch) for i in range(2)]
    rules = fj.upgrad(), fj.nash_mtl(), fj.mean(), fj.uw(), fj.random_weights(fj.random.key(1))
    for losses, rule in product((plain, TASKS), rules):
        state = own = None
        for _ in range(2):
            how = {"params": params, "aggregator": rule, "scale": fj.scale_state(2.0**4)}
            expected = fj.accumulate(losses, parts(batch), state=state, group=False, **how)
            for skip in ("step", "part"):
                how |= {"group": dist.group.WORLD, "skip": skip}
                found = fj.accumulate(losses, parts(mine(batch)), state=own, **how)
                assert all_same(found)
                close(found, expected)
            state, own = expected.state, found.state
    spoiled = parts(tuple(x * torch.inf if rank() == 0 and x.is_floating_point() else x for x in mine(batch)))
    call = lambda **more: fj.accumulate(plain, spoiled, params=params, aggregator=fj.upgrad(), **more)
    assert not call(group=dist.group.WORLD).moved
    found = call(group=dist.group.WORLD, skip="part")
    assert all_same(found)
    assert found.moved

    def drawing(p, buffers, *batch):
        now, following = fj.random.split(buffers["key"])
        return tree_map(lambda loss: loss * fj.random.uniform(now, ()), plain(p, *batch)), {"key": following}

    own, how = {"key": fj.random.key(3)}, {"losses": drawing, "aggregator": fj.upgrad()}
    step = how | {"optimizer": fj.sgd(1.0), "engine": fj.distributed.replicated()}
    state, _ = fj.step(fj.train_state(params, *mine(batch), buffers=own, **step), *mine(batch), **step)
    found = fj.accumulate(parts=[mine(batch)], params=params, buffers=own, group=dist.group.WORLD, **how)
    close(tree_map(torch.sub, params, found.direction), state.params)
    assert torch.equal(found.buffers["key"], state.buffers["key"])
    with pytest.raises(ValueError, match="accumulate: group must be a ProcessGroup"):
        call()
    with pytest.raises(ValueError, match="per_example losses in parts must have no group"):
        fj.accumulate(EACH, parts(batch), params=params, aggregator=fj.mean(), group=dist.group.WORLD)


def check_keys_of_weights_are_the_first_ranks():
    params, batch = problem()
    weigh = lambda G, k: (fj.random.uniform(k, (len(G),), dtype=G.dtype), fj.random.split(k)[1])
    keyed = lambda key: fj.Aggregator(fj.views.gramian, lambda G: key.clone(), weigh)
    for build in (fj.random_weights, keyed):
        first, own = (build(fj.random.key(seed)) for seed in (7, 7 + rank()))
        expected = fj.weights_fn(plain, first, group=False)(params, *batch)
        again = fj.weights_fn(plain, first, group=False)(params, *batch, state=expected.state)
        found = fj.weights_fn(plain, own, group=dist.group.WORLD)
        result = found(params, *mine(batch))
        assert all_same(result)
        close(result, expected)
        close(found(params, *mine(batch), state=result.state), again)


def check_what_is_not_finite_on_one_rank_shows_in_the_weights_on_all():
    params, batch = problem()
    spoiled = tuple(x * torch.inf if rank() == 0 and x.is_floating_point() else x for x in mine(batch))
    scale = fj.scale_state(2.0**10)
    for losses, rule in product((plain, TASKS, EACH), (fj.upgrad(), fj.excess_mtl(), fj.cr_mogm(fj.config()))):
        found = fj.weights_fn(losses, rule, group=dist.group.WORLD)
        first = found(params, *mine(batch))
        close(found(params, *mine(batch), scale=scale), first)
        for given in (None, scale):
            result = found(params, *spoiled, state=first.state, scale=given)
            assert not result.weights.isfinite().all()
            close(result.state, first.state, 0)


def check_weights_of_several_ranks_need_a_group():
    params, batch = problem()
    with pytest.raises(ValueError, match=rf"weights_fn: group must be .* there are {replicas()} ranks"):
        fj.weights_fn(plain, fj.upgrad())(params, *mine(batch))
    for wrong in (True, "gloo", None if rank() else 3):
        with pytest.raises(ValueError, match="weights_fn: group must be a ProcessGroup"):
            fj.weights_fn(plain, fj.upgrad(), group=wrong)(params, *mine(batch))
    more = lambda p, x, y, z: torch.stack([*plain(p, x, y, z).values()][: None if rank() else 1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a head that one loss alone does not reach
        with pytest.raises(ValueError, match="weights_fn: expected losses with the same names"):
            fj.weights_fn(more, fj.upgrad(), group=dist.group.WORLD)(params, *mine(batch))


def check_a_data_parallel_loop_with_weights_takes_the_step_of_the_whole_batch():
    torch.manual_seed(0)
    net = torch.nn.Linear(5, 3).double()
    x, y = torch.randn(16, 5).double(), torch.randn(16, 3).double()
    apply, start = fj.functional(net), {name: p.detach().clone() for name, p in net.named_parameters()}
    losses = lambda p, x, y: ((apply(p, {}, x)[0] - y) ** 2).mean(0)
    how = {"losses": losses, "aggregator": fj.upgrad(), "optimizer": fj.sgd(0.1)}
    state = fj.step(fj.train_state(start, x, y, **how), x, y, **how)[0]
    parallel, (own_x, own_y) = DistributedDataParallel(net), mine((x, y))
    weights = fj.weights_fn(losses, fj.upgrad(), group=dist.group.WORLD)(dict(net.named_parameters()), own_x, own_y)[0]
    (weights @ ((parallel(own_x) - own_y) ** 2).mean(0)).backward()
    for name, p in net.named_parameters():
        close(p.detach() - 0.1 * p.grad, state.params[name])
