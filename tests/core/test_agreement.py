"""Digests, checksums and layouts: one size for what ranks send, what differs is told, which part a rank holds."""

from fractions import Fraction
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from simulated import simulated

import functional_jd as fj
from functional_jd.core import sharding
from functional_jd.core.agreement import checksums, description, function_names, means_if_alike


class Ranks:
    """Ranks whose means are taken in one process: what the others send is recorded before."""

    def __init__(self, *ranks):
        self.sent = []
        for values, parts in ranks:
            messages = []
            # As if all others sent the same.
            means_if_alike(values, parts, lambda x, own=messages: own.append(x) or x, "Do so.")
            self.sent.append(messages)

    def means(self, values, parts, cure="Do so."):
        turns = iter(zip(*self.sent, strict=False))
        mean = lambda own: torch.stack([x / len(self.sent) for x in next(turns)]).sum(0).to(own)
        return means_if_alike(values, parts, mean, cure)


def values_of(m, dtype=torch.float32, device="cpu"):
    return [torch.arange(1.0, m + 1, dtype=dtype, device=device)]


def test_the_first_message_has_one_size_and_one_dtype():
    found = {
        (tuple(x.shape), x.dtype)
        for m in (0, 1, 999, 1000, 1001, 5000)
        for dtype in (torch.float32, torch.float64)
        for x in Ranks((values_of(m, dtype), {"losses": f"{m} {dtype}"})).sent[0][:1]
    }
    assert found == {((1001,), torch.float64)}


