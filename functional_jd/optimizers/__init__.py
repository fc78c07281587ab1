"""Optimizers as pairs of pure functions."""
