"""The demo: three tasks in three units on one trunk, in float16, under several rules. `python -m functional_jd`."""

import inspect
import math
import os
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy, linear, mse_loss, pad

import functional_jd as jd
from functional_jd.random import key, normal, permutation, split, uniform

TRAIN_IMAGES, TEST_IMAGES = 2048, 1000
WIDTH = 32  # the number of features
LEARNING_RATE = 5e-3
GREY_LEVELS = 16  # the range of pixel values in the data set


class Tasks(NamedTuple):
    """One value per task, in the order of the rows."""

    left: Any
    right: Any
    reconstruction: Any


UNITS = Tasks(1e-3, 1.0, 1e-9)  # 1e-9: in float16 these gradients underflow to zero unless they are scaled

DESCRIPTION = f"""\
Two handwritten digits overlap in one small image. One convolutional trunk serves three tasks: classify the left digit,
classify the right digit, and reconstruct the image. Their losses are in different units: that of the left digit is
multiplied by {UNITS.left:g}, that of the reconstruction by {UNITS.reconstruction:g}. Training is in mixed precision,
with one loss scale per task. Every rule starts from the same parameters and uses the same batches.

Under mean, the trunk learns what the right digit needs, whose loss has the largest unit, and little for the others.
Under config the units do not matter: every task has the same cosine with the direction.

The demo shows a table with one column per rule: test accuracies and errors, skipped steps, and loss scales."""


class Score(NamedTuple):
    """Test results: accuracies, cross entropies in nats, root mean square error in grey levels."""

    accuracy: list[float]
    entropy: list[float]
    error: float


class Report(NamedTuple):
    """The results of training under one rule, for the table and the figure."""

    scores: list[Score]  # after every epoch
    steps: int
    skipped: int
    scales: list[float]


Images: TypeAlias = tuple[Tensor, Tensor]
"""Images of two digits `[n, 1, 8, 12]` from 0 to 1, and the digits `[n, 2]`."""

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


def two_digits(key: Tensor, digits: Tensor, labels: Tensor, n: int) -> Images:
    """Create images of two random digits, which overlap in four of their eight columns."""
    left, right = ((uniform(side_key, (n,)) * len(digits)).long() for side_key in split(key))
    x = torch.maximum(pad(digits[left], (0, 4)), pad(digits[right], (4, 0)))
    return x[:, None], torch.stack([labels[left], labels[right]], dim=1)


def train_and_test_images(key: Tensor) -> tuple[Images, Images]:
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
    image_key, param_key, order_key = split(key(settings.seed, device=settings.device), 3)
    (x, y), test = train_and_test_images(image_key)
    losses = EXACT
    if settings.dtype != "float32":
        losses = jd.multitask(*(jd.autocast(f, getattr(torch, settings.dtype)) for f in (features, task_losses)))
    optimizer = jd.adamw(LEARNING_RATE, eps=1e-20)  # far below the direction, whose entries are tiny for one head
    method: dict[str, Any] = {"losses": losses, "aggregator": RULES[rule](), "optimizer": optimizer}
    scale = jd.scale_state(2.0**24, shape=(3,), growth_interval=32, device=settings.device)
    first_batch = x[: settings.batch_size], y[: settings.batch_size]
    state = jd.train_state(initial_params(param_key), *first_batch, scale=scale, **method)

    finite: list[Tensor] = []
    scores: list[Score] = []
    for epoch_key in split(order_key, settings.epochs):
        for rows in permutation(epoch_key, len(x)).split(settings.batch_size):
            state, info = jd.step(state, x[rows], y[rows], **method)
            finite.append(info.finite.all())
        scores.append(score(state.params, test))
    return Report(scores, len(finite), int((~torch.stack(finite)).sum()), state.scale.scale.tolist())


