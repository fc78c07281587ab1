"""Work of ranks outside of steps: weigh unequal parts of a batch, compare replicas, and leave."""

import gc
import sys
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from functional_jd.core.arguments import is_size, refuse
from functional_jd.core.rows import at_least_float32
from functional_jd.core.sharding import is_sharded, over_dimension, over_mesh, shard_of
from functional_jd.core.tree import floating_leaves, tree_leaves, tree_map, tree_names
from functional_jd.core.types import Losses, Tree
from functional_jd.engines.replicas import Group, check_alike, check_dense, collective, known_group
from functional_jd.torch_compat.torch_internals import under_transform


def weighted_by_examples(losses: Losses, examples: int | Tensor, group: Group = None) -> Losses:
    """Weight means over this rank's examples: their mean over the ranks is that over all examples.

    `R n_r / sum_s n_s * losses_r`

    Call it inside the losses of `replicated` engines and of `sharded`, if ranks have unequal parts of a batch, or
    unequally many tokens that count. Unweighted, each rank counts as much as another.

    Args:
        losses: pytree of floating-point tensors, means over `examples` each.
        examples: how many this rank has, an int or a tensor `[]`, such as the sum of a mask; at least one on each rank.
        group: the replicas, as for `mean_jacobian`; or the mesh of `sharded`.

    Returns:
        A pytree like `losses`, in at least float32; on equally many examples, the same values.

    Raises:
        TypeError: a leaf is not a floating-point tensor, or `examples` is not an int or a tensor `[]`.
        ValueError, RuntimeError: see `mean_jacobian`.

    Guarantees:
        Linear in the losses. Composes with vmap, grad, jvp and compile. Does not synchronize with the device.
    """
    leaves, _ = floating_leaves(losses)
    if examples.ndim if isinstance(examples, Tensor) else not is_size(examples):
        refuse("examples", "an int or a tensor []", examples, "Pass len(x), or mask.sum().")
    device = leaves[0].device
    # A copy of a number from the host would wait for the device.
    own = examples.to(device) if isinstance(examples, Tensor) else torch.full((), examples, device=device)
    # A total has more digits than its terms: 2 counts of 40,000 are too many for float16.
    own = at_least_float32(own) if own.is_floating_point() else own.long()
    meshed = hasattr(group, "get_group")
    total = over_mesh("sum", own, group) if meshed else collective("sum", own, group)
    ranks = group.size() if meshed else known_group(group)[1]

    def weighted(value: Tensor) -> Tensor:
        value = at_least_float32(value)
        return value * (own.to(value.dtype) * ranks / total.to(value.dtype))

    return tree_map(weighted, losses)


def check_replicas(tree: Tree, group: Group = None) -> None:
    """Raise RuntimeError, on all replicas at the same time, unless they hold the same bits.

    Steps keep replicas equal: they differ only after a fault of the program or of a machine. Call it every few hundred
    steps on all replicas, for instance in `on_step` of `fit`. It sends the tree once, and waits for the device.

    Args:
        tree: a `TrainState`, or any pytree of tensors. A `DTensor` is compared over the dimensions of its mesh that
            replicate it.
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
    shard = shard_of(leaf.detach()).resolve_conj().resolve_neg()
    if not is_sharded(leaf):
        firsts = [collective("first", shard, group)]
    else:
        replicated = [dim for dim, placement in enumerate(leaf.placements) if placement.is_replicate()]
        firsts = [over_dimension("first", shard, leaf.device_mesh, dim) for dim in replicated]
    own, *others = (x.contiguous().reshape(-1).view(torch.uint8) for x in (shard, *firsts))
    return torch.stack([(other != own).any() for other in (own, *others)]).any()


def leave() -> None:
    """Wait for all ranks, and end all process groups with their threads: the last line of a program.

    Use it instead of `torch.distributed.destroy_process_group()`, which leaves threads of gloo running if meshes were
    used: on a busy machine they abort a process that ends. Meshes and groups are of no use afterwards. A rank that has
    gone, or that does not answer in time, is not waited for. Import `functional_jd` before `init_process_group`: torch
    itself keeps a group for ever if parts of it are imported afterwards.

    Raises:
        ValueError: no process group.
    """
    known_group(None)
    # A rank that has got through closes its connections, which another may still be reading from.
    with suppress(RuntimeError):
        dist.barrier()
    _forget_groups()
    dist.destroy_process_group()
    gc.collect()


def _forget_groups() -> None:
    """Drop the references to process groups that torch itself keeps: `destroy_process_group` joins the threads of a
    group without any. A gloo thread that frees a tensor while Python ends aborts the process.
    """
    meshes: Any = sys.modules.get("torch.distributed.device_mesh")
    if meshes is not None:  # caches of DTensor keep meshes
        for mesh in [x for x in gc.get_objects() if type(x) is meshes.DeviceMesh]:
            getattr(mesh, "_pg_registry", {}).clear()
