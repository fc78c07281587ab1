"""The development problems but for differential equations: those that rules and thresholds were chosen on.

And one of the study of fronts alone, `beta_vae`.
"""

from collections.abc import Callable

import torch
from study_problem import (
    Data,
    Params,
    Problem,
    Split,
    accuracy,
    apply,
    data_set,
    entropy,
    explained,
    generator_of,
    judged,
    mixed,
    network,
    splits,
)
from torch import Tensor
from torch.nn.functional import avg_pool2d, cross_entropy, log_softmax, pad


def digits() -> tuple[Tensor, Tensor]:
    """1797 images `[n, 8, 8]` and their labels."""
    found = data_set("digits")
    return torch.tensor(found.images / 16, dtype=torch.float32), torch.tensor(found.target)


def units() -> Problem:
    """Five columns of a digit are seen: name the digit (cross entropy, times 1e-9) and guess the other three columns
    (squared error, times 1000).
    """
    images, labels = digits()
    columns = images[:, :, :5].flatten(1), labels, images[:, :, 5:].flatten(1)
    values = lambda params, x, *_: apply(params, x).split([10, 24], dim=1)
    return Problem(
        lambda draw: splits(columns, draw),
        lambda g: network(g, 40, 32, 34),
        *judged(values, lambda x, label, right: (label, right), (10, 0), (1e-9, 1e3)),
        ("accuracy", "R² of the columns"),
        m=2,
    )


def noisy_labels() -> Problem:
    """Digits, and an objective for every example of a batch of 16; four labels in ten are drawn at random.

    Validation and test have clean labels. Fixed weights mean nothing here.
    """
    images, labels = digits()

    def data(draw: int) -> Data:
        found = splits((images.flatten(1), labels), draw)
        g = generator_of(draw, 2)
        x, y = found.train
        wrong = torch.rand(len(y), generator=g) < 0.4
        noisy = torch.where(wrong, torch.randint(10, y.shape, generator=g), y)
        return found._replace(train=(x, noisy))

    return Problem(
        data,
        lambda g: network(g, 64, 32, 10),
        lambda params, x, label: cross_entropy(apply(params, x), label, reduction="none"),
        lambda x, label: entropy(label, 10).expand(16),
        lambda params, x, label: accuracy(apply(params, x), label)[None],
        ("accuracy",),
        m=16,
        batch=16,
    )


def overlapping(rows: int, arranged: Callable[[Tensor, Tensor, Tensor], Split]) -> Callable[[int], Data]:
    """The data of draws: images of two digits that overlap, and their names, so many for training, as arranged."""
    images, labels = digits()

    def data(draw: int) -> Data:
        g = generator_of(draw, 2)

        def pairs(split: Split, n: int) -> Split:
            image, label = split
            left, right = (torch.randint(len(label), (n,), generator=g) for _ in "12")
            both = torch.maximum(pad(image[left], (0, 4)), pad(image[right], (4, 0)))
            return arranged(both, label[left], label[right])

        found = splits((images, labels), draw)
        return Data(pairs(found.train, rows), pairs(found.validation, 1000), pairs(found.test, 1000))

    return data


def two_digits() -> Problem:
    """Two digits overlap in an image of 8 x 12: name both, reconstruct the image at half the resolution."""
    arranged = lambda x, left, right: (x.flatten(1), left, right, avg_pool2d(x[:, None], 2).flatten(1))
    values = lambda params, x, *_: apply(params, x).split([10, 10, 24], dim=1)
    return Problem(
        overlapping(2000, arranged),
        lambda g: network(g, 96, 32, 44),
        *judged(values, lambda x, *named: named, (10, 10, 0)),
        ("accuracy left", "accuracy right", "R² of the image"),
        m=3,
    )


def diabetes() -> Problem:
    """442 patients: the progress of the disease, the body mass index and the blood pressure, from eight other
    measurements. Most of the variance is noise.
    """
    found = data_set("diabetes", scaled=False)
    data = torch.tensor(found.data, dtype=torch.float32)
    y = torch.cat([torch.tensor(found.target, dtype=torch.float32)[:, None], data[:, [2, 3]]], dim=1)
    return mixed(data[:, [0, 1, 4, 5, 6, 7, 8, 9]], y, [], ("R² progress", "R² mass", "R² pressure"))


def tumours() -> Problem:
    """569 tumours: the largest radius, texture, area, smoothness and concavity of the cells, from means and deviations.

    Squared errors of areas are some 1e8 times those of smoothness.
    """
    data = torch.tensor(data_set("breast_cancer").data, dtype=torch.float32)
    names = ("radius", "texture", "area", "smoothness", "concavity")
    return mixed(data[:, :20], data[:, [20, 21, 23, 24, 26]], [], tuple(f"R² {name}" for name in names))


def unbalanced() -> Problem:
    """Four made-up regressions on a trunk of 16 units, sines of rising frequency with amplitudes 30, 1, 10 and 0.1."""
    frequencies, sizes = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([30.0, 1.0, 10.0, 0.1])

    def data(draw: int) -> Data:
        g = generator_of(draw, 2)
        x = 2 * torch.rand(3000, 4, generator=g) - 1
        turn = torch.randn(4, 4, generator=g) / 2
        y = torch.sin(frequencies * (x @ turn) + 0.3) * sizes
        return splits((x, y + 0.1 * sizes * torch.randn(y.shape, generator=g)), draw)

    values = lambda params, x, _: (sizes * apply(params, x)).unbind(1)
    return Problem(
        data,
        lambda g: network(g, 4, 16, 16, 4),
        *judged(values, lambda x, y: y.unbind(1), (0,) * 4),
        tuple(f"R² {i}" for i in range(4)),
        m=4,
    )


