"""Valid calls of precision and of loss scales."""

import torch
from fuzz_values import Argument, call, params, rows, scale_state, tensor, values, x
from garbage import CALLABLE, EMPTY, OF_TWO, OPTION, POSITIVE, kinds

import functional_jd as jd
from functional_jd import precision


class _Double(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: 2 * x)
    backward = staticmethod(lambda ctx, g: 2 * g)


def _scaled_grad(f, factor, argnums, has_aux):
    return precision.scaled_grad(f, factor, argnums, has_aux=has_aux)(x())


SCALES = Argument(lambda: scale_state(shape=2), kinds({"scalar", "nans", "meta"}))
SCALED = OF_TWO | EMPTY | {"sparse"}

PRECISION = {
    "autocast": call(
        lambda f, dtype: jd.autocast(f, dtype)(x()),
        f=Argument(lambda: torch.sum, CALLABLE, function=True),
        dtype=torch.bfloat16,
    ),
    "custom": call(
        precision.custom, function=Argument(lambda: _Double, OPTION), cast_inputs=Argument(torch.float32, OPTION)
    ),
    "scaled_grad": call(_scaled_grad, f=Argument(lambda: torch.sum, function=True), factor=Argument(2.0, POSITIVE)),
    "scale": call(precision.scale, state=SCALES, tree=Argument(values, SCALED)),
    "unscale": call(jd.unscale, state=SCALES, tree=Argument(rows, SCALED)),
    "update_scale": call(jd.update_scale, state=scale_state, losses_finite=Argument(lambda: tensor(True), OPTION)),
    "select": call(precision.select, new=params, old=params),
    "scale_state": call(
        jd.scale_state,
        init_scale=2.0,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=Argument(5, kinds({"minus_one", "zero"})),
    ),
    "no_scale": call(precision.no_scale),
    "scale_state_to_dict": call(precision.scale_state_to_dict, state=scale_state),
    "scale_state_from_dict": call(
        precision.scale_state_from_dict, entries=lambda: precision.scale_state_to_dict(scale_state(shape=2))
    ),
}
