"""What ranks send each other from an accelerator: without waiting, in dtypes that NCCL takes.

The group has two ranks, of which the other does nothing: it sends what this one sends.
"""

import pytest
import torch
import torch.distributed as dist
from simulated import simulated
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from zoo import MODELS, by_example, plain

import functional_jd as jd
from functional_jd import distributed

# NCCL's documentation, ncclDataType_t; torch sends a bool as a byte.
TAKEN = {torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool}
TAKEN |= {torch.float16, torch.bfloat16, torch.float32, torch.float64}


class Sent(TorchDispatchMode):
    """Collects the dtypes of what is sent."""

    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "_c10d_functional" and "wait" not in str(func):
            self.dtypes.add(args[0].dtype)
        return func(*args, **(kwargs or {}))


class Doubled(TorchDispatchMode):
    """The sum of what this rank sends and of what the other does, which torch's fake group leaves out."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        added = func.namespace == "_c10d_functional" and "all_reduce" in str(func) and args[1] == "sum"
        return found.add_(found) if added else found


@pytest.fixture
def device():
    with simulated() as device:
        dist.init_process_group("cpu:fake,sim:fake", rank=0, world_size=2, store=FakeStore())
        try:
            with Doubled():
                yield device
        finally:
            dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [*TAKEN, torch.int16, torch.uint16, torch.uint32])
def test_every_dtype_is_sent_as_one_that_nccl_takes(device, dtype):
    value = device.put(torch.tensor([0, 1, 3]).to(dtype))
    with Sent() as sent:
        found = distributed.replicate({"counter": value})["counter"]
    assert sent.dtypes
    assert sent.dtypes <= TAKEN
    assert found.dtype == dtype
    assert torch.equal(device.get(found).long(), torch.tensor([0, 1, 3]).to(dtype).long())


@pytest.mark.parametrize("examples", [3, torch.tensor(3)])
def test_weights_of_unequal_batches_do_not_wait(device, examples):
    examples = device.put(examples)
    losses = device.put(torch.arange(4.0))
    device.reset()
    found = distributed.weighted_by_examples(losses, examples)
    assert not device.waits
    assert found.device.type == "sim"
    assert device.get(found).shape == (4,)


@pytest.mark.parametrize("scale", [None, (), "each"])
@pytest.mark.parametrize("kind", [plain, by_example])
def test_a_step_of_replicas_waits_as_one_alone(device, kind, scale):
    case = kind(MODELS["mlp"]())
    params, batch = device.put((case.params, case.args))
    m = 4
    scale = None if scale is None else jd.scale_state(2.0**8, shape=m if scale == "each" else scale)
    for rule, engine, waits in ((jd.mean, "auto", 0), (jd.mean, "jacobian", 0), (jd.config, "auto", 2)):
        how = {"losses": case.losses, "aggregator": rule(), "optimizer": jd.sgd(0.1)}
        engine = distributed.replicated(engine)
        state = jd.train_state(params, *batch, scale=scale, engine=engine, **how)
        state, _ = jd.step(state, *batch, engine=engine, **how)
        device.reset()
        with Sent() as sent:
            state, info = jd.step(state, *batch, engine=engine, **how)
        assert device.synchronisations == waits
        assert sent.dtypes <= TAKEN
        assert all(x.device.type == "sim" for x in tree_leaves((state, info)))
