"""Regularized: a rule for some objectives, and fixed weights for the others, such as a penalty."""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from functional_jd.aggregation.aggregate import Aggregator, absent_objectives, check_rule, unless
from functional_jd.aggregation.observation import Observation
from functional_jd.aggregation.views import as_view, no_gradients
from functional_jd.core.arguments import Domain, Number, check_mapping, number
from functional_jd.core.heads import rows_of
from functional_jd.core.names import objective_names
from functional_jd.core.tree import tree_leaves, tree_map
from functional_jd.core.types import Tree, Weights

_FINITE = Domain(lambda x: abs(x) < torch.inf, "finite")


def regularized(rule: Aggregator, fixed: Mapping[str, Number]) -> Aggregator:
    """Give some objectives fixed weights, and the rule the others, which it receives alone.

    `direction = sum_k fixed_k g_k + aggregate(rule, J of the others).direction`

    For penalties: a divergence from a reference model starts at its minimum, where its row is rounding. A rule that
    balances rows, such as `config`, gives it a weight of 1e6.

    Args:
        rule: a rule that weights rows, not single entries.
        fixed: weights by the names of objectives, as `objective_names` gives them: `{"kl": 0.1}`; any sign.

    Returns:
        A rule with the cost of `rule`, and its state.

    Raises:
        TypeError: `rule` is no rule, `fixed` no dict of numbers.
        ValueError: a rule by groups (take one in every group), nothing fixed; when called, an objective that `fixed`
            names and the losses do not have, or no other; `aggregate` without losses; weights of single entries.

    Guarantees:
        The weights of the others are those of `rule` without the fixed rows. Linear in `fixed`.

    Example:
        >>> rule = regularized(upgrad(), {"kl": 0.1})
        >>> jacobian = {"w": torch.tensor([[2.0, 0.0], [-1.0, 1.0], [0.0, 1.0]])}
        >>> losses = dict.fromkeys(["answer", "brevity", "kl"], torch.tensor(1.0))
        >>> aggregate(rule, jacobian, losses=losses).weights
        tensor([0.7500, 1.0000, 0.1000], dtype=torch.float64)
    """
    check_rule(rule)
    check_mapping("fixed", fixed, "Pass for instance {'kl': 0.1}.")
    chosen = {name: number(f"fixed[{name!r}]", x, _FINITE, "Pass a weight.") for name, x in fixed.items()}
    inner = as_view(rule.view)
    if not chosen or inner.groups is not None:
        found = "a rule by groups. Take one in each group" if chosen else "none. Pass {'kl': 0.1}"
        raise ValueError(f"regularized: expected a rule for all parameters, and fixed weights, found {found}.")

    def receive(seen: Observation) -> tuple[Any, Tensor, Tensor, Tensor]:
        """What the rule receives; the fixed weights `[m]`; the places of its own `[m, k]`, and which are absent."""
        if seen.losses is None:
            raise ValueError("regularized: losses must be given, by whose names weights are fixed, found none.")
        names = objective_names(seen.losses)
        free = [i for i, name in enumerate(names) if name not in chosen]
        if len(names) - len(free) < len(chosen) or not free:
            raise ValueError(
                f"regularized: fixed must name some objectives of {names}, found {list(chosen)}. Take names that "
                "objective_names(losses) returns."
            )
        zeros = cast(Tensor, no_gradients.receive(seen))
        units = (zeros + 1).diag()
        given = sum((units[i] * chosen[name] for i, name in enumerate(names) if name in chosen), start=zeros)
        some = lambda x: torch.stack([x[i] for i in free])
        of_products = lambda x: some(x) if x.ndim == 1 else some(some(x).mT).mT
        values = [x for leaf in tree_leaves(seen.losses) for x in leaf.reshape(-1).unbind()]
        rows, *others = (None if x is None else tree_map(some, rows_of(x)) for x in (seen.rows, *seen.others))
        products = None if seen.products is None else of_products(seen.products)
        own = Observation([values[i] for i in free], products, rows, tuple(others))
        return inner.receive(own), given, some(units).mT, absent_objectives(own)

    def update(received: tuple[Any, Tensor, Tensor, Tensor], state: Tree) -> tuple[Weights, Tree]:
        weights, new = rule.update(received[0], state)
        if not isinstance(weights, Tensor) or weights.ndim != 1:
            raise ValueError("regularized: rule must weight rows, found one that weights single entries.")
        new = tree_map(unless(received[3], inner.products == "gramian"), state, new)
        return received[1] + received[2] @ weights.to(received[1]), new

    view = inner._like(receive)  # pyright: ignore[reportPrivateUsage]
    return Aggregator(view, lambda received: rule.init(received[0]), update, rule.on_host)
