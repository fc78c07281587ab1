"""Jacobian descent in mixed precision as pure functions, on torch.func: the table of contents."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from functional_jd import aggregation as aggregation
from functional_jd import diagnostics as diagnostics
from functional_jd import engines as engines
from functional_jd import objectives as objectives
from functional_jd import optimizers as optimizers
from functional_jd import precision as precision
from functional_jd import random
from functional_jd.aggregation.aggregate import Aggregator, aggregate
from functional_jd.aggregation.lifts import held, scalarized, stateless
from functional_jd.aggregation.regularized import regularized
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
from functional_jd.aggregators.dwa import dwa, dwa_end_epoch
from functional_jd.aggregators.epo import epo
from functional_jd.aggregators.excess_mtl import excess_mtl
from functional_jd.aggregators.fairgrad import fairgrad
from functional_jd.aggregators.famo import famo, famo_after_step
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
from functional_jd.aggregators.unit_sum import unit_sum
from functional_jd.aggregators.upgrad import upgrad
from functional_jd.aggregators.uw import uw
from functional_jd.core.names import objective_names
from functional_jd.diagnostics.gradients import check
from functional_jd.engines.differentiate import cross_gramian_fn, gramian_fn, jacobian_fn, squared_norms_fn, weighted_fn
from functional_jd.objectives import functional, multitask, per_example
from functional_jd.optimizers.adamw import adamw
from functional_jd.optimizers.adapters import from_torch, from_transformation
from functional_jd.optimizers.base import Optimizer
from functional_jd.optimizers.by_label import by_label
from functional_jd.optimizers.line_search import line_search
from functional_jd.optimizers.noised import noised
from functional_jd.optimizers.sgd import sgd
from functional_jd.precision.autocast import autocast
from functional_jd.precision.loss_scale import unscale, update_scale
from functional_jd.precision.scale_state import scale_state
from functional_jd.torch_compat.callers import SlowPathWarning
from functional_jd.training.accumulate import accumulate
from functional_jd.training.checkpoint import from_checkpoint, to_checkpoint
from functional_jd.training.compiled import compiled
from functional_jd.training.driver import chosen_engine
from functional_jd.training.loop import TrainingStalled, fit, steps
from functional_jd.training.private import private
from functional_jd.training.start import train_state
from functional_jd.training.state import StepInfo, TrainState
from functional_jd.training.step import step
from functional_jd.training.weights import FoundWeights, weigh, weights_fn

if TYPE_CHECKING:
    from functional_jd import distributed as distributed
    from functional_jd import fronts as fronts
    from functional_jd import plotting as plotting
    from functional_jd import testing as testing
    from functional_jd import views as views

__version__ = "0.4.0"

# So that torch.load(weights_only=True) takes checkpoints of the states: all records, as a list by hand would miss the
# state of the next rule.
torch.serialization.add_safe_globals(
    [record for record in tuple.__subclasses__() if record.__module__.split(".")[0] == __name__]
)

# By question, not by the alphabet.
# fmt: off
__all__ = [  # noqa: RUF022
    # training
    "train_state", "step", "steps", "fit", "check", "compiled", "accumulate", "private", "to_checkpoint",
    "from_checkpoint", "TrainState", "StepInfo", "TrainingStalled",
    # your own loop
    "weigh", "weights_fn", "FoundWeights",
    # losses
    "functional", "multitask", "per_example", "objective_names", "autocast", "random",
    # derivatives
    "jacobian_fn", "gramian_fn", "cross_gramian_fn", "squared_norms_fn", "weighted_fn", "chosen_engine",
    "SlowPathWarning",
    # loss scales
    "scale_state", "unscale", "update_scale",
    # optimizers
    "adamw", "sgd", "line_search", "noised", "by_label", "from_torch", "from_transformation", "Optimizer",
    # rules around rules, and rules of your own
    "aggregate", "grouped", "held", "regularized", "scalarized", "stateless", "Aggregator",
    # rules
    "aligned_mtl", "auto_clipped", "cagrad", "clipped", "config", "constant", "cosmos", "cr_mogm", "db_mtl",
    "dualproj", "dwa", "dwa_end_epoch", "epo", "excess_mtl", "fairgrad", "famo", "famo_after_step",
    "geometric_mean", "graddrop", "gradnorm", "gradvac", "imtl_g", "imtl_l", "krum", "levenberg_marquardt", "mean",
    "mgda", "moco", "modo", "nash_mtl", "natural_gradient", "pbi", "pcd", "pcgrad", "random_weights", "sdmgrad",
    "stch", "tchebycheff", "total", "trimmed_mean", "unit_sum", "upgrad", "uw",
]
# fmt: on

# The packages that load when they are first named.
_LOADED_LATER = ["distributed", "fronts", "plotting", "testing", "views"]


def __getattr__(name: str) -> Any:
    if name in _LOADED_LATER:
        try:
            return import_module(f"{__name__}.{name}")
        except ImportError as error:  # `hasattr` and `help` are to go on where an extra is not installed
            raise AttributeError(str(error)) from error
    alike = [x for x in __all__ if x.replace("_", "") == name.replace("_", "").lower()]  # UPGrad, NashMTL
    hint = f". Take {__name__}.{alike[0]}." if alike else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LOADED_LATER})
