"""Replicas that have come to differ, although they should be equal."""

from typing import Any

import torch
from torch import Tensor

from functional_jd.core.sharding import is_sharded, over_dimension, shard_of
from functional_jd.core.tree import tree_leaves, tree_names
from functional_jd.core.types import Tree
from functional_jd.engines.replicas import Group, check_alike, check_dense, collective, known_group
from functional_jd.torch_compat.torch_internals import under_transform


def check_replicas(tree: Tree, group: Group = None) -> None:
    """Raise RuntimeError, on all replicas at the same time, unless they hold the same bits.

    Steps keep replicas equal: they differ only after a fault of the program or of a machine. Call it every few hundred
    steps on all replicas, for instance in `on_step` of `fit`. It sends the tree once, and waits for the device.

    Args:
        tree: a `TrainState`, or any pytree of tensors. A `DTensor` is compared over the dimensions of its mesh on which
            it is replicated.
        group: the replicas, as for `mean_jacobian`.

    Raises:
        RuntimeError: leaves differ in some bit, by name, with the ranks in the group; or a replica stopped, or did not
            answer in time.
        TypeError: a leaf is not a dense tensor.
        ValueError: names, shapes or dtypes differ; the call is under a transform or torch.compile; or see
            `mean_jacobian`.
    """
    if under_transform():
        raise ValueError(
            "check_replicas: expected a call outside of transforms and torch.compile, since it raises because of "
            "values. Call it between two steps."
        )
    replicas = known_group(group)[1]
    check_dense(tree)
    check_alike(tree, group, "a tree")
    leaves = tree_leaves(tree)
    if not leaves:
        return
    device = leaves[0].device
    flags = torch.stack([_differs(leaf, group).to(device) for leaf in leaves])
    differs = collective("gather", flags.int(), group).reshape(replicas, -1).tolist()
    found = [
        f"{name} (ranks {', '.join(str(rank) for rank in range(replicas) if differs[rank][k])})"
        for k, name in enumerate(tree_names(tree))
        if any(row[k] for row in differs)
    ]
    if found:
        more = f" and {len(found) - 5} others" * (len(found) > 5)
        raise RuntimeError(
            f"check_replicas: expected the same bits on all {replicas} replicas, found others than the first one's in "
            f"{', '.join(found[:5])}{more}. Go on from the last checkpoint, and look for what one replica alone does."
        )


def _differs(leaf: Any, group: Group) -> Tensor:
    """Whether this rank's leaf has other bits than the first rank's: bool `[]`."""
    shard = shard_of(leaf.detach())
    if not is_sharded(leaf):
        firsts = [collective("first", shard, group)]
    else:
        replicated = [dim for dim, placement in enumerate(leaf.placements) if placement.is_replicate()]
        firsts = [over_dimension("first", shard, leaf.device_mesh, dim) for dim in replicated]
    own, *others = (x.contiguous().reshape(-1).view(torch.uint8) for x in (shard, *firsts))
    return torch.stack([(other != own).any() for other in (own, *others)]).any()
