"""Randomness as a pure function of a key: explicit draws, and functions that draw."""

from functional_jd.random.keyed_function import keyed
from functional_jd.random.keys import fold_in, key, normal, permutation, split, uniform

__all__ = ["fold_in", "key", "keyed", "normal", "permutation", "split", "uniform"]
