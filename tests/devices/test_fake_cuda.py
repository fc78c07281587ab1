"""Rules on fake tensors of CUDA: no device is mixed, no value is waited for, as torch's own functions for shapes tell.

It takes a torch that was built with CUDA, and no GPU. Steps are not possible: autograd asks for the GPU's streams.
"""

import pytest
import torch
from rule_table import RULES, rule_of
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._pytree import tree_leaves

import functional_jd as jd
from functional_jd import aggregate
from functional_jd.aggregation.aggregate import start

pytestmark = pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="needs a torch built with CUDA")

# Their search takes values, or minutes of fake operations.
SEARCHING = ("upgrad", "epo", "dualproj", "mgda", "cagrad", "fairgrad", "nash_mtl", "pcd", "cr_mogm", "grouped")
# They differentiate a function of the losses.
DIFFERENTIATING = ("geometric_mean", "stch", "tchebycheff", "cosmos", "pbi", "uw", "imtl_l")


@pytest.mark.parametrize("name", [name for name in RULES if name not in SEARCHING + DIFFERENTIATING])
def test_a_rule_stays_on_its_device(name):
    entry = RULES[name]
    m = entry.rows if isinstance(entry.rows, int) else entry.rows[1]
    with FakeTensorMode():
        rule = rule_of(name)
        jacobian, other = (torch.empty(m, 7, device="cuda") for _ in range(2))
        losses = torch.empty(m, device="cuda")
        found = aggregate(rule, jacobian, start(rule, jacobian, other, losses=losses), other, losses=losses)
        assert all(x.device.type == "cuda" for x in tree_leaves(found))


def test_masks_that_are_drawn_ahead_belong_to_their_device():
    found = []

    @jd.random.keyed
    def dropped(x, y):
        found.extend(torch.nn.functional.dropout(z, 0.5).device for z in (x, y, x, y))

    with FakeTensorMode(allow_non_fake_inputs=True):
        inputs = [torch.empty(8, device=f"cuda:{index}") for index in range(2)]
        # Afterwards the states of the generators are compared, which takes values.
        with pytest.raises(DataDependentOutputException):
            dropped(jd.random.key(0), *inputs)
    assert found == [x.device for x in inputs] * 2
