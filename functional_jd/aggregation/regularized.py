"""Regularized: a rule for some objectives, and fixed weights for the others, such as a penalty."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from functional_jd.aggregation.aggregate import Aggregator, absent_objectives, check_within, no_memory, unless
from functional_jd.aggregation.combine import weights_by_leaf
from functional_jd.aggregation.hyper_parameters import FINITE
from functional_jd.aggregation.observation import Observation
from functional_jd.aggregation.views import as_view, gramian, indices_of, loss_count, no_gradients
from functional_jd.core.arguments import Number, check_mapping, number, refuse
from functional_jd.core.rows import per_row
from functional_jd.core.tree import tree_map
from functional_jd.core.types import AffineWeights, Losses, Tree, Weights


def regularized(rule: Aggregator, fixed: Mapping[str, Number]) -> Aggregator:
    """Give some objectives fixed weights, and the rule the others, which it receives alone.

    `direction = sum_k fixed_k g_k + aggregate(rule, J of the others).direction`

    For penalties: the row of a divergence from a reference model starts as rounding, to which `config` gives 1e6.

    Args:
        rule: any rule but one by groups.
        fixed: weights by the names of objectives, as `objective_names` gives them: `{"kl": 0.1}`; any sign.

    Returns:
        A rule with the cost and the state of `rule`. It weighs the other rows as if they were alone. When called, it
        raises ValueError without losses, for a name that they do not have, and if all are fixed.

    Example:
        >>> rule = regularized(upgrad(), {"kl": 0.1})
        >>> jacobian = {"w": torch.tensor([[2.0, 0.0], [-1.0, 1.0], [0.0, 1.0]])}
        >>> losses = dict.fromkeys(["answer", "brevity", "kl"], torch.tensor(1.0))
        >>> aggregate(rule, jacobian, losses=losses).weights
        tensor([0.7500, 1.0000, 0.1000], dtype=torch.float64)
    """
    check_within(rule)
    check_mapping("fixed", fixed, "Pass for instance {'kl': 0.1}.")
    chosen = {name: number(f"fixed[{name!r}]", x, FINITE, "Pass a weight.") for name, x in fixed.items()}

    def places(losses: Losses) -> tuple[list[int], dict[int, Number]]:
        m = loss_count(losses)
        given = indices_of("fixed", chosen, losses, m)
        if len(given) == m:
            refuse("fixed", f"fewer than the {m} objectives", m, "Leave one to the rule.", ValueError)
        return [i for i in range(m) if i not in given], dict(zip(given, chosen.values(), strict=True))

    return of_some(rule, places)._replace(sensitivity=None)


def of_some(rule: Aggregator, places: Callable[[Losses], tuple[Sequence[int], Mapping[int, Number]]]) -> Aggregator:
    """`rule` for some objectives alone, and fixed weights, or 0, for others: `places(losses)` returns both by place."""
    inner = as_view(rule.view)

    def receive(seen: Observation) -> tuple[Any, ...]:
        """The view of the rule; fixed weights `[m]`; its places `[m, k]`; which are absent; rows, if it has them."""
        own, fixed = places(seen.losses)
        zeros = cast(Tensor, no_gradients.receive(seen))
        units = (zeros + 1).diag()
        given = sum((units[i] * x for i, x in fixed.items()), start=zeros)
        part = seen.of_objectives(own)
        absent = zeros[: len(own)] != 0 if seen.losses is None else absent_objectives(part)
        rows = part.rows if inner.products == "rows" else ()
        return inner.receive(part), given, torch.stack([units[i] for i in own]).mT, absent, rows

    def update(received: tuple[Any, ...], state: Tree) -> tuple[Weights, Tree]:
        own, given, units, absent, rows = received

        def among(w: Any) -> Any:
            if isinstance(w, AffineWeights):
                return w._replace(weights=among(w.weights))
            return per_row(given.to(w), w) + torch.tensordot(units.to(w), w, 1)

        weights, new = rule.update(own, state)
        by_leaf = lambda: tree_map(lambda _, w: among(w), rows, weights_by_leaf(weights, rows))
        new = tree_map(unless(absent, inner.products == "gramian"), state, new)
        return among(weights) if isinstance(weights, Tensor) else by_leaf(), new

    view = inner._like(receive)  # pyright: ignore[reportPrivateUsage]
    view.objectives = "some"
    takes = None if rule.takes is None else (*rule.takes[:2], lambda losses: places(losses)[0])
    return rule._replace(view=view, init=lambda received: rule.init(received[0]), update=update, takes=takes)


def of_reached(rule: Aggregator) -> Aggregator:
    """The rule of a group of parameters: without memory and by inner products, of the losses that reach the group.

    `train_state` finds their places, which are its state: `{places: ()}`. Other rows are zeros, which stop some rules.
    In a step where one of them is not, the rule receives all rows.
    """
    inner = as_view(rule.view)
    if rule.init is not no_memory or inner.products != "gramian" or inner.groups is not None:
        return rule

    def receive(seen: Observation) -> Any:
        received = seen.losses, gramian.receive(seen)
        return {seen.reached: received} if seen.reached else received

    def init(received: Any) -> Tree:
        return {next(iter(received)): ()} if isinstance(received, dict) else ()

    def update(received: Any, state: Tree) -> tuple[Weights, Tree]:
        losses, G = received[next(iter(received))] if isinstance(received, dict) else received
        weights, _ = rule.update(inner.receive(Observation(losses, G)), ())
        if not isinstance(state, dict):
            return weights, state
        places: tuple[int, ...] = next(iter(state))
        part, others = of_some(rule, lambda _: (places, {})), set(range(len(weights))) - set(places)
        values = G.diagonal() if losses is None else losses  # by which `of_some` counts objectives
        alone, _ = part.update(as_view(part.view).receive(Observation(values, G)), ())
        reached = torch.stack([G[i, i] != 0 for i in others]).any()
        return tree_map(lambda w, own: torch.where(reached, w, own), weights, alone), state

    view = inner._like(receive)  # pyright: ignore[reportPrivateUsage]
    view.objectives = "reached"
    return rule._replace(view=view, init=init, update=update)
