"""The demo: three tasks in three units on one trunk, under several rules. Run it: `python -m functional_jd`.

Two handwritten digits overlap in one small image. One convolutional trunk serves three tasks: name the left digit, name
the right digit, and redraw the image. Their losses are in different units: that of the left digit is multiplied by
0.001, that of the image by 1e-9. Training is in mixed precision, with one loss scale per task. Every rule starts from
the same parameters and uses the same batches.

Under mean, the trunk learns what the right digit needs, whose loss has the largest unit, and little for the others.
Under config the units do not matter: every task has the same cosine with the direction.
"""

import inspect
import math
import sys
from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy, linear, mse_loss, pad

import functional_jd as jd
from functional_jd.core.record_display import as_text
from functional_jd.random import key, normal, permutation, split, uniform

TRAIN_IMAGES, TEST_IMAGES = 2048, 1000
WIDTH = 32  # the number of features
BATCH_SIZE = 64
LEARNING_RATE = 5e-3
GREY_LEVELS = 16  # the range of pixel values in the data set


class Tasks(NamedTuple):
    """One value per task, in the order of the rows."""

    left: Any
    right: Any
    reconstruction: Any


UNITS = Tasks(1e-3, 1.0, 1e-9)  # 1e-9: in float16 these gradients underflow to zero unless they are scaled

NAMES = ("left digit", "right digit", "reconstruction")

RESULTS = {
    "test accuracy, left digit": "{:.1%}",
    "test accuracy, right digit": "{:.1%}",
    f"test reconstruction, rms error (of {GREY_LEVELS} grey levels)": "{:.2f}",
}
"""The test results, and how they are written."""


class Report(NamedTuple):
    """Training under one rule: the test results after every epoch, the steps, those skipped, the last loss scales."""

    results: list[list[float]]
    steps: int
    skipped: int
    scales: list[float]


# On the meta device, as the module only defines the shapes: all values are drawn from keys.
TRUNK = nn.Sequential(
    *(nn.Conv2d(1, 8, 3, padding=1, device="meta"), nn.GroupNorm(4, 8, device="meta"), nn.ReLU()),
    *(nn.Conv2d(8, 16, 3, padding=1, stride=2, device="meta"), nn.GroupNorm(4, 16, device="meta"), nn.ReLU()),
    *(nn.Flatten(), nn.Linear(16 * 4 * 6, WIDTH, device="meta"), nn.ReLU()),
)


def features(shared: dict[str, Tensor], x: Tensor, _: Tensor) -> Tensor:
    """Compute the features with the trunk."""
    return functional_call(TRUNK, shared, (x,))


def predictions(heads: dict[str, Any], z: Tensor) -> Tasks:
    """Compute the logits of the left digit, the logits of the right digit, and the image."""
    return Tasks(*(linear(z, **heads[task]) for task in Tasks._fields))


def task_losses(heads: dict[str, Any], z: Tensor, x: Tensor, y: Tensor) -> Tasks:
    """Compute the three losses."""
    left, right, image = predictions(heads, z)
    values = cross_entropy(left, y[:, 0]), cross_entropy(right, y[:, 1]), mse_loss(image, x.flatten(1))
    return Tasks(*(unit * value for unit, value in zip(UNITS, values, strict=True)))


EXACT = jd.multitask(features, task_losses)


def initial_params(key: Tensor) -> dict[str, Any]:
    """Draw the weights of the trunk with variance 2 / fan-in (for ReLU); the heads start at zero."""
    shared: dict[str, Tensor] = {}
    parameters = dict(TRUNK.named_parameters())
    for weight_key, (name, p) in zip(split(key, len(parameters)), parameters.items(), strict=True):
        if p.ndim > 1:
            shared[name] = normal(weight_key, p.shape) * math.sqrt(2 / p[0].numel())
        else:
            shared[name] = torch.full(p.shape, float("weight" in name), device=key.device)
    outputs = zip(Tasks._fields, (10, 10, 8 * 12), strict=True)
    with key.device:
        heads = {task: {"weight": torch.zeros(n, WIDTH), "bias": torch.zeros(n)} for task, n in outputs}
    return {"shared": shared, "heads": heads}


