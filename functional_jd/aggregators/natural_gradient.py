"""Natural gradient in residual space: the step of Gauss and Newton, solved with the Gramian of the residuals."""

from torch import Tensor

from functional_jd.aggregation import Aggregator, Gramian, Weights, gramian_and_losses, stateless
from functional_jd.core.arguments import NOT_NEGATIVE, Number, check_flag, number
from functional_jd.solvers.spectral import damped_weights, largest_eigenvalue, pseudo_inverse


def natural_gradient(damping: Number = 1e-3, *, relative: bool = False) -> Aggregator:
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

    Returns:
        A rule that needs the Gramian and the losses. Weights of any sign; differentiable with `relative` where the
        largest eigenvalue is simple, for the number 0 where the rank is constant.

    Guarantees:
        With learning rate 1 and damping 0, one step solves linear least squares, by the solution of least norm, up to a
        residual of about `eps cond(J)^2`; singular values below `sqrt(8 m eps)` of the largest count as zero.
        Cholesky's decomposition adds a ridge of `8 m eps` of the largest diagonal entry. On the CPU, the pseudo-inverse
        leaves out the part of the residuals that no step reduces; under a transform, compiled, and on a GPU take a
        damping of a hundred times `m eps` of the largest eigenvalue or more. The heads of `multitask` losses follow the
        sum of their residuals: use a plain function.

    Source:
        Müller & Zeinhofer, ICML 2023, arXiv 2302.13163; solved in the space of residuals, as Chen & Heyl, arXiv
        2302.01941 (minSR), and Goldshlager, Abrahamsen & Lin, arXiv 2401.10190.
    """
    check_flag("relative", relative)
    damping = number("damping", damping, NOT_NEGATIVE, "The default is 1e-3.")

    def weigh(view: tuple[Gramian, Tensor]) -> Weights:
        G, residuals = view
        if not isinstance(damping, Tensor) and damping == 0:
            inverse, _ = pseudo_inverse(G)
            return inverse @ residuals
        return damped_weights(G, residuals, damping * largest_eigenvalue(G) if relative else damping)

    return stateless(gramian_and_losses, weigh)
