"""Valid calls of what several replicas do together."""

from fuzz_values import WHERE, Argument, call, method, params, rows, x
from garbage import FLOATS, SWITCH, kinds
from torch.distributed.device_mesh import init_device_mesh

import functional_jd as jd
from functional_jd import distributed


def _replicated(engine, group):
    return jd.train_state(params(), x(), **method(), engine=distributed.replicated(engine, group))


def _sharded(losses, mesh, reshard, params, x):
    return distributed.sharded(losses, mesh, reshard)(params, x)


DISTRIBUTED = {
    "mean_jacobian": call(distributed.mean_jacobian, jacobian=Argument(rows, FLOATS), said_by=("distributed",)),
    "agree": call(distributed.agree, said_by=("distributed",)),
    "replicate": call(distributed.replicate, said_by=("distributed",)),
    "check_replicas": call(distributed.check_replicas, said_by=("distributed",)),
    "weighted_by_examples": call(
        distributed.weighted_by_examples,
        losses=Argument(params, FLOATS),
        examples=Argument(3, kinds({"minus_one", "zero", "scalar"})),
        said_by=("distributed",),
    ),
    "replicated": call(_replicated, said_by=("distributed", "train_state")),
    "sharded": call(_sharded, mesh=lambda: init_device_mesh(WHERE["now"], (1,)), reshard=Argument(True, SWITCH)),
}