@torch.no_grad()
def score(params: dict[str, Any], test: Images) -> Score:
    """Evaluate the parameters on a set of images, in float32."""
    losses = Tasks(*(loss.item() / unit for loss, unit in zip(EXACT(params, *test), UNITS, strict=True)))
    left, right, _ = predictions(params["heads"], features(params["shared"], *test))
    hits = torch.stack([left.argmax(1), right.argmax(1)], dim=1) == test[1]
    error = GREY_LEVELS * math.sqrt(losses.reconstruction)
    return Score(hits.double().mean(0).tolist(), [losses.left, losses.right], error)


def table(reports: dict[str, Report]) -> str:
    """Return the results as a text table, one column per rule."""
    rows: dict[str, Callable[[Score, Report], str]] = {
        "test accuracy, left digit": lambda last, _: f"{last.accuracy[0]:.1%}",
        "test accuracy, right digit": lambda last, _: f"{last.accuracy[1]:.1%}",
        "test cross entropy, left digit (nats)": lambda last, _: f"{last.entropy[0]:.3f}",
        "test cross entropy, right digit (nats)": lambda last, _: f"{last.entropy[1]:.3f}",
        f"test reconstruction, rms error (of {GREY_LEVELS} grey levels)": lambda last, _: f"{last.error:.2f}",
        "skipped steps": lambda _, report: f"{report.skipped} of {report.steps}",
        "final scale, left digit": lambda _, report: f"2^{math.log2(report.scales[0]):.0f}",
        "final scale, right digit": lambda _, report: f"2^{math.log2(report.scales[1]):.0f}",
        "final scale, reconstruction": lambda _, report: f"2^{math.log2(report.scales[2]):.0f}",
    }
    cells = {label: [show(report.scores[-1], report) for report in reports.values()] for label, show in rows.items()}
    width = max(len(cell) for column in (reports, *cells.values()) for cell in column) + 2
    lines = [
        label.ljust(max(map(len, rows))) + "".join(cell.rjust(width) for cell in row)
        for label, row in ({"": list(reports)} | cells).items()
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def conclusion(reports: dict[str, Report]) -> str:
    """Say what the table shows, and why steps were skipped."""
    seen = ", ".join(f"{report.scores[-1].accuracy[0]:.1%} under {rule}" for rule, report in reports.items())
    return f"""The left digit, whose loss is multiplied by {UNITS.left:g}, is named right in {seen}.
Skipped steps find the loss scales: where a gradient overflows in float16, the step is skipped and that scale halved."""


def draw(reports: dict[str, Report], file: Path) -> None:
    """Draw the learning curves: a panel for each task, a colour for each rule."""
    from matplotlib.figure import Figure

    axes: Any = (figure := Figure(figsize=(10, 3.2), layout="constrained")).subplots(1, 3)
    for rule, report in reports.items():
        curves = [(*(100 * accuracy for accuracy in score.accuracy), score.error) for score in report.scores]
        for ax, values in zip(axes, zip(*curves, strict=True), strict=True):
            ax.plot(range(1, len(values) + 1), values, marker=".", label=rule)
    labels = ("test accuracy (%)", "test accuracy (%)", f"rms test error (of {GREY_LEVELS} grey levels)")
    for ax, task, unit, label in zip(axes, ("left digit", "right digit", "reconstruction"), UNITS, labels, strict=True):
        top = 100 if "%" in label else None
        ax.set(title=f"{task}: loss times {unit:g}", xlabel="epoch", ylabel=label, ylim=(0, top))
        ax.xaxis.get_major_locator().set_params(integer=True)
        ax.grid(alpha=0.3)
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False)
    figure.savefig(file, dpi=100)


def builds_without_arguments(build: Any) -> bool:
    """Return whether this function builds a rule without arguments, for one batch per step."""
    if not inspect.isfunction(build) or (signature := inspect.signature(build)).return_annotation is not jd.Aggregator:
        return False
    return all(p.default is not p.empty for p in signature.parameters.values()) and build().view.batches == 1


