"""Statistics of the study, from cells: paired differences with intervals, ranks, budgets. Nothing here trains."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Cell = dict[str, Any]
REFERENCE = "standardised"  # chosen in the protocol, before the runs
SHARES = {"a quarter": 0, "a half": 1, "all": 2}


def scores(cell: Cell, share: int = 2, trials: int | None = None) -> Tensor:
    """The test score of each draw `[d]`, of the configuration that its validation score chooses.

    `share` is the place in `SHARES`; with `trials`, only so many configurations are looked at, in their order.
    """
    validation = torch.tensor(cell["validation"], dtype=torch.float64)[:trials, :, share]
    test = torch.tensor(cell["test"], dtype=torch.float64)[:trials, :, share]
    return test.gather(0, validation.argmax(0)[None])[0]


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences, and its 95 % interval."""

    mean: float
    low: float
    high: float

    @property
    def word(self) -> str:
        return "better" if self.low > 0 else "worse" if self.high < 0 else "none seen"


def difference(ours: Tensor, theirs: Tensor, shared: bool, resamples: int = 10_000) -> Difference:
    """Bootstrap over draws; widened after Nadeau and Bengio where draws are splits of the same rows.

    Training has three times the rows of the test: variance of the mean is (1/n + 1/3) and not 1/n of that of a draw.
    """
    found = ours - theirs
    n, mean = len(found), found.mean()
    g = torch.Generator().manual_seed(0)
    means = found[torch.randint(n, (resamples, n), generator=g)].mean(1)
    low, high = torch.quantile(means, torch.tensor([0.025, 0.975], dtype=means.dtype))
    wider = (1 + n / 3) ** 0.5 if shared else 1.0
    return Difference(float(mean), float(mean - wider * (mean - low)), float(mean + wider * (high - mean)))


def students_t(ours: Tensor, theirs: Tensor, shared: bool) -> Difference:
    """As `difference`, by Student's t in place of the bootstrap."""
    from scipy.stats import t

    found = ours - theirs
    n, mean = len(found), float(found.mean())
    deviation = float(found.std()) * (1 / n + (1 / 3 if shared else 0)) ** 0.5
    return Difference(mean, *t.interval(0.95, n - 1, mean, deviation))


def spent(cell: Cell) -> tuple[float, float]:
    """What the search of one draw costs, in trainings of a plain sum: by backward passes, and by measured time."""
    trainings = len(cell["configurations"])
    return trainings * cell["passes"], trainings * cell["time"]


def passes_taken(cell: Cell, trials: int | None = None) -> int:
    """The backward passes of all trainings of a draw, by the steps that they took; with `trials`, of so many trainings
    of the first run.
    """
    if trials is not None:
        return cell["passes"] * cell["steps"][0] * trials
    runs = zip(cell["steps"], cell["curve"], strict=True)
    return cell["passes"] * sum(steps * len(curve[0]) for steps, curve in runs)


def joined(first: Cell, then: Cell, trials: int) -> Cell:
    """The configurations of two cells as those of one search: all of the first, and so many of the other that there are
    `trials` in all.
    """
    more = max(0, trials - len(first["configurations"]))
    return {key: first[key] + then[key][:more] for key in ("configurations", "validation", "test")}


def at_the_end(cell: Cell, patience: float) -> tuple[bool, float]:
    """Of the run with the best configuration: whether it went on to the largest number of steps, and by how much the
    best validation score, mean over draws, rose in this share of its steps at its end.
    """
    curves = [torch.tensor(curve, dtype=torch.float64) for curve in cell["curve"]]  # [e, c]
    i = max(range(len(curves)), key=lambda i: float(curves[i].max()))
    best = curves[i].amax(1).cummax(0).values
    return not cell["stopped"][i], float(best[-1] - best[len(best) - 1 - int(len(best) * patience)])


def mean_ranks(table: Tensor) -> Tensor:
    """Of scores `[problems, methods]`, the mean rank of each method; 1 is best, ties share."""
    from scipy.stats import rankdata

    return torch.from_numpy(rankdata(-table.numpy(), axis=1)).mean(0)


def friedman(table: Tensor) -> float:
    """The chance of ranks so different if all methods were alike."""
    from scipy.stats import friedmanchisquare

    return float(friedmanchisquare(*table.T.numpy()).pvalue)


def critical_difference(methods: int, problems: int, level: float = 0.05) -> float:
    """Of Nemenyi: mean ranks that differ by less are not told apart (Demsar 2006, section 3.2.2)."""
    from scipy.stats import studentized_range

    q = float(studentized_range.ppf(1 - level, methods, float("inf"))) / 2**0.5
    return q * (methods * (methods + 1) / (6 * problems)) ** 0.5


def signed_ranks(table: Tensor, reference: int) -> list[float]:
    """The chance, by Wilcoxon's test over problems, of each method against one of them; corrected after Holm."""
    others = [i for i in range(table.shape[1]) if i != reference]
    corrected = dict(zip(others, holm([signed_rank(table[:, i] - table[:, reference]) for i in others]), strict=True))
    return [corrected.get(i, 1.0) for i in range(table.shape[1])]


def signed_rank(found: Tensor) -> float:
    """The chance, by Wilcoxon's test, of differences `[problems]` so far from 0."""
    from scipy.stats import wilcoxon

    return float(wilcoxon(found.numpy()).pvalue) if found.abs().max() > 0 else 1.0


def holm(chances: list[float]) -> list[float]:
    """Chances of several tests, corrected so that one of them being below 0.05 by luck has a chance of 0.05."""
    ordered, order = torch.tensor(chances, dtype=torch.float64).sort()
    corrected = (ordered * torch.arange(len(chances), 0, -1)).clamp(max=1).cummax(0).values
    return corrected[order.argsort()].tolist()


def complete(cells: dict[str, dict[str, Cell]], methods: list[str]) -> list[str]:
    """The problems on which all of these methods have been trained."""
    return [name for name, found in cells.items() if all(method in found for method in methods)]


def table_of(cells: dict[str, dict[str, Cell]], problems: list[str], methods: list[str]) -> Tensor:
    """Mean test scores `[problems, methods]`."""
    return torch.tensor([[float(scores(cells[p][m]).mean()) for m in methods] for p in problems], dtype=torch.float64)
