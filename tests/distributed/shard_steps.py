"""Steps on shards of other kinds: multitask losses, buffers, tensor parallelism, meshes of two dimensions, loops."""

import copy
import warnings
from functools import partial
from itertools import product

import pytest
import torch
from shard_models import EXAMPLES, STEPS, all_same, close, mesh, mine, mlp, none_is_whole, placed, total_weight, trained
from torch import nn
from torch.distributed import get_rank as rank
from torch.distributed import get_world_size as ranks
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import functional_jd as fj
from functional_jd import distributed


def check_no_rank_holds_a_whole_leaf_after_a_step():
    draw = torch.Generator().manual_seed(0)
    params = {"w": torch.randn(37, 53, generator=draw), "v": torch.randn(4, 37, generator=draw)}
    losses = lambda p, x: (torch.tanh(x @ p["w"].mT) @ p["v"].mT).square().mean(0)
    batch = torch.randn(EXAMPLES, 53, generator=draw)
    how = {"aggregator": fj.upgrad(), "optimizer": fj.adamw(1e-2, eps=1e-5)}
    expected, _ = trained(params, (batch,), how | {"losses": losses}, n=2)
    for mode, reshard in product(("loop", "vmap"), (False, True)):
        own = {"losses": distributed.sharded(losses, mesh(), reshard), "engine": fj.engines.jacobian_engine(mode)}
        state, infos = trained(placed(params), (mine(batch),), how | own, n=2)
        assert none_is_whole((params, expected))
        close(state, expected)
        assert all(info.moved for info in infos)


def check_multitask_losses_are_gathered_part_by_part():
    draw = torch.Generator().manual_seed(0)
    normal = partial(torch.randn, generator=draw)
    params = {"shared": {"w": normal(5, 7), "b": normal(7)}, "heads": {"one": normal(7), "two": normal(7, 2)}}
    features = lambda p, x: torch.tanh(x @ p["w"] + p["b"])
    heads = lambda p, h, x: {"one": (h @ p["one"]).square().mean(), "two": (h @ p["two"]).square().mean()}
    losses, x = fj.multitask(features, heads), normal(EXAMPLES, 5)
    for rule in (fj.upgrad(), fj.mean()):
        how = {"losses": losses, "aggregator": rule, "optimizer": fj.sgd(0.1)}
        expected, _ = trained(params, (x,), how)
        own = placed(params)
        state, infos = trained(own, (mine(x),), how | {"losses": distributed.sharded(losses, mesh())})
        assert state.params["shared"]["w"].placements == own["shared"]["w"].placements
        assert all_same((state, infos))
        close(state, expected)


def check_parts_give_the_direction_of_the_whole_batch():
    params, losses, batch = mlp()
    parts = lambda batch: [tuple(x[i::2] for x in batch) for i in range(2)]
    over = distributed.sharded(losses, mesh())
    divided = [fj.aggregators.normalized(fj.upgrad(), by) for by in ("norm", "loss", "both")]
    for rule in (fj.upgrad(), fj.mean(), fj.nash_mtl(), *divided):
        for skip in ("step", "part"):
            how = {"aggregator": rule, "skip": skip, "scale": fj.scale_state(2.0**4)}
            expected = fj.accumulate(losses, parts(batch), params=params, group=False, **how)
            found = fj.accumulate(over, parts(mine(batch)), params=placed(params), **how)
            assert none_is_whole((params, expected))
            close(found.direction, expected.direction)
            assert all_same((found.weights, found.losses, found.finite, found.scale))
            assert found.moved


def check_buffers_are_averaged_others_are_the_first_ranks_and_keys_each_ranks_own():
    params, losses, batch = mlp()
    key = fj.random.key(3)

    def counting(p, buffers, *batch):
        now, following = fj.random.split(buffers["key"])
        moved = {"mean": batch[0].mean(0), "count": buffers["count"] + 1 + rank(), "key": following}
        return losses(p, *batch), moved, (batch[1], fj.random.uniform(now, (4,)))

    how = {"losses": distributed.sharded(counting, mesh()), "aggregator": fj.upgrad(), "optimizer": fj.sgd(0.1)}
    buffers = {"mean": torch.zeros(5), "count": torch.tensor(0), "key": key}
    state = fj.train_state(placed(params), *mine(batch), buffers=buffers, has_aux=True, **how)
    state, info = fj.step(state, *mine(batch), has_aux=True, **how)
    close(state.buffers["mean"], batch[0].mean(0), 4 * torch.finfo(torch.float32).eps)
    assert state.buffers["count"] == 1
    assert torch.equal(state.buffers["key"], fj.random.split(key)[1])
    own = fj.random.fold_in(key, rank()) if rank() else key
    assert torch.equal(info.aux[0], mine(batch)[1]), "aux is the rank's own"
    assert torch.equal(info.aux[1], fj.random.uniform(fj.random.split(own)[0], (4,)))
    assert all_same(state)


