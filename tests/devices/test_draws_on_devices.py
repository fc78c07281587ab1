"""Draws with keys on the simulated accelerator: the CPU's bits, without waiting, in few launches.

A draw takes some thirty launches, or 45 for normal numbers, whatever the number of keys: dropout draws for the next
calls too, and noise for all leaves at once.
"""

import pytest
import torch
from simulated import simulated
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

import functional_jd as jd

KEY = jd.random.key(5)


def same_bits_on_both(f, *inputs, launches):
    expected = f(*inputs)
    with simulated() as device:
        there = device.put(inputs)
        f(*there)
        device.reset()
        found = f(*there)
        assert not device.waits
        assert device.launches <= launches
        found = device.get(found)
    leaves, others = map(torch.utils._pytree.tree_leaves, (found, expected))
    assert [x.dtype for x in leaves] == [x.dtype for x in others]
    assert all(map(torch.equal, leaves, others))


def dropped(times, p=0.5):
    def f(x):
        for _ in range(times):
            x = F.dropout(x, p)
        return x

    return f


def mixed(x):
    """Masks of several sizes and kinds, numbers between them that may be written to, and transforms inside."""
    first = F.dropout(x, 0.5)
    noise = torch.rand(12, device=x.device).mul_(2.0)
    feature = F.dropout1d(x[None], 0.3)
    inside = torch.vmap(lambda row: F.dropout(row, 0.4), randomness="different")(x)
    gradient = torch.func.grad(lambda y: (F.dropout(y, 0.4) ** 2).sum())(x)
    events = torch.bernoulli(torch.full((3, 4), 0.5, dtype=torch.float64, device=x.device))
    again = F.dropout(x, 0.5)
    return first, noise, feature, inside, gradient, events, again, F.dropout(torch.ones_like(x[0]), 0.5)


DRAWS = [
    (lambda key: jd.random.uniform(key, (1001,)), (KEY,), 29),
    (lambda key: jd.random.uniform(key, (7, 3), dtype=torch.float16), (KEY,), 29),
    (lambda key: jd.random.normal(key, (33,)), (KEY,), 45),
    (lambda key: jd.random.normal(key, (3, 70), dtype=torch.float64), (KEY,), 44),
    (lambda key: jd.random.split(key, 5), (KEY,), 25),
    (lambda key: jd.random.permutation(key, 50), (KEY,), 26),
    (lambda key: jd.random.fold_in(key, 3), (KEY,), 52),
    (lambda key: torch.vmap(lambda key: jd.random.normal(key, (4, 2)))(jd.random.split(key, 3)), (KEY,), 70),
    # Masks of one size are drawn together.
    (jd.random.keyed(dropped(1)), (KEY, torch.ones(6, 50)), 58),
    (jd.random.keyed(dropped(5)), (KEY, torch.ones(6, 50)), 74),
    (jd.random.keyed(dropped(36)), (KEY, torch.ones(6, 50)), 252),
    (jd.random.keyed(mixed), (KEY, torch.ones(3, 4)), 290),
    (torch.vmap(jd.random.keyed(dropped(3)), in_dims=(0, None)), (jd.random.split(KEY, 3), torch.ones(20)), 66),
]


@pytest.mark.parametrize(("draw", "inputs", "launches"), DRAWS)
def test_draws_have_the_bits_of_the_cpu_in_few_launches(draw, inputs, launches):
    same_bits_on_both(draw, *inputs, launches=launches)


def test_a_key_on_the_host_makes_no_step_wait():
    with simulated() as device:
        x = device.put(torch.ones(6, 50))
        f = jd.random.keyed(lambda x: (dropped(3)(x), torch.randn_like(x)))
        f(KEY, x)
        device.reset()
        f(KEY, x)
        assert not device.waits


def test_a_checkpoint_draws_the_same_masks_again():
    def loss(key, w):
        part = lambda x: F.dropout(F.dropout(x * w, 0.5), 0.5)
        run = jd.random.keyed(lambda x: checkpoint(part, F.dropout(x, 0.5), use_reentrant=False).square().sum())
        leaf = w.detach().requires_grad_()
        w = leaf
        return torch.autograd.grad(run(key, torch.ones_like(w)), leaf)[0]

    same_bits_on_both(loss, KEY, torch.linspace(1, 2, 40), launches=139)


@pytest.mark.parametrize(
    ("params", "launches"),
    [
        ([torch.ones(5, 3), torch.ones(3), torch.ones(()), torch.ones(2, 2)], 114),
        ([torch.ones(1, 70000), torch.ones(4), torch.ones(3, 3)], 155),
        ([torch.ones(3)], 100),
        ([torch.ones(3), torch.ones(5, dtype=torch.float64), torch.ones(2).half()], 199),
    ],
)
def test_noise_of_small_leaves_of_a_dtype_is_drawn_together(params, launches):
    optimizer = jd.noised(jd.sgd(0.1), KEY, 1.1, max_norm=1.0, batch_size=4)
    moved = lambda params, state: optimizer.update(params, state, params)
    same_bits_on_both(moved, params, optimizer.init(params), launches=launches)


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="needs a torch built with CUDA, and no GPU")
def test_masks_that_are_drawn_ahead_belong_to_their_device():
    """On fake tensors of two CUDA devices. Steps are not possible: autograd asks for the GPU's streams."""
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
