"""Files of safetensors: from shards and back, and damaged ones."""

from pathlib import Path

import pytest
import torch
from bounds import check_same
from distributed.ranks import python
from inputs import library
from shard_files import METHOD, STEPS, problem, trained
from torch.utils._pytree import tree_leaves

import functional_jd as fj


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(tree_leaves(a), tree_leaves(b), strict=True))


def test_shards_of_two_ranks_go_on_as_whole_tensors_of_one_process(tmp_path):
    files = library("safetensors.torch")
    python(Path(__file__).with_name("shard_files.py"), tmp_path)
    params, losses, x = problem()
    like = trained(params, x, losses, 0)
    state = fj.from_checkpoint(files.load_file(tmp_path / "shards.safetensors"), like=like, **METHOD)
    expected = trained(params, x, losses, STEPS)
    for found, wanted in zip(tree_leaves(state), tree_leaves(expected), strict=True):
        check_same(found, wanted)
    assert not same(state.params, like.params)


def test_no_flipped_bit_of_a_file_goes_unnoticed(tmp_path):
    files, file = library("safetensors.torch"), tmp_path / "state.safetensors"
    params, losses, x = problem()
    state = trained(params, x, losses, STEPS)
    files.save_file(fj.to_checkpoint(state, **METHOD), file)
    raw, draw, ours = bytearray(file.read_bytes()), torch.Generator().manual_seed(0), 0
    for bit in torch.randint(len(raw) * 8, (300,), generator=draw).tolist():
        raw[bit // 8] ^= 1 << bit % 8
        file.write_bytes(raw)
        raw[bit // 8] ^= 1 << bit % 8
        try:
            entries = files.load_file(file)
        except Exception:  # the library's own, of a damaged header
            continue
        with pytest.raises(ValueError, match=r"^from_checkpoint: "):
            fj.from_checkpoint(entries, like=state, **METHOD)
        ours += 1
    assert ours > 100
