"""The blocks of Python of a page, and what a reader has who typed them."""

import re

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
