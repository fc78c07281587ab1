"""The problems of the study: small enough for one CPU core, and different in what is hard about them."""

from math import pi

import torch
from study_problem import (
    Params,
    Problem,
    accuracy,
    always,
    apply,
    closeness,
    data_set,
    explained,
    network,
    sampler,
    splits,
    standardized,
)
from torch import Tensor
from torch.nn.functional import avg_pool2d, cross_entropy, log_softmax, pad


def units() -> Problem:
    """Two tasks on the digits; the unit of one loss is 1e-9, that of the other 1e3."""
    found = data_set("digits")
    x = torch.tensor(found.data / 16, dtype=torch.float32)
    right = x.reshape(-1, 8, 8)[:, :, 5:].flatten(1)  # the columns to be guessed from the others
    x = x.reshape(-1, 8, 8)[:, :, :5].flatten(1)
    parts = splits(x, torch.tensor(found.target), right)

    def losses(params: Params, x: Tensor, label: Tensor, right: Tensor) -> Tensor:
        out = apply(params, x)
        return torch.stack([1e-9 * cross_entropy(out[:, :10], label), 1e3 * (out[:, 10:] - right).square().mean()])

    def scores(params: Params, split: str) -> Tensor:
        x, label, right = parts[split]
        out = apply(params, x)
        return torch.stack([accuracy(out[:, :10], label), explained(out[:, 10:].flatten(), right.flatten())])

    return Problem(
        "digits in two units",
        "Five columns of a digit are seen: name the digit (cross entropy, times 1e-9) and guess the other three "
        "columns (squared error, times 1000).",
        losses,
        lambda g: network(g, 40, 32, 34),
        sampler(parts["train"], 64),
        scores,
        ("accuracy", "R² of the columns"),
        m=2,
        steps=300,
    )


def noisy_labels() -> Problem:
    """Digits, an objective for each example of a batch; four labels in ten are wrong."""
    found = data_set("digits")
    x, y = torch.tensor(found.data / 16, dtype=torch.float32), torch.tensor(found.target)
    parts = splits(x, y)
    g = torch.Generator().manual_seed(1)
    x, y = parts["train"]
    wrong = torch.rand(len(y), generator=g) < 0.4
    y = torch.where(wrong, torch.randint(10, y.shape, generator=g), y)

    def losses(params: Params, x: Tensor, label: Tensor) -> Tensor:
        return cross_entropy(apply(params, x), label, reduction="none")

    def scores(params: Params, split: str) -> Tensor:
        x, label = parts[split]
        return accuracy(apply(params, x), label)[None]

    return Problem(
        "noisy labels",
        "Digits, and an objective for every example of a batch of 16; four labels in ten are drawn at random. "
        "Validation and test have clean labels. Fixed weights mean nothing here, so the grid is `mean()` alone.",
        losses,
        lambda g: network(g, 64, 32, 10),
        sampler((x, y), 16),
        scores,
        ("accuracy",),
        m=16,
        steps=300,
        exchangeable=True,
    )


def two_digits() -> Problem:
    """Two digits overlap in one image: name both, and reconstruct the image."""
    found = data_set("digits")
    images, labels = torch.tensor(found.images / 16, dtype=torch.float32), torch.tensor(found.target)
    own = splits(images, labels)
    g = torch.Generator().manual_seed(2)
    parts = {}
    for name, (image, label) in own.items():
        n = 2000 if name == "train" else 1000
        left, right = (torch.randint(len(label), (n,), generator=g) for _ in "12")
        x = torch.maximum(pad(image[left], (0, 4)), pad(image[right], (4, 0)))
        parts[name] = (x.flatten(1), label[left], label[right], avg_pool2d(x[:, None], 2).flatten(1))

    def losses(params: Params, x: Tensor, left: Tensor, right: Tensor, small: Tensor) -> Tensor:
        out = apply(params, x)
        both = [cross_entropy(out[:, :10], left), cross_entropy(out[:, 10:20], right)]
        return torch.stack([*both, (out[:, 20:] - small).square().mean()])

    def scores(params: Params, split: str) -> Tensor:
        x, left, right, small = parts[split]
        out = apply(params, x)
        both = [accuracy(out[:, :10], left), accuracy(out[:, 10:20], right)]
        return torch.stack([*both, explained(out[:, 20:].flatten(), small.flatten())])

    return Problem(
        "two digits",
        "Two digits overlap in an image of 8 x 12: name the left one, name the right one, reconstruct the "
        "image at half the resolution.",
        losses,
        lambda g: network(g, 96, 32, 44),
        sampler(parts["train"], 64),
        scores,
        ("accuracy left", "accuracy right", "R² of the image"),
        m=3,
        steps=300,
    )


