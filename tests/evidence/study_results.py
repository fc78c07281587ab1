"""Results of a problem as plain numbers: what is stored, and what tables and pictures are made from."""

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from study_problem import Problem
from study_rules import Build, backward_passes, grid, rules_for
from study_training import Trained, start_losses, time_ratio, train

import functional_jd as jd

Result = dict[str, Any]
NEAR = 0.98  # a rule counts as good as the best from this share of its score on


def machine() -> Result:
    """What the figures depend on beside the problems: nothing that names the machine."""
    threads = torch.get_num_threads()
    return {
        "cores": os.cpu_count(),
        "threads": threads,
        "torch": torch.__version__.partition("+")[0],
        "functional_jd": jd.__version__,
    }


def run(problem: Problem, seeds: int, steps: int, rounds: int, rules: list[str] | None = None) -> Result:
    """Train under the grid and under all rules, or those named."""
    begin = time.perf_counter()
    weights = grid(start_losses(problem), problem.exchangeable)
    tuned = chosen(problem, train(problem, jd.constant, seeds, steps, weights))
    candidate = tuned.pop("candidate")
    tuned |= {"weights": rounded(weights[candidate].tolist()), "candidates": len(weights), "passes": 1, "time": 1.0}
    tuned["trainings"] = len(weights) * len(problem.rates)
    _say(problem, "grid", tuned, begin)
    found: Result = {}
    for name, build in rules_for(problem.m).items():
        if rules is None or name in rules:
            found[name] = under_rule(problem, build, seeds, steps, rounds)
            _say(problem, name, found[name], begin)
    return {
        "about": problem.about,
        "scored": list(problem.scored),
        "m": problem.m,
        "parameters": sum(p.numel() for p in problem.init(torch.Generator()).values()),
        "steps": steps,
        "seeds": seeds,
        "rates": list(problem.rates),
        "grid": tuned,
        "rules": found,
    }


def under_rule(problem: Problem, build: Build, seeds: int, steps: int, rounds: int) -> Result:
    """Train under a rule, and measure the time of its step."""
    result = chosen(problem, train(problem, build, seeds, steps))
    del result["candidate"]
    ratio = time_ratio(problem, build, rounds)
    return result | {
        "passes": backward_passes(build, problem.m),
        "time": rounded(ratio),
        "trainings": len(problem.rates),
    }


def chosen(problem: Problem, trained: Trained) -> Result:
    """The training that is best on the validation split in the end, of all rates and weights, and what it got."""
    final = trained.curve[-1]
    rate, candidate = divmod(int(final.argmax()), final.shape[1])
    return {
        "rate": problem.rates[rate],
        "candidate": candidate,
        "validation": rounded(trained.curve[:, rate, candidate].tolist()),
        "test": rounded(trained.test[rate, candidate].tolist()),
        "skipped": rounded(float(trained.skipped[rate, candidate])),
        "seconds": rounded(trained.seconds),
    }


def rounded(value: Any) -> Any:
    """Numbers with four digits, in lists too."""
    return [rounded(x) for x in value] if isinstance(value, list) else float(f"{value:.4g}")


def by_score(result: Result) -> list[float]:
    """The mean over seeds of each score on the test split."""
    return torch.tensor(result["test"], dtype=torch.float64).mean(0).tolist()


def overall(result: Result) -> float:
    """The mean over seeds and scores on the test split."""
    return sum(by_score(result)) / len(by_score(result))


def spread(result: Result) -> float:
    """The standard deviation over seeds of the mean score."""
    values = torch.tensor(result["test"], dtype=torch.float64).mean(1)
    return float(values.std()) if len(values) > 1 else 0.0


def best(problem: Result) -> float:
    """The best mean score of all rules on the test split."""
    return max(overall(rule) for rule in problem["rules"].values())


def near_best(problem: Result) -> list[str]:
    """The rules within 2 % of the best of all, best first."""
    rules = problem["rules"]
    found = [name for name in rules if overall(rules[name]) >= NEAR * best(problem)]
    return sorted(found, key=lambda name: -overall(rules[name]))


def share_to_grid(problem: Result, result: Result) -> float | None:
    """The share of the steps until the validation score is that of the tuned weights in the end; None if never."""
    goal = problem["grid"]["validation"][-1]
    curve = result["validation"]
    reached = [i for i, value in enumerate(curve) if value >= goal]
    return (reached[0] + 1) / len(curve) if reached else None


def search_cost(result: Result) -> int:
    """The backward passes of the search per step of a training: a training for each rate and weights, times passes."""
    return result["trainings"] * result["passes"]


def load(path: Path) -> Result:
    """What is stored, or nothing."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"problems": {}}


def store(path: Path, stored: Result) -> None:
    """Store results; lists of numbers take one line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_compact(stored, 0) + "\n", encoding="utf-8")


def _compact(value: Any, depth: int) -> str:
    if isinstance(value, dict) and value:
        inner = ",\n".join(f"{' ' * (depth + 1)}{json.dumps(k)}: {_compact(v, depth + 1)}" for k, v in value.items())
        return "{\n" + inner + "\n" + " " * depth + "}"
    return json.dumps(value, ensure_ascii=False)


def _say(problem: Problem, name: str, result: Result, begin: float) -> None:
    took = time.perf_counter() - begin
    print(f"{problem.name:20} {name:15} {overall(result):.3f}  rate {result['rate']:<7g} {took:5.0f} s", flush=True)
