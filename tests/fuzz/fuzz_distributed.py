"""Valid calls of what several replicas do together."""

from fuzz_values import WHERE, given, method, params, rows, tensor, x
from garbage import EMPTY, EVERYTHING, FLOATS, OPTION, SWITCH, TREE, Call, kinds
from torch.distributed.device_mesh import init_device_mesh

import functional_jd as jd
from functional_jd import distributed


def _of_a_group(f, valid, fine, name: str = "distributed") -> Call:
    return Call(f, valid, fine | {"group": OPTION}, names=("distributed", name))


DISTRIBUTED = {
    "mean_jacobian": _of_a_group(distributed.mean_jacobian, given("group", jacobian=rows), {"jacobian": FLOATS}),
    "agree": _of_a_group(distributed.agree, given("group", finite=lambda: tensor(True)), {}),
    "replicate": _of_a_group(distributed.replicate, given("group", tree=params), {"tree": TREE | EMPTY}),
    "check_replicas": _of_a_group(distributed.check_replicas, given("group", tree=params), {"tree": TREE | EMPTY}),
    "weighted_by_examples": _of_a_group(
        distributed.weighted_by_examples,
        given("group", losses=params, examples=3),
        {"losses": FLOATS, "examples": kinds({"minus_one", "zero", "scalar"})},
    ),
    "replicated": _of_a_group(
        lambda engine, group: jd.train_state(params(), x(), **method(), engine=distributed.replicated(engine, group)),
        given("engine group"),
        {},
        "train_state",
    ),
    "sharded": Call(
        lambda losses, mesh, reshard, params, x: distributed.sharded(losses, mesh, reshard)(params, x),
        given("losses params x", mesh=lambda: init_device_mesh(WHERE["now"], (1,)), reshard=True),
        {"x": EVERYTHING, "reshard": SWITCH},
        kinds({"losses"}),
    ),
}