def tabular(
    name: str, about: str, x: Tensor, y: Tensor, scored: tuple[str, ...], rates: tuple[float, float, float]
) -> Problem:
    """Regression of several columns, each in its own unit, by one network that starts at their means."""
    parts = standardized(splits(x, y))
    shift = parts["train"][1].mean(0)
    unit = parts["train"][1].std(0)

    def losses(params: Params, x: Tensor, y: Tensor) -> Tensor:
        return ((shift + unit * apply(params, x)) - y).square().mean(0)

    def scores(params: Params, split: str) -> Tensor:
        x, y = parts[split]
        return explained(shift + unit * apply(params, x), y)

    init = lambda g: network(g, x.shape[1], 24, y.shape[1])
    batch = sampler(parts["train"], 64)
    return Problem(name, about, losses, init, batch, scores, scored, m=y.shape[1], steps=300, rates=rates)


def diabetes() -> Problem:
    """Three measurements of 442 patients, from seven others."""
    found = data_set("diabetes", scaled=False)
    data = torch.tensor(found.data, dtype=torch.float32)
    y = torch.cat([torch.tensor(found.target, dtype=torch.float32)[:, None], data[:, [2, 3]]], dim=1)
    return tabular(
        "diabetes",
        "442 patients: the progress of the disease, the body mass index and the blood pressure, each in its own unit, "
        "from eight other measurements. Most of the variance is noise.",
        data[:, [0, 1, 4, 5, 6, 7, 8, 9]],
        y,
        ("R² progress", "R² mass", "R² pressure"),
        (1e-3, 4e-3, 1.6e-2),  # three hundred patients are soon known by heart
    )


def tumours() -> Problem:
    """The worst values of five measurements, from the means and deviations of ten."""
    found = data_set("breast_cancer")
    data = torch.tensor(found.data, dtype=torch.float32)
    names = ("radius", "texture", "area", "smoothness", "concavity")
    return tabular(
        "tumours",
        "569 tumours: the largest radius, texture, area, smoothness and concavity of the cells, each in its own unit, "
        "from the means. Squared errors of areas are some 1e8 times those of smoothness.",
        data[:, :20],
        data[:, [20, 21, 23, 24, 26]],
        tuple(f"R² {name}" for name in names),
        (4e-3, 1.6e-2, 6.4e-2),
    )


def unbalanced() -> Problem:
    """Four tasks on one small trunk, with losses of different sizes and of different difficulty."""
    g = torch.Generator().manual_seed(3)
    x = 2 * torch.rand(3000, 4, generator=g) - 1
    turn = torch.randn(4, 4, generator=g) / 2
    frequencies, sizes = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([30.0, 1.0, 10.0, 0.1])
    y = torch.sin(frequencies * (x @ turn) + 0.3) * sizes
    parts = splits(x, y + 0.1 * sizes * torch.randn(y.shape, generator=g))

    def losses(params: Params, x: Tensor, y: Tensor) -> Tensor:
        return (sizes * apply(params, x) - y).square().mean(0)

    def scores(params: Params, split: str) -> Tensor:
        x, y = parts[split]
        return explained(sizes * apply(params, x), y)

    return Problem(
        "unbalanced tasks",
        "Four made-up regressions on a trunk of 16 units, sines of rising frequency with amplitudes 30, 1, 10 and 0.1.",
        losses,
        lambda g: network(g, 4, 16, 16, 4),
        sampler(parts["train"], 64),
        scores,
        tuple(f"R² {i}" for i in range(4)),
        m=4,
        steps=300,
    )