RULES = {name: getattr(jd, name) for name in jd.__all__ if builds_without_arguments(getattr(jd, name))}


class Parser(ArgumentParser):
    """An argument parser whose errors are one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with code 2."""
        self.exit(2, f"{self.prog}: {message}\n")


def flag(expected: str, read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return the parser of a flag: what `read` returns, or an error that tells what was expected."""

    def parse(text: str) -> Any:
        try:
            return read(text)
        except (ValueError, RuntimeError, AssertionError, TypeError, NotImplementedError):
            raise ArgumentTypeError(f"expected {expected}, found {text!r}") from None

    return parse


def rule_names(text: str) -> list[str]:
    """Read names of rules, separated by commas."""
    names = [name.strip() for name in text.split(",")]
    if not set(names) <= RULES.keys():
        raise ValueError
    return names


def positive(text: str) -> int:
    """Read a whole number of at least 1."""
    if int(text) < 1:
        raise ValueError
    return int(text)


def seed(text: str) -> int:
    """Read the seed of a key."""
    key(int(text))
    return int(text)


def usable_device(text: str) -> torch.device:
    """Read an available device that supports float64, which Gramians need."""
    torch.ones((), dtype=torch.float64, device=text).item()
    return torch.device(text)


def writable_file(text: str) -> Path:
    """Read the path of a writable image file."""
    file = Path(text)
    target = file if file.exists() else file.parent
    if file.suffix not in {".png", ".pdf", ".svg", ".jpg"} or file.is_dir() or not os.access(target, os.W_OK):
        raise ValueError
    return file


def settings_from(arguments: Sequence[str] | None) -> Namespace:
    """Parse the command line."""
    parser = Parser("python -m functional_jd", None, DESCRIPTION, formatter_class=RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--rule", type=flag(f"some of {', '.join(RULES)}", rule_names), action="extend", metavar="NAME[,NAME]",
        help=f"one or more rules; may be repeated (default: mean,config). One of {', '.join(RULES)}")  # fmt: skip
    add("--dtype", choices=("float16", "bfloat16", "float32"), default="float16",
        help="the dtype of autocast; float32 is full precision (default: %(default)s)")  # fmt: skip
    count = flag("a whole number of at least 1", positive)
    add("--epochs", type=count, default=6, help="passes through the training images (default: %(default)s)")
    add("--batch-size", type=count, default=64, help="images per step (default: %(default)s)")
    device = flag("an available device with float64", usable_device)
    add("--device", type=device, default="cpu", help="the device (default: %(default)s)")
    add("--seed", type=flag("a whole number of at most 64 bits", seed), default=0,
        help="the seed of images, parameters and batches (default: %(default)s)")  # fmt: skip
    add("--plot", type=flag("a writable file ending in .png, .pdf, .svg or .jpg", writable_file), metavar="FILE",
        help="save the learning curves to FILE (default: no figure)")  # fmt: skip
    given = parser.parse_args(arguments)
    given.rule = list(dict.fromkeys(given.rule or ["mean", "config"]))
    for module, used in (("sklearn", True), ("matplotlib", given.plot is not None)):
        if used and find_spec(module) is None:
            parser.exit(1, f'{parser.prog}: needs {module}. Install it: pip install "functional_jd[demo]"\n')
    return given


def main(arguments: Sequence[str] | None = None) -> int:
    """Train under every rule, and print the results; returns the exit code."""
    settings = settings_from(arguments)
    print(f"training under {' and '.join(settings.rule)}: {settings.epochs} epochs each", flush=True)
    try:
        reports = {rule: train(rule, settings) for rule in settings.rule}
    except KeyboardInterrupt:
        print("interrupted: nothing to show", file=sys.stderr)
        return 130
    print(table(reports))
    print(f"\n{conclusion(reports)}")
    if settings.plot is not None:
        draw(reports, settings.plot)
        print(f"learning curves: {settings.plot}")
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)  # for tensors this small, one thread is faster than several
    sys.exit(main())
