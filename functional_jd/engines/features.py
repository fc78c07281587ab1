"""The features engine: for multitask losses, inner products of the rows with respect to the features."""

from torch import Tensor

from functional_jd.aggregation.observation import Observation
from functional_jd.core.types import Direction
from functional_jd.engines.observed import finite_rows
from functional_jd.engines.plan import Engine, Plan, require


def features_engine() -> Engine:
    """Inner products of the rows with respect to the features of `multitask` losses, for rules that need the Gramian,
    with the losses or without.

    The heads are differentiated once per objective, the trunk once for all: the weighted sum of the rows goes through
    it. The Gramian is that of the features, and the weights are those for the features, not for the parameters:
    `"auto"` never takes this engine.

    Returns:
        An `Engine`, for `step` and `train_state`. With one scale per objective, an overflow in the trunk cannot be
        assigned to an objective: all scales back off.

    Raises:
        ValueError: from `step` and `train_state`, for losses that are not made by `multitask`, or a rule with another
            view.

    Laws:
        The direction of the trunk is `sum_i w_i J_i`, with w the rule's weights for `Z Z'` and Z the rows by feature.

    Source:
        Sener and Koltun, Multi-task learning as multi-objective optimization, NeurIPS 2018, arXiv 1810.04650, section
        3.3 (MGDA-UB).
    """

    def observe(plan: Plan) -> Observation:
        assert plan.kind.features is not None
        products, values, carried, pull = plan.kind.features(plan.losses, plan.args, plan)
        rows = finite_rows(products, plan.scale_state.scale.ndim)

        def pullback(weights: Tensor) -> tuple[Direction, Tensor]:
            direction, passed = pull(weights)
            # A row that overflowed is to blame for what comes after it.
            return direction, rows & (passed | ~rows.all())

        return Observation(values, products=products, pullback=pullback, carried=carried)

    def check(plan: Plan) -> None:
        if plan.kind.features is None:
            raise ValueError(
                f"{plan.where}: features_engine() serves losses with features, found {type(plan.losses).__name__}. "
                "Make them with multitask(features, heads), or use engine='auto'."
            )
        serves = plan.view.products == "gramian" and plan.view.groups is None
        require(plan, "features", serves=serves, rules="the Gramian of all parameters")

    return Engine(observe, check)
