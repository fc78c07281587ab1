"""Checksums: the sum of all bits with odd factors, and nothing is changed."""

import pytest
import torch

from functional_jd.core.agreement import checksums

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
    expected = sum((2 * k + 1) * word for k, word in enumerate(words)) % 2**64
    (found,) = checksums([x])
    assert (found.dtype, found.shape, int(found) % 2**64) == (torch.int64, (), expected)
    assert torch.equal(x, before)


def test_of_nothing_and_of_complex_numbers():
    x = torch.tensor([1 + 2j, -3j])
    assert int(checksums([torch.zeros(0, 3)])[0]) == 0
    assert checksums([x]) == checksums([torch.view_as_real(x)])
    assert checksums([x.conj()]) == checksums([torch.view_as_real(x.conj().resolve_conj())])
