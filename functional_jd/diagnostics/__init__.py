"""Diagnostics: conflicts between the objectives, the distance to Pareto stationarity, and advice on a rule."""
