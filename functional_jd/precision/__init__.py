"""In which dtype? Op tables, autocast, custom functions, loss scaling."""

from functional_jd.precision.autocast import autocast
from functional_jd.precision.custom_functions import custom
from functional_jd.precision.loss_scale import scale, select, unscale, update_scale
from functional_jd.precision.scale_state import (
    ScaleState,
    no_scale,
    scale_state,
    scale_state_from_dict,
    scale_state_to_dict,
)
from functional_jd.precision.scaled_grad import scaled_grad

__all__ = [
    "ScaleState",
    "autocast",
    "custom",
    "no_scale",
    "scale",
    "scale_state",
    "scale_state_from_dict",
    "scale_state_to_dict",
    "scaled_grad",
    "select",
    "unscale",
    "update_scale",
]