def gap(yes: Tensor, group: Tensor) -> Tensor:
    """How much more often the second group gets a yes."""
    rates = [(yes * (group == k)).sum() / (group == k).sum().clamp(min=1) for k in (0, 1)]
    return rates[1] - rates[0]


def unfair(params: Params, x: Tensor, label: Tensor, group: Tensor) -> Tensor:
    """The losses of a classifier that should say yes equally often in both groups."""
    out = apply(params, x)
    return torch.stack([cross_entropy(out, label), gap(torch.softmax(out, dim=1)[:, 1], group).square()])


def unfair_constant(x: Tensor, label: Tensor, group: Tensor) -> Tensor:
    """A constant answer has no gap: instead of it, that of the labels."""
    return torch.stack([entropy(label, 2), gap(label.float(), group).square()])


def fairness() -> Problem:
    """Made-up data in which a group has more positive labels: be accurate, and say yes equally often in both groups.

    No classifier is best in both.
    """

    def data(draw: int) -> Data:
        g = generator_of(draw, 2)
        group = (torch.rand(4000, generator=g) < 0.4).long()
        x = torch.randn(4000, 8, generator=g)
        x[:, :3] += 0.8 * group[:, None]
        label = (x.sum(1) / 2 + torch.randn(4000, generator=g) > 0.5).long()
        return splits((torch.cat([x, group[:, None]], dim=1), label, group), draw)

    def scores(params: Params, x: Tensor, label: Tensor, group: Tensor) -> Tensor:
        out = apply(params, x)
        return torch.stack([accuracy(out, label), 1 - gap((out.argmax(1) == 1).float(), group).abs()])

    init = lambda g: network(g, 9, 16, 2)
    return Problem(data, init, unfair, unfair_constant, scores, ("accuracy", "1 - gap"), m=2, batch=128)


def bandit() -> Problem:
    """A policy gradient (REINFORCE, contextual bandit): two noisy costs, of which one is 50 times the other, and which
    want different actions. Scores: the share of what the best policy for that cost alone saves.
    """
    actions, scale = 6, torch.tensor([1.0, 50.0])

    def data(draw: int) -> Data:
        g = generator_of(draw, 2)
        first, second = torch.randn(5, actions, generator=g), torch.randn(5, actions, generator=g)
        wanted = torch.stack([first, 0.4 * first + 0.9 * second])

        def rows(n: int) -> Split:
            x = torch.randn(n, 5, generator=g)
            costs = scale[:, None] * torch.sigmoid(-torch.einsum("nf,ofa->noa", x, wanted))
            gumbel = -torch.log(-torch.log(torch.rand(n, actions, generator=g).clamp(1e-6, 1 - 1e-6)))
            return x, costs, gumbel, 2 * torch.rand(n, 2, generator=g)

        return Data(rows(20_000), rows(2000), rows(2000))

    def losses(params: Params, x: Tensor, costs: Tensor, gumbel: Tensor, noise: Tensor) -> Tensor:
        """Mean costs of drawn actions, whose gradients are the policy gradient with the batch mean as baseline."""
        logits = apply(params, x)
        chosen = ((logits.detach() + gumbel).argmax(1, keepdim=True) == torch.arange(actions)).to(x.dtype)
        chance = (log_softmax(logits, dim=1) * chosen).sum(1)
        factor = torch.exp(chance - chance.detach())
        seen = (costs * chosen[:, None]).sum(2) * noise
        return (factor[:, None] * (seen - seen.mean(0))).mean(0) + seen.mean(0)

    def scores(params: Params, x: Tensor, costs: Tensor, *_: Tensor) -> Tensor:
        policy = torch.softmax(apply(params, x), dim=1)
        even, least = costs.mean((0, 2)), costs.amin(2).mean(0)
        return ((even - (policy[:, None] * costs).sum(2).mean(0)) / (even - least)).clamp(min=0)

    init, even = lambda g: network(g, 5, 16, actions), lambda x, costs, *_: costs.mean((0, 2))  # actions drawn evenly
    return Problem(data, init, losses, even, scores, ("saved of cost 1", "saved of cost 2"), m=2, batch=128)


CODE, AMPLE = 4, 20.0  # the numbers of a code, and nats that are ample for it
ANEW = 8  # how many codes of each training image are drawn


def beta_vae() -> Problem:
    """Give digits back from a noisy code of four numbers (squared error), and let the code say little (its divergence
    from a standard normal distribution, in nats; Higgins et al., 2017, equation 4).
    """
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

    def part(params: Params, prefix: str) -> Params:
        return {name.removeprefix(prefix): value for name, value in params.items() if name.startswith(prefix)}

    def values(params: Params, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_variance = apply(part(params, "to_"), x).chunk(2, dim=-1)
        again = apply(part(params, "from_"), mean + (log_variance / 2).exp() * noise)
        return again, (mean.square() + log_variance.exp() - log_variance - 1).sum(-1).mean() / 2

    def losses(params: Params, x: Tensor, noise: Tensor) -> Tensor:
        again, nats = values(params, x, noise)
        return torch.stack([(again - x).square().mean(), nats])

    def scores(params: Params, x: Tensor, noise: Tensor) -> Tensor:
        again, nats = values(params, x, noise)
        return torch.stack([explained(again.flatten(), x.flatten()), (1 - nats / AMPLE).clamp(min=0)])

    constant = lambda x, noise: torch.stack([x.var(0).mean(), torch.tensor(AMPLE)])
    return Problem(data, init, losses, constant, scores, ("R² of the image", "1 - nats / 20"), m=2)
