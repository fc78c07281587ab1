"""ExcessMTL: the rows of objectives that are far from their best gain weight."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from functional_jd.aggregation.aggregate import Aggregator
from functional_jd.aggregation.views import full_jacobian
from functional_jd.core.rows import as_matrix, at_least_float32
from functional_jd.core.safe import nonzero
from functional_jd.core.tree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from functional_jd.core.types import Jacobian, Tree


class ExcessMtlState(NamedTuple):
    """What ExcessMTL remembers: as much memory as the Jacobian takes.

    Attributes:
        roots: pytree like the Jacobian, at least float32: root of the sum of squares of every entry so far.
        baseline: float64 `[m]`: the excess risk that counts as one, 0 where there was none yet.
        log_weights: float64 `[m]`.
        calls: int64 `[]`.
    """

    roots: Tree
    baseline: Tensor
    log_weights: Tensor
    calls: Tensor


def excess_mtl(rate: float = 1.0, n_warmup: int = 0) -> Aggregator:
    """Multiply each weight by the exponential of its objective's excess risk, as its gradients tell.

    `w_i <- w_i exp(rate E_i / B_i)`, normalised to sum 1, with `E_i = sum_p J_ip^2 / H_ip`, where H is the root of the
    sum of all squares so far (Adagrad's diagonal), and the baseline B is the mean E of the warm-up.

    Args:
        rate: of the weights, without unit; positive.
        n_warmup: how many calls only collect; the weights stay uniform. The paper takes three epochs. Without any, the
            first call is the baseline of the others, and moves the weights by `rate E_i` itself.

    Returns:
        A rule that looks at the whole Jacobian. Its weights, float64 `[m]`, lie in the simplex; differentiable with
        respect to Jacobian and state (entries that were always zero have derivative zero, where `|J_ip|` has a kink).

    Raises:
        ValueError: `rate` or `n_warmup` out of range.

    Laws:
        With a warm-up, the weights do not change when rows are scaled, each by its factor in all calls; squares are
        never formed, so no norm is too small or large. A row of zeros has risk 0; the first risk that is not zero
        becomes its baseline. Equal or opposite rows get equal weights; one row gets weight 1. A Jacobian that is not
        finite gives a state that is not: carry on with the old one, as `step` does.

    Source:
        He et al., Robust multi-task learning with excess risks, ICML 2024: equations 6 and 7 (the risk), 9 (the
        weights), section 3.2 (the baseline), appendix C.1 (the warm-up).

    Differs:
        The reference code adds 1e-7 under the root and to the baseline; here a row without a baseline is not divided.
        As in the reference code, and not in the paper, the first call without a warm-up is not scaled.
    """
    if not 0 < rate < math.inf:
        raise ValueError(f"excess_mtl: rate must be positive and finite, found {rate}. The default is 1.")
    if n_warmup < 0:
        raise ValueError(f"excess_mtl: n_warmup must not be negative, found {n_warmup}. Take 0 for no warm-up.")

    def init(jacobian: Jacobian) -> ExcessMtlState:
        leaf = tree_leaves(jacobian)[0]
        zeros = torch.zeros(leaf.shape[0], dtype=torch.float64, device=leaf.device)
        roots = tree_map(lambda leaf: torch.zeros_like(at_least_float32(leaf)), jacobian)
        return ExcessMtlState(roots, zeros, zeros - math.log(len(zeros)), zeros.new_zeros((), dtype=torch.int64))

    def update(jacobian: Jacobian, state: ExcessMtlState) -> tuple[Tensor, ExcessMtlState]:
        leaves, structure = tree_flatten(jacobian)
        pairs = [_grow(leaf, root) for leaf, root in zip(leaves, tree_leaves(state.roots), strict=True)]
        roots = tree_unflatten(structure, [root for root, _ in pairs])
        risk = torch.stack([risk for _, risk in pairs]).sum(0)
        mean = (state.calls * state.baseline + risk) / (state.calls + 1)
        late = nonzero(state.baseline, risk)
        baseline = torch.where(state.calls < max(n_warmup, 1), mean, late)
        gain = torch.where(state.calls == 0, risk, risk / nonzero(baseline))
        moved = torch.log_softmax(state.log_weights + rate * gain, dim=0)
        log_weights = torch.where(state.calls < n_warmup, state.log_weights, moved)
        return log_weights.exp(), ExcessMtlState(roots, baseline, log_weights, state.calls + 1)

    return Aggregator(full_jacobian, init, update)


def _grow(leaf: Tensor, root: Tensor) -> tuple[Tensor, Tensor]:
    """The new root `h = sqrt(root^2 + x^2)` and the risk `sum x^2 / h` by rows, both with a derivative at zero."""
    x = at_least_float32(leaf)
    h = torch.hypot(root, nonzero(x))
    risk = x * (x / h)
    return torch.where(x == 0, root, h), as_matrix(risk).sum(1, dtype=torch.float64)
