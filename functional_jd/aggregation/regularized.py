"""Regularized: a rule for some objectives, and fixed weights for the others, such as a penalty."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from functional_jd.aggregation.aggregate import Aggregator, absent_objectives, check_within, unless
from functional_jd.aggregation.combine import weights_by_leaf
from functional_jd.aggregation.hyper_parameters import FINITE
from functional_jd.aggregation.observation import Observation
from functional_jd.aggregation.views import as_view, no_gradients
from functional_jd.core.arguments import Number, check_mapping, number
from functional_jd.core.names import objective_names
from functional_jd.core.rows import per_row
from functional_jd.core.tree import tree_map
from functional_jd.core.types import AffineWeights, Losses, Tree, Weights


def regularized(rule: Aggregator, fixed: Mapping[str, Number]) -> Aggregator:
    """Give some objectives fixed weights, and the rule the others, which it receives alone.

    `direction = sum_k fixed_k g_k + aggregate(rule, J of the others).direction`

    For penalties: a divergence from a reference model starts at its minimum, where its row is rounding. A rule that
    balances rows, such as `config`, gives it a weight of 1e6.

    Args:
        rule: any rule but one by groups.
        fixed: weights by the names of objectives, as `objective_names` gives them: `{"kl": 0.1}`; any sign.

    Returns:
        A rule with the cost of `rule`, and its state. The weights of the others are those of `rule` without the fixed
        rows. When called, it raises ValueError without losses, for a name that they do not have, and if all are fixed.

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
    if not chosen:
        raise ValueError("regularized: fixed must hold fixed weights, found none. Pass {'kl': 0.1}.")

    def places(losses: Losses) -> tuple[list[int], dict[int, Number]]:
        if losses is None:
            raise ValueError("regularized: losses must be given, by whose names weights are fixed, found none.")
        names = objective_names(losses)
        free = [i for i, name in enumerate(names) if name not in chosen]
        if len(names) - len(free) < len(chosen) or not free:
            raise ValueError(
                f"regularized: fixed must name some objectives of {names}, found {list(chosen)}. Take names that "
                "objective_names(losses) returns."
            )
        return free, {i: chosen[name] for i, name in enumerate(names) if name in chosen}

    return of_some(rule, places)._replace(sensitivity=None)


def of_some(rule: Aggregator, places: Callable[[Losses], tuple[Sequence[int], Mapping[int, Number]]]) -> Aggregator:
    """A rule that gives weights to some objectives, as `rule` does of these alone, and fixed ones to others, or 0:
    `places(losses)` returns the places of the former, and the fixed weights by place.
    """
    inner = as_view(rule.view)

    def receive(seen: Observation) -> tuple[Any, ...]:
        """What the rule receives; fixed weights `[m]`; its places `[m, k]`; which are absent; rows, if it has them."""
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
    view.partial = True
    takes = None if rule.takes is None else (*rule.takes[:2], lambda losses: places(losses)[0])
    return rule._replace(view=view, init=lambda received: rule.init(received[0]), update=update, takes=takes)
