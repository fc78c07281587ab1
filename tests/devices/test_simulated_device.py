"""The simulated accelerator itself: what it counts, what it refuses, and that it is gone afterwards."""

import pytest
import torch
from simulated import simulated
from torch.nn import functional as F  # noqa: N812

ROWS = torch.arange(6.0).view(2, 3)


def test_an_operation_is_a_launch_and_a_view_is_none():
    with simulated() as device:
        x = device.put(ROWS)
        device.reset()
        y = (x.mT[1:] + 1).reshape(-1) * 2
    assert device.by_name == {"add": 1, "mul": 1, "copy_": 1}
    assert device.launches == 3
    assert device.synchronisations == 0
    assert torch.equal(device.get(y), (ROWS.mT[1:] + 1).reshape(-1) * 2)


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: x[0].tolist(),
        lambda x: bool((x > 1).all()),
        lambda x: x.cpu(),
        lambda x: x[x > 1],
        lambda x: torch.nonzero(x),
        lambda x: torch.equal(x, x),
        lambda x: x + torch.tensor([1.0, 2.0, 3.0], device="sim"),
        lambda x: torch.linalg.eigh(x[:, :2]),
        lambda x: torch.linalg.cholesky(torch.eye(2, device="sim")),
    ],
)
def test_whoever_waits_is_counted_and_not_captured(wait):
    with simulated() as device:
        x = device.put(ROWS)
        device.reset()
        wait(x)
        assert device.synchronisations == 1
        device.capturing = True
        with pytest.raises(RuntimeError, match="capturing"):
            wait(x)


def test_devices_are_not_mixed_but_for_single_numbers():
    with simulated() as device:
        x = device.put(ROWS)
        for mix in (lambda: x + ROWS, lambda: x @ ROWS.mT, lambda: torch.cat([x, ROWS]), lambda: F.linear(ROWS, x)):
            with pytest.raises(RuntimeError, match="same device"):
                mix()
        with pytest.raises(RuntimeError, match="same device"):
            torch.stack([x[0, 0], torch.tensor(1.0)])
        assert torch.equal(device.get(x + torch.tensor(2.0)), ROWS + 2)


def test_bytes_alive_and_their_peak():
    with simulated() as device:
        x = device.put(ROWS)
        before = device.bytes
        y = x * 2
        view = y[0]
        del y
        assert device.bytes == before + 24
        del view
        assert device.bytes == before
        assert device.peak == before + 24


def test_a_device_without_float64_refuses_it():
    with simulated(float64=False) as device:
        x = device.put(ROWS)
        for wide in (lambda: x.double(), lambda: ROWS.double().to("sim"), lambda: x.to("cpu", torch.float64)):
            with pytest.raises(TypeError, match="float64"):
                wide()
        assert torch.equal(device.get(torch.where(x > 1, x, 0.0)), torch.where(ROWS > 1, ROWS, 0.0))


def test_layers_of_many_tensors_are_one_launch_if_they_are_alike():
    with simulated() as device:
        some = device.put([torch.ones(2), torch.ones(3)])
        other = device.put([torch.ones(2), torch.ones(3, dtype=torch.float64)])
        device.reset()
        torch._foreach_add(some, some)
        torch._foreach_add(other, other)
        torch._foreach_copy_(some, device.put([torch.ones(2), torch.ones(3)]))
    assert device.by_name == {"_foreach_add": 1 + 2, "_foreach_copy_": 1}


def test_no_accelerator_is_left():
    with simulated():
        assert torch.accelerator.is_available()
    assert not torch.accelerator.is_available()


@pytest.mark.parametrize("draw", [lambda x: F.dropout(x, 0.5), torch.rand_like, lambda x: x.bernoulli(0.5)])
def test_the_device_draws_from_a_generator_of_its_own(draw):
    torch.manual_seed(0)
    expected, before = draw(ROWS), torch.get_rng_state()
    with simulated() as device:
        x = device.put(ROWS)
        torch.sim.manual_seed(0)
        state = torch.sim.get_rng_state()
        assert torch.equal(device.get(draw(x)), expected)
        assert torch.equal(torch.get_rng_state(), before)
        assert not torch.equal(torch.sim.get_rng_state(), state)
