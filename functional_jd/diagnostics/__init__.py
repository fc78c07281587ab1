"""Diagnostics: conflicts between the objectives, and the distance to Pareto stationarity."""
