"""A problem of the study of fronts alone: an autoencoder whose code should be short."""

import torch
from problems_development import digits
from study_problem import Data, Params, Problem, Split, apply, explained, generator_of, network, splits
from torch import Tensor

CODE, AMPLE = 4, 20.0  # the numbers of a code, and nats that are ample for it
ANEW = 8  # how many codes of each training image are drawn


def _part(params: Params, prefix: str) -> Params:
    return {name.removeprefix(prefix): value for name, value in params.items() if name.startswith(prefix)}


def beta_vae() -> Problem:
    """Give digits back from a noisy code of few nats (Higgins et al., 2017, equation 4)."""
    images, _ = digits()

    def data(draw: int) -> Data:
        g = generator_of(draw, 2)

        def noisy(split: Split, times: int) -> Split:
            x = split[0].repeat(times, 1)
            return x, torch.randn(len(x), CODE, generator=g)

        found = splits((images.flatten(1),), draw)
        return Data(noisy(found.train, ANEW), noisy(found.validation, 1), noisy(found.test, 1))

    def init(g: torch.Generator) -> Params:
        parts = {"to_": network(g, 64, 32, 2 * CODE), "from_": network(g, CODE, 32, 64)}
        return {prefix + name: value for prefix, part in parts.items() for name, value in part.items()}

    def values(params: Params, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_variance = apply(_part(params, "to_"), x).chunk(2, dim=-1)
        again = apply(_part(params, "from_"), mean + (log_variance / 2).exp() * noise)
        return again, (mean.square() + log_variance.exp() - log_variance - 1).sum(-1).mean() / 2

    def losses(params: Params, x: Tensor, noise: Tensor) -> Tensor:
        again, nats = values(params, x, noise)
        return torch.stack([(again - x).square().mean(), nats])

    def scores(params: Params, x: Tensor, noise: Tensor) -> Tensor:
        again, nats = values(params, x, noise)
        return torch.stack([explained(again.flatten(), x.flatten()), (1 - nats / AMPLE).clamp(min=0)])

    return Problem(
        "beta-VAE",
        "Give digits back from a noisy code of four numbers (squared error), and let the code say little (its "
        "divergence from a standard normal distribution, in nats).",
        data,
        init,
        losses,
        lambda x, noise: torch.stack([x.var(0).mean(), torch.tensor(AMPLE)]),
        scores,
        ("R² of the image", "1 - nats / 20"),
        m=2,
    )
