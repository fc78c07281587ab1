"""Randomness as a pure function of a key: explicit draws, and functions that draw."""

from functional_jd.random.keyed_function import keyed
from functional_jd.random.keys import key, normal, permutation, split, uniform

__all__ = ["key", "keyed", "normal", "permutation", "split", "uniform"]
