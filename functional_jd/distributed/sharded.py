"""Fully sharded data parallelism as a function of losses."""

from collections.abc import Callable
from typing import Any

from functional_jd.core.arguments import check_flag, check_function
from functional_jd.objectives import Sharded


def sharded(losses: Callable[..., Any], mesh: Any, reshard: bool = True) -> Sharded:
    """Losses of parameters that are sharded over the ranks of a mesh, each rank with its own part of the batch.

    `losses_i = mean_r losses_i(params, *batch_r)`

    The leaves of params are `DTensor`s on this mesh, placed `Shard` or `Replicate`, or plain tensors that are the same
    on all ranks. Each is gathered by every function that takes it, just before, and its gradients are reduced and
    scattered as soon as they are known: rows, direction, moments and parameters stay sharded as the parameters are.

    Args:
        losses: `losses(params, *batch)`, a function of whole tensors, or made by `multitask`; means over the examples
            of the batch, of which all ranks have equally many, or `weighted_by_examples`.
        mesh: a `torch.distributed.device_mesh.DeviceMesh`, of any number of dimensions.
        reshard: whether leaves are freed after each use, and gathered again by the next and by the backward pass.
            `False` gathers each once and keeps it, which saves traffic and costs memory; it is needed where the losses
            use transforms of torch.func, `torch.vmap` or scripted functions on parameters, or ask autograd for
            derivatives by them. `True` refuses these, a scripted function with an error of torch's own.

    Returns:
        A function `(params, *batch) -> losses`, for `step`, `train_state`, `jacobian_fn`, `gramian_fn` and
        `weighted_fn`. Losses, weights, flags, scales and Gramians are plain tensors, equal on all ranks. Of buffers,
        floating-point tensors are averaged, and others are those of the first rank; aux is the rank's own.

    Raises:
        TypeError: `losses` is not callable, or `mesh` is no mesh.
        ValueError: when called, leaves on another mesh or with other placements; `per_example` losses; a transform or
            torch.compile around the call; `mode="forward"`; a parameter that no function gathers (see `reshard`); on
            all ranks, other rules, and losses that differ between them in names, numbers, shapes or dtypes, or use
            leaves of equal shapes in another order (off the CPU, where collectives fit: the step is skipped).

    Laws:
        Equal to the losses of the whole batch, to rounding, and so are its rows. One rank's overflow skips the step on
        all. All ranks hold the same bits of what is plain.

    Differs:
        From `torch.distributed.fsdp.fully_shard`, which gathers module by module, and the next one ahead of time: here
        leaf by leaf.
    """
    check_function("sharded", "losses", losses, "Pass losses(params, ...).")
    if not callable(getattr(mesh, "get_group", None)):
        raise TypeError(
            f"sharded: mesh must be a DeviceMesh, found {type(mesh).__name__}. Make one: "
            "torch.distributed.device_mesh.init_device_mesh('cuda', (world_size,))."
        )
    check_flag("sharded", "reshard", reshard)
    return Sharded(losses, mesh, reshard)
