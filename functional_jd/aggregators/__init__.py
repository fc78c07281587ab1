"""The rules, one a file. Those below are named here; the others at the top level."""

from functional_jd.aggregators.alternating import alternating
from functional_jd.aggregators.constrained import constrained
from functional_jd.aggregators.learning_rate_annealing import learning_rate_annealing
from functional_jd.aggregators.normalized import normalized
from functional_jd.aggregators.ntk_weights import ntk_weights
from functional_jd.aggregators.protect import protect
from functional_jd.aggregators.relobralo import relobralo
from functional_jd.aggregators.softadapt import softadapt
from functional_jd.aggregators.uw_so import uw_so

__all__ = [
    "alternating",
    "constrained",
    "learning_rate_annealing",
    "normalized",
    "ntk_weights",
    "protect",
    "relobralo",
    "softadapt",
    "uw_so",
]
