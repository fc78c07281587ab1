"""All problems of the study, by name."""

from collections.abc import Callable
from typing import NamedTuple

from problems_development import (
    bandit,
    beta_vae,
    diabetes,
    fairness,
    noisy_labels,
    tumours,
    two_digits,
    unbalanced,
    units,
)
from problems_equations import burgers, heat, helmholtz
from problems_held_out import computers, diamonds, households, loans, molecule_properties, signals_of_digits, twenty
from problems_large import convolutions, graph_net, transformer
from study_problem import Problem


class Entry(NamedTuple):
    """What is known of a problem before its data are read.

    `shared`: whether the draws are splits of the same rows. `exchangeable`: whether objectives have no identity, so
    that fixed weights mean nothing. `own_loss`: whether the score is one minus the mean of standardised losses, but for
    the rows that variances and entropies are taken over: there, `standardised` minimises what is scored. `front_only`:
    whether it is in the study of fronts and in no other.
    """

    build: Callable[[], Problem]
    m: int
    shared: bool = True
    exchangeable: bool = False
    held_out: bool = False
    own_loss: bool = False
    front_only: bool = False


PROBLEMS = {
    "units": Entry(units, 2),
    "two_digits": Entry(two_digits, 3),
    "noisy_labels": Entry(noisy_labels, 16, exchangeable=True),
    "diabetes": Entry(diabetes, 3, own_loss=True),
    "tumours": Entry(tumours, 5, own_loss=True),
    "unbalanced": Entry(unbalanced, 4, shared=False, own_loss=True),
    "fairness": Entry(fairness, 2, shared=False),
    "bandit": Entry(bandit, 2, shared=False),
    "burgers": Entry(burgers, 3, shared=False),
    "helmholtz": Entry(helmholtz, 2, shared=False),
    "diamonds": Entry(diamonds, 3, shared=False, held_out=True, own_loss=True),
    "computers": Entry(computers, 3, held_out=True, own_loss=True),
    "households": Entry(households, 3, held_out=True, own_loss=True),
    "loans": Entry(loans, 2, held_out=True),
    "molecules": Entry(molecule_properties, 5, held_out=True, own_loss=True),
    "signals": Entry(signals_of_digits, 2, shared=False, held_out=True),
    "twenty": Entry(twenty, 20, held_out=True),
    "heat": Entry(heat, 3, shared=False, held_out=True),
    "convolutions": Entry(convolutions, 3, held_out=True),
    "characters": Entry(transformer, 3, shared=False, held_out=True),
    "graphs": Entry(graph_net, 5, held_out=True, own_loss=True),
    "beta_vae": Entry(beta_vae, 2, front_only=True),
}
