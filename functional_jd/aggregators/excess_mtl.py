"""ExcessMTL: larger weights for objectives that are far from their optimum."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from functional_jd.aggregation import Aggregator, Jacobian, Tree, full_jacobian, zero_rows
from functional_jd.core.arguments import POSITIVE, Number, check_integer, number
from functional_jd.core.rows import as_matrix, at_least_float32
from functional_jd.core.safe import nonzero
from functional_jd.core.tree import tree_flatten, tree_leaves


class ExcessMtlState(NamedTuple):
    """The state of ExcessMTL, which takes as much memory as the Jacobian."""

    roots: Tree  # pytree like the Jacobian, at least float32: root of the sum of squares of every entry so far
    baseline: Tensor  # float64 `[m]`: the excess risk that is normalised to one; 0 where there was none yet
    log_weights: Tensor  # float64 `[m]`
    calls: Tensor  # int64 `[]`


def excess_mtl(rate: Number = 1.0, n_warmup: int = 0) -> Aggregator:
    """Multiply each weight by the exponential of its objective's excess risk, estimated from gradients.

    `w_i <- w_i exp(rate E_i / B_i)`, normalised to sum 1, with `E_i = sum_p J_ip^2 / H_ip`, where H is the root of the
    sum of all squares so far (Adagrad's diagonal), and the baseline B is the mean E of the warm-up.

    Args:
        rate: step size of the log-weights, dimensionless; positive.
        n_warmup: number of initial calls that only set the baseline, with uniform weights. The paper uses three epochs.
            For 0, the first call sets the baseline, and its own exponent is `rate E_i`.

    Returns:
        A rule that needs the full Jacobian. Weights lie in the simplex. Entries that were always zero have the
        derivative zero.

    Guarantees:
        With a warm-up, invariant to scaling each row by a factor that is the same in all calls. No squares are formed,
        so that norms of any size are allowed. The first nonzero risk of a row becomes its baseline. Equal or opposite
        rows get equal weights.

    Source:
        He et al., ICML 2024, equations 6, 7 and 9; section 3.2: the baseline; appendix C.1: the warm-up. The authors'
        code adds 1e-7 under the root and to the baseline. As there, and unlike the paper, the first call without a
        warm-up is not normalised.
    """
    rate = number("rate", rate, POSITIVE, "The default is 1.")
    check_integer("n_warmup", n_warmup, 0, "Use 0 for no warm-up.")

    def init(jacobian: Jacobian) -> ExcessMtlState:
        leaf = tree_leaves(jacobian)[0]
        zeros = torch.zeros(leaf.shape[0], dtype=torch.float64, device=leaf.device)
        calls = zeros.new_zeros((), dtype=torch.int64)
        return ExcessMtlState(zero_rows(jacobian), zeros, zeros - math.log(len(zeros)), calls)

    def update(jacobian: Jacobian, state: ExcessMtlState) -> tuple[Tensor, ExcessMtlState]:
        leaves, structure = tree_flatten(jacobian)
        pairs = [_accumulate(leaf, root) for leaf, root in zip(leaves, tree_leaves(state.roots), strict=True)]
        roots = structure.unflatten([root for root, _ in pairs])
        risk = torch.stack([risk for _, risk in pairs]).sum(0)
        mean = (state.calls * state.baseline + risk) / (state.calls + 1)
        baseline = torch.where(state.calls < max(n_warmup, 1), mean, nonzero(state.baseline, risk))
        excess = torch.where(state.calls == 0, risk, risk / nonzero(baseline))
        updated = torch.log_softmax(state.log_weights + rate * excess, dim=0)
        log_weights = torch.where(state.calls < n_warmup, state.log_weights, updated)
        return log_weights.exp(), ExcessMtlState(roots, baseline, log_weights, state.calls + 1)

    return Aggregator(full_jacobian, init, update)


def _accumulate(leaf: Tensor, root: Tensor) -> tuple[Tensor, Tensor]:
    """The new root `h = sqrt(root^2 + x^2)` and the risk `sum x^2 / h` by rows, with finite derivatives at zero."""
    x = at_least_float32(leaf)
    h = torch.hypot(root, nonzero(x))
    return torch.where(x == 0, root, h), as_matrix(x * (x / h)).sum(1, dtype=torch.float64)
