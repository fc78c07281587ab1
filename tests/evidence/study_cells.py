"""A cell is one method on one problem, in all draws: how it is trained, and what of it is stored, one file a cell."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import torch
from study_problem import Problem, generator_of
from study_rules import RULES, Method, backward_passes, grid
from study_training import Draws, Trained, time_ratio, train
from torch import Tensor

import functional_jd as jd

Cell = dict[str, Any]
STORED = Path(__file__).with_name("results")
RATES = (1e-3, 4e-3, 1.6e-2, 6.4e-2)
EXTENSIONS = 3  # of the grid of rates, by a factor of 4, on either side


def machine() -> Cell:
    """What the figures depend on beside the problems: nothing that names the machine."""
    return {
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__.partition("+")[0],
        "functional_jd": jd.__version__,
    }


def under_method(problem: Problem, method: Method, draws: Draws, steps: int, rounds: int = 10) -> Cell:
    """Train with all rates, and with more of them while the best is at an edge."""
    runs, order, top = tuned(problem, method, draws, steps)
    found = kept(runs, [{"rate": rate} for rate in order], len(draws.data))
    passes = backward_passes(method.build, problem.m)
    ratio = time_ratio(problem, method.build, draws, rounds)
    inside = min(order) < top < max(order)
    return found | {"inside": inside, "best_rate": top, "passes": passes, "time": digits(ratio), "machine": machine()}


def tuned(
    problem: Problem, method: Method, draws: Draws, steps: int, optimizer: Any = None
) -> tuple[list[Trained], list[float], float]:
    """The runs with all rates, the rates in their order, and the best of them by validation, mean over the draws."""
    runs: list[Trained] = []
    means: dict[float, float] = {}
    weights = draws.scale(method.scale)
    d, m = weights.shape

    def take(*rates: float) -> None:
        column, own = torch.tensor(rates)[:, None].expand(len(rates), d), weights.expand(len(rates), d, m)
        runs.append(train(problem, method, draws, column, own, steps, optimizer=optimizer))
        means.update(zip(rates, runs[-1].validation.amax(0).mean(1).tolist(), strict=True))

    take(*RATES)
    for _ in range(2 * EXTENSIONS):
        top, low, high = max(means, key=lambda rate: means[rate]), min(means), max(means)
        if top == low and low > min(RATES) * 4.0 ** (0.5 - EXTENSIONS):
            take(low / 4)
        elif top == high and high < max(RATES) * 4.0 ** (EXTENSIONS - 0.5):
            take(high * 4)
        else:
            break
    return runs, [*means], max(means, key=lambda rate: means[rate])


def kept(runs: list[Trained], configurations: list[Cell], count: int) -> Cell:
    """What is stored: for each configuration and draw the best validation score and the test score of that moment, at
    a quarter, a half and all of the steps; of the training that a draw chooses, all its test scores; curves.
    """
    shares = (0.25, 0.5, 1.0)
    validation, test, parts = [], [], []
    for run in runs:
        looks = len(run.validation)
        until = [max(1, round(share * looks)) for share in shares]
        best = [run.validation[:e].max(0) for e in until]  # [c, d]
        validation.append(torch.stack([b.values for b in best], dim=-1))
        test.append(torch.stack([run.test.gather(0, b.indices[None])[0] for b in best], dim=-1))
        place = best[-1].indices[None, ..., None].expand(1, *run.parts.shape[1:])
        parts.append(run.parts.gather(0, place)[0])
    v, t, p = torch.cat(validation), torch.cat(test), torch.cat(parts)
    chosen = v[..., -1].argmax(0)
    return {
        "configurations": configurations,
        "validation": digits(v.tolist()),  # [c, d, 3]
        "test": digits(t.tolist()),
        "chosen": chosen.tolist(),  # [d]
        "parts": digits([p[chosen[i], i].tolist() for i in range(count)]),  # [d, k]
        "curve": [digits(run.validation.mean(2).tolist()) for run in runs],  # by run, [e, c]
        "skipped": digits(float(torch.cat([run.skipped for run in runs]).mean())),
        "steps": [run.steps for run in runs],
        "stopped": [run.stopped for run in runs],
        "seconds": digits(sum(run.seconds for run in runs)),
    }


def digits(value: Any) -> Any:
    """Numbers with four digits, in lists too."""
    return [digits(x) for x in value] if isinstance(value, list) else float(f"{value:.4g}")


def path_of(problem: str, method: str, folder: Path = STORED) -> Path:
    return folder / problem / f"{method}.json.gz"


def store(cell: Cell, path: Path) -> None:
    """Write a cell, at once or not at all; the same cell gives the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_bytes(gzip.compress(json.dumps(cell).encode(), mtime=0))
    part.replace(path)


def load(path: Path) -> Cell | None:
    """A cell, or None where it has not been trained."""
    return json.loads(gzip.decompress(path.read_bytes())) if path.exists() else None


def load_all(folder: Path = STORED) -> dict[str, dict[str, Cell]]:
    """All cells that are stored, by problem and method."""
    found: dict[str, dict[str, Cell]] = {}
    for path in sorted(folder.glob("*/*.json.gz")):
        cell = load(path)
        if cell is not None:
            found.setdefault(path.parent.name, {})[path.name.removesuffix(".json.gz")] = cell
    return found


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
