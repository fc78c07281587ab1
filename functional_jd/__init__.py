"""Jacobian descent in mixed precision as pure functions, on torch.func: the table of contents."""

import warnings
from typing import Any

import torch

from functional_jd import random
from functional_jd.aggregation.aggregate import Aggregation, Aggregator, aggregate, combine
from functional_jd.aggregation.held import held
from functional_jd.aggregation.lifts import scalarized, stateless
from functional_jd.aggregation.views import cross_gramian, full_jacobian, gramian, losses, no_gradients, norms
from functional_jd.aggregators.aligned_mtl import aligned_mtl
from functional_jd.aggregators.auto_clipped import auto_clipped
from functional_jd.aggregators.cagrad import cagrad
from functional_jd.aggregators.clipped import clipped
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
from functional_jd.aggregators.levenberg_marquardt import levenberg_marquardt
from functional_jd.aggregators.mean import mean
from functional_jd.aggregators.mgda import mgda
from functional_jd.aggregators.moco import moco
from functional_jd.aggregators.modo import modo
from functional_jd.aggregators.nash_mtl import nash_mtl
from functional_jd.aggregators.natural_gradient import natural_gradient
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
from functional_jd.core.names import objective_names
from functional_jd.core.types import AffineWeights, MultitaskJacobian
from functional_jd.diagnostics import Advice, Diagnosis, advise, describe, diagnose
from functional_jd.engines.choose import EngineChoice
from functional_jd.engines.gramian.cross import cross_gramian_fn
from functional_jd.engines.gramian.engine import gramian_fn, squared_norms_fn
from functional_jd.engines.jacobian import jacobian_fn
from functional_jd.engines.weighted import weighted_fn
from functional_jd.objectives import functional, merge, multitask, partition, per_example
from functional_jd.optimizers.adamw import adamw
from functional_jd.optimizers.adapters import from_torch, from_transformation
from functional_jd.optimizers.base import Optimizer
from functional_jd.optimizers.by_label import by_label
from functional_jd.optimizers.clipping import clip_by_norm, clip_by_value, global_norm
from functional_jd.optimizers.line_search import line_search
from functional_jd.optimizers.noised import noised
from functional_jd.optimizers.sgd import sgd
from functional_jd.precision.autocast import autocast
from functional_jd.precision.custom_functions import custom, float32_island
from functional_jd.precision.grad_scaler import scale_state_from_dict, scale_state_to_dict
from functional_jd.precision.loss_scale import scale, select, unscale, update_scale
from functional_jd.precision.policy import Policy, policy
from functional_jd.precision.scale_state import ScaleState, no_scale, scale_state
from functional_jd.precision.scaled_grad import scaled_grad
from functional_jd.torch_compat.slow_path import SlowPathWarning
from functional_jd.training.checkpoint import from_checkpoint, to_checkpoint
from functional_jd.training.choice import chosen_engine
from functional_jd.training.engines import Engine, features_engine, gramian_engine, jacobian_engine, weighted_engine
from functional_jd.training.fit import fit
from functional_jd.training.skips import TrainingStalled
from functional_jd.training.start import train_state
from functional_jd.training.state import StepInfo, TrainState
from functional_jd.training.step import step
from functional_jd.training.steps import steps
from functional_jd.training.weights import FoundWeights, weights_fn

__version__ = "0.2.0"

# So that torch.load(weights_only=True) takes checkpoints of the states: all records, as a list by hand would miss the
# state of the next rule.
torch.serialization.add_safe_globals(
    [record for record in tuple.__subclasses__() if record.__module__.split(".")[0] == __name__]
)

__all__ = [
    "Advice",
    "AffineWeights",
    "Aggregation",
    "Aggregator",
    "Diagnosis",
    "Engine",
    "EngineChoice",
    "FoundWeights",
    "MultitaskJacobian",
    "Optimizer",
    "Policy",
    "ScaleState",
    "SlowPathWarning",
    "StepInfo",
    "TrainState",
    "TrainingStalled",
    "adamw",
    "advise",
    "after_step",
    "aggregate",
    "aligned_mtl",
    "auto_clipped",
    "autocast",
    "by_label",
    "cagrad",
    "chosen_engine",
    "clip_by_norm",
    "clip_by_value",
    "clipped",
    "combine",
    "config",
    "constant",
    "cosmos",
    "cr_mogm",
    "cross_gramian",
    "cross_gramian_fn",
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
    "features_engine",
    "fit",
    "float32_island",
    "from_checkpoint",
    "from_torch",
    "from_transformation",
    "full_jacobian",
    "functional",
    "geometric_mean",
    "global_norm",
    "graddrop",
    "gradnorm",
    "gradvac",
    "gramian",
    "gramian_engine",
    "gramian_fn",
    "grouped",
    "held",
    "imtl_g",
    "imtl_l",
    "jacobian_engine",
    "jacobian_fn",
    "krum",
    "levenberg_marquardt",
    "line_search",
    "losses",
    "mean",
    "merge",
    "mgda",
    "moco",
    "modo",
    "multitask",
    "nash_mtl",
    "natural_gradient",
    "no_gradients",
    "no_scale",
    "noised",
    "norms",
    "objective_names",
    "partition",
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
    "scaled_grad",
    "sdmgrad",
    "select",
    "sgd",
    "squared_norms_fn",
    "stateless",
    "stch",
    "step",
    "steps",
    "tchebycheff",
    "to_checkpoint",
    "total",
    "train_state",
    "trimmed_mean",
    "unscale",
    "update_scale",
    "upgrad",
    "uw",
    "weighted_engine",
    "weighted_fn",
    "weights_fn",
]

_RENAMED = {"blank": "no_gradients", "whole": "full_jacobian", "Carried": "AffineWeights"}


def __getattr__(name: str) -> Any:
    """The names of version 0.1, which go in version 0.3."""
    if name not in _RENAMED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    new = _RENAMED[name]
    warnings.warn(f"functional_jd.{name} is now functional_jd.{new}.", DeprecationWarning, stacklevel=2)
    return globals()[new]
