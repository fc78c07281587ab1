"""What the guide to objectives shows in its blocks is so."""

import re
from pathlib import Path

import torch

PAGE = Path(__file__).parents[1] / "docs" / "guides" / "objectives.md"


def test_norms_of_layers_in_the_guide_are_those_of_the_rows():
    found = {}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL):
            exec(compile(code, PAGE.name, "exec"), found)
    head, trunk, x, price = found["arguments"]
    for index, name in enumerate(("head", "trunk")):
        rows = [torch.func.grad(found["layered"], index)(head, trunk, *one) for one in zip(x, price, strict=True)]
        expected = torch.stack([sum(g.square().sum() for g in row.values()) for row in rows])
        torch.testing.assert_close(found[f"squares_of_{name}"].float(), expected, rtol=1e-4, atol=1e-5)