def fairness() -> Problem:
    """A classifier that should be accurate, and should say yes as often in both groups; its data make that hard."""
    g = torch.Generator().manual_seed(4)
    group = (torch.rand(4000, generator=g) < 0.4).long()
    x = torch.randn(4000, 8, generator=g)
    x[:, :3] += 0.8 * group[:, None]
    label = (x.sum(1) / 2 + torch.randn(4000, generator=g) > 0.5).long()
    parts = splits(torch.cat([x, group[:, None]], dim=1), label, group)

    def losses(params: Params, x: Tensor, label: Tensor, group: Tensor) -> Tensor:
        out = apply(params, x)
        yes = torch.softmax(out, dim=1)[:, 1]
        rate = [(yes * (group == k)).sum() / (group == k).sum().clamp(min=1) for k in (0, 1)]
        return torch.stack([cross_entropy(out, label), (rate[1] - rate[0]).square()])

    def scores(params: Params, split: str) -> Tensor:
        x, label, group = parts[split]
        out = apply(params, x)
        yes = (out.argmax(1) == 1).float()
        rate = [(yes * (group == k)).sum() / (group == k).sum() for k in (0, 1)]
        return torch.stack([accuracy(out, label), 1 - (rate[1] - rate[0]).abs()])

    return Problem(
        "fairness",
        "Made-up data in which a group has more positive labels: be accurate, and say yes equally often in both "
        "groups. No classifier is best in both.",
        losses,
        lambda g: network(g, 9, 16, 2),
        sampler(parts["train"], 128),
        scores,
        ("accuracy", "1 - gap"),
        m=2,
        steps=200,
    )


def bandit() -> Problem:
    """A policy gradient with two rewards that want different actions."""
    g = torch.Generator().manual_seed(5)
    actions, size = 6, 128
    wanted = [torch.randn(5, actions, generator=g), torch.randn(5, actions, generator=g)]
    wanted[1] = 0.4 * wanted[0] + 0.9 * wanted[1]
    scale = (1.0, 50.0)

    def costs(x: Tensor) -> list[Tensor]:
        """What each action costs, in both objectives: positive."""
        return [c * torch.sigmoid(-x @ w) for c, w in zip(scale, wanted, strict=True)]

    contexts = {name: torch.randn(2000, 5, generator=g) for name in ("validation", "test")}

    def batch(generator: torch.Generator) -> tuple[Tensor, ...]:
        gumbel = -torch.log(-torch.log(torch.rand(size, actions, generator=generator).clamp(1e-6, 1 - 1e-6)))
        return torch.randn(size, 5, generator=generator), gumbel, torch.rand(size, 2, generator=generator)

    def losses(params: Params, x: Tensor, gumbel: Tensor, noise: Tensor) -> Tensor:
        """Mean costs of drawn actions, whose gradients are the policy gradient with the batch mean as baseline."""
        logits = apply(params, x)
        chosen = ((logits.detach() + gumbel).argmax(1, keepdim=True) == torch.arange(actions)).to(x.dtype)
        chance = (log_softmax(logits, dim=1) * chosen).sum(1)
        factor = torch.exp(chance - chance.detach())
        seen = [(c * chosen).sum(1) * 2 * noise[:, i] for i, c in enumerate(costs(x))]
        return torch.stack([(factor * (c - c.mean())).mean() + c.mean() for c in seen])

    def scores(params: Params, split: str) -> Tensor:
        x = contexts[split]
        policy = torch.softmax(apply(params, x), dim=1)
        found = []
        for cost in costs(x):
            uniform, best = cost.mean(), cost.amin(1).mean()
            found.append((uniform - (policy * cost).sum(1).mean()) / (uniform - best))
        return torch.stack(found).clamp(min=0)

    return Problem(
        "two rewards",
        "A policy gradient (REINFORCE, contextual bandit, six actions): two noisy costs, of which one is 50 times the "
        "other, and which want different actions. Scores: the share of what the best policy for that cost alone saves.",
        losses,
        lambda g: network(g, 5, 16, actions),
        batch,
        scores,
        ("saved of cost 1", "saved of cost 2"),
        m=2,
        steps=300,
    )


