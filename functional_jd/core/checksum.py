"""Checksums of tensors: of whole ones and of shards the same, so that a checkpoint may be read on other ranks."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from functional_jd.core.sharding import is_sharded, over_dimension, positions, shard_dims, shard_of

_CHUNK = 1 << 16

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksums(leaves: Sequence[Any]) -> list[Tensor]:
    """A checksum of each tensor, int64 `[]`: `sum_k (2 k + 1) bits_k` modulo 2^64, with the bits of entry k.

    As the factors are odd, one changed entry always changes it. That of a `DTensor` is that of the whole tensor: the
    ranks add up theirs, at the same time, one message for all leaves on the same dimensions of a mesh.
    """
    found = [_of_shard(leaf) for leaf in leaves]
    meshes: dict[Any, list[int]] = {}
    for index, leaf in enumerate(leaves):
        for key in shard_dims(leaf):
            meshes.setdefault(key, []).append(index)
    for (mesh, dim), members in meshes.items():
        total = over_dimension("sum", torch.stack([found[index] for index in members]), mesh, dim)
        for index, value in zip(members, total.unbind(), strict=True):
            found[index] = value
    return found


def _of_shard(leaf: Any) -> Tensor:
    shard: Tensor = shard_of(leaf).detach().resolve_conj().resolve_neg()
    values = (torch.view_as_real(shard) if shard.is_complex() else shard).contiguous().reshape(-1)
    words = values.view(_WORDS[values.element_size()])
    parts = len(words) // max(1, shard.numel())  # of an entry: the second is the imaginary part
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    places = positions(leaf).reshape(-1) if is_sharded(leaf) else None
    step = _CHUNK * max(1, parts)
    for start in range(0, len(words), step):
        some = words[start : start + step]
        at = torch.arange(start, start + len(some), device=words.device)
        if places is not None:
            at = places[torch.div(at, parts, rounding_mode="floor")] * parts + at % parts
        total = total + at.mul_(2).add_(1).mul_(some).sum()
    return total
