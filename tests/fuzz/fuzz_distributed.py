"""Valid calls of what several replicas do together."""

from fuzz_values import EMPTY, FLOATS, OPTION, SWITCH, TREE, WHERE, kinds, losses, method, params, rows, tensor, x
from garbage import EVERYTHING, Call
from torch.distributed.device_mesh import init_device_mesh

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
        distributed.agree, lambda: {"finite": tensor(True), "group": None}, {"group": OPTION}, names=("distributed",)
    ),
    "replicate": Call(
        distributed.replicate,
        lambda: {"tree": params(), "group": None},
        {"tree": TREE | EMPTY, "group": OPTION},
        names=("distributed",),
    ),
    "check_replicas": Call(
        distributed.check_replicas,
        lambda: {"tree": params(), "group": None},
        {"tree": TREE | EMPTY, "group": OPTION},
        names=("distributed",),
    ),
    "weighted_by_examples": Call(
        distributed.weighted_by_examples,
        lambda: {"losses": params(), "examples": 3, "group": None},
        {"losses": FLOATS, "examples": kinds({"minus_one", "zero", "scalar"}), "group": OPTION},
        names=("distributed",),
    ),
    "replicated": Call(
        lambda engine, group: jd.train_state(params(), x(), **method(), engine=distributed.replicated(engine, group)),
        lambda: {"engine": "auto", "group": None},
        {"group": OPTION},
        names=("distributed", "train_state"),
    ),
    "sharded": Call(
        lambda losses, mesh, reshard, params, x: distributed.sharded(losses, mesh, reshard)(params, x),
        lambda: {
            "losses": losses,
            "mesh": init_device_mesh(WHERE["now"], (1,)),
            "reshard": True,
            "params": params(),
            "x": x(),
        },
        {"x": EVERYTHING, "reshard": SWITCH},
        kinds({"losses"}),
    ),
}
