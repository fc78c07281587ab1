"""Collective operations as differentiable functions with vmap rules."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from functional_jd.core import agreement
from functional_jd.core.agreement import description
from functional_jd.core.arguments import refuse
from functional_jd.core.rows import at_least_float32
from functional_jd.core.sharding import collective as collective_of
from functional_jd.core.sharding import is_sharded
from functional_jd.core.tree import described_leaves, tree_flatten, tree_leaves, tree_map, tree_unflatten
from functional_jd.core.types import Tree
from functional_jd.precision.autocast import autocast_disabled
from functional_jd.torch_compat.torch_internals import is_concrete, under_transform

Group = Any
"""A `torch.distributed.ProcessGroup`; `None` is all processes."""

_BUCKET = 1 << 22
"""Elements that travel together, at most: a collective costs a round trip, and what is larger pays for its own."""


def sum_over_group(tree: Tree, group: Group) -> Tree:
    """Add up over the group, small leaves of one dtype together."""
    leaves, structure = tree_flatten(tree)
    sums: list[Tensor] = []
    for bucket in _buckets(leaves):
        if len(bucket) == 1:
            sums.append(collective("sum", bucket[0], group))
            continue
        total = collective("sum", torch.cat([leaf.reshape(-1) for leaf in bucket]), group)
        parts = total.split([leaf.numel() for leaf in bucket])
        sums.extend(part.reshape(leaf.shape) for part, leaf in zip(parts, bucket, strict=True))
    return tree_unflatten(structure, sums)


def _buckets(leaves: list[Tensor]) -> list[list[Tensor]]:
    """The leaves in their order, side by side where they fit together."""
    buckets: list[list[Tensor]] = []
    kind, held = None, 0
    for leaf in leaves:
        before, kind, held = kind, (type(leaf), leaf.dtype, leaf.device), held + leaf.numel()
        if kind != before or held > _BUCKET:
            buckets.append([])
            held = leaf.numel()
        buckets[-1].append(leaf)
    return buckets


def mean_over_group(tree: Tree, group: Group) -> Tree:
    """Average over the group. Divides before summing, so that finite values do not overflow."""
    replicas = known_group(group)[1]
    sums = sum_over_group(tree_map(lambda leaf: at_least_float32(leaf) / replicas, tree), group)
    return tree_map(lambda leaf, total: total.to(leaf.dtype), tree, sums)


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
    with autocast_disabled():
        return collective_of(kind, value, *known_group(group)[:2])


def check_dense(where: str, tree: Tree) -> None:
    """Refuse leaves that are no dense tensors."""
    for leaf in tree_leaves(tree):
        if not isinstance(leaf, Tensor) or leaf.layout != torch.strided:  # pyright: ignore[reportUnnecessaryIsInstance]
            refuse(where, "tree", "a pytree of dense tensors", leaf, "Make numbers tensors, torch.as_tensor(...).")


def check_alike(where: str, tree: Tree, group: Group, what: str, method: Mapping[str, Any] = {}) -> None:
    """Raise ValueError unless all replicas hold pytrees with the same names, shapes and dtypes: one exchange of a
    digest. Collectives of different sizes would end the process.

    Args:
        where: the function that the user called.
        tree: the pytree.
        group: the replicas.
        what: what the pytree is called.
        method: by name, what else must be alike: a rule and an optimizer, but for keys, as the first replica's state
            counts.
    """
    leaves = tree_leaves(tree)
    if under_transform() or not leaves or not is_concrete(leaves[0]):  # `compiled` writes down shapes, not values
        return
    parts = {f"{what} with the same names, shapes and dtypes": described_leaves(tree)}
    parts |= {f"the same {name}": [description(record, keys=False)] for name, record in method.items()}
    least = partial(collective, "least", group=group)
    agreement.check_alike(where, parts, least, leaves[0].device, "Build them alike everywhere.")
