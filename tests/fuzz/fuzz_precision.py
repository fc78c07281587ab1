"""Valid calls of precision and of loss scales."""

import torch
from fuzz_values import WHERE, given, params, rows, scale_state, tensor, values, x
from garbage import CALLABLE, EMPTY, OF_TWO, OPTION, POSITIVE, Call, kinds

import functional_jd as jd


class _Double(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: 2 * x)
    backward = staticmethod(lambda ctx, g: 2 * g)


PRECISION = {
    "autocast": Call(
        lambda f, dtype: jd.autocast(f, dtype)(x()),
        lambda: {"f": torch.sum, "dtype": torch.bfloat16},
        {"f": CALLABLE},
        kinds({"f"}),
    ),
    "custom": Call(
        lambda function, cast_inputs: jd.precision.custom(function, cast_inputs=cast_inputs),
        lambda: {"function": _Double, "cast_inputs": torch.float32},
        {"function": OPTION, "cast_inputs": OPTION},
    ),
    "scaled_grad": Call(
        lambda f, factor, argnums, has_aux: jd.precision.scaled_grad(f, factor, argnums, has_aux=has_aux)(x()),
        lambda: {"f": torch.sum, "factor": 2.0, "argnums": 0, "has_aux": False},
        {"factor": POSITIVE, "argnums": kinds({"zero", "minus_one"})},
        kinds({"f"}),
    ),
    **{
        f.__name__: Call(
            f,
            given(state=lambda: scale_state(shape=2), tree=tree),
            {"tree": OF_TWO | EMPTY | {"sparse"}, "state": kinds({"scalar", "nans", "meta"})},
        )
        for f, tree in ((jd.precision.scale, values), (jd.unscale, rows))
    },
    "update_scale": Call(
        jd.update_scale,
        lambda: {"state": scale_state(), "finite": tensor(True), "losses_finite": tensor(True)},
        {"losses_finite": OPTION},
    ),
    "select": Call(jd.precision.select, lambda: {"finite": tensor(True), "new": params(), "old": params()}),
    "scale_state": Call(
        jd.scale_state,
        given(
            **{"init_scale": 2.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 5, "shape": 2},
            device=lambda: WHERE["now"],
        ),
        {"growth_interval": kinds({"minus_one", "zero"}), "shape": kinds({"list"}), "device": OPTION},
    ),
    "no_scale": Call(jd.precision.no_scale, lambda: {"device": WHERE["now"]}, {"device": OPTION}),
    "scale_state_to_dict": Call(jd.precision.scale_state_to_dict, lambda: {"state": scale_state()}),
    "scale_state_from_dict": Call(
        jd.precision.scale_state_from_dict,
        lambda: {"entries": jd.precision.scale_state_to_dict(scale_state(shape=2)), "shape": 2, "device": WHERE["now"]},
        {"shape": kinds({"list"}), "device": OPTION},
    ),
}
