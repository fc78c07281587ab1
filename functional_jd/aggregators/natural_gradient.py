"""Natural gradient in residual space: the step of Gauss and Newton, solved with the Gramian of the residuals."""

import torch
from torch import Tensor

from functional_jd.aggregation import AffineWeights, Aggregator, Gramian, Jacobian, Tree, stateless
from functional_jd.aggregation.combine import weighted_sum
from functional_jd.aggregation.views import cross_gramian, gramian, gramian_and_losses, jacobian_and_losses
from functional_jd.core.arguments import BELOW_1, NOT_NEGATIVE, Number, check_flag, check_integer, number
from functional_jd.core.tree import tree_map
from functional_jd.solvers.spectral import damped_solve, damped_weights, largest_eigenvalue, pseudo_inverse


def natural_gradient(
    damping: Number = 1e-3, *, relative: bool = False, rank: int | None = None, momentum: Number = 0.0
) -> Aggregator:
    """The damped step of Gauss and Newton (Levenberg, Marquardt) for residuals r, which the losses are.

    `weights = (G + damping 1)^-1 r`, so that `direction = J' weights = (J' J + damping 1)^-1 J' r`, which minimizes `|J
    d - r|^2 + damping |d|^2`. The losses must be the residuals themselves, mostly by `per_example`. The system is `[m,
    m]`, whatever the number of parameters.

    Args:
        damping: not negative, in the unit of a squared gradient; larger is a shorter step, closer to the gradient of
            `|r|^2 / (2 damping)`. The number 0 gives the step of least norm, by the pseudo-inverse, which takes ten
            times as long.
        relative: whether `damping` is a fraction of the largest eigenvalue of the Gramian, at the cost of a
            decomposition.
        rank: how many of the largest singular values of J count, as if the others were zero, at the cost of a
            decomposition; `None` for all. It leaves out what noise, or too few points, decide.
        momentum: mu, in [0, 1): the last direction, times mu, takes the place of 0 in `damping |d - mu d_last|^2`, with
            `weights = (G + damping 1)^-1 (r - mu J d_last)`. For new points in every step.

    Returns:
        A rule that needs the Gramian and the losses. Weights of any sign; differentiable with `relative` where the
        largest eigenvalue is simple, for the number 0 where the rank is constant, with `rank` where the least
        eigenvalue that counts is larger than the next. With momentum, it needs the rows, its weights have leaves
        `AffineWeights`, and its state is the last direction, float64, with leaves `[1, *p]`.

    Guarantees:
        With learning rate 1 and damping 0, one step solves linear least squares, by the solution of least norm, up to a
        residual of about `eps cond(J)^2`; singular values below `sqrt(8 m eps)` of the largest count as zero.
        Cholesky's decomposition adds a ridge of `8 m eps` of the largest diagonal entry. On the CPU, the pseudo-inverse
        leaves out the part of the residuals that no step reduces; under a transform, compiled, and on a GPU take a
        damping of a hundred times `m eps` of the largest eigenvalue or more. The heads of `multitask` losses follow the
        sum of their residuals: use a plain function.

    Source:
        Müller & Zeinhofer, ICML 2023, arXiv 2302.13163; solved in the space of residuals, as Chen & Heyl, arXiv
        2302.01941 (minSR). Momentum: Goldshlager, Abrahamsen & Lin, arXiv 2401.10190 (SPRING), whose bound on the norm
        is `clip_by_norm` of a direction; for equations, arXiv 2505.12149. Rank: arXiv 2604.01279 (Sven), damping 0.
    """
    check_flag("relative", relative)
    damping = number("damping", damping, NOT_NEGATIVE, "The default is 1e-3.")
    keep = number("momentum", momentum, BELOW_1, "Use 0 for none.")
    if rank is not None:
        check_integer("rank", rank, 1, "It counts singular values; None takes all.")

    def solve(G: Gramian, r: Tensor) -> Tensor:
        without = not isinstance(damping, Tensor) and damping == 0
        shift = damping * largest_eigenvalue(G) if relative and not without else damping
        if rank is None and not without:
            return damped_weights(G, r, shift)
        inverse, projection = pseudo_inverse(G, rank)
        return inverse @ r if without else projection @ damped_solve(G, projection @ r, shift)

    if not isinstance(keep, Tensor) and keep == 0:
        return stateless(gramian_and_losses, lambda view: solve(*view))

    def init(view: tuple[Jacobian, Tensor]) -> Tree:
        return tree_map(lambda leaf: torch.zeros_like(leaf[:1], dtype=torch.float64), view[0])

    def update(view: tuple[Jacobian, Tensor], last: Tree) -> tuple[Tree, Tree]:
        rows, r = view
        rest = tree_map(lambda d: keep * d, last)
        w = solve(gramian(rows), r - cross_gramian(rows, rest).squeeze(1))
        new = tree_map(lambda leaf, d: weighted_sum(leaf.double(), w) + d, rows, rest)
        return tree_map(lambda d: AffineWeights(w, d.squeeze(0)), rest), new

    return Aggregator(jacobian_and_losses, init, update)
