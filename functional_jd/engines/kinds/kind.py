"""What an engine must know of a kind of objectives."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_jd.core.float64 import has_float64
from functional_jd.core.tree import tree_leaves
from functional_jd.core.types import Params, Tree
from functional_jd.engines.evaluate import objective_count, row_scales
from functional_jd.engines.gramian.assemble import RowsNeededError
from functional_jd.engines.kinds.from_rows import gramian_from_rows, weighted_from_rows
from functional_jd.engines.kinds.results import Args, FoundFeatures, FoundGramian, FoundJacobian, FoundWeighted
from functional_jd.engines.plan import Plan
from functional_jd.objectives.buffers import CarryingLosses, Extras, carrying_losses
from functional_jd.torch_compat.slow_path import attempt
from functional_jd.torch_compat.watching import StateJournal


class Kind(NamedTuple):
    """A kind of objectives, such as one loss per example: how each engine differentiates it. One file a kind.

    Only the rows are needed: `gramian` and `weighted`, which engines call, make of them what else is not given.

    Attributes:
        jacobian: `jacobian(losses, args, plan)` returns the Jacobian, the losses, and aux: detached unless it is to
            be differentiable. Its backward passes run at `plan.scale`, by which the rows are divided afterwards.
        layered: what `gramian` returns, `layered(losses, args, plan)`, without rows where that costs less.
            May raise where it cannot do without.
        in_one_pass: what `weighted` returns, `in_one_pass(losses, args, plan)`, in one backward pass.
        features: `features(losses, args, plan)` returns the Gramian of the rows by feature, the losses, aux, and
            `pullback(weights) -> (direction, finite)`; None where there are no features.
        row_params: `row_params(losses, params)`: the parameters that have rows.
        expected_m: `expected_m(losses, batch, others)`: the number m as far as shapes tell it, else an estimate; so
            many leaves have no rows.
        carrying: `carrying(losses, batch, extras)`: the losses, with or without buffers and aux, as `CarryingLosses`.
        sample: `sample(losses, args, where) -> (losses, args)`: a plain function and its arguments, for a look at the
            graph by the function that the user called.
        over_shards: `over_shards(losses, chosen, enter)`: the losses as functions of shards, made of their functions of
            whole parameters by `enter(f, chosen)`; None: parameters may not be sharded.
        rows_are_examples: whether replicas add their rows to those of others, instead of taking the mean.
        several_sets: whether these are several sets of examples, one after the other.
    """

    jacobian: Callable[..., FoundJacobian]
    layered: Callable[..., FoundGramian] | None = None
    in_one_pass: Callable[..., FoundWeighted] | None = None
    features: Callable[..., FoundFeatures] | None = None
    row_params: Callable[[Any, Params], Tree] = lambda _losses, params: params
    # Not known before the losses are evaluated: four are usual.
    expected_m: Callable[[Any, Args, int], int] = lambda _losses, _batch, _others: 4
    carrying: Callable[[Any, Args, Extras], CarryingLosses] = carrying_losses
    sample: Callable[[Any, Args, str], tuple[Callable[..., Any], Args]] = lambda losses, args, _where: (losses, args)
    over_shards: Callable[..., Any] | None = None
    rows_are_examples: bool = False
    several_sets: bool = False

    def gramian(self, losses: Any, args: Args, plan: Plan) -> FoundGramian:
        """What `plan.products` says of the rows, layer by layer; from all rows if that cannot be."""

        def by_rows() -> FoundGramian:
            return gramian_from_rows(self.jacobian(losses, args, plan._replace(mode="auto")), plan)

        argnums = plan.argnums  # not checked yet
        leaves = tree_leaves(args[argnums if isinstance(argnums, int) else argnums[0]])
        first = leaves[0] if leaves else None
        narrow = isinstance(first, Tensor) and not (first.is_cpu or has_float64(first.device))
        layered = self.layered
        if layered is None or narrow:
            return by_rows()
        if torch.compiler.is_compiling():  # torch.compile cannot trace a fallback that depends on what raises
            try:
                return layered(losses, args, plan)
            except RowsNeededError:
                return by_rows()
        journal = StateJournal()
        return attempt(
            partial(layered, losses, args, plan._replace(journal=journal)),
            by_rows,
            where=plan.where,
            instead="evaluates the losses again and forms all rows, as engine='jacobian' does at once, which takes "
            "memory for [m, n]",
            journal=journal,
        )

    def weighted(self, losses: Any, args: Args, plan: Plan) -> FoundWeighted:
        """The losses, aux, and the pullback of weights: `pullback(weights, last=True)` returns the direction
        of all parameters, and what is finite; None without a scale.
        """
        if self.in_one_pass is None:
            return weighted_from_rows(self.jacobian(losses, args, plan), plan)
        found = self.in_one_pass(losses, args, plan)
        if plan.scale is not None and plan.scale.ndim:  # a scale that does not fit is refused at once
            row_scales(plan.scale, objective_count(found[0]), plan.scale, plan.where)
        return found
