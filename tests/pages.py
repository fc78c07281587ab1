"""Pages in Markdown: their blocks of Python, what a reader has who typed them, and tables between marks."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch


def blocks(path, first=None, last=None):
    return re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), flags=re.DOTALL)[first:last]


def typed(path):
    """The session after all blocks of a page, from the seed 0."""
    session = {}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for block in blocks(path):
            exec(compile(block, path.name, "exec"), session)
    return session


def line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def table(head: Sequence[str], rows: Iterable[Iterable[str]], align: str = "---") -> str:
    return "\n".join(map(line, [head, ["---", *[align] * (len(head) - 1)], *rows]))


def write_between(page: Path, begin: str, end: str, text: str) -> None:
    """Replace what stands between two marks of a page."""
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise SystemExit(f"expected {page.name} with the marks {begin!r} and {end!r}")
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}", encoding="utf-8")
