"""Fully sharded data parallelism as a function of losses."""

from collections.abc import Callable
from typing import Any

from functional_jd.core.arguments import check_flag, check_function
from functional_jd.distributed.gathering import Gathers
from functional_jd.objectives import Sharded


def sharded(losses: Callable[..., Any], mesh: Any, reshard: bool = True) -> Sharded:
    """Shard parameters over the ranks of a mesh, each rank with its own part of the batch.

    `losses_i = mean_r losses_i(params, *batch_r)`

    Parameters are `DTensor`s on this mesh, placed `Shard` or `Replicate`, or plain tensors that are equal on all ranks.
    Every function gathers the parameters that it takes. Their gradients are reduced and scattered once they are
    known, so that rows, direction and moments stay sharded.

    Args:
        losses: `losses(params, *batch)`, a function of whole tensors, or made by `multitask`. Means over examples need
            equally many on each rank, or `weighted_by_examples`.
        mesh: a `torch.distributed.device_mesh.DeviceMesh`, of any number of dimensions.
        reshard: whether parameters are freed after each use, and gathered again by the next and by the backward pass.
            `False` gathers each once and keeps it: less traffic, more memory. Losses need it that pass parameters to
            transforms of torch.func, `torch.vmap` or scripted functions, or that take derivatives by them. With `True`
            these raise; a scripted function with an error of torch's own.

    Returns:
        A function `(params, *batch) -> losses`, for `step`, `train_state`, `jacobian_fn`, `gramian_fn` and
        `weighted_fn`. Losses, weights, flags, scales and Gramians are plain tensors, equal on all ranks.
        Floating-point buffers are averaged, others are those of the first rank; aux is the rank's own.

    Raises:
        TypeError: `losses` is not callable, or `mesh` is not a mesh.
        ValueError: when called, leaves on another mesh or with other placements; `per_example` losses; a transform or
            torch.compile around the call; a parameter that no function gathers (see `reshard`); on
            all ranks, other rules, and losses that differ between them in names, numbers, shapes or dtypes, or use
            leaves of equal shapes in another order (off the CPU, where collectives fit: the step is skipped).

    Guarantees:
        Equal to the losses of the whole batch, to rounding, and so are its rows. One rank's overflow skips the step on
        all. All ranks hold the same bits of plain tensors.

    Differences:
        From `torch.distributed.fsdp.fully_shard`, which gathers module by module, and the next one ahead of time: here
        leaf by leaf.
    """
    check_function("losses", losses, "Pass losses(params, ...).")
    if not callable(getattr(mesh, "get_group", None)):
        raise TypeError(
            f"sharded: mesh must be a DeviceMesh, found {type(mesh).__name__}. Make one: "
            "torch.distributed.device_mesh.init_device_mesh('cuda', (world_size,))."
        )
    check_flag("reshard", reshard)
    return Sharded(losses, mesh, reshard, Gathers)
