"""The study of optimizers: its Muon is that of torch, units do not matter, and what is stored is not trained again."""

import json

import pytest
import study_optimizers
import torch
from bounds import check_within
from study_optimizers import OPTIMIZERS, against, cell_of, keys, muon, orthogonal, run
from study_training import draws_of
from tiny_problem import tiny

import functional_jd as jd


@pytest.fixture
def little(monkeypatch):
    monkeypatch.setattr(study_optimizers, "PROBLEMS", {"tiny": type("Entry", (), {"build": tiny, "shared": True})})
    monkeypatch.setattr(study_optimizers, "DEVELOPMENT", ("tiny",))
    monkeypatch.setattr(study_optimizers, "METHODS", ("standardised", "config"))
    monkeypatch.setattr(study_optimizers, "OPTIMIZERS", {"SGD": OPTIMIZERS["SGD"]})
    monkeypatch.setattr(study_optimizers, "DRAWS", 2)


def test_muon_is_that_of_torch():
    """Up to bfloat16, in which torch iterates: five steps of a quintic multiply its roundings by some tens."""
    draw = torch.Generator().manual_seed(0)
    start = {"w": torch.randn(5, 3, generator=draw), "b": torch.randn(3, generator=draw)}
    theirs = jd.from_torch(torch.optim.Muon, lr=0.01, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    pair = jd.by_label({"w": theirs, "b": OPTIMIZERS["AdamW"](0.01)}, lambda name, leaf: name)
    found, state = start, muon(0.01).init(start)
    expected, other = start, pair.init(start)
    for _ in range(4):
        direction = {name: torch.randn(p.shape, generator=draw) for name, p in start.items()}
        found, state = muon(0.01).update(direction, state, found)
        expected, other = pair.update(direction, other, expected)
    assert torch.equal(found["b"], expected["b"])
    way = (expected["w"] - start["w"]).norm()
    check_within(found["w"], expected["w"], 32 * torch.finfo(torch.bfloat16).eps * way)
    values = torch.linalg.svdvals(orthogonal(1e-9 * start["w"].mT))
    assert ((values > 0.6) & (values < 1.3)).all()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_unit_of_directions_does_not_matter(name):
    start, ends = {"w": torch.eye(3, 2), "b": torch.ones(2)}, []
    for unit in (1.0, 2.0**-40):
        params, optimizer = start, OPTIMIZERS[name](torch.tensor(0.01))
        state = optimizer.init(params)
        for step in range(3):
            direction = {key: unit * torch.cos(step + p.cumsum(0)) for key, p in start.items()}
            params, state = optimizer.update(direction, state, params)
        ends.append(params)
    for key, p in ends[0].items():
        check_within(ends[1][key], p, 2**8 * torch.finfo(p.dtype).eps * (p - start[key]).abs().max())


def test_a_cell_that_is_stored_is_not_trained_again(little, tmp_path, monkeypatch):
    path = tmp_path / "optimizers.json"
    cells = run(path)
    assert [*cells] == ["/".join(key) for key in keys()]
    path.write_text(json.dumps({"tiny/SGD/standardised": cells["tiny/SGD/standardised"]}))
    assert run(path) == cells
    monkeypatch.setattr(study_optimizers, "cell_of", None)
    assert run(path) == cells
    assert against(cells, "tiny", "SGD", "config", "steps") is not None
    assert against({}, "tiny", "SGD", "config", "steps") is None
    report = tmp_path / "REPORT.md"
    report.write_text("\n".join(["# Title", *study_optimizers.MARKS, "## Next"]))
    for _ in range(2):  # the second time in the place of the first
        study_optimizers.write_page(cells, report)
    assert report.read_text().count("spread of rules") == 1
    assert report.read_text().endswith("\n## Next")
    assert (tmp_path / "evidence_optimizers.svg").exists()
    with pytest.raises(ValueError, match="expected the mark"):
        study_optimizers.write_between(report, "<!-- other -->", "", [])


def test_fewer_steps_are_read_off_where_a_step_takes_several_passes():
    problem = tiny()
    cell = cell_of(problem, "AdamW", "config", draws_of(problem, 2), 40)
    assert cell["taken"] >= 16
    assert cell["steps"] != cell["passes"]
    one = cell_of(problem, "AdamW", "standardised", draws_of(problem, 2), 40)
    assert one["steps"] == one["passes"]
