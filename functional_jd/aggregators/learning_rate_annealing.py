"""Learning-rate annealing for physics-informed networks: terms as long as the largest entry of the primary row."""

import torch
from torch import Tensor

from functional_jd.aggregation import Aggregator, Jacobian, Observation, View, full_jacobian, places_of, remembering
from functional_jd.core.arguments import BELOW_1, Number, number, refuse
from functional_jd.core.float64 import on_wide_device
from functional_jd.core.rows import as_matrix
from functional_jd.core.safe import divide
from functional_jd.core.tree import tree_leaves


def learning_rate_annealing(primary: str | int = 0, momentum: Number = 0.9) -> Aggregator:
    """Weight each loss by the largest entry of the primary row over the mean entry of its own.

    `w_i <- momentum w_i + (1 - momentum) max_p |J_rp| / mean_p |J_ip|` for all i but the primary objective r, whose
    weight is 1; all start at 1. The primary objective is the residual of the equation.

    Args:
        primary: the residual of the equation, by name, as `objective_names` gives it, or by index.
        momentum: weight of the previous weights, in [0, 1).

    Returns:
        A rule that needs the full Jacobian. Its state is the averages of the ratios, `[m]`.

    Guarantees:
        With momentum 0, scaling a row other than the primary one changes nothing. For a row of zeros the ratio is 0.

    Source:
        Wang, Teng & Perdikaris, SIAM Journal on Scientific Computing 43, 2021, arXiv 2001.04536, algorithm 1. The paper
        gives the new ratio the weight 0.9; the authors' code gives it to the old weights, as here. That code takes the
        mean of the means of weight matrices; here all entries count the same.
    """
    keep = number("momentum", momentum, BELOW_1, "The authors' code has 0.9.")
    if type(primary) not in (str, int):
        refuse("primary", "a name or an index of a loss", primary, "Pass for instance 0.")

    def update(received: tuple[Tensor, Tensor, Tensor], ratios: Tensor) -> tuple[Tensor, Tensor]:
        largest, mean, is_primary = received
        ratios = keep * ratios + (1 - keep) * divide((largest * is_primary).sum(), mean)
        return torch.where(is_primary, 1, ratios), ratios

    def receive(seen: Observation) -> tuple[Tensor, Tensor, Tensor]:
        return *_entries(full_jacobian.receive(seen)), places_of([primary], seen)

    view = View(receive, "rows", losses=isinstance(primary, str))
    return remembering("ratios", view, lambda received: torch.ones_like(received[0]), update)


def _entries(jacobian: Jacobian) -> tuple[Tensor, Tensor]:
    """The largest and the mean magnitude of the entries of each row, float64 `[m]`."""
    matrices = [on_wide_device(as_matrix(leaf)).abs() for leaf in tree_leaves(jacobian) if leaf.numel()]
    largest = torch.stack([x.amax(1).double() for x in matrices]).amax(0)
    total = torch.stack([x.sum(1, dtype=torch.float64) for x in matrices]).sum(0)
    return largest, total / sum(x.shape[1] for x in matrices)
