"""EPO: towards the Pareto optimal solution whose losses are in given proportions."""

import torch
from torch import Tensor

from functional_jd.aggregation import Aggregator, Numbers, gramian_and_losses, per_objective, runs_on_host, stateless
from functional_jd.core.arguments import NOT_NEGATIVE, POSITIVE, Number, number
from functional_jd.core.safe import divide, nan_unless, order_of, with_nan_of
from functional_jd.core.types import Gramian, Weights
from functional_jd.solvers.linear_program import linear_program
from functional_jd.solvers.search import Solver

# Weighted losses that differ by less, relative to the largest, are equally large.
_LARGEST = 2.0**-40


def epo(preference: Numbers, tolerance: Number = 1e-4, *, solver: Solver = "host") -> Aggregator:
    """Approach the Pareto optimal solution where `u_1 L_1 = u_2 L_2 = ...`, also on concave parts of the front.

    With shares `s = u L / sum(u L)`, their distance from uniform is `mu = sum_i s_i log(m s_i)`, and
    `a_i = u_i (log(m s_i) - mu)`. Weights lie in the simplex. While `mu > tolerance`, `max w'G a`, subject to
    `(G w)_i >= 0` for the largest u_i L_i, and `(G w)_i >= (G a)_i` where it is not positive (if it never is, `>= 0`):
    other losses may grow while the proportions are put right. Afterwards `max sum_i (G w)_i`, subject to `G w >= 0` and
    `w'G a >= min(0, max_i (G a)_i)`: all losses fall and the proportions stay, or suffer as little as possible.

    Args:
        preference: u `[m]`, positive: twice the weight means half the loss. Its size counts in a, as in the paper:
            weights that sum to one are usual.
        tolerance: proportions within the distance mu are right; not negative. Two losses are then right to about
            `sqrt(2 mu)`: 1.4 % at 1e-4.
        solver: `"host"` or `"device"`.

    Returns:
        A rule that needs the Gramian and the losses. Weights are a vertex of a polytope, so that they jump.

    Guarantees:
        The weights stay the same when the Jacobian is scaled. Negative losses give NaN weights, as does a search that
        does not end. Losses that are all zero are in proportion. It may conflict with losses that are small enough.

    Source:
        Mahapatra & Rajan, ICML 2020, algorithm 1, with the programs of the authors' code, which multiplies the weights
        by m, and fails if none meet the last constraint of the second program; here they miss it by the least amount.
    """
    u = per_objective("preference", preference, POSITIVE)
    tolerance = number("tolerance", tolerance, NOT_NEGATIVE, "The default is 1e-4.")

    def weigh(pair: tuple[Gramian, Tensor]) -> Weights:
        G, losses = pair
        C = G / order_of(G)
        distance, a, worst = _adjustment(nan_unless((losses >= 0).all(), losses), u(losses))
        excess = distance + -tolerance  # torch subtracts no bool, which is a number to Python
        balancing, pull = excess > 0, with_nan_of(C @ a, excess)
        towards = pull > 0
        free = balancing & towards & ~worst
        least = torch.where(balancing & towards.any() & ~towards & ~worst, pull, 0)
        gains, proportion = torch.where(balancing, pull, C.sum(1)), torch.where(balancing, 0, pull)
        return _best_weights(C, gains, free, least, proportion, solver)

    rule = stateless(gramian_and_losses, weigh, on_host=runs_on_host(solver, tolerance))
    return rule._replace(takes=("epo", NOT_NEGATIVE))


def _adjustment(losses: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The distance mu of the shares from uniform, the slopes a, and whose weighted loss is the largest."""
    m, weighted = len(losses), u * losses
    shares = divide(weighted, weighted.sum(), 1 / m)
    logs = (m * shares).clamp(min=torch.finfo(shares.dtype).eps).log()
    distance = shares @ logs
    return distance, u * (logs - distance), weighted >= weighted.amax() * (1 - _LARGEST)


def _best_weights(
    C: Gramian, gains: Tensor, free: Tensor, least: Tensor, proportion: Tensor, solver: Solver
) -> Weights:
    """The w of the simplex with the largest `gains'w`, subject to `(C w)_i >= least_i` where not free,
    and to `proportion'w >= min(0, max_i proportion_i)`, or to missing that by the least amount.
    """
    one, none = torch.ones_like(gains), torch.zeros_like(gains[:1])
    proportion = proportion / order_of(proportion)
    rows = torch.stack([*torch.where(free.unsqueeze(-1), 0, -C), -proportion, one])
    limits = torch.cat([-least, -proportion.amax().clamp(max=0).unsqueeze(0), none + 1])
    # The last variable is the amount.
    rows = torch.cat([rows, torch.cat([0 * one, none - 1, none]).unsqueeze(-1)], -1)
    aims = [(one, none), (0 * one, none - 1), (gains / order_of(gains), none)]
    return linear_program(torch.stack([torch.cat(aim) for aim in aims]), rows, limits, solver)[:-1]
