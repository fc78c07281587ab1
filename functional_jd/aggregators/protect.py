"""Protect: a rule whose direction is projected so that some losses do not rise."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from functional_jd.aggregation import Aggregator, Observation, Solver, Tree, check_within, row_weights, runs_on_host
from functional_jd.aggregation.views import beside, gramian, narrowed, places_of
from functional_jd.core.arguments import refuse
from functional_jd.solvers.lcp import projected


def protect(rule: Aggregator, primary: str | int | Sequence[str | int], *, solver: Solver = "host") -> Aggregator:
    """Change a rule's direction as little as possible, so that no primary loss rises, to first order.

    `direction = argmin { |y - x| : <y, g_p> >= 0 for all p }` with x the direction of the rule, and p the primary
    objectives: for unlearning, safety and continual learning.

    Args:
        rule: a rule with one weight per row. `constant([1.0, 0.0])` minimises the first of two losses only.
        primary: the losses that must not rise, by name, as `objective_names` gives them, or by index; one or a list.
        solver: `"host"` or `"device"`.

    Returns:
        A rule that needs the Gramian, and all that `rule` does, with its state. It raises ValueError for a rule by
        groups or by entries.

    Guarantees:
        `<direction, g_p> >= 0` for all primary losses. Equal to `rule` if that conflicts with none of them. If all
        losses are primary, `protect(constant(u), ...)` is `dualproj(u)`.

    Source:
        Wang et al., GRU, ICML 2025, arXiv 2503.09117, for one loss; Lopez-Paz & Ranzato, NeurIPS 2017, equation 11.

    Example:
        >>> rule = protect(total(), 0)
        >>> aggregate(rule, torch.tensor([[1.0, 0.0], [-3.0, 1.0]])).direction  # the sum of the rows is [-2, 1]
        tensor([0., 1.])
    """
    inner = check_within(rule)
    chosen: Any = [primary] if isinstance(primary, str | int) else primary
    if not isinstance(chosen, list | tuple) or not chosen or not all(type(x) in (str, int) for x in chosen):
        refuse("primary", "a name, an index, or a list of at least one", primary, 'Pass for instance "safety".')

    def receive(seen: Observation) -> tuple[Any, Tensor, Tensor]:
        return inner.receive(narrowed(seen, inner.products)), gramian.receive(seen), places_of(chosen, seen)

    def update(received: tuple[Any, Tensor, Tensor], state: Tree) -> tuple[Tensor, Tree]:
        own, G, guarded = received
        weights, state = rule.update(own, state)
        return projected(row_weights(weights).to(G), G, guarded.unsqueeze(0), solver), state

    on_host = runs_on_host(solver) and inner.products != "rows"
    view = beside(inner, "gramian", receive, losses=any(isinstance(x, str) for x in chosen))
    return Aggregator(view, lambda received: rule.init(received[0]), update, on_host, takes=rule.takes)
