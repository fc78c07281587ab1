"""Layouts without processes: which part of a leaf a rank holds, and where its entries are. With them: `shards.py`."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from functional_jd.core import sharding


class Mesh:
    """The sizes of a mesh and the place of one rank in it."""

    def __init__(self, sizes, place):
        self.sizes, self.place = sizes, place

    def size(self, dim):
        return self.sizes[dim]

    def get_local_rank(self, dim):
        return self.place[dim]


@given(st.integers(0, 12), st.integers(1, 5), st.integers(1, 3), st.data())
def test_a_rank_holds_the_chunk_of_a_chunk_that_torch_gives_it(n, first, second, data):
    place = data.draw(st.integers(0, first - 1)), data.draw(st.integers(0, second - 1))
    expected = torch.arange(n)
    for parts, index in zip((first, second), place, strict=True):
        chunks = expected.chunk(parts) if len(expected) else ()
        expected = chunks[index] if index < len(chunks) else expected[:0]
    start, length = sharding.shard_range(n, Mesh((first, second), place), (0, 1))
    assert list(range(start, start + length)) == expected.tolist() or (length == 0 and not len(expected))


def test_plain_leaves_pass_through_unchanged():
    leaf = torch.ones(2, 3)
    assert sharding.shard_of(leaf) is leaf
    assert sharding.sharded_as(leaf, torch.ones(5), rows=1) is leaf
    flags = torch.tensor([True, False])
    assert sharding.agreed(flags, [leaf]) is flags
    parts = [torch.tensor(1.0), torch.tensor(2.0)]
    assert sharding.sum_over_shards(parts, [leaf, leaf]) == 3


@given(st.lists(st.integers(0, 4), max_size=3))
def test_positions_count_the_entries_of_a_leaf_or_a_row(shape):
    expected = torch.arange(torch.Size(shape).numel()).reshape(shape)
    assert torch.equal(sharding.positions(torch.zeros(shape)), expected)
    assert torch.equal(sharding.positions(torch.zeros(2, *shape), 1), expected)
