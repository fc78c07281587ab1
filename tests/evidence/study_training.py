"""Trainings of the study: all seeds, learning rates and weights of a rule at once, by one vmap over train states."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import Any

import torch
from study_problem import Problem
from study_rules import Build
from torch import Tensor

import functional_jd as jd
from functional_jd.aggregators.dwa import DwaState

EPOCHS = 20  # the number of times that scores are taken; `dwa` compares the losses between them


@dataclass(frozen=True)
class Trained:
    """The results of a rule; r are the learning rates, c the weights (1 for a rule), s the seeds.

    Attributes:
        curve: `[e, r, c]`, the mean over seeds and scores on the validation split, after each of the epochs.
        test: `[r, c, s, k]`, the scores in the end.
        skipped: `[r, c]`, the share of steps that were skipped.
        seconds: for all trainings.
    """

    curve: Tensor
    test: Tensor
    skipped: Tensor
    seconds: float


def optimizer_for(problem: Problem, rate: Any, steps: int) -> jd.Optimizer:
    """Adam with a rate that falls to zero; an eps far below all directions, so that units do not matter to it."""
    schedule = lambda taken: rate * (1 - taken / steps)
    return jd.adamw(schedule, eps=1e-20, weight_decay=0.0)


def train(problem: Problem, build: Build, seeds: int, steps: int, weights: Tensor | None = None) -> Trained:
    """Train under a rule, or under each of several fixed weights `[c, m]`."""
    started = time.perf_counter()
    count = 1 if weights is None else len(weights)
    shape = (len(problem.rates), count, seeds)
    places = list(product(*map(range, shape)))
    rates = torch.tensor([problem.rates[r] for r, _, _ in places])
    if weights is None:
        given = torch.stack([jd.random.key(s) for _, _, s in places])
    else:
        given = torch.stack([weights[c] for _, c, _ in places])
    seed_of = torch.tensor([s for _, _, s in places])
    generators = [torch.Generator().manual_seed(1000 + s) for s in range(seeds)]
    starts = [problem.init(generator) for generator in generators]
    params = {name: torch.stack([start[name] for start in starts])[seed_of] for name in starts[0]}

    def method(given: Tensor, rate: Any) -> dict[str, Any]:
        optimizer = optimizer_for(problem, rate, steps)
        return {"losses": problem.losses, "aggregator": build(given), "optimizer": optimizer}

    def batch() -> tuple[Tensor, ...]:
        columns = zip(*(problem.batch(generator) for generator in generators), strict=True)
        return tuple(torch.stack(column)[seed_of] for column in columns)

    start = torch.vmap(lambda p, given, rate, *b: jd.train_state(p, *b, **method(given, rate)))
    forward = torch.vmap(lambda state, given, rate, *b: jd.step(state, *b, **method(given, rate)))
    state = start(params, given, rates, *batch())
    curve, moved = [], torch.zeros(len(places))
    for i in range(1, steps + 1):
        state, info = forward(state, given, rates, *batch())
        moved += info.moved
        if i % max(1, steps // EPOCHS) == 0 or i == steps:
            curve.append(scores(problem, state.params, "validation").mean(-1))
            state = with_epoch_ended(state)
    found = scores(problem, state.params, "test").reshape(*shape, -1)
    curves = torch.stack(curve).reshape(-1, *shape).mean(-1)
    skipped = 1 - moved.reshape(shape).mean(-1) / steps
    return Trained(curves, found, skipped, time.perf_counter() - started)


def scores(problem: Problem, params: Any, split: str) -> Tensor:
    """The scores of all trainings `[n, k]`; 0 where they are not finite."""
    with torch.no_grad():
        return torch.vmap(lambda p: problem.scores(p, split))(params).nan_to_num(0, 0, 0)


def with_epoch_ended(state: jd.TrainState) -> jd.TrainState:
    """The state of `dwa` after the end of an epoch; other states as they are."""
    if isinstance(state.aggregator, DwaState):
        return state._replace(aggregator=torch.vmap(jd.dwa_end_epoch)(state.aggregator))
    return state


def start_losses(problem: Problem) -> Tensor:
    """The losses of a network at its start, on a batch: what weights of the grid are relative to."""
    generator = torch.Generator().manual_seed(999)
    return problem.losses(problem.init(generator), *problem.batch(generator)).detach()


def time_ratio(problem: Problem, build: Build, rounds: int) -> float:
    """The time of a step of one training, eager, relative to `mean`: the median of ratios of neighbours in time."""
    generator = torch.Generator().manual_seed(998)
    params, batch = problem.init(generator), problem.batch(generator)

    def stepper(build: Build) -> Callable[[], None]:
        method = {"losses": problem.losses, "aggregator": build(jd.random.key(0)), "optimizer": jd.adamw(1e-3)}
        state = [jd.train_state(params, *batch, **method)]

        def run() -> None:
            state[0], _ = jd.step(state[0], *batch, **method)

        run()
        return run

    def timed(run: Callable[[], None]) -> float:
        begin = time.perf_counter()
        for _ in range(3):
            run()
        return time.perf_counter() - begin

    plain, own = stepper(lambda key: jd.mean()), stepper(build)
    ratios = []
    for i in range(rounds):
        if i % 2:
            late = timed(own)
            ratios.append(late / timed(plain))
        else:
            early = timed(plain)
            ratios.append(timed(own) / early)
    return median(ratios)


def window(problem: Problem, seeds: int, steps: int) -> tuple[Tensor, Tensor]:
    """What `advise` is given: Gramians `[s, k, m, m]` and losses `[s, k, m]` of k consecutive steps, the first tenth of
    a training with `mean` at the middle rate.
    """
    length = max(4, steps // 10)
    gramians, losses = [], []
    method = {"losses": problem.losses, "aggregator": jd.mean()}
    method["optimizer"] = optimizer_for(problem, problem.rates[1], steps)
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(1000 + seed)
        params, batch = problem.init(generator), problem.batch(generator)
        state = jd.train_state(params, *batch, **method)
        rows = []
        for _ in range(length):
            jacobian, values = jd.jacobian_fn(problem.losses)(state.params, *batch)
            rows.append((jd.views.gramian(jacobian), values.detach().double()))
            state, _ = jd.step(state, *batch, **method)
            batch = problem.batch(generator)
        gramians.append(torch.stack([g for g, _ in rows]))
        losses.append(torch.stack([v for _, v in rows]))
    return torch.stack(gramians), torch.stack(losses)
