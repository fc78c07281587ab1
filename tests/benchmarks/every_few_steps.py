"""`python tests/benchmarks/every_few_steps.py`: what a rule every k steps costs in quality, and saves in time."""

from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from page import table
from sklearn.datasets import load_digits
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import cross_entropy, linear, mse_loss
from tqdm import tqdm

import functional_jd as jd
from functional_jd.__main__ import features as trunk_of_images
from functional_jd.__main__ import initial_params, predictions, train_and_test_images
from functional_jd.random import key, normal, permutation, split

SEEDS, EPOCHS, BATCH = 5, 8, 64
RULES = {"mean": jd.mean, "upgrad": jd.upgrad, "config": jd.config, "imtl_g": jd.imtl_g}
ALTERNATING = "alternating(config())"
EVERY = {"mean": (1,), "upgrad": (1, 8, 32), "config": (1, 8, 32), ALTERNATING: (1,), "imtl_g": (1, 8, 32)}


class Problem(NamedTuple):
    """A training set, losses on a batch of it, and figures on a test set, by name."""

    params: Any
    data: tuple[Tensor, ...]
    losses: Any
    figures: Callable[[Any], dict[str, float]]


def two_digits(seed: int) -> Problem:
    """Left digit, right digit and the image, whose loss has another unit (grey levels): one convolutional trunk."""
    data_key, param_key = split(key(seed))
    (x, y), (x_test, y_test) = train_and_test_images(data_key)

    def heads(own: Any, z: Tensor, x: Tensor, y: Tensor) -> Any:
        left, right, image = predictions(own, z)
        parts = cross_entropy(left, y[:, 0]), cross_entropy(right, y[:, 1]), 256 * mse_loss(image, x.flatten(1))
        return dict(zip(("left", "right", "image"), parts, strict=True))

    def figures(params: Any) -> dict[str, float]:
        left, right, image = predictions(params["heads"], trunk_of_images(params["shared"], x_test, y_test))
        hits = [(scores.argmax(1) == y_test[:, i]).double().mean() for i, scores in enumerate((left, right))]
        error = 16 * (image - x_test.flatten(1)).square().mean().sqrt()
        return {"left, %": 100 * float(hits[0]), "right, %": 100 * float(hits[1]), "image, grey levels": float(error)}

    return Problem(initial_params(param_key), (x, y), jd.multitask(trunk_of_images, heads), figures)


def digit_and_brightness(seed: int) -> Problem:
    """A digit, and how bright its image is, in units that make the loss a thousand times larger: one linear trunk."""
    bundle: Any = load_digits()
    images = torch.tensor(bundle.data / 16, dtype=torch.float32)
    digits, brightness = torch.tensor(bundle.target), 1000 * images.mean(1)
    order_key, *param_keys = split(key(seed), 3)
    test, train = permutation(order_key, len(images)).split([400, len(images) - 400])
    trunk = torch.nn.Sequential(torch.nn.Linear(64, 64, device="meta"), torch.nn.ReLU())
    shared = {"0.weight": normal(param_keys[0], (64, 64)) / 6, "0.bias": torch.zeros(64)}
    own = {name: {"weight": torch.zeros(n, 64), "bias": torch.zeros(n)} for name, n in (("digit", 10), ("light", 1))}

    def features(shared: Any, x: Tensor, *_: Tensor) -> Tensor:
        return functional_call(trunk, shared, (x,))

    def heads(own: Any, z: Tensor, x: Tensor, digit: Tensor, light: Tensor) -> Any:
        error = linear(z, **own["light"])[:, 0] * 1000 - light
        return {"digit": cross_entropy(linear(z, **own["digit"]), digit), "light": error.square().mean()}

    def figures(params: Any) -> dict[str, float]:
        z = features(params["shared"], images[test])
        hits = (linear(z, **params["heads"]["digit"]).argmax(1) == digits[test]).double().mean()
        error = linear(z, **params["heads"]["light"])[:, 0] * 1000 - brightness[test]
        explained = 1 - error.square().mean() / brightness[test].var()
        return {"digit, %": 100 * float(hits), "brightness, % explained": 100 * float(explained)}

    data = images[train], digits[train], brightness[train]
    return Problem({"shared": shared, "heads": own}, data, jd.multitask(features, heads), figures)


def trained(problem: Problem, name: str, every: int, seed: int) -> tuple[dict[str, float], float]:
    """The figures after training with a rule every so many steps, and the seconds that the steps took."""
    optimizer = jd.adamw(5e-3, eps=1e-20)
    if name == ALTERNATING:
        first = problem.losses(problem.params, *(x[:BATCH] for x in problem.data))
        fresh, trunk = jd.aggregators.alternating(jd.config(), len(first), lr=5e-3, eps=1e-20)
        optimizer = jd.by_label({"shared": trunk, "heads": optimizer}, lambda name, _: name.split(".")[0])
        repeated = fresh
    else:
        fresh, repeated = jd.held(RULES[name]()) if every > 1 else (RULES[name](),) * 2
    method = {"losses": problem.losses, "optimizer": optimizer}
    state = jd.train_state(problem.params, *(x[:BATCH] for x in problem.data), aggregator=fresh, **method)
    count, seconds = 0, 0.0
    for epoch_key in split(key(100 + seed), EPOCHS):
        for rows in permutation(epoch_key, len(problem.data[0])).split(BATCH):
            take = partial(jd.step, aggregator=repeated if count % every else fresh, **method)
            batch = [x[rows] for x in problem.data]
            start = perf_counter()
            state, _ = take(state, *batch)
            seconds += perf_counter() - start
            count += 1
    return problem.figures(state.params), seconds


def main() -> None:
    """Print one table per problem: medians over the seeds."""
    torch.set_num_threads(1)
    for build in (two_digits, digit_and_brightness):
        cases = [(name, every) for name in EVERY for every in EVERY[name]]
        found: dict[tuple[str, int], list[tuple[dict[str, float], float]]] = {case: [] for case in cases}
        for seed in tqdm(range(SEEDS), desc=build.__name__):
            problem = build(seed)
            for name, every in cases:  # in turns, so that all see the same load of the machine
                found[name, every].append(trained(problem, name, every, seed))
        names, rows = list(found["mean", 1][0][0]), []
        for (name, every), runs in found.items():
            values = [f"{median(figures[key] for figures, _ in runs):.1f}" for key in names]
            ratio = median(own / base for (_, own), (_, base) in zip(runs, found["mean", 1], strict=True))
            rows.append((f"`{name}`", str(every), *values, f"{ratio:.2f}"))
        print(f"\n{build.__doc__}\n\n{table(('rule', 'every', *names, 'time / `mean`'), rows, '---:')}")


if __name__ == "__main__":
    main()
