"""The Gramian of a model whose embedding is its last layer: by the peer's engine, and by ours, beside the rows'."""

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torchjd.autogram import Engine

import functional_jd as jd


class Tied(nn.Module):
    """Token by token: embed, think, and compare with all embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.think = nn.Linear(4, 4)
        self.last = nn.Linear(4, 5, bias=False)
        self.last.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.last(torch.tanh(self.think(self.embed(tokens))))


class Twice(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 5)
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.second.weight = self.first.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(self.embed(tokens))))


class Again(Twice):
    """One layer that is called twice."""

    def forward(self, tokens: Tensor) -> Tensor:
        return self.first(torch.tanh(self.first(self.embed(tokens))))


MODELS = {
    "an embedding is the last layer": Tied,
    "two layers have one weight": Twice,
    "one layer is called twice": Again,
}


def off(build: type[nn.Module], seed: int) -> tuple[float, float]:
    """How far the peer's Gramian and ours are from the exact one, in the norm of Frobenius."""
    torch.manual_seed(seed)
    model = build().double()
    tokens, following = torch.randint(5, (2, 6))
    params = {name: value.detach() for name, value in model.named_parameters()}

    def losses(params: dict[str, Tensor]) -> Tensor:
        logits = functional_call(model, params, tokens)
        return nn.functional.cross_entropy(logits, following, reduction="none")

    rows = torch.cat([value.flatten(1) for value in jacrev(losses)(params).values()], dim=1)
    exact = rows @ rows.T
    ours, *_ = jd.gramian_fn(losses)(params)
    engine = Engine(model, batch_dim=0)
    theirs = engine.compute_gramian(nn.functional.cross_entropy(model(tokens), following, reduction="none"))
    far = lambda found: float((found - exact).norm() / exact.norm())
    return far(theirs), far(ours)


def measure() -> dict[str, str]:
    """The figures of the row `Gramian with tied weights`: ten models of each kind, an objective for each token."""
    found = {}
    for name, build in MODELS.items():
        pairs = torch.tensor([off(build, seed) for seed in range(10)])
        for who, values in zip(("TorchJD Engine(model, batch_dim=0)", "functional_jd"), pairs.T, strict=True):
            found[f"{who}, {name}"] = f"{values.min():.1%} to {values.max():.1%} off"
    return found