def with_slopes(params: Params, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A network's values `[n]`, first and second derivatives `[2, n]` along both inputs: layer by layer, no graph."""
    h, first, second = x, torch.eye(2)[:, None].expand(2, *x.shape), torch.zeros(2, *x.shape)
    last = len(params) // 2 - 1
    for i in range(last + 1):
        w = params[f"w{i}"]
        h, first, second = h @ w + params[f"b{i}"], first @ w, second @ w
        if i < last:
            h = torch.tanh(h)
            slope = 1 - h.square()
            first, second = slope * first, slope * second - 2 * h * slope * first.square()
    return h[:, 0], first[..., 0], second[..., 0]


def burgers() -> Problem:
    """`u_t + u u_x = nu u_xx` from minus a sine, with the solution of Cole and Hopf."""
    viscosity = 0.05
    g = torch.Generator().manual_seed(6)
    low, high = torch.tensor([0.0, -1.0]), torch.tensor([1.0, 1.0])
    inside, start, edge = (low + (high - low) * torch.rand(n, 2, generator=g) for n in (80, 32, 24))
    start[:, 0], edge[:, 1] = 0, edge[:, 1].sign()

    def losses(params: Params, inside: Tensor, start: Tensor, edge: Tensor) -> Tensor:
        u, first, second = with_slopes(params, inside)
        residual = first[0] + u * first[1] - viscosity * second[1]
        begin = apply(params, start)[:, 0] + torch.sin(pi * start[:, 1])
        return torch.stack([residual.square().mean(), begin.square().mean(), apply(params, edge).square().mean()])

    points = {name: low + (high - low) * torch.rand(1000, 2, generator=g) for name in ("validation", "test")}
    exact = {name: _cole_hopf(x, viscosity) for name, x in points.items()}
    return Problem(
        "Burgers",
        "A network solves the equation of Burgers (viscosity 0.05): equation, start and edge. Score: one minus the "
        "relative L2 error against the solution of Cole and Hopf.",
        losses,
        lambda g: network(g, 2, 16, 16, 1),
        always(inside, start, edge),
        lambda params, split: closeness(apply(params, points[split])[:, 0], exact[split])[None],
        ("closeness",),
        m=3,
        steps=250,
        rates=(4e-3, 1.2e-2, 3.6e-2),
    )


def _cole_hopf(x: Tensor, viscosity: float) -> Tensor:
    """The solution at points (t, x), an integral over the line by the trapezoidal rule."""
    t, place = x.double()[:, :1].clamp(min=1e-4), x.double()[:, 1:]
    step = (4 * viscosity * t).sqrt() * torch.linspace(-6, 6, 2001, dtype=torch.float64)
    y = place - step
    log_weight = -torch.cos(pi * y) / (2 * pi * viscosity) - step.square() / (4 * viscosity * t)
    weight = torch.softmax(log_weight, dim=1)
    return -(weight * torch.sin(pi * y)).sum(1).float()


def helmholtz() -> Problem:
    """`u_xx + u_yy + u = q` on a square, with zeros at its edge."""
    g = torch.Generator().manual_seed(7)
    inside, edge = (2 * torch.rand(n, 2, generator=g) - 1 for n in (80, 48))
    side = torch.arange(48) % 2
    edge[torch.arange(48), side] = edge[torch.arange(48), side].sign()
    a, b = 1, 1

    def exact(x: Tensor) -> Tensor:
        return torch.sin(a * pi * x[:, 0]) * torch.sin(b * pi * x[:, 1])

    source = (1 - (a * pi) ** 2 - (b * pi) ** 2) * exact(inside)

    def losses(params: Params, inside: Tensor, source: Tensor, edge: Tensor) -> Tensor:
        u, _, second = with_slopes(params, inside)
        return torch.stack([(second.sum(0) + u - source).square().mean(), apply(params, edge).square().mean()])

    points = {name: 2 * torch.rand(1000, 2, generator=g) - 1 for name in ("validation", "test")}
    return Problem(
        "Helmholtz",
        "A network solves the equation of Helmholtz on a square: equation and edge, the first loss some 1000 times the "
        "second. Score: one minus the relative L2 error.",
        losses,
        lambda g: network(g, 2, 16, 16, 1),
        always(inside, source, edge),
        lambda params, split: closeness(apply(params, points[split])[:, 0], exact(points[split]))[None],
        ("closeness",),
        m=2,
        steps=250,
        rates=(4e-3, 1.2e-2, 3.6e-2),
    )


PROBLEMS = {
    build.__name__: build
    for build in (
        *(units, two_digits, noisy_labels, diabetes, tumours, unbalanced, fairness, bandit),
        *(burgers, helmholtz),
    )
}
