"""What the laws measure with: the reach, what is close, and the Jacobians that they make from one, by hand."""

import pytest
import torch

from functional_jd.aggregation import AffineWeights, Aggregation
from functional_jd.testing.measures import check_close, reach_of, variants, with_first_entry, with_moderate_norms

J = torch.tensor([[1.0, -2.0], [3.0, 4.0]], dtype=torch.float64)


def test_the_reach_bounds_every_entry_of_the_direction():
    assert reach_of(J, torch.tensor([-1.0, 0.5])).tolist() == [2.5, 4]
    rest = torch.tensor([-5.0, 1.0], dtype=torch.float64)
    assert reach_of(J, AffineWeights(torch.zeros(2, 1), rest)).tolist() == [7, 4]
    assert reach_of(J, AffineWeights(torch.tensor([[-2.0], [0.0]]), rest)).tolist() == [8.5, 7]


def test_what_is_close_is_relative_to_the_jacobian_where_the_reach_is_zero():
    zero = Aggregation(torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64), ())
    check_close(zero._replace(direction=zero.direction + 2.0**-39), zero, J, "far")
    with pytest.raises(AssertionError, match=r"far: off by 3.64e-12, with a reach of 0"):
        check_close(zero._replace(direction=zero.direction + 2.0**-38 + 2.0**-50), zero, J, "far")


def test_norms_become_moderate_by_powers_of_two():
    rows = torch.tensor([[3.0, -0.0], [3e-20, 1e-20], [1e20, -3e20], [0.0, 0.0], [200.0, 1.0]], dtype=torch.float64)
    found = with_moderate_norms(rows)
    factors = found[[0, 1, 2, 4]].abs().amax(1) / rows[[0, 1, 2, 4]].abs().amax(1)
    assert torch.equal(torch.frexp(factors).mantissa, torch.full((4,), 0.5, dtype=torch.float64))
    assert (factors[0], factors[3]) == (1, 1)
    assert torch.equal(found[[0, 1, 2, 4]], rows[[0, 1, 2, 4]] * factors[:, None])
    largest = found.abs().amax(1)
    assert largest[3] == 0
    assert (largest[[0, 1, 2, 4]] >= 2.0**-8).all()
    assert (largest <= 2.0**8).all()


def test_variants_and_replaced_entries():
    column = torch.tensor([[1.0], [2.0], [3.0]])
    found = [jacobian.squeeze(1).tolist() for jacobian, others, losses in variants(column, (), None)]
    assert found == [[1, 2, 3], [3, 2, 1], [6, 2, 4]]
    assert with_first_entry(J, 7.0, -1).tolist() == [[1, -2], [7, 4]]
    assert with_first_entry(J, 7.0, 0).tolist() == [[7, -2], [3, 4]]
    assert J.tolist() == [[1, -2], [3, 4]]
