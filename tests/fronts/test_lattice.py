"""Preferences that are spread over the simplex."""

from itertools import product

import pytest
import torch

from functional_jd.fronts import lattice


@pytest.mark.parametrize(("m", "divisions"), [(1, 1), (1, 5), (2, 1), (2, 7), (3, 1), (3, 4), (4, 3), (5, 2)])
def test_the_points_are_all_multiples_of_one_division_that_add_to_one(m, divisions):
    expected = [counts for counts in product(range(divisions + 1), repeat=m) if sum(counts) == divisions]
    found = lattice(m, divisions)
    assert found.dtype == torch.float64
    assert torch.equal(found, torch.tensor(expected, dtype=torch.float64).reshape(-1, m) / divisions)


@pytest.mark.parametrize(
    ("m", "divisions", "message"),
    [
        (0, 3, "lattice: m must be an integer of at least 1, found 0"),
        (2, 0.5, "lattice: divisions must be an integer of at least 1, found 0.5"),
        (40, 40, "lattice: divisions must be such that there are at most 2\\^20 preferences"),
    ],
)
def test_sizes_are_checked(m, divisions, message):
    with pytest.raises(ValueError, match=message):
        lattice(m, divisions)
