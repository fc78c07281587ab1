"""Diagnostics: conflicts between the objectives, the distance to Pareto stationarity, and advice on a rule."""

from functional_jd.diagnostics.advise import Advice, advise, describe
from functional_jd.diagnostics.diagnose import Diagnosis, diagnose
from functional_jd.diagnostics.gradients import blame

__all__ = ["Advice", "Diagnosis", "advise", "blame", "describe", "diagnose"]
