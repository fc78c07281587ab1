"""Checkpoints of sharded training, by torch.distributed.checkpoint."""

import torch
from shard_models import close, mesh, mine, mlp, placed, same
from shard_training import STEPS, trained
from torch.distributed.checkpoint import load, save
from torch.utils._pytree import tree_map

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
    close(state, expected, 1e-6)
    for _ in range(STEPS):
        expected, wanted = fj.step(expected, *batch, **how)
        state, info = fj.step(state, *mine(batch), **own)
        close(info.losses, wanted.losses, 1e-6)
