"""What compiling takes is measured in a process that compiles, and put beside plain training's."""

import first_call
import page
import pytest
import torch


@pytest.mark.parametrize("side", ["ours", "plain"])
def test_a_case_is_compiled_and_its_steps_are_timed(side, monkeypatch, tmp_path):
    pytest.importorskip("torchjd")
    monkeypatch.setattr(first_call, "_TIMED", 3)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    found = first_call.measured("tiny MLP", "T=2", side, toy=True, backend="eager")
    assert found["graphs"] == 1
    assert found["parts"]["torch"] > 0
    assert found["all"] == pytest.approx(sum(found["parts"].values()))
    assert found["kernels"] == found["lines"] == 0  # nothing was written in C++
    assert found["eager"] > 0
    assert found["compiled"] > 0


def test_a_first_call_has_paid_when_its_steps_have_saved_as_much(tmp_path):
    parts = {"torch": 6.0, "C++": 4.0}
    ours = {"parts": parts, "all": 10.0, "kernels": 7, "lines": 70, "compiled": 1.0, "eager": 3.0, "graphs": 1}
    plain = ours | {"all": 4.0, "compiled": 0.5}
    row = first_call.cells("conv", "T=2", (ours, ours | {"all": 3.0}), (plain, plain | {"all": 2.0}))
    never = first_call.cells("MLP, each", "m=64", (ours | {"compiled": 3.0}, ours), (plain, plain))
    text = first_call.tables([row, never])
    assert "| convolutions, 2 tasks | 6.0 | 4.0 | 10.0 | 4.0 | 2.50 | 3.0 | 2.0 | 1.50 |" in text
    assert "| convolutions, 2 tasks | 3.0 | 1.0 | 0.5 | 2.00 | 5,000 steps | 7 | 70 | 1 |" in text
    assert "| MLP, 64 examples | 3.0 | 3.0 | 0.5 | 6.00 | never | 7 | 70 | 1 |" in text
    marks = [mark.format("first calls") for mark in (page.BEGIN.replace("page.py", "first_call.py"), page.END)]
    assert text in page.with_table("\nstale\n".join([*marks, ""]), "first calls", text, "first_call.py")
