"""The engines of a step, by name, and the observations that they make of rows."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from functional_jd.aggregation.combine import combined
from functional_jd.aggregation.groups import check_groups
from functional_jd.aggregation.observation import Observation, Products
from functional_jd.core.arguments import check_integer, check_option, refuse
from functional_jd.core.tree import tree_leaves
from functional_jd.core.types import Jacobian, Losses
from functional_jd.engines.kinds.kind import FoundJacobian, gramian_from_rows
from functional_jd.engines.plan import Engine, Plan, require
from functional_jd.precision.loss_scale import nan_rows_unless, unscale

MODES = ("auto", "vmap", "loop")


def rows_at_once(mode: str, chunk_size: int | None) -> tuple[str, int | None]:
    """The mode and the number of rows at once. Raises for an unknown mode, and for a wrong number of rows."""
    check_option("mode", mode, MODES, "'auto' chooses by shapes. For column by column call torch.func.jacfwd.")
    if chunk_size is not None:
        check_integer("chunk_size", chunk_size, 1, "1 is the loop, None is no limit.")
    return "loop" if chunk_size == 1 else mode, chunk_size


def jacobian_engine(mode: str = "auto", chunk_size: int | None = None) -> Engine:
    """All rows, for every rule.

    Args:
        mode, chunk_size: as for `jacobian_fn`.

    Returns:
        An `Engine`, for `step` and `train_state`.

    Raises:
        ValueError: an unknown mode, or a chunk size below 1.
    """
    how = rows_at_once(mode, chunk_size)
    return Engine(lambda plan: of_rows(plan, *rows_of_plan(plan, *how)))


def rows_of_plan(plan: Plan, mode: str = "auto", chunk_size: int | None = None) -> FoundJacobian:
    """The rows, the losses, and `(buffers, aux)`."""
    plan = plan._replace(mode=mode, chunk_size=chunk_size)
    return plan.kind.jacobian(plan.losses, plan.args, plan)


def gramian_engine() -> Engine:
    """Inner products of the rows, without rows where layers allow, for rules that need these or the rows' norms, and no
    more but the losses.

    Returns:
        An `Engine`, for `step` and `train_state`: see `gramian_fn`, and `squared_norms_fn` for rules that need norms.

    Raises:
        ValueError: from `step` and `train_state`, for a rule with another view.
    """

    def check(plan: Plan) -> None:
        require(plan, "gramian", serves=plan.view.inner_products_suffice, rules="inner products of rows")

    return Engine(lambda plan: of_products(*plan.kind.gramian(plan.losses, plan.args, plan)), check)


def weighted_engine() -> Engine:
    """One backward pass with the weights as cotangent, for rules that need no gradients: `view.products` is `"none"`.

    Returns:
        An `Engine`, for `step` and `train_state`. With one scale per objective, the backward pass runs at the largest
        scale that serves all. If only its gradient is not finite, all scales back off. `multitask` losses are flagged
        one by one as far as their features. Groups of parameters whose rules differ take one pass each.

    Raises:
        ValueError: from `step` and `train_state`, for a rule that needs more.
    """

    def observe(plan: Plan) -> Observation:
        if plan.view.groups is not None:
            check_groups(plan.kind.row_params(plan.losses, plan.args[0]), plan.view.groups)
        values, carried, pull = plan.kind.weighted(plan.losses, plan.args, plan)
        return Observation(values, pullback=partial(pull, last=True), carried=carried)

    def check(plan: Plan) -> None:
        require(plan, "weighted", serves=plan.view.products == "none", rules="no gradients")

    return Engine(observe, check)


def features_engine() -> Engine:
    """Inner products of the rows with respect to the features of `multitask` losses, for rules that need the Gramian,
    with the losses or without.

    The heads are differentiated once per objective, the trunk once for the weighted sum of the rows. The weights are
    those for the features, not for the parameters: `"auto"` never takes this engine.

    Returns:
        An `Engine`, for `step` and `train_state`. After an overflow in the trunk, all scales back off.

    Raises:
        ValueError: from `step` and `train_state`, for losses that are not made by `multitask`, or a rule with another
            view.

    Guarantees:
        The direction of the trunk is `sum_i w_i J_i`, with w the rule's weights for `Z Z'` and Z the rows by feature.

    Source:
        Sener and Koltun, Multi-task learning as multi-objective optimization, NeurIPS 2018, arXiv 1810.04650, section
        3.3 (MGDA-UB).
    """

    def observe(plan: Plan) -> Observation:
        assert plan.kind.features is not None
        products, values, carried, pull = plan.kind.features(plan.losses, plan.args, plan)
        return Observation(values, products=products, pullback=partial(pull, last=True), carried=carried)

    def check(plan: Plan) -> None:
        if plan.kind.features is None:
            expected = "made by multitask(features, heads), for features_engine()"
            refuse("losses", expected, plan.losses, "Or use engine='auto'.", ValueError)
        serves = plan.view.products == "gramian" and plan.view.groups is None
        require(plan, "features", serves=serves, rules="the Gramian of all parameters")

    return Engine(observe, check)


ENGINES: dict[str, Engine] = {"jacobian": jacobian_engine(), "gramian": gramian_engine(), "weighted": weighted_engine()}
"""`"auto"` is one of these, as `choose_engine` says."""


def of_rows(plan: Plan, jacobian: Jacobian, values: Losses, carried: Any) -> Observation:
    """The observation of rows, which may not be finite: of their inner products if the rule needs no more."""
    leaves = [] if plan.scale is None else tree_leaves(jacobian)
    # The squares of finite float32 numbers are finite in float64. Without a scale it does not matter whether a step is
    # skipped for rows or for squares that overflow.
    if plan.view.inner_products_suffice and all(leaf.dtype != torch.float64 for leaf in leaves):
        return of_products(*gramian_from_rows((jacobian, values, carried), plan))
    rows, finite = checked(plan, jacobian)
    summed = lambda weights: (combined(rows, weights), None)
    return Observation(values, rows=rows, pullback=summed, finite=finite, carried=carried)


def of_products(products: Products, values: Losses, carried: Any, pull: Any) -> Observation:
    """The observation of inner products, which tell what overflowed."""
    return Observation(values, products=products, pullback=lambda weights: (pull(weights), None), carried=carried)


def checked(plan: Plan, jacobian: Jacobian) -> tuple[Jacobian, Tensor | None]:
    """The rows, and which of them are finite. For others the rule receives zeros, or NaN if no step reads the flags."""
    if not plan.guarded and plan.scale is None:
        return jacobian, None
    rows, finite = unscale(torch.ones_like(plan.scale_state.scale), jacobian)
    return rows if plan.guarded else nan_rows_unless(finite, rows), finite
