"""Collective operations as differentiable functions with vmap rules."""

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from functional_jd.core.collectives import collective as collective_of
from functional_jd.core.rows import as_matrix, at_least_float32
from functional_jd.core.sharding import is_sharded
from functional_jd.core.torch_internals import under_transform
from functional_jd.core.tree import tree_leaves, tree_map, tree_names
from functional_jd.core.types import Direction, Tree
from functional_jd.precision.autocast import autocast_disabled

Group = Any
"""A `torch.distributed.ProcessGroup`; `None` is all processes."""


def sum_over_group(tree: Tree, group: Group) -> Tree:
    return tree_map(lambda leaf: collective("sum", leaf, group), tree)


def mean_over_group(tree: Tree, group: Group) -> Tree:
    """Average over the group. Divides before summing, so that finite values do not overflow."""
    replicas = known_group(group)[1]
    return tree_map(lambda leaf: sum_over_group(at_least_float32(leaf) / replicas, group).to(leaf.dtype), tree)


def shard_columns(leaf: Tensor, group: Group) -> Tensor:
    """Average a leaf `[m, *p]` and return this replica's shard of the columns, `[m, k]`; the last one is padded."""
    replicas = known_group(group)[1]
    matrix = as_matrix(at_least_float32(leaf)) / replicas
    if matrix.shape[1] % replicas:  # pad copies, even by a width of zero
        matrix = torch.nn.functional.pad(matrix, (0, -matrix.shape[1] % replicas))
    parts = matrix.reshape(len(matrix), replicas, matrix.shape[1] // replicas).transpose(0, 1)
    return collective("scatter", parts, group).to(leaf.dtype)


def gather_columns(part: Tensor, like: Tensor, group: Group) -> Direction:
    """Gather the shards `[k]` of all replicas into the direction `[*p]`."""
    return collective("gather", part, group).reshape(-1)[: like.numel()].reshape(like.shape)


def known_group(group: Group) -> tuple[str, int, int]:
    """Return the name of the group, its number of replicas, and the rank of this process."""
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            "distributed: expected a process group, found none. Call torch.distributed.init_process_group('gloo') "
            "(or 'nccl') first, and start the program with torchrun."
        )
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            f"distributed: expected a process group that this process is in, found {group!r}. "
            "Call this function on members of the group only."
        )
    return group.group_name, group.size(), group.rank()


def collective(kind: str, value: Tensor, group: Group) -> Tensor:
    if is_sharded(value):
        raise ValueError(
            "distributed: expected tensors that are whole on every replica, found a DTensor. For sharded parameters "
            "use sharded(losses, mesh), without replicated()."
        )
    with autocast_disabled(value):
        return collective_of(kind, value, *known_group(group)[:2])


def check_alike(tree: Tree, group: Group, what: str) -> None:
    """Raise ValueError unless all replicas hold pytrees with the same names, shapes and dtypes: one exchange of a
    digest. Collectives of different sizes would end the process.
    """
    leaves = tree_leaves(tree)
    if under_transform() or not leaves:
        return
    described = [
        f"{name} {str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}"
        for name, leaf in zip(tree_names(tree), leaves, strict=True)
    ]
    digest = int.from_bytes(hashlib.blake2b(repr(described).encode(), digest_size=7).digest(), "big")
    least, negative = collective("least", torch.tensor([digest, -digest], device=leaves[0].device), group).tolist()
    if least != -negative:
        here = ", ".join(described[:5]) + f" and {len(described) - 5} others" * (len(described) > 5)
        raise ValueError(
            f"train_state: expected {what} with the same names, shapes and dtypes on all replicas, found different "
            f"ones; on this replica: {here}. Build them alike everywhere."
        )