@pytest.mark.parametrize("m", [0, 1, 999, 1000, 1001, 5000])
def test_means_have_the_shapes_and_dtypes_of_the_values(m):
    parts = {"losses": str(m), "rule": "mean"}
    one = [torch.tensor(2.0), *values_of(m, torch.float64), torch.full((2, 1), torch.nan)]
    other = [torch.tensor(4.0), *(3 * x for x in one[1:])]
    ranks = Ranks((one, parts), (other, parts))
    assert len(ranks.sent[0]) == 1 + (m + 3 > 1000)
    found = ranks.means(one, parts)
    torch.testing.assert_close(found, [torch.tensor(3.0), 2 * one[1], one[2]], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("ranks", [2, 3, 6, 49])
def test_every_rank_is_told_what_differs(ranks):
    alike = {"losses": "a, b", "rule": "mean"}
    for last, words in (
        ({"losses": "a, c"}, "expected losses on all ranks, found different ones; on this rank: a, [bc]"),
        ({"rule": "total"}, "expected rule on all ranks, found different ones; on this rank: (mean|total)"),
        ({"losses": "c", "rule": "total"}, "expected losses and rule on .*: (a, b; mean|c; total)"),
    ):
        own = [(values_of(3), alike)] * (ranks - 1) + [(values_of(4), alike | last)]
        seen = Ranks(*own)
        for values, parts in (own[0], own[-1]):
            with pytest.raises(ValueError, match=rf"^functional_jd: {words}\. Do so\.$"):
                seen.means(values, parts)
    same = Ranks(*[(values_of(3), alike)] * ranks)
    torch.testing.assert_close(same.means(values_of(3), alike), values_of(3))


def test_gradients_are_those_of_the_means():
    x = torch.ones(1001, requires_grad=True)
    (mean,) = means_if_alike([x * 2], {"losses": "a"}, lambda x: (x + x.detach()) / 2, "")
    mean.sum().backward()
    assert torch.equal(x.grad, torch.ones(1001))


def test_nobody_waits_for_an_accelerator():
    """Means are NaN where ranks differ, without an exchange between device and host."""
    with simulated() as device:
        values = values_of(3, device="sim")
        for other, is_told in (("a", False), ("b", True)):
            ranks = Ranks((values, {"losses": "a"}), (values, {"losses": other}))
            device.reset()
            (found,) = ranks.means(values, {"losses": "a"})
            assert not device.synchronisations
            assert device.get(found).isnan().all() == is_told


def test_a_description_waits_for_an_accelerator_only_if_it_may():
    with simulated() as device:
        rules = [fj.upgrad(device.put(torch.tensor([1.0, x]))) for x in (2.0, 3.0)]
        device.reset()
        assert description(rules[0], waiting=False) == description(rules[1], waiting=False)
        assert not device.synchronisations
        assert description(rules[0]) != description(rules[1])
        assert device.synchronisations
    assert description(fj.sgd(Fraction(1, 2))) != description(fj.sgd(Fraction(1, 4)))
    rules = [fj.upgrad(torch.tensor([1.0, x])) for x in (2.0, 3.0)]
    assert description(rules[0], waiting=False) != description(rules[1], waiting=False)


WIDTHS = {torch.uint8: 8, torch.bool: 8, torch.bfloat16: 16, torch.float32: 32, torch.float64: 64, torch.int64: 64}


@pytest.mark.parametrize("dtype", WIDTHS)
def test_checksums_are_their_definition(dtype):
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(-9, 9, (70, 1001), generator=draw).to(dtype).mT  # more than one chunk, and not contiguous
    before = x.clone()
    width = WIDTHS[dtype] // 8
    raw = bytes(x.contiguous().reshape(-1).view(torch.uint8).tolist())
    signed = dtype not in (torch.uint8, torch.bool)
    words = [int.from_bytes(raw[k : k + width], "little", signed=signed) for k in range(0, len(raw), width)]
    fold = lambda word: word % 2**64 ^ word % 2**64 >> 32
    mixed = sum(fold((2 * k + 1) * 0x1E3779B97F4A7C15 * fold(word)) for k, word in enumerate(words))
    plain = sum((2 * k + 1) * word for k, word in enumerate(words))
    for found, expected in zip((*checksums([x]), *checksums([x], mixed=False)), (mixed, plain), strict=True):
        assert (found.dtype, found.shape, int(found) % 2**64) == (torch.int64, (), expected % 2**64)
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_checksums_see_signs_and_places_of_several_entries(dtype):
    """Plain sums of products do not: two signs of float64 add up to 2^64, and 1 - 3 - 5 + 7 is 0."""
    x = torch.tensor([1.0, -1.0, -1.0, 1.0, 2.0, -2.0, -2.0, 2.0], dtype=dtype)
    signs = torch.tensor(list(product([1.0, -1.0], repeat=8)), dtype=dtype)
    found = torch.stack(checksums([own * x for own in signs]))
    assert len(found.unique()) == 256
    places = torch.stack(checksums([x.roll(k) for k in range(8)]))
    assert len(places.unique()) == 8


def test_of_nothing_and_of_complex_numbers():
    x = torch.tensor([1 + 2j, -3j])
    assert int(checksums([torch.zeros(0, 3)])[0]) == 0
    assert checksums([x]) == checksums([torch.view_as_real(x)])
    assert checksums([x.conj()]) == checksums([torch.view_as_real(x.conj().resolve_conj())])


@given(st.integers(0, 12), st.integers(1, 5), st.integers(1, 3), st.data())
def test_a_rank_holds_the_chunk_of_a_chunk_that_torch_gives_it(n, first, second, data):
    place = data.draw(st.integers(0, first - 1)), data.draw(st.integers(0, second - 1))
    expected = torch.arange(n)
    for parts, index in zip((first, second), place, strict=True):
        chunks = expected.chunk(parts) if len(expected) else ()
        expected = chunks[index] if index < len(chunks) else expected[:0]
    mesh = SimpleNamespace(size=(first, second).__getitem__, get_local_rank=place.__getitem__)
    start, length = sharding.shard_range(n, mesh, (0, 1))
    assert list(range(start, start + length)) == expected.tolist() or (length == 0 and not len(expected))


@given(st.lists(st.integers(0, 4), max_size=3))
def test_positions_count_the_entries_of_a_leaf_or_a_row(shape):
    expected = torch.arange(torch.Size(shape).numel()).reshape(shape)
    assert torch.equal(sharding.positions(torch.zeros(shape)), expected)
    assert torch.equal(sharding.positions(torch.zeros(2, *shape), 1), expected)


def test_a_function_whose_variable_has_no_value_yet_is_described():
    def outer(assigned):
        def own():
            return later, weight

        weight = torch.ones(2)
        if assigned:
            later = 3
        own.__module__ = "functional_jd.a_rule"
        return own

    assert description(outer(True)) != description(outer(False))
    assert function_names(outer(False))
