"""The demo: three tasks in three units on one trunk, in float16, under several rules. `python -m functional_jd`."""

import inspect
import math
import os
import statistics
import sys
import time
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
CONFLICT_INTERVAL = 8  # the number of steps between two tests for conflicts
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

The demo shows a progress bar for each rule (in a terminal), then a table with one column per rule: test accuracies and
errors, skipped steps, how often tasks conflicted on the trunk, the loss scales, and the rounding errors they avoid."""


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
    conflicts: float
    scales: list[float]
    errors: list[float]  # of the reconstruction gradient: without a scale, with a shared scale, with its own scale
    seconds: float


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
    """Train under one rule. The same settings give the same results, except for the time."""
    from tqdm import tqdm

    image_key, param_key, order_key = split(key(settings.seed, device=settings.device), 3)
    (x, y), test = train_and_test_images(image_key)
    losses = EXACT
    if settings.dtype != "float32":
        losses = jd.multitask(*(jd.autocast(f, getattr(torch, settings.dtype)) for f in (features, task_losses)))
    aggregator = RULES[rule]()
    optimizer = jd.adamw(LEARNING_RATE, eps=1e-20)  # far below the direction, whose entries are tiny for one head
    scale = jd.scale_state(2.0**24, shape=(3,), growth_interval=32, device=settings.device)
    first_batch = x[: settings.batch_size], y[: settings.batch_size]
    state = jd.train_state(
        initial_params(param_key), *first_batch, losses=losses, aggregator=aggregator, optimizer=optimizer, scale=scale
    )

    skipped = torch.zeros((), dtype=torch.int64, device=settings.device)
    conflicts: list[Tensor] = []
    scores: list[Score] = []
    seconds: list[float] = []
    steps = settings.epochs * math.ceil(len(x) / settings.batch_size)
    with tqdm(total=steps, desc=rule, unit="step", disable=None) as bar:  # None: shown in a terminal only
        for epoch_key in split(order_key, settings.epochs):
            for rows in permutation(epoch_key, len(x)).split(settings.batch_size):
                batch = x[rows], y[rows]
                if len(seconds) % CONFLICT_INTERVAL == 0:
                    conflicts.append(conflicted(losses, state, batch))
                start = synchronized_time(settings.device)
                state, info = jd.step(state, *batch, losses=losses, aggregator=aggregator, optimizer=optimizer)
                seconds.append(synchronized_time(settings.device) - start)
                skipped += ~info.finite.all()
                bar.update()
                if not bar.disable and len(seconds) % CONFLICT_INTERVAL == 0:
                    bar.set_postfix({task: f"{loss.item():.2g}" for task, loss in info.losses._asdict().items()})
            scores.append(score(state.params, test))

    return Report(
        scores=scores,
        steps=len(seconds),
        skipped=int(skipped.item()),
        conflicts=torch.stack(conflicts).double().mean().item(),
        scales=state.scale.scale.tolist(),
        errors=reconstruction_errors(losses, state, first_batch),
        seconds=statistics.median(seconds),
    )


def conflicted(losses: Callable[..., Tasks], state: jd.TrainState, batch: Images) -> Tensor:
    """Return whether two tasks conflict on the trunk: a negative inner product of rows."""
    jacobian, _, _ = jd.jacobian_fn(losses, scale=state.scale)(state.params, *batch)
    return (jd.views.gramian(jacobian) < 0).any()


@torch.no_grad()
def score(params: dict[str, Any], test: Images) -> Score:
    """Evaluate the parameters on a set of images, in float32."""
    losses = Tasks(*(loss.item() / unit for loss, unit in zip(EXACT(params, *test), UNITS, strict=True)))
    left, right, _ = predictions(params["heads"], features(params["shared"], *test))
    hits = torch.stack([left.argmax(1), right.argmax(1)], dim=1) == test[1]
    error = GREY_LEVELS * math.sqrt(losses.reconstruction)
    return Score(hits.double().mean(0).tolist(), [losses.left, losses.right], error)


def reconstruction_errors(losses: Callable[..., Tasks], state: jd.TrainState, images: Images) -> list[float]:
    """Compute the relative errors of the reconstruction row: without a scale, with a shared scale, with its own."""

    def row(function: Callable[..., Tasks], scale: Tensor) -> Tensor:
        jacobian, _, _ = jd.jacobian_fn(function, scale=scale)(state.params, *images)
        return torch.cat([leaf[2].flatten() for leaf in jacobian.shared.values()])

    scales = state.scale.scale
    exact = row(EXACT, torch.ones_like(scales))
    shared_scale = scales.min().expand(3)  # limited by the largest gradients of all tasks
    rows = [row(losses, scale) for scale in (torch.ones_like(scales), shared_scale, scales)]
    return [((rounded - exact).norm() / exact.norm()).item() for rounded in rows]


def synchronized_time(device: torch.device) -> float:
    """Return the time after all work queued on the device is done."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


