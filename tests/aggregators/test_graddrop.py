"""GradDrop: one sign per entry, as often as its share, so that on average nothing is lost."""

import pytest
import torch

from functional_jd.aggregation.aggregate import aggregate
from functional_jd.aggregators.graddrop import graddrop
from functional_jd.random import key, split

MANY = 40_000


@pytest.mark.parametrize("column", [[3.0, -1.0, 0.0], [-1e-18, -2e-18, 1e-18], [1e18, -3e18, 2e17]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sign_is_picked_as_often_as_its_share_so_that_the_mean_is_the_sum(column, dtype):
    column = torch.tensor(column, dtype=dtype)
    positive, size = column.clamp(min=0).sum(), column.abs().sum()
    d = aggregate(graddrop(key(0)), column.unsqueeze(1).expand(-1, MANY)).direction
    share = float((d > 0).double().mean())
    expected = float(positive / size)
    deviation = (expected * (1 - expected) / MANY) ** 0.5
    assert abs(share - expected) < 4 * deviation
    assert abs(float(d.double().mean() / size) - float(column.sum() / size)) < 4 * deviation


def test_the_signs_of_different_entries_and_calls_are_independent():
    rule, J = graddrop(key(0)), {"a": torch.tensor([[1.0], [-1.0]]).expand(2, MANY // 2)}
    J["b"] = J["a"].clone()
    first = aggregate(rule, J)
    second = aggregate(rule, J, first.state)
    signs = torch.stack([result.direction[name] for result in (first, second) for name in ("a", "b")]).double()
    assert (torch.corrcoef(signs) - torch.eye(4)).abs().max() < 4 * (MANY / 2) ** -0.5
    neighbours = torch.stack([signs[0, :-1], signs[0, 1:]])
    assert abs(float(torch.corrcoef(neighbours)[0, 1])) < 4 * (MANY / 2) ** -0.5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_largest_numbers_of_a_dtype_do_not_overflow(dtype):
    most = torch.finfo(dtype).max
    J = torch.tensor([[most], [most], [-most], [-most]], dtype=dtype).expand(4, MANY)
    weights = aggregate(graddrop(key(0)), J).weights
    assert weights.dtype == torch.float32
    assert abs(float(weights[0].mean()) - 0.5) < 4 * 0.5 * MANY**-0.5


def test_derivatives_by_finite_differences_in_the_rows_and_in_the_leak():
    J = torch.randn(3, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    leak = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    f = lambda J, leak: aggregate(graddrop(key(0), leak), J).direction
    assert torch.autograd.gradcheck(f, (J.requires_grad_(), leak.requires_grad_()), check_forward_ad=True)
    assert torch.func.jacrev(f, argnums=1)(J.detach(), leak.detach()).abs().max() > 0.1


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_so_in_its_entry_whatever_chance_says(bad):
    J = torch.tensor([[bad, 1.0], [1.0, 1.0], [-1.0, 1.0]])
    found = torch.vmap(lambda k: aggregate(graddrop(k), J).direction)(split(key(0), 20))
    assert not found[:, 0].isfinite().any()
    assert torch.equal(found[:, 1], torch.full((20,), 3.0))