def two_digits(key: Tensor, digits: Tensor, labels: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Create images `[n, 1, 8, 12]` of two digits, which overlap in four columns, and the digits `[n, 2]`."""
    left, right = ((uniform(side_key, (n,)) * len(digits)).long() for side_key in split(key))
    x = torch.maximum(pad(digits[left], (0, 4)), pad(digits[right], (4, 0)))
    return x[:, None], torch.stack([labels[left], labels[right]], dim=1)


def train_and_test_images(key: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Create a training and a test set from disjoint sets of handwritten digits."""
    from sklearn.datasets import load_digits

    dataset: Any = load_digits()
    digits = torch.tensor(dataset.images / GREY_LEVELS, dtype=torch.float32, device=key.device)
    labels = torch.tensor(dataset.target, device=key.device)
    order_key, train_key, test_key = split(key, 3)
    test, train = permutation(order_key, len(digits)).split([len(digits) // 5, len(digits) - len(digits) // 5])
    train_images = two_digits(train_key, digits[train], labels[train], TRAIN_IMAGES)
    return train_images, two_digits(test_key, digits[test], labels[test], TEST_IMAGES)


def train(rule: str, settings: Namespace) -> Report:
    """Train under one rule. The same settings give the same results."""
    image_key, param_key, order_key = split(settings.seed.to(settings.device), 3)
    (x, y), test = train_and_test_images(image_key)
    losses = EXACT
    if settings.dtype != "float32":
        losses = jd.multitask(*(jd.autocast(f, getattr(torch, settings.dtype)) for f in (features, task_losses)))
    optimizer = jd.adamw(LEARNING_RATE, eps=1e-20)  # far below the direction, whose entries are tiny for one head
    method: dict[str, Any] = {"losses": losses, "aggregator": RULES[rule](), "optimizer": optimizer}
    scale = jd.scale_state(2.0**24, shape=(3,), growth_interval=32, device=settings.device)
    state = jd.train_state(initial_params(param_key), x[:BATCH_SIZE], y[:BATCH_SIZE], scale=scale, **method)

    infos: list[jd.StepInfo] = []
    results: list[list[float]] = []
    for epoch_key in split(order_key, settings.epochs):
        batches = ((x[rows], y[rows]) for rows in permutation(epoch_key, len(x)).split(BATCH_SIZE))
        state = jd.fit(partial(jd.step, **method), state, batches, on_step=infos.append)
        results.append(tested(state.params, test))
    return Report(results, len(infos), sum(not info.finite.all() for info in infos), state.scale.scale.tolist())


@torch.no_grad()
def tested(params: dict[str, Any], test: tuple[Tensor, Tensor]) -> list[float]:
    """Evaluate the parameters on a set of images, in float32: the numbers of `RESULTS`."""
    image_error = EXACT(params, *test).reconstruction.item() / UNITS.reconstruction
    left, right, _ = predictions(params["heads"], features(params["shared"], *test))
    hits = torch.stack([left.argmax(1), right.argmax(1)], dim=1) == test[1]
    return [*hits.double().mean(0).tolist(), GREY_LEVELS * math.sqrt(image_error)]


def table(reports: dict[str, Report]) -> str:
    """Return the results as a text table, one column per rule, and a summary."""
    labels = ["after training", *RESULTS, "skipped steps", *(f"final scale, {name}" for name in NAMES)]
    columns = [
        [
            rule,
            *map(str.format, RESULTS.values(), report.results[-1]),
            f"{report.skipped} of {report.steps}",
            *(f"2^{math.log2(scale):.0f}" for scale in report.scales),
        ]
        for rule, report in reports.items()
    ]
    headers, *rows = [list(row) for row in zip(labels, *columns, strict=True)]
    seen = ", ".join(f"{report.results[-1][0]:.1%} under {rule}" for rule, report in reports.items())
    return f"""{as_text(("", headers, rows))}

The left digit, whose loss is multiplied by {UNITS.left:g}, is named right in {seen}.
Skipped steps find the loss scales: if a gradient overflows in float16, the step is skipped and that scale halved."""


def builds_rule(build: Any) -> bool:
    """Return whether this function builds a rule without arguments, for one batch per step."""
    if not inspect.isfunction(build) or (signature := inspect.signature(build)).return_annotation is not jd.Aggregator:
        return False
    return all(p.default is not p.empty for p in signature.parameters.values()) and build().view.batches == 1


RULES = {name: getattr(jd, name) for name in jd.__all__ if builds_rule(getattr(jd, name))}


def flag(expected: str, read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return the parser of a flag: what `read` returns, or an error that tells what was expected."""

    def parse(text: str) -> Any:
        with suppress(ValueError, RuntimeError, AssertionError, TypeError, NotImplementedError):
            if (value := read(text)) is not None:
                return value
        raise ArgumentTypeError(f"expected {expected}, found {text!r}")

    return parse


def settings_from(arguments: Sequence[str] | None) -> Namespace:
    """Parse the command line."""
    # Without the usage, an error is one line.
    parser = ArgumentParser("python -m functional_jd", SUPPRESS, __doc__, formatter_class=RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--rule", choices=RULES, nargs="+", action="extend", metavar="NAME",
        help=f"one or more rules (default: mean config). Some of {', '.join(RULES)}")  # fmt: skip
    add("--dtype", choices=("float16", "bfloat16", "float32"), default="float16",
        help="the dtype of autocast; float32 is full precision (default: %(default)s)")  # fmt: skip
    count = flag("a whole number of at least 1", lambda text: max(int(text), 0) or None)
    add("--epochs", type=count, default=6, help="passes through the training images (default: %(default)s)")
    read = lambda text: torch.ones((), dtype=torch.float64, device=text).item() and torch.device(text)
    device = flag("an available device with float64", read)
    add("--device", type=device, default="cpu", help="the device (default: %(default)s)")
    add("--seed", type=flag("a whole number of at most 64 bits", lambda text: key(int(text))), default="0",
        help="the seed of images, parameters and batches (default: %(default)s)")  # fmt: skip
    given = parser.parse_args(arguments)
    given.rule = list(dict.fromkeys(given.rule or ["mean", "config"]))
    if find_spec("sklearn") is None:
        parser.exit(1, f'{parser.prog}: needs sklearn. Install it: pip install "functional_jd[demo]"\n')
    return given


def main(arguments: Sequence[str] | None = None) -> int:
    """Train under every rule, and print the results; returns the exit code."""
    settings = settings_from(arguments)
    print(f"training under {' and '.join(settings.rule)}: {settings.epochs} epochs each", flush=True)
    print(table({rule: train(rule, settings) for rule in settings.rule}))
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)  # for tensors this small, one thread is faster than several
    sys.exit(main())
