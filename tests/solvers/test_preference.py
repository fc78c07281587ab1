"""A preference is checked where a rule is built."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from functional_jd.solvers.preference import preferred

G = torch.eye(2, dtype=torch.float64)


@given(st.lists(st.floats(0, 1e30), min_size=1, max_size=5).filter(any))
def test_the_preference_is_what_was_given(u):
    of = preferred(u, "rule")(torch.eye(len(u), dtype=torch.float64))
    assert of.dtype == torch.float64
    assert of.tolist() == u


def test_none_is_one_share_each():
    assert preferred(None, "rule")(torch.eye(4, dtype=torch.float64)).tolist() == [0.25] * 4


def test_it_keeps_its_own_copy():
    u = torch.tensor([1.0, 2.0], dtype=torch.float64)
    of = preferred(u, "rule")
    u.zero_()
    assert of(G).tolist() == [1, 2]


def test_differentiable_under_a_transform_where_values_are_not_known():
    u = torch.tensor([1.0, 2.0], dtype=torch.float64)
    assert torch.func.jacrev(lambda u: preferred(u, "rule")(G))(u).tolist() == [[1, 0], [0, 1]]
    assert torch.vmap(lambda u: preferred(u, "rule")(G))(u.repeat(3, 1)).tolist() == [[1, 2]] * 3


@pytest.mark.parametrize(
    "u", [[-1.0, 2.0], [0.0, 0.0], [1.0, torch.inf], torch.tensor([torch.nan, 1.0]), [], [[1.0, 2.0]], torch.ones(())]
)
def test_what_is_no_preference_is_refused_in_the_name_of_the_rule(u):
    with pytest.raises(ValueError, match=r"config: preference must .*, found .*\. .*"):
        preferred(u, "config")


def test_integers_are_refused():
    with pytest.raises(TypeError, match=r"config: .* found torch\.int64\. Convert it"):
        preferred(torch.tensor([1, 2]), "config")


def test_one_preference_per_row_is_wanted():
    with pytest.raises(ValueError, match=r"config: .* found 3 preferences and 2 rows"):
        preferred([1.0, 2.0, 3.0], "config")(G)
