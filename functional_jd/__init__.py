"""Jacobian descent in mixed precision as pure functions, on torch.func: the table of contents."""

from functional_jd import random
from functional_jd.aggregation import (
    Aggregation,
    Aggregator,
    aggregate,
    blank,
    combine,
    cross_gramian,
    gramian,
    losses,
    stateless,
    whole,
)
from functional_jd.aggregators.constant import constant
from functional_jd.aggregators.mean import mean
from functional_jd.aggregators.total import total
from functional_jd.aggregators.upgrad import upgrad
from functional_jd.jacobian import jacobian_fn
from functional_jd.objectives import multitask, per_example
from functional_jd.optimizers import Optimizer, adamw, from_torch, from_transformation, sgd
from functional_jd.precision import autocast
from functional_jd.scaling import (
    ScaleState,
    no_scale,
    scale,
    scale_state,
    scale_state_from_dict,
    scale_state_to_dict,
    select,
    unscale,
    update_scale,
)
from functional_jd.step import StepInfo, TrainState, step, train_state
from functional_jd.types import MultitaskJacobian

__version__ = "0.1.0"

__all__ = [
    "Aggregation",
    "Aggregator",
    "MultitaskJacobian",
    "Optimizer",
    "ScaleState",
    "StepInfo",
    "TrainState",
    "adamw",
    "aggregate",
    "autocast",
    "blank",
    "combine",
    "constant",
    "cross_gramian",
    "from_torch",
    "from_transformation",
    "gramian",
    "jacobian_fn",
    "losses",
    "mean",
    "multitask",
    "no_scale",
    "per_example",
    "random",
    "scale",
    "scale_state",
    "scale_state_from_dict",
    "scale_state_to_dict",
    "select",
    "sgd",
    "stateless",
    "step",
    "total",
    "train_state",
    "unscale",
    "update_scale",
    "upgrad",
    "whole",
]
