"""Losses that tests of fronts share, and what any weights of a population must show under transforms."""

import torch


def quadratics(w):
    return torch.stack([(w - 1).square().sum(), (w + 1).square().sum()])


def cloud(k, m, seed=0):
    return torch.rand(k, m, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def check_composes(f, batch):
    """vmap over a batch is a loop, and `f` compiles into one graph; returns the results one by one."""
    alone = torch.stack([f(x) for x in batch])
    torch.testing.assert_close(torch.vmap(f)(batch), alone)
    torch.testing.assert_close(torch.compile(f, fullgraph=True, backend="aot_eager")(batch[0]), alone[0])
    return alone