LABELS = (
    "",
    "test accuracy, left digit",
    "test accuracy, right digit",
    "test cross entropy, left digit (nats)",
    "test cross entropy, right digit (nats)",
    f"test reconstruction, rms error (of {GREY_LEVELS} grey levels)",
    f"conflicting tasks, share of every {CONFLICT_INTERVAL}th step",
    "skipped steps",
    "median time per step",
    "final scale, left digit",
    "final scale, right digit",
    "final scale, reconstruction",
    "error of its trunk gradient against float32: not scaled",
    "... with one scale for all tasks",
    "... with its own scale",
)


def column(rule: str, report: Report) -> list[str]:
    """Return the column of the table for one rule."""
    last = report.scores[-1]
    return [
        rule,
        *(f"{accuracy:.1%}" for accuracy in last.accuracy),
        *(f"{entropy:.3f}" for entropy in last.entropy),
        f"{last.error:.2f}",
        f"{report.conflicts:.0%}",
        f"{report.skipped} of {report.steps}",
        f"{1000 * report.seconds:.1f} ms",
        *(f"2^{math.log2(scale):.0f}" for scale in report.scales),
        *(f"{error:.1%}" for error in report.errors),
    ]


def table(reports: dict[str, Report]) -> str:
    """Return the results as a text table, one column per rule."""
    columns = [column(rule, report) for rule, report in reports.items()]
    width = max(len(cell) for cells in columns for cell in cells) + 2
    lines = [
        label.ljust(max(map(len, LABELS))) + "".join(cell.rjust(width) for cell in cells)
        for label, *cells in zip(LABELS, *columns, strict=True)
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


def rule_names(text: str) -> list[str]:
    """Parse names of rules, separated by commas."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in RULES:
            raise ArgumentTypeError(f"expected some of {', '.join(RULES)}, found {name!r}")
    return names


def positive(text: str) -> int:
    """Parse a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"expected a whole number of at least 1, found {text!r}")
    return int(text)


def seed(text: str) -> int:
    """Parse the seed of a key."""
    try:
        key(int(text))
    except ValueError:
        raise ArgumentTypeError(f"expected a whole number of at most 64 bits, found {text!r}") from None
    return int(text)


def usable_device(text: str) -> torch.device:
    """Parse an available device that supports float64, which Gramians need."""
    try:
        device = torch.device(text)
        torch.ones((), dtype=torch.float64, device=device).item()
    except (RuntimeError, AssertionError, TypeError, NotImplementedError):
        raise ArgumentTypeError(f"expected an available device with float64, found {text!r}") from None
    return device


def writable_file(text: str) -> Path:
    """Parse the path of a writable image file."""
    file = Path(text)
    target = file if file.exists() else file.parent
    if file.suffix not in {".png", ".pdf", ".svg", ".jpg"} or file.is_dir() or not os.access(target, os.W_OK):
        raise ArgumentTypeError(f"expected a writable file ending in .png, .pdf, .svg or .jpg, found {text!r}")
    return file


def settings_from(arguments: Sequence[str] | None) -> Namespace:
    """Parse the command line."""
    parser = Parser("python -m functional_jd", None, DESCRIPTION, formatter_class=RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--rule", type=rule_names, action="extend", metavar="NAME[,NAME]",
        help=f"one or more rules; may be repeated (default: mean,config). One of {', '.join(RULES)}")  # fmt: skip
    add("--dtype", choices=("float16", "bfloat16", "float32"), default="float16",
        help="the dtype of autocast; float32 is full precision (default: %(default)s)")  # fmt: skip
    add("--epochs", type=positive, default=6, help="passes through the training images (default: %(default)s)")
    add("--batch-size", type=positive, default=64, help="images per step (default: %(default)s)")
    add("--device", type=usable_device, default="cpu", help="the device (default: %(default)s)")
    add("--seed", type=seed, default=0,
        help="the seed of images, parameters and batches (default: %(default)s)")  # fmt: skip
    add("--plot", type=writable_file, metavar="FILE", help="save the learning curves to FILE (default: no figure)")
    given = parser.parse_args(arguments)
    given.rule = list(dict.fromkeys(given.rule or ["mean", "config"]))
    for module, used in (("sklearn", True), ("tqdm", True), ("matplotlib", given.plot is not None)):
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
