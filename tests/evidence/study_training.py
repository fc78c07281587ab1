"""Trainings of the study: all rates and draws of a method at once, by one vmap over train states."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from study_problem import Data, Params, Problem
from study_rules import Build, Method
from torch import Tensor

import functional_jd as jd
from functional_jd.aggregators.dwa import DwaState

LOOKS = 40  # the number of times that scores are taken, at most; `dwa` compares the losses between them
ETA = 8  # of the running average
PATIENCE, RISE, SOONEST = 1 / 3, 0.002, 0.4  # no more rise than this within this share of the steps: stop


@dataclass(frozen=True)
class Trained:
    """The results of c configurations (rate, weights) in d draws, after each of e looks.

    Attributes:
        validation_parts, parts: `[e, c, d, k]`, the scores on the validation and on the test split.
        skipped: `[c, d]`, the share of steps that were skipped.
        steps: that were taken.
        stopped: whether the scores stood still before the largest number of steps.
        seconds: for all trainings.
    """

    validation_parts: Tensor
    parts: Tensor
    skipped: Tensor
    steps: int
    stopped: bool
    seconds: float

    @property
    def validation(self) -> Tensor:
        """The mean score `[e, c, d]` on the validation split."""
        return self.validation_parts.mean(-1)

    @property
    def test(self) -> Tensor:
        """The mean score `[e, c, d]` on the test split."""
        return self.parts.mean(-1)


@dataclass(frozen=True)
class Draws:
    """The rows of some draws, and what depends on them: weights `[d, m]` that make losses comparable."""

    numbers: tuple[int, ...]
    data: tuple[Data, ...]
    standard: Tensor
    start: Tensor

    def scale(self, kind: str) -> Tensor:
        return {"standard": self.standard, "start": self.start, "raw": torch.ones_like(self.standard)}[kind]


def generators(draws: Sequence[int]) -> list[torch.Generator]:
    """Of the start of the network and of the batches: the same for all methods."""
    return [torch.Generator().manual_seed(1000 + draw) for draw in draws]


def batch_of(problem: Problem, data: Data, generator: torch.Generator) -> tuple[Tensor, ...]:
    """The rows of a step, drawn with replacement."""
    if problem.batch is None:
        return data.train
    rows = torch.randint(len(data.train[0]), (problem.batch,), generator=generator)
    return tuple(column[rows] for column in data.train)


def draws_of(problem: Problem, count: int) -> Draws:
    """The first draws of a problem."""
    numbers = tuple(range(count))
    data = tuple(problem.data(draw) for draw in numbers)
    constant = torch.stack([problem.constant(*found.train) for found in data]).detach()
    starts = []
    for found, generator in zip(data, generators(numbers), strict=True):
        params = problem.init(generator)
        starts.append(problem.losses(params, *batch_of(problem, found, generator)).detach())
    weights = [1 / x.double().abs().clamp(min=1e-300) for x in (constant, torch.stack(starts))]
    return Draws(numbers, data, *weights)


def optimizer_for(rate: Any) -> jd.Optimizer:
    """Adam, with an eps far below all directions, so that units do not matter to it."""
    return jd.adamw(rate, eps=1e-20, weight_decay=0.0)


def train(
    problem: Problem,
    method: Method,
    draws: Draws,
    rates: Tensor,
    weights: Tensor,
    steps: int,
    *,
    marks: Tensor | None = None,
    whole: bool = False,
    optimizer: Callable[[Any], jd.Optimizer] | None = None,
) -> Trained:
    """Train c configurations in all draws: rates `[c, d]`, and factors `[c, d, m]` of the losses.

    The rule of a training is built from its mark, `marks` `[c d, ...]`; without them, from the random key of its draw.
    With `whole`, all steps are taken, whatever the scores do. `optimizer` builds one from a rate; Adam unless given.
    """
    begin = time.perf_counter()
    c, d, _ = weights.shape
    rates, weights = rates.flatten(), weights.flatten(0, 1).float()
    if marks is None:
        marks = torch.stack([jd.random.key(draw) for draw in draws.numbers]).repeat(c, 1)
    sources = generators(draws.numbers)
    starts = [problem.init(source) for source in sources]
    params = {name: torch.stack([start[name] for start in starts] * c) for name in starts[0]}

    def parts(mark: Tensor, weight: Tensor, rate: Any) -> dict[str, Any]:
        losses = lambda params, *rows: weight * problem.losses(params, *rows)
        return {"losses": losses, "aggregator": method.build(mark), "optimizer": (optimizer or optimizer_for)(rate)}

    def batch() -> tuple[Tensor, ...]:
        rows = [batch_of(problem, found, source) for found, source in zip(draws.data, sources, strict=True)]
        return tuple(torch.stack(column * c) for column in map(list, zip(*rows, strict=True)))

    begun = torch.vmap(lambda p, mark, weight, rate, *rows: jd.train_state(p, *rows, **parts(mark, weight, rate)))
    forward = torch.vmap(lambda state, mark, weight, rate, *rows: jd.step(state, *rows, **parts(mark, weight, rate)))
    rows = batch()
    state = begun(params, marks, weights, rates, *rows)
    average, moved, looks, taken, stopped = params, torch.zeros(c * d), [], 0, False
    while taken < steps and not stopped:
        state, info = forward(state, marks, weights, rates, *rows)
        taken, moved, rows = taken + 1, moved + info.moved, batch()
        average = averaged(average, state.params, taken)
        if taken % max(1, steps // LOOKS) == 0 or taken == steps:
            looks.append([scores(problem, average, draws, split).reshape(c, d, -1) for split in ("validation", "test")])
            state = with_epoch_ended(state)
            validation = torch.stack([look[0].mean(-1) for look in looks])
            stopped = not whole and taken < steps and stands_still(validation, taken / steps)
    found = [torch.stack(split) for split in zip(*looks, strict=True)]
    skipped = 1 - moved.reshape(c, d) / taken
    seconds = time.perf_counter() - begin
    return Trained(*found, skipped, taken, stopped, seconds)


def averaged(average: Params, params: Params, taken: int) -> Params:
    """The running average with polynomial decay; it forgets what is not finite with the steps."""
    share = (ETA + 1) / (taken + ETA)
    return {name: torch.lerp(old, params[name].detach(), share) for name, old in average.items()}


def scores(problem: Problem, params: Params, draws: Draws, split: str) -> Tensor:
    """The scores of all trainings `[n, k]`, draws last; 0 where they are not finite."""
    d, found = len(draws.data), []
    with torch.no_grad():
        for i, data in enumerate(draws.data):
            columns = getattr(data, split)
            own = {name: value[i::d] for name, value in params.items()}
            found.append(
                torch.vmap(lambda p, *columns: problem.scores(p, *columns), (0, *[None] * len(columns)))(own, *columns)
            )
    return torch.stack(found, dim=1).flatten(0, 1).nan_to_num(0, 0, 0)


def stands_still(validation: Tensor, share: float) -> bool:
    """Whether the best score of the best configuration, mean over the draws, has not risen for a while."""
    if share < SOONEST:
        return False
    best = validation.cummax(0).values.mean(2).amax(1)
    e = len(best)
    return bool(best[-1] - best[e - 1 - int(e * PATIENCE)] < RISE)


def with_epoch_ended(state: jd.TrainState) -> jd.TrainState:
    """The state of `dwa` after the end of an epoch; other states as they are."""
    if isinstance(state.aggregator, DwaState):
        return state._replace(aggregator=torch.vmap(jd.dwa_end_epoch)(state.aggregator))
    return state


def time_ratio(problem: Problem, build: Build, draws: Draws, rounds: int) -> float:
    """The time of a step of one training, eager, relative to `mean`: the median of ratios of neighbours in time."""
    [source] = generators(draws.numbers[:1])
    params = problem.init(source)
    batch = batch_of(problem, draws.data[0], source)

    def timed(build: Build) -> Any:
        parts = {"losses": problem.losses, "aggregator": build(jd.random.key(0)), "optimizer": jd.adamw(1e-3)}
        state = [jd.train_state(params, *batch, **parts)]

        def run() -> float:
            begin = time.perf_counter()
            for _ in range(3):
                state[0], _ = jd.step(state[0], *batch, **parts)
            return time.perf_counter() - begin

        run()
        return run

    plain, own = timed(lambda key: jd.mean()), timed(build)
    ratios = torch.tensor([own() / plain() for _ in range(rounds)])
    return float(ratios.median())
