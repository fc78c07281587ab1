"""Trainings and engines of the peer: norm layers under autocast, one loss scale, tied weights, several processes."""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from peer_rules import outcome
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.multiprocessing.spawn import spawn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torchjd.aggregation import UPGrad
from torchjd.autogram import Engine
from torchjd.autojac import backward, jac_to_grad

import functional_jd as jd

NORMS: dict[str, Callable[[], nn.Module]] = {
    "LayerNorm": lambda: nn.LayerNorm(8),
    "BatchNorm1d": lambda: nn.BatchNorm1d(8),
    "GroupNorm": lambda: nn.GroupNorm(2, 8),
    "RMSNorm": lambda: nn.RMSNorm(8),
}


def values_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


def norm_layers() -> dict[str, str]:
    """A Jacobian of two losses under autocast, bfloat16 on the CPU, with defaults, and with rows one by one."""

    def built(norm: str) -> tuple[nn.Module, Tensor]:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 8), NORMS[norm](), nn.Linear(8, 2)), torch.randn(6, 5)

    def of_peer(norm: str, **options: int) -> None:
        model, x = built(norm)
        with torch.autocast("cpu", torch.bfloat16):
            losses = model(x).float().square().mean(0)
        backward([losses[0], losses[1]], **options)

    def of_jacrev(norm: str, chunk_size: int | None = None) -> None:
        model, x = built(norm)

        def losses(params: dict[str, Tensor]) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return functional_call(model, params, x).float().square().mean(0)

        jacrev(losses, chunk_size=chunk_size)(values_of(model))

    def ours(norm: str) -> None:
        model, x = built(norm)
        apply, buffers = jd.functional(model), dict(model.named_buffers())
        losses = jd.autocast(lambda p: apply(p, buffers, x)[0].float().square().mean(0), dtype=torch.bfloat16)
        jd.jacobian_fn(losses)(values_of(model))

    ways: dict[str, Callable[[str], None]] = {
        "functional_jd": ours,
        "TorchJD backward(), defaults": of_peer,
        "TorchJD backward(parallel_chunk_size=1)": lambda norm: of_peer(norm, parallel_chunk_size=1),
        "jacrev(), defaults": of_jacrev,
        "jacrev(chunk_size=1)": lambda norm: of_jacrev(norm, 1),
    }
    return {f"{way}, {norm}": outcome(attempt, norm) for norm in NORMS for way, attempt in ways.items()}


def loss_scales() -> dict[str, str]:
    """One `GradScaler` for all losses of the peer; float32 on the CPU, where it can only be looked at."""
    torch.manual_seed(0)
    x, plain = torch.randn(6, 5), None
    found = {}
    for name in ("without a scale", "with one GradScaler"):
        torch.manual_seed(0)
        model = nn.Linear(5, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=name != "without a scale")
        backward([scaler.scale(loss) for loss in model(x).square().mean(0)])
        jac_to_grad(model.parameters(), UPGrad())
        scaler.unscale_(optimizer)
        gradient = model.weight.grad.clone()
        plain = gradient if plain is None else plain
        scaler.step(optimizer)
        scaler.update()
        found[f"TorchJD {name}"] = f"runs; direction off by {float((gradient - plain).norm() / plain.norm()):.1e}"
    return found


class Tied(nn.Module):
    """Token by token: embed, think, and compare with all embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.think, self.last = nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5, bias=False)
        self.last.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.last(torch.tanh(self.think(self.embed(tokens))))


class Twice(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.first, self.second = nn.Embedding(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)
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
    """How far the peer's Gramian and ours are from that of the rows, in the norm of Frobenius."""
    torch.manual_seed(seed)
    model = build().double()
    tokens, following = torch.randint(5, (2, 6))
    params = values_of(model)
    losses = lambda params: cross_entropy(functional_call(model, params, tokens), following, reduction="none")
    rows = torch.cat([value.flatten(1) for value in jacrev(losses)(params).values()], dim=1)
    exact = rows @ rows.T
    theirs = Engine(model, batch_dim=0).compute_gramian(cross_entropy(model(tokens), following, reduction="none"))
    far = lambda found: float((found - exact).norm() / exact.norm())
    return far(theirs), far(jd.gramian_fn(losses)(params)[0])


def tied_weights() -> dict[str, str]:
    """The Gramian of ten models of each kind, an objective for each token: by the peer's engine, and by ours."""
    found = {}
    for name, build in MODELS.items():
        pairs = torch.tensor([off(build, seed) for seed in range(10)])
        for who, values in zip(("TorchJD Engine(model, batch_dim=0)", "functional_jd"), pairs.T, strict=True):
            found[f"{who}, {name}"] = f"{values.min():.1%} to {values.max():.1%} off"
    return found


def _train(rank: int, cured: bool, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=Path(folder, "store").as_uri(), rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Linear(5, 2)
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + rank)
    for _ in range(5):
        optimizer.zero_grad()
        losses = replica(torch.randn(8, 5)).square().mean(0)
        backward([losses[0], losses[1]], parallel_chunk_size=1)
        jac_to_grad(model.parameters(), UPGrad())
        for p in model.parameters() if cured else ():
            dist.all_reduce(p.grad)
            p.grad /= 2
        optimizer.step()
    torch.save(model.state_dict(), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def replicas() -> dict[str, str]:
    """Two processes with other data each, five steps of SGD: do parameters stay equal? As it is, and with the cure."""
    found = {}
    ways = ("backward() beside DistributedDataParallel", "with dist.all_reduce(p.grad, AVG) before the step")
    for way, cured in zip(ways, (False, True), strict=True):
        with TemporaryDirectory() as folder:
            spawn(_train, (cured, folder), nprocs=2)
            one, other = (torch.load(Path(folder) / f"{rank}.pt")["weight"] for rank in (0, 1))
        found[f"TorchJD, {way}"] = f"replicas apart by {float((one - other).norm() / one.norm()):.1%}"
    return found
