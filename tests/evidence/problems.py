"""All problems of the study, by name."""

from collections.abc import Callable

from problems_development import bandit, diabetes, fairness, noisy_labels, tumours, two_digits, unbalanced, units
from problems_equations import burgers, heat, helmholtz
from problems_held_out import (
    computers,
    diamonds,
    households,
    loans,
    molecule_properties,
    signals_of_digits,
    twenty,
)
from study_problem import Problem

PROBLEMS: dict[str, Callable[[], Problem]] = {
    "units": units,
    "two_digits": two_digits,
    "noisy_labels": noisy_labels,
    "diabetes": diabetes,
    "tumours": tumours,
    "unbalanced": unbalanced,
    "fairness": fairness,
    "bandit": bandit,
    "burgers": burgers,
    "helmholtz": helmholtz,
    "diamonds": diamonds,
    "computers": computers,
    "households": households,
    "loans": loans,
    "molecules": molecule_properties,
    "signals": signals_of_digits,
    "twenty": twenty,
    "heat": heat,
}
DEVELOPMENT = tuple(PROBLEMS)[:10]
