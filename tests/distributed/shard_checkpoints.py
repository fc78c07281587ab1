"""Checkpoints of sharded training, by torch.distributed.checkpoint."""

import pytest
import torch
from shard_models import STEPS, all_same, close, mesh, mine, mlp, placed, rank, same, trained
from torch.distributed.checkpoint import load, save
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils._pytree import tree_leaves, tree_map

import functional_jd as fj
from functional_jd import distributed

FOLDER = {}
"""Under "here": what this run writes. Beside it stands what runs on other numbers of ranks write."""


def resumed(params, batch, how):
    """The state in the checkpoint that lies beside the folder of this run, on these ranks."""
    fresh = fj.train_state(placed(tree_map(torch.zeros_like, params)), *batch, **how)
    entries = fj.to_checkpoint(fresh)
    load(entries, checkpoint_id=str(FOLDER["here"].parent / "checkpoint"))
    return fj.from_checkpoint(entries, like=fresh)


def check_checkpoints_are_saved_and_loaded_by_torch():
    params, losses, batch = mlp()
    how = {"losses": distributed.sharded(losses, mesh()), "aggregator": fj.upgrad(), "optimizer": fj.adamw(1e-2)}
    state, _ = trained(placed(params), mine(batch), how)
    save(fj.to_checkpoint(state), checkpoint_id=str(FOLDER["here"].parent / "checkpoint"))
    loaded = resumed(params, mine(batch), how)
    assert same(loaded, state)
    assert same(fj.step(loaded, *mine(batch), **how)[0], fj.step(state, *mine(batch), **how)[0])


def check_checkpoints_of_another_number_of_ranks_go_on_with_the_same_losses():
    params, losses, batch = mlp()
    how = {"losses": losses, "aggregator": fj.upgrad(), "optimizer": fj.adamw(1e-2)}
    expected, _ = trained(params, batch, how)
    own = how | {"losses": distributed.sharded(losses, mesh())}
    state = resumed(params, mine(batch), own)
    close(state, expected)
    for _ in range(STEPS):
        expected, wanted = fj.step(expected, *batch, **how)
        state, info = fj.step(state, *mine(batch), **own)
        close(info.losses, wanted.losses)


def check_whole_checkpoints_become_shards_and_back():
    """Whole tensors of one process, shards of these ranks in other layouts, and files that know no shards."""
    params, losses, batch = mlp()
    how = {"losses": losses, "aggregator": fj.upgrad(), "optimizer": fj.adamw(1e-2)}
    own_how = how | {"losses": distributed.sharded(losses, mesh())}
    state, _ = trained(params, batch, how)
    fresh = fj.train_state(placed(params), *mine(batch), **own_how)
    own = fj.from_checkpoint(fj.to_checkpoint(state), like=fresh)
    assert [type(x) for x in tree_leaves(own)] == [type(x) for x in tree_leaves(fresh)]
    close(own, state, 0)
    rows = {name: distribute_tensor(p, mesh(), [Shard(0) if p.ndim else Replicate()]) for name, p in params.items()}
    like = fj.train_state(rows, *mine(batch), **own_how)
    for back in (fj.to_checkpoint(own), fj.to_checkpoint(own, whole=True)):
        assert same(fj.from_checkpoint(back, like=state), state)
        close(fj.from_checkpoint(back, like=like), state, 0)
    whole = fj.to_checkpoint(own, whole=True)
    assert all(type(x) is torch.Tensor and x.untyped_storage().nbytes() == x.nbytes for x in whole.values())
    assert all_same(whole)
    lists = lambda entries: {name: x.tolist() for name, x in entries.items()}
    assert lists(whole) == lists(fj.to_checkpoint(state))
    damaged = fj.to_checkpoint(own)
    if rank() == 0:  # on one rank only: refused on all
        damaged["params.w"].to_local()[0, 0] += 1
    with pytest.raises(ValueError, match=r"from_checkpoint: expected tensors as .*found others in 'params\.w'"):
        fj.from_checkpoint(damaged, like=fresh)


def check_shards_in_other_places_are_refused_and_gathered():
    """Tensor parallelism below `fully_shard`: the ranks of the first dimension hold every second part."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    square = mesh("square")
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 8))
    params = {name: p.detach().clone() for name, p in net.named_parameters()}
    parallelize_module(net, square["model"], {"0": ColwiseParallel()})
    own = dict(fully_shard(net, mesh=square["data"]).named_parameters())
    with pytest.raises(ValueError, match=r"to_checkpoint: .*placements Shard and Replicate, found .* in '0\.bias'"):
        fj.to_checkpoint(own)
    entries = fj.to_checkpoint(own, whole=True)
    close(fj.from_checkpoint(entries, like=params), params, 0)
    with pytest.raises(ValueError, match=r"from_checkpoint: .*placements Shard and Replicate"):
        fj.from_checkpoint(entries, like=own)
