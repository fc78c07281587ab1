"""All problems of the study, by name."""

from collections.abc import Callable
from typing import NamedTuple

import problems_development as development
import problems_equations as equations
import problems_held_out as held_out
import problems_large as large
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
    "units": Entry(development.units, 2),
    "two_digits": Entry(development.two_digits, 3),
    "noisy_labels": Entry(development.noisy_labels, 16, exchangeable=True),
    "diabetes": Entry(development.diabetes, 3, own_loss=True),
    "tumours": Entry(development.tumours, 5, own_loss=True),
    "unbalanced": Entry(development.unbalanced, 4, shared=False, own_loss=True),
    "fairness": Entry(development.fairness, 2, shared=False),
    "bandit": Entry(development.bandit, 2, shared=False),
    "burgers": Entry(equations.burgers, 3, shared=False),
    "helmholtz": Entry(equations.helmholtz, 2, shared=False),
    "diamonds": Entry(held_out.diamonds, 3, shared=False, held_out=True, own_loss=True),
    "computers": Entry(held_out.computers, 3, held_out=True, own_loss=True),
    "households": Entry(held_out.households, 3, held_out=True, own_loss=True),
    "loans": Entry(held_out.loans, 2, held_out=True),
    "molecules": Entry(held_out.molecule_properties, 5, held_out=True, own_loss=True),
    "signals": Entry(held_out.signals_of_digits, 2, shared=False, held_out=True),
    "twenty": Entry(held_out.twenty, 20, held_out=True),
    "heat": Entry(equations.heat, 3, shared=False, held_out=True),
    "convolutions": Entry(large.convolutions, 3, held_out=True),
    "characters": Entry(large.transformer, 3, shared=False, held_out=True),
    "graphs": Entry(large.graph_net, 5, held_out=True, own_loss=True),
    "beta_vae": Entry(development.beta_vae, 2, front_only=True),
}
