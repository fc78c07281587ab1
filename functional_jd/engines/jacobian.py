"""The Jacobian engine: one row per objective, by leaf."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from functional_jd.aggregation.observation import Observation
from functional_jd.core.arguments import check_integer, check_option
from functional_jd.core.types import LossFunction
from functional_jd.engines.evaluate import check_losses, is_differentiable
from functional_jd.engines.kinds import found_kind
from functional_jd.engines.kinds.results import FoundJacobian
from functional_jd.engines.observed import of_rows
from functional_jd.engines.plan import Engine, Plan
from functional_jd.precision.loss_scale import multiplier, unscale
from functional_jd.precision.scale_state import ScaleState

MODES = ("auto", "vmap", "loop")


def jacobian_fn(
    losses: LossFunction,
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    scale: ScaleState | Tensor | None = None,
    mode: str = "auto",
    chunk_size: int | None = None,
) -> Callable[..., Any]:
    """Turn losses into a function that returns their Jacobian and their values.

    `J_i = scale_i * d losses_i / d params`

    Args:
        losses: `losses(params, *args)`: a tensor, or a pytree of tensors, with m elements in leaf order; plain, or made
            by `per_example` or `multitask`.
        argnums: the argument to differentiate, or several; with several, the Jacobian is a tuple. Other than 0, the
            structure of `per_example` and `multitask` is not used.
        has_aux: whether `losses` returns `(losses, aux)`, with aux a pytree of tensors.
        scale: a `ScaleState` or tensor, `[]` or `[m]`: the backward pass of row i runs at that scale, the rows come out
            unscaled, with flags of those that did not overflow.
        mode: `"vmap"` differentiates rows together; `"loop"` one after the other, without vmap; `"auto"` chooses
            by shapes (a loop for few or wide rows on a CPU; groups, so that they fit its cache), and falls back to the
            loop. If m is far above the number of parameters, take `torch.func.jacfwd`.
        chunk_size: rows differentiated at once; 1 is the loop.

    Returns:
        `f(*args) -> (jacobian, losses)`, with `has_aux` `(jacobian, (losses, aux))`. With `scale`, a third value
        `finite`, bool of the scale's shape: rows that overflowed are zeros, all of them where one scale serves all, as
        `unscale` returns them. Jacobian: pytree like params with leaves `[m, *p]` in the parameters' dtypes, with
        `scale` in at least float32; for `multitask` losses `MultitaskJacobian(shared, heads)`. Losses
        come back in the structure that the function gave them. Parameters that no objective depends on have rows of
        zeros. With one scale per objective, a row that overflowed in the heads is left out of the sum `heads`, so that
        only its own scale backs off. Where rows are differentiated together, an infinite
        derivative of one objective can make other rows NaN, as 0 x inf; examples stay apart, and in the loop so do
        losses that are separate tensors.

    Raises:
        TypeError: losses or parameters that are not floating-point tensors, `losses` not callable.
        ValueError: no objectives, an unknown mode, a chunk size below 1, a scale that does not fit m; a module's own
            parameters that run again in the backward pass.

    Laws:
        Equal to a loop of plain autograd in every mode. Composes with vmap, grad, jvp and compile;
        a derivative of the Jacobian is right. Where no transform is active and no input
        requires grad, plain autograd does the work and the result is detached. Parameters that only a closure captures
        are not inputs. Where vmap refuses rows that `"auto"` would differentiate together, the loop does, with a
        `SlowPathWarning`.

    Differs:
        From `torch.func.jacrev`: native autocast inside works with every layer, and the backward pass is never
        autocast; custom functions without a vmap rule, buffers changed in place and checkpoints
        (`use_reentrant=False`) work in `"auto"` and `"loop"`. A checkpoint runs again as its forward pass did, in the
        same precision. Call modules with checkpoints by `functional(module)`.

    Example:
        >>> losses = lambda params: {"a": params.square().sum(), "b": params[0]}
        >>> jacobian, values = jacobian_fn(losses)(torch.tensor([1.0, 2.0]))
        >>> jacobian
        tensor([[2., 4.],
                [1., 0.]])
    """
    check_losses("jacobian_fn", losses, argnums, has_aux)
    check_rows("jacobian_fn", mode, chunk_size)
    factor = None if scale is None else multiplier(scale, "jacobian_fn")

    def jacobian_and_losses(*args: Any) -> Any:
        objectives, kind = found_kind(losses, argnums, args, "jacobian_fn")
        differentiable = is_differentiable((args, factor))
        how = _rows_at_once(mode, chunk_size)
        plan = Plan("jacobian_fn", has_aux, factor, differentiable, *how, argnums=argnums)
        jacobian, values, aux = kind.jacobian(objectives, args, plan)
        found = (values, aux) if has_aux else values
        if factor is None:
            return jacobian, found
        jacobian, finite = unscale(torch.ones_like(factor), jacobian)
        return jacobian, found, finite

    return jacobian_and_losses


def jacobian_engine(mode: str = "auto", chunk_size: int | None = None) -> Engine:
    """All rows, for every rule.

    Args:
        mode: how rows are differentiated, as for `jacobian_fn`.
        chunk_size: the number of rows differentiated at once, as for `jacobian_fn`.

    Returns:
        An `Engine`, for `step` and `train_state`.

    Raises:
        ValueError: an unknown mode, or a chunk size below 1.
    """
    check_rows("jacobian_engine", mode, chunk_size)
    mode, chunk_size = _rows_at_once(mode, chunk_size)

    def observe(plan: Plan) -> Observation:
        return of_rows(plan, *rows_of_plan(plan, mode, chunk_size))

    return Engine(observe)


def rows_of_plan(plan: Plan, mode: str = "auto", chunk_size: int | None = None) -> FoundJacobian:
    """The rows, the losses, and `(buffers, aux)`."""
    plan = plan._replace(mode=mode, chunk_size=chunk_size)
    return plan.kind.jacobian(plan.losses, plan.args, plan)


def check_rows(where: str, mode: str, chunk_size: int | None) -> None:
    """Refuse an unknown mode, and what is no number of rows."""
    if isinstance(mode, str) and mode == "forward":
        raise ValueError(
            f"{where}: mode must be one of {', '.join(MODES)}, found 'forward'. For column by column call "
            "torch.func.jacfwd."
        )
    check_option(where, "mode", mode, MODES, "'auto' chooses by shapes.")
    if chunk_size is not None:
        check_integer(where, "chunk_size", chunk_size, 1, "1 is the loop, None is no limit.")


def _rows_at_once(mode: str, chunk_size: int | None) -> tuple[str, int | None]:
    return ("loop" if chunk_size == 1 and mode in ("auto", "vmap") else mode), chunk_size
