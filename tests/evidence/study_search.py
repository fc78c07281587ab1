"""Baselines that search for weights: at random, by Optuna's TPE, on a grid; every draw for itself."""

from typing import Any

import torch
from study_cells import RATES, Cell, kept, machine
from study_problem import Problem, generator_of
from study_rules import RULES, Method, grid
from study_training import Draws, Trained, train
from torch import Tensor

TRIALS, ROUNDS = 32, 4
SPAN = 2.0  # weights reach from 10^-SPAN to 10^SPAN times the standard ones
MEAN = Method(RULES["mean"])


def random_search(problem: Problem, draws: Draws, steps: int, trials: int = TRIALS) -> Cell:
    """Weights and rates at random; in the order in which they were drawn."""
    exponents, rates = [], []
    low, high = torch.tensor(RATES[0]).log(), torch.tensor(RATES[-1]).log()
    for draw in draws.numbers:
        g = generator_of(draw, 3)
        exponents.append(SPAN * (2 * torch.rand(trials, problem.m, generator=g) - 1))
        rates.append((low + (high - low) * torch.rand(trials, generator=g)).exp())
    weights = draws.standard * 10.0 ** torch.stack(exponents, dim=1)  # [trials, d, m]
    run = train(problem, MEAN, draws, torch.stack(rates, dim=1), _largest_is_one(weights), steps)
    return _cell([run], trials, draws)


def grid_search(problem: Problem, draws: Draws, steps: int) -> Cell:
    """All weights of the grid with all rates."""
    weights = torch.stack([grid(base) for base in draws.standard], dim=1)  # [w, d, m]
    c = len(RATES) * len(weights)
    column = torch.tensor(RATES).repeat_interleave(len(weights))[:, None].expand(c, len(draws.data))
    run = train(problem, MEAN, draws, column, weights.repeat(len(RATES), 1, 1), steps)
    return _cell([run], c, draws)


def tpe(problem: Problem, draws: Draws, steps: int, trials: int = TRIALS, rounds: int = ROUNDS) -> Cell:
    """The tree-structured Parzen estimator of Optuna, in rounds: the trials of a round do not see one another."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    studies = []
    for draw in draws.numbers:
        sampler = optuna.samplers.TPESampler(seed=draw, n_startup_trials=trials // rounds)
        studies.append(optuna.create_study(direction="maximize", sampler=sampler))
    runs = []
    for _ in range(rounds):
        asked = [[study.ask() for _ in range(trials // rounds)] for study in studies]  # [d][c]
        found = [[_suggested(trial, problem.m) for trial in own] for own in asked]
        exponents = torch.tensor([[e for e, _ in own] for own in found]).transpose(0, 1)
        rates = torch.tensor([[rate for _, rate in own] for own in found]).T
        run = train(problem, MEAN, draws, rates, _largest_is_one(draws.standard * 10.0**exponents), steps)
        best = run.validation.amax(0)  # [c, d]
        for i, (study, own) in enumerate(zip(studies, asked, strict=True)):
            for j, trial in enumerate(own):
                study.tell(trial, float(best[j, i]))
        runs.append(run)
    return _cell(runs, trials, draws)


def _suggested(trial: Any, m: int) -> tuple[list[float], float]:
    """Exponents of the weights and a rate."""
    exponents = [trial.suggest_float(f"w{i}", -SPAN, SPAN) for i in range(m)]
    return exponents, trial.suggest_float("rate", RATES[0], RATES[-1], log=True)


def _largest_is_one(weights: Tensor) -> Tensor:
    return weights / weights.amax(-1, keepdim=True)


def _cell(runs: list[Trained], count: int, draws: Draws) -> Cell:
    found = kept(runs, [{"trial": i} for i in range(count)], len(draws.data))
    return found | {"inside": None, "best_rate": None, "passes": 1, "time": 1.0, "machine": machine()}


SEARCHES = {"random_search": random_search, "tpe": tpe, "grid": grid_search}
