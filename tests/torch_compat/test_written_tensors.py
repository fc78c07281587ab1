"""What is seen to be written into, and that other addresses are others' memory."""

import pytest
import torch

from functional_jd.torch_compat.written_tensors import WrittenTensors

X = torch.ones(2, 3)


def in_a_view(x):
    x[0].add_(1)


def by_out(x):
    torch.add(torch.zeros(2, 3), 1, out=x)


def in_a_list(x):
    torch._foreach_add_([x[1], torch.ones(3)], 1)


@pytest.mark.parametrize("write", [torch.Tensor.zero_, in_a_view, by_out, in_a_list])
def test_what_is_written_into_is_seen_and_nothing_else(write):
    given, read = X.clone(), X.clone()
    with WrittenTensors() as seen:
        write(given)
        read.add(1)
    memory = {leaf.untyped_storage().data_ptr() for leaf in (given, read)}
    assert seen.by_memory.keys() & memory == {given.untyped_storage().data_ptr()}


def test_transforms_and_errors_pass_through():
    given = X.clone()
    with WrittenTensors() as seen:
        torch.func.grad(lambda x: x.square().sum())(given)
    assert given.untyped_storage().data_ptr() not in seen.by_memory
    with pytest.raises(RuntimeError, match="size"), WrittenTensors() as seen:
        torch.vmap(lambda x: x.mul_(2).add_(torch.ones(5)))(given)
    assert given.untyped_storage().data_ptr() in seen.by_memory
