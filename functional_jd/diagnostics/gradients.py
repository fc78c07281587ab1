"""Faults of losses and of their gradients, for loops by hand."""

from collections.abc import Collection
from typing import Any

from functional_jd.aggregators.mean import mean
from functional_jd.core.heads import rows_of
from functional_jd.core.rows import as_matrix, magnitudes
from functional_jd.core.tree import tree_map
from functional_jd.core.types import LossFunction, Params, Tree
from functional_jd.engines.evaluate import check_losses, is_differentiable
from functional_jd.engines.kinds import found_kind
from functional_jd.engines.plan import Plan
from functional_jd.precision.autocast import autocast_disabled
from functional_jd.precision.loss_scale import multiplier
from functional_jd.precision.scale_state import ScaleState
from functional_jd.torch_compat.torch_internals import under_transform
from functional_jd.torch_compat.watching import StateJournal
from functional_jd.training.checks import check_buffers, check_learning, check_linear, detach_parameters, undone
from functional_jd.training.driver import prepare


def blame(losses: LossFunction, params: Params, *batch: Any, scale: ScaleState | None = None) -> Tree:
    """Find which rows are not finite, by objective and parameter, one row after the other.

    For steps that are skipped although all losses are finite: rows that are differentiated together share their flags.

    Args:
        losses: as for `jacobian_fn`. With buffers, pass a function that holds them.
        params: as for `jacobian_fn`.
        batch: what the losses take after the parameters.
        scale: the loss scale of the step that was skipped, `state.scale`.

    Returns:
        A pytree like params, of `multitask` losses like `params["shared"]`, with bool `[m]`: whether the gradient of
        objective i is finite, in the order of `objective_names(losses)`. With a scale `[m]`, a loss whose gradient by
        the heads is not finite is false everywhere.

    Guarantees:
        Losses that are separate tensors do not spoil one another. Costs m backward passes and memory for all rows.

    Example:
        >>> losses = lambda params: {"calm": params["w"].sum(), "wild": (1e30 * params["b"]).square().sum()}
        >>> blame(losses, {"w": torch.ones(2), "b": torch.ones(2)})
        {'w': tensor([True, True]), 'b': tensor([ True, False])}
    """
    check_losses(losses, 0, False)
    factor, args = None if scale is None else multiplier(scale), (params, *batch)
    objectives, kind = found_kind(losses, 0, args)
    plan = Plan(False, factor, is_differentiable((args, factor)), "loop")
    rows = rows_of(kind.jacobian(objectives, args, plan)[0])
    with autocast_disabled():
        return tree_map(lambda leaf: magnitudes(as_matrix(leaf)).isfinite(), rows)


def check(
    losses: LossFunction,
    params: Params,
    *batch: Any,
    scale: ScaleState | None = None,
    buffers: Tree = (),
    has_aux: bool = False,
    constant: Collection[str] = (),
) -> None:
    """Check what trains wrongly without an error, once, before a loop by hand: as `train_state` does.

    Args:
        losses: as for `step`, and so are `params`, `batch`, `buffers` and `has_aux`.
        scale: the loss scale of the loop; None: losses are not scaled.
        constant: as for `train_state`.

    Raises:
        ValueError: what `train_state` raises for losses and parameters; a call under a transform.

    Warns:
        UserWarning: what `train_state` warns of; losses whose gradient is not linear in their factor, to half of the
            digits: a backward pass that normalises, clips or rounds loses weights and loss scales.

    Guarantees:
        The losses are evaluated twice. Generators and tensors that they change in place are put back.
        Costs 2 m backward passes, and memory for two gradients.

    Example:
        >>> check(lambda params, x: (params["w"] - x).square(), {"w": torch.zeros(2)}, torch.ones(2))
    """
    check_losses(losses, 0, has_aux)
    own = detach_parameters(params)
    check_buffers(buffers)
    if under_transform():
        raise ValueError("check: expected a call outside of transforms, found one inside. Call it before the loop.")
    buffers = tree_map(lambda x: x.detach().clone(), buffers)
    plan, *_ = prepare(losses, own, batch, mean(), scale=scale, buffers=buffers, has_aux=has_aux, starting=True)
    with undone(journal := StateJournal()):
        check_learning(plan, buffers, constant, journal=journal)
        check_linear(plan)
