"""Pareto fronts: one solution for each preference, what a set of solutions is worth, and which one to choose."""

import torch

from functional_jd.fronts.hypervolume import hypervolume, hypervolume_gradient
from functional_jd.fronts.moo_svgd import moo_svgd
from functional_jd.fronts.pmtl import pmtl
from functional_jd.fronts.points import knee, lattice, non_dominated
from functional_jd.fronts.population import Population
from functional_jd.fronts.tch_set import tch_set
from functional_jd.fronts.train import Front, train

__all__ = [
    "Front",
    "Population",
    "hypervolume",
    "hypervolume_gradient",
    "knee",
    "lattice",
    "moo_svgd",
    "non_dominated",
    "pmtl",
    "tch_set",
    "train",
]

# As the records that load with the package: checkpoints may hold it.
torch.serialization.add_safe_globals([Front])
