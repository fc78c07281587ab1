"""The tables of the page that compare fronts: of rules with preferences, and of single rules, beside weighted sums."""

from collections.abc import Callable

import torch
from pages import table
from problems import PROBLEMS
from study_format import Cells, points, signed, spelled
from study_fronts import FAMILIES, ON, PREFIX, beside_sums, sizes, utility, worth
from study_statistics import difference
from torch import Tensor

SPELLED = {
    "sums": "weighted sums",
    "stch": "`stch(0.1, u)`",
    "upgrad": "`upgrad(preference=u)`",
    "epo": "`epo(u)`",
    "tchebycheff": "`tchebycheff(u)`",
    "pbi": "`pbi(5, u)`",
}
SUMS = PREFIX + "sums"
WORDS = (
    "Two objectives in conflict, standardised losses, the same eleven preferences and five rates for each method. "
    "*Area*: what the test scores of a front dominate, up to (0, 0); the front is chosen by validation scores. "
    "*Utility*: what somebody gets who weighs the two scores, chooses on validation and is tested, the mean over 21 "
    "weights. Less weighted sums after as many steps, in hundredths. *Equal passes*: rules that need rows, after half "
    "of the steps."
)
SINGLE = (
    "Single rules, with the rate and moment that the mean score chooses: in how many draws of ten a solution on the "
    "front of weighted sums is better in both test scores, and the area that the rule adds to that of the front, in "
    "hundredths. Losses as they come, unless it is said."
)
HOW_MANY = "Solutions on a front, the mean over draws, and the share of them whose rate is the lowest or the highest."


def front_tables(cells: Cells) -> list[str]:
    """All that is said of fronts, by paragraphs."""
    both = [less_sums(cells, *kind) for kind in (("Area", worth), ("Utility", utility))]
    return ["### Fronts", WORDS, *both, HOW_MANY, how_many(cells), SINGLE, single_rules(cells)]


def less_sums(cells: Cells, title: str, measure: Callable[..., Tensor]) -> str:
    """A row a problem, a column a method: its measure less that of the sums, after all steps and at equal passes."""
    others = [family for family in FAMILIES if family != "sums"]
    columns = [(family, 2) for family in others]
    columns += [(family, 1) for family in others if cells[ON[0]][PREFIX + family]["passes"] == 2]
    rows = []
    for name in ON:
        sums = measure(cells[name][SUMS])
        found = [measure(cells[name][PREFIX + family], share) for family, share in columns]
        apart = [points(difference(each, sums, PROBLEMS[name].shared)) for each in found]
        rows.append([name, f"{sums.mean():.3f}", *apart])
    titles = [SPELLED[family] + (", equal passes" if share == 1 else "") for family, share in columns]
    return table([title, SPELLED["sums"], *titles], rows)


def how_many(cells: Cells) -> str:
    """A row a problem, a column a method."""
    said = lambda cell: "{:.1f}, {:.0%}".format(*sizes(cell)).replace("%", " %")
    rows = [[name, *(said(cells[name][PREFIX + family]) for family in FAMILIES)] for name in ON]
    return table(["", *(SPELLED[family] for family in FAMILIES)], rows)


def single_rules(cells: Cells) -> str:
    """A row a rule, a column a problem: draws in which the front of sums is better in both, and the area added."""
    names = [name for name in ON if not PROBLEMS[name].front_only]
    methods = [m for m in dict.fromkeys(m for name in names for m in cells[name]) if _is_single(cells, names, m)]
    rows = []
    for method in methods:
        behind, row = 0, [spelled(method)]
        for name in names:
            lost, more = beside_sums(cells[name][SUMS], torch.tensor(cells[name][method]["parts"], dtype=torch.float64))
            behind += int(lost.sum())
            row.append(f"{int(lost.sum())} of {len(lost)}, {signed(float(more.mean()))}")
        rows.append((behind, row))
    rows.sort(key=lambda row: row[0])
    return table(["", *names], [row for _, row in rows])


def _is_single(cells: Cells, names: list[str], method: str) -> bool:
    """Whether the method is one solution a draw on all of these problems: no search of weights, no rule of the peer."""
    others = ("peer_", PREFIX, "random_search", "tpe", "grid", "advice")
    return not method.startswith(others) and all(method in cells[name] for name in names)
