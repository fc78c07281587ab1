"""Valid calls of what several replicas do together."""

import torch
from fuzz_values import EMPTY, FLOATS, OPTION, TREE, method, params, rows, x
from garbage import Call

import functional_jd as jd
from functional_jd import distributed

DISTRIBUTED = {
    "mean_jacobian": Call(
        distributed.mean_jacobian,
        lambda: {"jacobian": rows(), "group": None},
        {"jacobian": FLOATS, "group": OPTION},
        names=("distributed",),
    ),
    "agree": Call(
        distributed.agree,
        lambda: {"finite": torch.tensor(True), "group": None},
        {"group": OPTION},
        names=("distributed",),
    ),
    "replicate": Call(
        distributed.replicate,
        lambda: {"tree": params(), "group": None},
        {"tree": TREE | EMPTY, "group": OPTION},
        names=("distributed",),
    ),
    "replicated": Call(
        lambda engine, group: jd.train_state(params(), x(), **method(), engine=distributed.replicated(engine, group)),
        lambda: {"engine": "auto", "group": None},
        {"group": OPTION},
        names=("distributed",),
    ),
}
