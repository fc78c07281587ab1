"""Many small tensors: the same values as one by one, in a few launches of an accelerator."""

import pytest
import torch
from simulated import simulated
from torch import nn

import functional_jd as jd
from functional_jd.core.foreach import clone_each, copy_each, times, where_each

SHAPES = [(3,), (), (2, 3), (5,), (1, 2), (4,), (7,), (0,), (20_000,)]
DTYPES = [torch.float32, torch.int64, torch.float64]


def tensors(seed):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=draw).mul(9).to(dtype) for dtype in DTYPES for shape in SHAPES]


@pytest.mark.parametrize("flag", [True, False])
def test_choices_are_those_of_where_and_have_memory_of_their_own(flag):
    new, old = tensors(0), tensors(1)
    (old if flag else new)[0][0] = torch.nan
    with simulated() as device:
        given = device.put(new), device.put(old), device.put(torch.tensor(flag))
        device.reset()
        found = where_each(given[2], *given[:2])
        assert device.launches <= 3 * (2 + 1 + 1 + 1)  # by dtype: two joins, a choice, a copy, and the large one
        assert len({x.untyped_storage().data_ptr() for x in found if x.numel()}) == sum(x.numel() > 0 for x in found)
        for x, y in zip(device.get(found), new if flag else old, strict=True):
            assert x.dtype == y.dtype
            assert torch.equal(x, y)


def test_copies_take_one_launch_by_dtype_and_no_gradient():
    given = tensors(2)
    with simulated() as device:
        there = device.put(given)
        device.reset()
        found = clone_each(there)
        assert device.launches == len(DTYPES)
        assert not any(x.requires_grad for x in found)
        found[0].zero_()
        assert all(map(torch.equal, device.get(there), given))
        targets = [torch.empty_like(x).mT if x.ndim == 2 else torch.empty_like(x) for x in there]
        copy_each([x.mT if x.ndim == 2 else x for x in targets], there)
    assert clone_each([x.requires_grad_() for x in given[:2]])[0].grad_fn is None


def special_tensors():
    """Zeros of both signs, the smallest and the largest numbers, infinities and others, in many dtypes and layouts."""
    found = [torch.tensor([True, False]), torch.arange(3, dtype=torch.uint8), torch.tensor([1 + 2j, -0.0j])]
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64):
        info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
        values = (
            [0.0, 1.5, -7.0, float(info.max), float(info.min)] if dtype.is_floating_point else [0, info.min, info.max]
        )
        if dtype.is_floating_point:
            values += [-0.0, torch.inf, -torch.inf, info.smallest_normal, info.smallest_normal * info.eps]
        x = torch.tensor(values, dtype=dtype)
        found += [x, x.repeat(2, 1).mT, x[::2], x[:0], x[1]]
    return found


def test_copies_have_the_same_bits_and_their_strides():
    given = special_tensors()
    with simulated() as device:
        there = device.put(given)
        found = clone_each(there)
        for x, y, z in zip(device.get(found), given, found, strict=True):
            assert (x.dtype, x.shape) == (y.dtype, y.shape)
            assert torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8)) if x.ndim else x == y
            assert z.is_contiguous() or z.mT.is_contiguous()


def test_products_have_derivatives_by_their_factor():
    leaves = [torch.arange(3.0), torch.ones(2, requires_grad=True)]
    factor = torch.tensor(2.0, requires_grad=True)
    sum(x.sum() for x in times(leaves, factor)).backward()
    assert factor.grad == 5
    assert torch.equal(leaves[1].grad, torch.full((2,), 2.0))


def test_copies_keep_the_graph_of_what_is_copied():
    x, target = torch.ones(3, requires_grad=True), torch.empty(3)
    copy_each([target], [2 * x])
    assert torch.equal(torch.autograd.grad(target.sum(), x)[0], torch.full((3,), 2.0))


def test_twenty_normalisations_cost_few_launches_beside_plain_training():
    layers = [layer for _ in range(20) for layer in (nn.Linear(3, 3), nn.BatchNorm1d(3))]
    net = nn.Sequential(*layers)
    with simulated() as device:
        net, x = net.to("sim"), device.put(torch.randn(8, 3, generator=torch.Generator().manual_seed(0)))
        apply = jd.functional(net)

        def losses(params, buffers, x):
            y, buffers = apply(params, buffers, x)
            return {"a": y.square().sum(), "b": (y - 1).abs().sum()}, buffers

        how = {"losses": losses, "aggregator": jd.mean(), "optimizer": jd.adamw()}
        state = jd.train_state(dict(net.named_parameters()), x, buffers=dict(net.named_buffers()), **how)
        for _ in range(2):
            device.reset()
            state, info = jd.step(state, x, **how)
        ours = device.launches
        before = device.get(state.buffers)
        state, info = jd.step(state, x * torch.nan, **how)
        assert not info.moved.item()
        for name, y in device.get(state.buffers).items():
            assert torch.equal(y, before[name])
        device.reset()
        y = net(x)
        torch.autograd.grad(y.square().sum() + (y - 1).abs().sum(), list(net.parameters()))
        plain = device.launches
    assert ours <= plain + 60
