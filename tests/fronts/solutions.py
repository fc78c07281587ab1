"""Losses that tests of fronts share, and what any weights of a population must show under transforms."""

import math

import torch

import functional_jd as jd


def quadratics(w):
    return torch.stack([(w - 1).square().sum(), (w + 1).square().sum()])


def vlmop2(w):
    at = 1 / math.sqrt(len(w))
    return torch.stack([1 - (-(w - at).square().sum()).exp(), 1 - (-(w + at).square().sum()).exp()])


def trained(start, losses, rule, rates, steps, **how):
    """The front after as many steps at each rate."""
    for rate in rates:
        start = jd.fronts.train(start, [()] * steps, losses=losses, rule=rule, optimizer=jd.sgd(rate), **how)
    return start


def cloud(k, m, seed=0):
    return torch.rand(k, m, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def check_composes(f, batch):
    """vmap over a batch is a loop, and `f` compiles into one graph; returns the results one by one."""
    alone = torch.stack([f(x) for x in batch])
    torch.testing.assert_close(torch.vmap(f)(batch), alone)
    torch.testing.assert_close(torch.compile(f, fullgraph=True, backend="aot_eager")(batch[0]), alone[0])
    return alone
