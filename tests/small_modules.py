"""Modules that reach their tensors in many ways, for tests of what makes functions of them."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))


class Tied(nn.Module):
    """An embedding that is the output layer too, and a buffer in two places."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.out.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(2.0))
        self.again = nn.Module()
        self.again.register_buffer("scale", self.scale)

    def forward(self, x):
        return self.out(torch.tanh(self.embed(x.long().abs() % 5))).sum(-1) * self.scale * self.again.scale


class Counting(nn.Module):
    """Running statistics, a counter and something left on the module."""

    def __init__(self):
        super().__init__()
        self.norm, self.out = nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.register_buffer("calls", torch.zeros(()), persistent=False)
        self.seen = None

    def forward(self, x):
        self.calls.add_(1)
        self.seen = x
        return self.out(self.norm(x))


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)

    def inner(self, x):
        return torch.tanh(self.norm(self.a(x)))

    def forward(self, x):
        return self.b(checkpoint(self.inner, x, use_reentrant=False))


MODULES = {
    "linear": lambda: nn.Linear(4, 3),
    "tied": Tied,
    "counting": Counting,
    "checkpointed": Checkpointed,
    "lstm": lambda: nn.LSTM(4, 3, num_layers=2, bidirectional=True),
    "attention": lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
    "spectral_norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)),
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)),
}


def made(make):
    """The module of this name, or that this function makes."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return MODULES.get(make, make)()
