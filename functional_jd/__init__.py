"""Jacobian descent in mixed precision as pure functions, on torch.func: the table of contents."""

import torch

from functional_jd import random
from functional_jd.adapters import from_torch, from_transformation
from functional_jd.aggregation import (
    Aggregation,
    Aggregator,
    aggregate,
    blank,
    combine,
    cross_gramian,
    losses,
    scalarized,
    stateless,
    whole,
)
from functional_jd.aggregation import gramian as look_at_gramian
from functional_jd.aggregators.aligned_mtl import aligned_mtl
from functional_jd.aggregators.cagrad import cagrad
from functional_jd.aggregators.config import config
from functional_jd.aggregators.constant import constant
from functional_jd.aggregators.cosmos import cosmos
from functional_jd.aggregators.cr_mogm import cr_mogm
from functional_jd.aggregators.db_mtl import db_mtl
from functional_jd.aggregators.dualproj import dualproj
from functional_jd.aggregators.dwa import dwa, end_epoch
from functional_jd.aggregators.excess_mtl import excess_mtl
from functional_jd.aggregators.fairgrad import fairgrad
from functional_jd.aggregators.famo import after_step, famo
from functional_jd.aggregators.geometric_mean import geometric_mean
from functional_jd.aggregators.graddrop import graddrop
from functional_jd.aggregators.gradnorm import gradnorm
from functional_jd.aggregators.gradvac import gradvac
from functional_jd.aggregators.grouped import grouped
from functional_jd.aggregators.imtl_g import imtl_g
from functional_jd.aggregators.imtl_l import imtl_l
from functional_jd.aggregators.krum import krum
from functional_jd.aggregators.mean import mean
from functional_jd.aggregators.mgda import mgda
from functional_jd.aggregators.moco import moco
from functional_jd.aggregators.modo import modo
from functional_jd.aggregators.nash_mtl import nash_mtl
from functional_jd.aggregators.pbi import pbi
from functional_jd.aggregators.pcd import pcd
from functional_jd.aggregators.pcgrad import pcgrad
from functional_jd.aggregators.random_weights import random_weights
from functional_jd.aggregators.sdmgrad import sdmgrad
from functional_jd.aggregators.stch import stch
from functional_jd.aggregators.tchebycheff import tchebycheff
from functional_jd.aggregators.total import total
from functional_jd.aggregators.trimmed_mean import trimmed_mean
from functional_jd.aggregators.upgrad import upgrad
from functional_jd.aggregators.uw import uw
from functional_jd.clipping import clip_by_norm, clip_by_value, global_norm
from functional_jd.custom import custom, float32_island
from functional_jd.diagnostics import Diagnosis, describe, diagnose
from functional_jd.fit import fit
from functional_jd.gramian import gramian_fn
from functional_jd.jacobian import jacobian_fn
from functional_jd.naming import objective_names
from functional_jd.objectives import multitask, per_example
from functional_jd.optimizers import Optimizer, adamw, sgd
from functional_jd.policy import Policy, policy
from functional_jd.precision import autocast
from functional_jd.scaler_dict import scale_state_from_dict, scale_state_to_dict
from functional_jd.scaling import (
    ScaleState,
    no_scale,
    scale,
    scale_state,
    select,
    unscale,
    update_scale,
)
from functional_jd.step import StepInfo, TrainState, step, train_state
from functional_jd.types import Carried, MultitaskJacobian

__version__ = "0.1.0"

gramian = look_at_gramian  # the function, not the file of the same name, which importing the engine put here

# So that torch.load(weights_only=True) takes checkpoints of the states: all records, as a list by hand would miss the
# state of the next rule.
torch.serialization.add_safe_globals(
    [record for record in tuple.__subclasses__() if record.__module__.split(".")[0] == __name__]
)

__all__ = [
    "Aggregation",
    "Aggregator",
    "Carried",
    "Diagnosis",
    "MultitaskJacobian",
    "Optimizer",
    "Policy",
    "ScaleState",
    "StepInfo",
    "TrainState",
    "adamw",
    "after_step",
    "aggregate",
    "aligned_mtl",
    "autocast",
    "blank",
    "cagrad",
    "clip_by_norm",
    "clip_by_value",
    "combine",
    "config",
    "constant",
    "cosmos",
    "cr_mogm",
    "cross_gramian",
    "custom",
    "db_mtl",
    "describe",
    "diagnose",
    "dualproj",
    "dwa",
    "end_epoch",
    "excess_mtl",
    "fairgrad",
    "famo",
    "fit",
    "float32_island",
    "from_torch",
    "from_transformation",
    "geometric_mean",
    "global_norm",
    "graddrop",
    "gradnorm",
    "gradvac",
    "gramian",
    "gramian_fn",
    "grouped",
    "imtl_g",
    "imtl_l",
    "jacobian_fn",
    "krum",
    "losses",
    "mean",
    "mgda",
    "moco",
    "modo",
    "multitask",
    "nash_mtl",
    "no_scale",
    "objective_names",
    "pbi",
    "pcd",
    "pcgrad",
    "per_example",
    "policy",
    "random",
    "random_weights",
    "scalarized",
    "scale",
    "scale_state",
    "scale_state_from_dict",
    "scale_state_to_dict",
    "sdmgrad",
    "select",
    "sgd",
    "stateless",
    "stch",
    "step",
    "tchebycheff",
    "total",
    "train_state",
    "trimmed_mean",
    "unscale",
    "update_scale",
    "upgrad",
    "uw",
    "whole",
]
