"""The inputs of rules: the views, for rules of your own.

The input of the rule, and the data that a step forms for it:

- `no_gradients`: zeros, float64 `[m]`; no rows, one backward pass.
- `losses`: the losses, float64 `[m]`; no rows, one backward pass.
- `norms`: `|g_i|`, not the squares, float64 `[m]`; no rows where norms cost less.
- `gramian`: `<g_i, g_j>`, float64 `[m, m]`; no rows where products cost less.
- `full_jacobian`: the rows, a pytree like params with leaves `[m, *p]`; all rows.
- `cross_gramian`: `<g_i, h_j>` on two batches, float64 `[m, m]`; nothing, as `aggregate` alone has it.

`norms_and_losses`, `gramian_and_losses` and `jacobian_and_losses` give a pair, with the losses float64 `[m]`, at the
same cost. `aggregate` gives rows in the dtypes of the Jacobian, and a step at least in float32; of `multitask` losses,
the rows are those of `shared`. Float64 is on the CPU for devices without it. With `view.map(f)`, a rule receives `f` of
what the view gives.
"""

from functional_jd.aggregation.views import (
    View,
    cross_gramian,
    full_jacobian,
    gramian,
    gramian_and_losses,
    jacobian_and_losses,
    losses,
    no_gradients,
    norms,
    norms_and_losses,
    with_losses,
)

__all__ = [
    "View",
    "cross_gramian",
    "full_jacobian",
    "gramian",
    "gramian_and_losses",
    "jacobian_and_losses",
    "losses",
    "no_gradients",
    "norms",
    "norms_and_losses",
    "with_losses",
]
