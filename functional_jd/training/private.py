"""Private training (DP-SGD): losses, rule and optimizer that fit one another."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from functional_jd.aggregators.auto_clipped import auto_clipped
from functional_jd.aggregators.clipped import clipped
from functional_jd.core.arguments import POSITIVE, check_number, check_option, refuse
from functional_jd.core.tree import floating_leaves
from functional_jd.objectives import PerExample
from functional_jd.optimizers.base import Optimizer
from functional_jd.optimizers.noised import check_noise, noised
from functional_jd.training.state import warn

_CLIPPINGS = {"flat": clipped, "automatic": lambda max_norm: auto_clipped(max_norm=max_norm)}
_OTHERS = "Leave it out. By layers: replace the aggregator by grouped({key: clipped(max_norm / k**0.5), ...})."


def private(
    loss: Callable[..., Any],
    *,
    max_norm: float | Tensor,
    noise_multiplier: float | Tensor,
    batch_size: float | Tensor,
    optimizer: Optimizer,
    key: Tensor,
    clipping: str = "flat",
) -> dict[str, Any]:
    """Build losses, rule and optimizer of private training (DP-SGD).

    The optimizer receives `(sum_i g_i min(1, max_norm / |g_i|) + noise_multiplier max_norm z) / batch_size`, with g_i
    the gradient of the loss of example i and z standard normal.

    Args:
        loss: `loss(params, *example) -> scalar` of one example, not a batch; or `per_example` of it, with `in_dims`.
        max_norm: the largest norm of an example's gradient; positive. A number or a tensor `[]`, as are the next two.
        noise_multiplier: the standard deviation of the noise in units of `max_norm`; not negative. The number 0 warns.
        batch_size: the expected number of examples in a batch, sampling rate times examples in all; positive.
        optimizer: receives the noisy mean: `sgd`, `adamw`, ...
        key: int64 `[2]`, from `functional_jd.random.key`; do not use it again.
        clipping: `"flat"` shortens the gradients that are longer than `max_norm` (`clipped`); `"automatic"` gives all
            of them nearly this norm (`auto_clipped`).

    Returns:
        `dict(losses=, aggregator=, optimizer=)`, for `train_state(params, *batch, **method)` and `step`.

    Raises:
        TypeError, ValueError: a setting out of range, an optimizer that compares losses or adds noise itself.

    Guarantees:
        Except for the noise, no example moves the optimizer's input by more than `max_norm / batch_size`, if nothing
        that all examples share depends on the data, such as an argument by `in_dims=None`.
        A batch without examples, as a Poisson sampler makes them, is a step of pure noise, with one loss of 0.

    Limits:
        Buffers get no noise: keep none that follow the examples. `info` is not private. The privacy spent is not
        counted: skipped steps count too. See `noised` and `clipped`.

    Source:
        Abadi et al., Deep learning with differential privacy, CCS 2016, arXiv 1607.00133, algorithm 1.
    """
    if not callable(loss) or (hasattr(loss, "each") and not isinstance(loss, PerExample)):
        refuse("loss", "the loss of one example, or per_example of it", loss, "Pass a function.")
    examples = loss if isinstance(loss, PerExample) else PerExample(loss, 0)
    check_option("clipping", clipping, tuple(_CLIPPINGS), _OTHERS)
    check_noise(optimizer, key, batch_size, noise_multiplier=noise_multiplier)
    check_number("max_norm", max_norm, POSITIVE, "A common value is 1.", tensors=True)
    if not isinstance(noise_multiplier, Tensor) and not noise_multiplier:
        warn("private: noise_multiplier 0 adds no noise, so that nothing is protected. A common value is 1.")
    return {
        "losses": PerExample(examples.loss, examples.in_dims, _NOTHING_LOST),
        "aggregator": _CLIPPINGS[clipping](max_norm),
        "optimizer": noised(optimizer, key, noise_multiplier, max_norm, batch_size),
    }


_NOTHING_LOST: Any = lambda params, *_: floating_leaves(params)[0][0].new_zeros(1)  # no parameter moves it
