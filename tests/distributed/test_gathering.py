"""Leaves that are gathered where they are used, on a mesh of one rank. On more: `tests/distributed`."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from functional_jd.distributed.gathering import GatheredWhereUsed, Gathers
from functional_jd.objectives.over_shards import Leaf, Sharded


@pytest.fixture
def like(tmp_path):
    dist.init_process_group("gloo", init_method=(tmp_path / "store").as_uri(), rank=0, world_size=1)
    yield distribute_tensor(torch.arange(6.0).reshape(3, 2), init_device_mesh("cpu", (1,)), [Shard(0)])
    dist.destroy_process_group()


def gathers_of(like):
    return Gathers(like.device_mesh, False)


def leaf_of(like, gathers=None):
    shard = like.to_local().clone().requires_grad_()
    return shard, GatheredWhereUsed.of(Leaf(shard, like, "w"), gathers or gathers_of(like))


def test_functions_get_the_whole_leaf_and_gradients_reach_the_shard(like):
    shard, leaf = leaf_of(like)
    expected = like.full_tensor()
    for found in (leaf + 0, 0 + leaf, torch.stack([leaf])[0], leaf.mT.mT, leaf[:], torch.add(0, other=leaf)):
        assert type(found) is torch.Tensor
        assert torch.equal(found, expected)
    (gradient,) = torch.autograd.grad((leaf * leaf).sum(), shard)
    assert torch.equal(gradient, 2 * expected)


def test_what_a_leaf_tells_of_itself_needs_no_gathering(like):
    gathers = gathers_of(like)
    shard, leaf = leaf_of(like, gathers)
    assert (leaf.shape, leaf.ndim, len(leaf), leaf.numel(), leaf.size(1)) == ((3, 2), 2, 3, 6, 2)
    assert (leaf.dtype, leaf.device, leaf.layout) == (shard.dtype, shard.device, shard.layout)
    assert leaf.requires_grad
    assert leaf.is_floating_point()
    assert not gathers.names
    assert leaf.sum() == 15
    assert leaf.stride() == (2, 1)
    assert gathers.names == ["w", "w"]


def test_the_backward_pass_reaches_a_leaf_before_what_was_recorded_earlier(like):
    """So that the gradient of one layer is scattered before that of the layer below is computed."""
    order = []
    layers = [leaf_of(like) for _ in range(3)]
    for index, (shard, _) in enumerate(layers):
        shard.register_hook(lambda _, index=index: order.append(index))
    x = torch.ones(2, 3)
    for _, leaf in layers:
        x = torch.tanh(x @ leaf)[:, :1].expand(2, 3)
        x.register_hook(lambda _: order.append("between"))
    torch.autograd.grad(x.sum(), [shard for shard, _ in layers])
    assert [entry for entry in order if entry != "between"] == [2, 1, 0]
    assert order.index(2) < len(order) - 1 - order[::-1].index("between")


def test_saved_shards_do_not_stand_for_memory_that_was_given_back(like):
    gathers = gathers_of(like)
    with gathers.saving_shards():
        _, leaf = leaf_of(like, gathers)
        whole = leaf + 0
        del whole
        (leaf * 1).sum()  # the gathered leaf is gone now, and its memory may be taken
        points = [torch.full((3, 2), float(i), requires_grad=True) for i in range(50)]
        outputs = [(point * point).sum() for point in points]
    for i, (point, output) in enumerate(zip(points, outputs, strict=True)):
        assert torch.equal(torch.autograd.grad(output, point)[0], torch.full((3, 2), 2.0 * i))


def test_a_saved_tensor_that_was_changed_is_refused_as_autograd_refuses_it(like):
    gathers = gathers_of(like)
    with gathers.saving_shards():
        shard, leaf = leaf_of(like, gathers)
        x = torch.ones(2, 3)
        y = (x @ leaf).exp()  # autograd saves the result
        y.mul_(2)
    with pytest.raises(RuntimeError, match=r"changed in place after it was saved: shape \[2, 2\]"):
        torch.autograd.grad(y.sum(), shard)


@pytest.mark.parametrize("through", [lambda whole: whole, lambda whole: whole[1:], lambda whole: whole.detach()])
def test_a_gathered_leaf_that_was_changed_is_saved_itself(like, through):
    x = torch.ones(3, 2, requires_grad=True)
    gathers = gathers_of(like)
    with gathers.saving_shards():
        _, leaf = leaf_of(like, gathers)
        whole = leaf.view(3, 2)
        with torch.no_grad():
            through(whole).mul_(3)
        output = (x * whole.detach()).sum()
    assert torch.equal(torch.autograd.grad(output, x)[0], whole)


@pytest.mark.parametrize("change", [lambda leaf: leaf.mul_(2), lambda leaf: torch.nn.init.zeros_(leaf)])
def test_a_change_that_the_next_function_would_not_see_is_refused(like, change):
    _, leaf = leaf_of(like)
    with pytest.raises(RuntimeError, match="sharded: losses must not change their parameters"):
        change(leaf)


class Address(torch.autograd.Function):
    """Takes the address of its argument, as kernels of one's own do."""

    @staticmethod
    def forward(ctx, w):
        w.data_ptr()
        return w

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent


def test_an_address_that_a_kernel_would_read_too_late_is_refused(like):
    _, leaf = leaf_of(like)
    with pytest.raises(ValueError, match=r"sharded: .* takes the address of a parameter: .* reshard=False"):
        Address.apply(leaf)


def test_losses_of_a_mesh_that_nothing_gathers_are_refused():
    with pytest.raises(ValueError, match=r"sharded: losses must be made by .*sharded\(losses, mesh\), found"):
        Sharded(lambda params: params, mesh=object())(torch.ones(2))
