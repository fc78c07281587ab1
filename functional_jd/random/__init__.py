"""Randomness as a pure function of a key."""

from functional_jd.random.keys import key, normal, permutation, split, uniform

__all__ = ["key", "normal", "permutation", "split", "uniform"]
