"""Problems whose fronts are compared: those of the literature, and two on real data.

Without bounds, ZDT and DTLZ through a sigmoid; losses are not negative. Parameters are one vector, as peers have them.
"""

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from sklearn.datasets import load_diabetes, load_digits
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, pad

from functional_jd import fronts

SIZE = 10


def zdt(shape: Callable[[Tensor, Tensor], Tensor], w: Tensor) -> Tensor:
    x = torch.sigmoid(w)
    g = 1 + 9 * x[1:].mean()
    return torch.stack([x[0], g * shape(x[0], g)])


def zdt3(f: Tensor, g: Tensor) -> Tensor:
    return 2 - (f / g).sqrt() - f / g * torch.sin(10 * math.pi * f)  # one more than usual


def dtlz2(w: Tensor) -> Tensor:
    x = torch.sigmoid(w)
    g, (a, b) = (x[2:] - 0.5).square().sum(), x[:2] * math.pi / 2
    return (1 + g) * torch.stack([a.cos() * b.cos(), a.cos() * b.sin(), a.sin()])


def vlmop2(w: Tensor) -> Tensor:
    at = 1 / math.sqrt(len(w))
    return torch.stack([1 - (-(w - at).square().sum()).exp(), 1 - (-(w + at).square().sum()).exp()])


def curve(f: Callable[[Tensor], Tensor]) -> Tensor:
    """Points of a front of two losses."""
    t = torch.linspace(0, 1, 2001, dtype=torch.float64)
    return torch.stack([t, f(t)], 1)


class Problem(NamedTuple):
    """Losses of one solution, a reference, the hypervolume of the whole front up to it, and the size of parameters.

    Where the front is not known, `whole` is the box up to the reference.
    """

    losses: Callable[[Tensor], Tensor]
    reference: Tensor
    whole: float
    size: int = SIZE


def problem_of(losses: Callable[[Tensor], Tensor], reference: float, points: Tensor) -> Problem:
    limit = torch.full((2,), reference, dtype=torch.float64)
    return Problem(losses, limit, float(fronts.hypervolume(points, limit)))


def line_of_vlmop2() -> Tensor:
    at = torch.linspace(-1, 1, 2001, dtype=torch.float64) / math.sqrt(SIZE)
    return torch.vmap(vlmop2)(at.unsqueeze(1).expand(-1, SIZE))


def standardized(x: Tensor) -> Tensor:
    return (x - x.mean(0)) / x.std(0).clamp(min=1e-6)


def layers(w: Tensor, *widths: int) -> list[Tensor]:
    """Matrices `[out, in + 1]` of layers between these widths, from one vector, which has entries of order one."""
    shapes = [(b, a + 1) for a, b in pairwise(widths)]
    parts = w.split([a * b for a, b in shapes])
    return [part.reshape(shape) / math.sqrt(shape[1]) for part, shape in zip(parts, shapes, strict=True)]


def size_of(*widths: int) -> int:
    return sum(b * (a + 1) for a, b in pairwise(widths))


def affine(layer: Tensor, x: Tensor) -> Tensor:
    return pad(x, (0, 1), value=1.0) @ layer.mT


def fairness() -> Problem:
    """Patients with diabetes: who has a high blood pressure? In one sex 61 % have it, in the other 35 %. Cross entropy,
    and the squared difference of the mean answers, over what the labels have.
    """
    data = load_diabetes(scaled=False)
    columns = torch.tensor(data.data, dtype=torch.float32)
    pressure, sex = columns[:, 3], columns[:, 1] == columns[:, 1].amax()
    label = (pressure > pressure.median()).float()
    x = standardized(torch.cat([columns[:, :3], columns[:, 4:]], 1))
    usual = (label[sex].mean() - label[~sex].mean()).square()

    def losses(w: Tensor) -> Tensor:
        hidden, last = layers(w, 9, 8, 1)
        out = affine(last, affine(hidden, x).tanh())[:, 0]
        gap = out[sex].sigmoid().mean() - out[~sex].sigmoid().mean()
        return torch.stack([binary_cross_entropy_with_logits(out, label), gap.square() / usual])

    return Problem(losses, torch.ones(2, dtype=torch.float64), 1.0, size_of(9, 8, 1))


def beta_vae() -> Problem:
    """Handwritten digits: the squared error of the reconstruction over their variance, and the divergence of the code
    from a normal distribution, in tens of nats. The noise is drawn once.
    """
    images = torch.tensor(load_digits().data[:128], dtype=torch.float32) / 16
    centred = images - images.mean(0)
    noise = torch.randn(len(images), 4, generator=torch.Generator().manual_seed(0))
    there, back = (64, 16, 8), (4, 16, 64)

    def losses(w: Tensor) -> Tensor:
        encode, code, decode, last = (*layers(w[: size_of(*there)], *there), *layers(w[size_of(*there) :], *back))
        mean, log_deviation = affine(code, affine(encode, centred).tanh()).split(4, 1)
        drawn = mean + log_deviation.exp() * noise
        error = (affine(last, affine(decode, drawn).tanh()) - centred).square().sum(1).mean()
        divergence = (mean.square() + (2 * log_deviation).exp() - 1 - 2 * log_deviation).sum(1).mean() / 2
        return torch.stack([error / centred.square().sum(1).mean(), divergence / 10])

    return Problem(losses, torch.ones(2, dtype=torch.float64), 1.0, size_of(*there) + size_of(*back))


PROBLEMS = {
    "ZDT1": lambda: problem_of(partial(zdt, lambda f, g: 1 - (f / g).sqrt()), 1.1, curve(lambda t: 1 - t.sqrt())),
    "ZDT2": lambda: problem_of(partial(zdt, lambda f, g: 1 - (f / g).square()), 1.1, curve(lambda t: 1 - t.square())),
    "ZDT3": lambda: problem_of(partial(zdt, zdt3), 2.1, curve(lambda t: zdt3(t, torch.ones(())))),
    "VLMOP2": lambda: problem_of(vlmop2, 1.1, line_of_vlmop2()),
    # Outside of the unit ball: an eighth of it is pi / 6.
    "DTLZ2": lambda: Problem(dtlz2, torch.full((3,), 1.1, dtype=torch.float64), 1.1**3 - math.pi / 6),
    "fairness": fairness,
    "beta-VAE": beta_vae,
}
