"""Names of objectives: one for each row, in the order of the rows."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as torch_pytree

from functional_jd import jacobian_fn
from functional_jd.core.names import names_or_indices, objective_names


class Two(NamedTuple):
    right: torch.Tensor
    left: torch.Tensor


@dataclass
class Box:
    inside: torch.Tensor


torch_pytree.register_dataclass(Box)


def test_names_are_keys_and_indices():
    one, two = torch.zeros(()), torch.zeros(2)
    assert objective_names({"image": two, "digits": {"right": one, "left": one}}) == [
        *("digits.left", "digits.right"),
        *("image[0]", "image[1]"),
    ]
    assert objective_names(Two(one, torch.zeros(1, 2))) == ["right", "left[0, 0]", "left[0, 1]"]
    assert objective_names([Two(one, one), {"z": Box(one), "a": one}]) == ["0.right", "0.left", "1.a", "1.z.inside"]
    assert objective_names(two) == ["0", "1"]
    assert objective_names(one) == ["loss"]
    assert objective_names([one, one]) == ["0", "1"]


@given(
    st.dictionaries(st.text("abc", min_size=1, max_size=3), st.lists(st.integers(0, 3), max_size=2), min_size=1).filter(
        lambda shapes: any(0 not in shape for shape in shapes.values())
    )
)
def test_every_row_of_the_jacobian_has_its_name(shapes):
    """Each loss is a number that its own name can be read off, and rows are their slopes."""

    def losses(x):
        return {key: x * sum(key.encode()) * torch.ones(shape) for key, shape in shapes.items()}

    jacobian, values = jacobian_fn(losses)(torch.tensor(1.0))
    names = objective_names(values)
    assert len(set(names)) == len(names) == len(jacobian)
    assert [sum(name.split("[")[0].encode()) for name in names] == jacobian.tolist()


def test_a_loss_that_is_no_tensor_is_refused():
    with pytest.raises(TypeError, match="found float in 'a'"):
        objective_names({"a": 1.0})


def test_names_must_be_as_many_as_rows():
    assert names_or_indices(None, 2) == ["0", "1"]
    assert names_or_indices(("a", "b"), 2) == ["a", "b"]
    with pytest.raises(ValueError, match="functional_jd: expected one name for each of 2 objectives, found 1"):
        names_or_indices(["a"], 2)


@pytest.mark.parametrize("compiled", [False, True])
def test_rows_of_losses_in_an_ordered_dict_come_in_its_order(compiled):
    f = jacobian_fn(lambda p: OrderedDict(b=p["w"].sum(), a=(p["w"] ** 2).sum()))
    f = torch.compile(f, fullgraph=True, backend="aot_eager") if compiled else f
    jacobian, losses = f({"w": torch.tensor([1.0, 2.0])})
    torch.testing.assert_close(jacobian["w"], torch.tensor([[1.0, 1.0], [2.0, 4.0]]))
    assert list(losses) == objective_names(losses) == ["b", "a"]
    torch.compiler.reset()
