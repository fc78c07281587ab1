"""Draws on fake tensors of two CUDA devices, which are not mixed.

It takes a torch that was built with CUDA, and no GPU. Steps are not possible: autograd asks for the GPU's streams.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

import functional_jd as jd

pytestmark = pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="needs a torch built with CUDA")


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
