"""Ranks that have different numbers of examples."""

import torch
from torch import Tensor

from functional_jd.core.arguments import is_size, refuse
from functional_jd.core.rows import at_least_float32
from functional_jd.core.sharding import over_mesh
from functional_jd.core.tree import floating_leaves, tree_map
from functional_jd.core.types import Losses
from functional_jd.engines.replicas import Group, collective, known_group


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
