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
from functional_jd.aggregators.aligned_mtl import aligned_mtl
from functional_jd.aggregators.cagrad import cagrad
from functional_jd.aggregators.config import config
from functional_jd.aggregators.constant import constant
from functional_jd.aggregators.cr_mogm import cr_mogm
from functional_jd.aggregators.dualproj import dualproj
from functional_jd.aggregators.excess_mtl import excess_mtl
from functional_jd.aggregators.fairgrad import fairgrad
from functional_jd.aggregators.graddrop import graddrop
from functional_jd.aggregators.gradvac import gradvac
from functional_jd.aggregators.grouped import grouped
from functional_jd.aggregators.imtl_g import imtl_g
from functional_jd.aggregators.krum import krum
from functional_jd.aggregators.mean import mean
from functional_jd.aggregators.mgda import mgda
from functional_jd.aggregators.modo import modo
from functional_jd.aggregators.nash_mtl import nash_mtl
from functional_jd.aggregators.pcd import pcd
from functional_jd.aggregators.pcgrad import pcgrad
from functional_jd.aggregators.random_weights import random_weights
from functional_jd.aggregators.sdmgrad import sdmgrad
from functional_jd.aggregators.total import total
from functional_jd.aggregators.trimmed_mean import trimmed_mean
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
    "aligned_mtl",
    "autocast",
    "blank",
    "cagrad",
    "combine",
    "config",
    "constant",
    "cr_mogm",
    "cross_gramian",
    "dualproj",
    "excess_mtl",
    "fairgrad",
    "from_torch",
    "from_transformation",
    "graddrop",
    "gradvac",
    "gramian",
    "grouped",
    "imtl_g",
    "jacobian_fn",
    "krum",
    "losses",
    "mean",
    "mgda",
    "modo",
    "multitask",
    "nash_mtl",
    "no_scale",
    "pcd",
    "pcgrad",
    "per_example",
    "random",
    "random_weights",
    "scale",
    "scale_state",
    "scale_state_from_dict",
    "scale_state_to_dict",
    "sdmgrad",
    "select",
    "sgd",
    "stateless",
    "step",
    "total",
    "train_state",
    "trimmed_mean",
    "unscale",
    "update_scale",
    "upgrad",
    "whole",
]