def check_unequal_batches_count_by_their_examples_and_what_drifts_is_found():
    params, losses, batch = mlp(torch.float64)
    parts = [1] * (ranks() - 1) + [EXAMPLES + 1 - ranks()]
    own = [leaf.split(parts)[rank()] for leaf in batch]
    weighted = lambda p, *batch: distributed.weighted_by_examples(losses(p, *batch), len(batch[0]), mesh())
    for rule in (fj.upgrad(), fj.mean()):
        how = {"losses": losses, "aggregator": rule, "optimizer": fj.sgd(0.1)}
        expected, infos = trained(params, batch, how)
        state, _ = trained(placed(params), own, how | {"losses": distributed.sharded(weighted, mesh())})
        # A sum over the examples in another order, in each of the steps; entries of rows are of size 1.
        bound = STEPS * 0.1 * EXAMPLES * torch.finfo(torch.float64).eps * total_weight(infos)
        close(state.params, expected.params, bound)
    distributed.check_replicas(state)
    plain = torch.tensor([float(rank() == ranks() - 1)])
    for drifted in (plain, DTensor.from_local(plain, mesh(), [Replicate()], run_check=False)):
        with pytest.raises(RuntimeError, match=rf"check_replicas: .* in params.gain \(ranks {ranks() - 1}\)"):
            distributed.check_replicas(state._replace(params=state.params | {"gain": drifted}))


def check_losses_that_compute_with_dtensors_themselves():
    """Tensor parallelism: the batch is whole on every rank, and each multiplies with its own columns and rows."""
    params, _, batch = mlp()
    whole_losses = lambda p, x, y: ((torch.tanh(x @ p["w"].mT + p["b"]) @ p["v"].mT * p["gain"] - y) ** 2).mean(0)

    def parallel(p, x, y):
        x, y = (DTensor.from_local(z, mesh(), [Replicate()], run_check=False) for z in (x, y))
        h = torch.tanh(x @ p["w"].mT + p["b"])  # its columns lie on the ranks
        return (((h @ p["v"].mT).redistribute(placements=[Replicate()]) * p["gain"] - y) ** 2).mean(0)

    layouts = {"w": Shard(0), "b": Shard(0), "v": Shard(1), "gain": Replicate()}
    own = {name: distribute_tensor(params[name], mesh(), [layouts[name]]) for name in params}
    for rule in (fj.upgrad(), fj.mean()):
        how = {"aggregator": rule, "optimizer": fj.adamw(1e-2, eps=1e-5)}
        expected, _ = trained(params, batch, how | {"losses": whole_losses})
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", fj.SlowPathWarning)
            state, infos = trained(own, batch, how | {"losses": parallel})
        slow = [w for w in told if issubclass(w.category, fj.SlowPathWarning)]
        assert bool(slow) == (rule.view is fj.views.gramian), "one backward pass takes no slow path"
        assert all_same((state, infos))
        assert {k: leaf.placements[0] for k, leaf in state.params.items()} == layouts
        close(state, expected)


def check_a_mesh_of_two_dimensions():
    draw = torch.Generator().manual_seed(0)
    params = {"w": torch.randn(7, 5, generator=draw), "v": torch.randn(5, 3, generator=draw), "b": torch.ones(3)}
    losses = lambda p, x: (torch.tanh(x @ p["w"]) @ p["v"] + p["b"]).square().mean(0)
    x = torch.randn(EXAMPLES, 7, generator=draw)
    square = mesh("square")
    layouts = {"w": [Shard(0), Shard(0)], "v": [Replicate(), Shard(1)], "b": [Shard(0), Replicate()]}
    own = {name: distribute_tensor(params[name], square, layouts[name]) for name in params}
    for rule in (fj.upgrad(), fj.graddrop(fj.random.key(1))):
        how = {"losses": losses, "aggregator": rule, "optimizer": fj.sgd(0.1)}
        expected, _ = trained(params, (x,), how)
        state, infos = trained(own, (mine(x),), how | {"losses": distributed.sharded(losses, square)})
        assert {k: list(leaf.placements) for k, leaf in state.params.items()} == layouts
        assert all_same((state, infos))
        close(state, expected)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def check_a_module_is_made_a_function_before_it_is_fully_sharded():
    words = "functional: expected a module without the hooks of fully_shard, found FSDP.*Before fully_shard, call"
    net, x = network(), torch.randn(EXAMPLES, 5)
    apply, copied = fj.functional(net), fj.functional(copy.deepcopy(net))
    expected = copied(dict(net.named_parameters()), {}, x)[0]
    for part in (net[0], net):  # a part alone, and all
        fully_shard(part, mesh=mesh())
        with pytest.raises(ValueError, match=words):
            fj.functional(net)
    params = {name: p.full_tensor() for name, p in net.named_parameters()}
    with pytest.raises(ValueError, match=words):
        apply(params, {}, x)  # the same module, sharded after it was read
    close(copied(params, {}, x)[0], expected, 0)


def check_a_module_whose_parameters_are_distributed_is_a_function_of_them():
    net = network()
    params, x = {name: p.detach() for name, p in net.named_parameters()}, torch.randn(EXAMPLES, 5)
    expected = fj.jacobian_fn(lambda p, x: fj.functional(net)(p, {}, x)[0].square().mean(0))(params, x)
    own = network()
    for part in (own[0], own[2]):
        for name, p in list(part.named_parameters()):
            setattr(part, name, nn.Parameter(distribute_tensor(p.detach(), mesh(), [Shard(0)])))
    apply = fj.functional(own)
    losses = distributed.sharded(lambda p, x: apply(p, {}, x)[0].square().mean(0), mesh())
    found = fj.jacobian_fn(losses)(dict(own.named_parameters()), mine(x))
    close(found, expected)
    close(dict(own.named_parameters()), params, 0)
