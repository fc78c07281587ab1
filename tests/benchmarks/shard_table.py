"""`python tests/benchmarks/shard_table.py [WIDTH LAYERS RANKS ...]`: memory and traffic per rank, beside `fully_shard`.

A multilayer perceptron of 10.6 million parameters with three losses, trained by AdamW in float32. Memory is the peak of
live tensors in a step, parameters and moments included, in units of n / R: a rank's share of the parameters. Sent are
numbers in units of n, counted at the collectives: a gather or a scatter of n numbers is 1, an all-reduce 2, as both.
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from memory import peak_memory
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import functional_jd as jd
from functional_jd.distributed import sharded

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the script finds the neighbours of its folder too
from distributed.ranks import meet, started

WIDTH, LAYERS, EXAMPLES, OBJECTIVES = 1152, 8, 8, 3
Prepared = tuple[Callable[[], Any], Callable[[], Any]]
"""A step, and what is held between two steps."""


class Traffic(TorchDispatchMode):
    """Counts collectives and what they send: the numbers of the whole tensor, twice for an all-reduce."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.sent = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = func.__name__
        if func.namespace not in ("_c10d_functional", "c10d") or not any(k in name for k in ("all", "scatter")):
            return found
        given = [x for x in tree_leaves((args, found)) if isinstance(x, Tensor)]
        largest = max(x.numel() for x in given)
        self.calls += 1
        self.sent += largest * (2 if "allreduce" in name or "all_reduce" in name else 1)
        return found


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(LAYERS) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def losses_of(output: Tensor) -> Tensor:
    return torch.stack([part.square().mean() for part in output.chunk(OBJECTIVES, dim=1)])


def ours(mode: str, rule: jd.Aggregator, mesh: Any, x: Tensor) -> Prepared:
    """A step on `DTensor`s: rows one after the other, or together by vmap; one backward pass if the rule allows."""
    net = network()
    apply = jd.functional(net)
    losses = sharded(lambda params, x: losses_of(apply(params, {}, x)[0]), mesh)
    spread = lambda p: distribute_tensor(p.detach(), mesh, [Shard(0) if p.ndim > 1 else Replicate()])
    params = {name: spread(p) for name, p in net.named_parameters()}
    engine = jd.engines.weighted_engine() if mode == "blind" else jd.engines.jacobian_engine(mode)
    how = {"losses": losses, "aggregator": rule, "optimizer": jd.adamw(1e-3), "engine": engine}
    held = [jd.train_state(params, x, **how)]
    del params, net

    def step() -> None:
        held[0] = jd.step(held[0], x, **how)[0]

    return step, lambda: held[0]


def by_hand(wrap: Callable[[nn.Sequential], nn.Module], rule: jd.Aggregator | None, x: Tensor) -> Prepared:
    """One backward pass for the mean, or one for each loss, whose gradients the rule combines."""
    net = wrap(network())
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    gradients = lambda: {name: p.grad for name, p in net.named_parameters()}

    def step() -> None:
        losses = losses_of(net(x))
        if rule is None:
            losses.mean().backward()
        else:
            rows = []
            for loss in losses:
                optimizer.zero_grad()
                loss.backward(retain_graph=True)
                rows.append(gradients())
            local = [[_local(g) for g in row.values()] for row in rows]
            G = torch.stack([torch.stack([sum(map(_inner, u, v)) for v in local]) for u in local])
            if hasattr(next(net.parameters()), "to_local"):
                dist.all_reduce(G)
            weights = rule.update(G.double(), rule.init(G.double()))[0].float()
            for name, p in net.named_parameters():
                first, *rest = (row.pop(name) for row in rows)
                p.grad = first.mul_(weights[0])
                for g, weight in zip(rest, weights[1:], strict=True):
                    p.grad.add_(g.mul_(weight))
            del rows, local, first, rest, g
        optimizer.step()
        optimizer.zero_grad()

    return step, lambda: ([*net.parameters()], [*optimizer.state.values()])


def layer_by_layer(mesh: Any, net: nn.Sequential) -> nn.Module:
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def _local(x: Any) -> Tensor:
    return x.to_local() if hasattr(x, "to_local") else x


def _inner(a: Tensor, b: Tensor) -> Any:
    return a.flatten() @ b.flatten()


def cases(mesh: Any, x: Tensor) -> dict[str, Callable[[], Prepared]]:
    shards = partial(layer_by_layer, mesh)
    return {
        "`DistributedDataParallel`, the mean": lambda: by_hand(DistributedDataParallel, None, x),
        "`fully_shard`, the mean": lambda: by_hand(shards, None, x),
        "`sharded`, the mean": lambda: ours("blind", jd.mean(), mesh, x),
        "`fully_shard`, `upgrad` by hand": lambda: by_hand(shards, jd.upgrad(), x),
        "`sharded`, `upgrad`, loop": lambda: ours("loop", jd.upgrad(), mesh, x),
        "`sharded`, `upgrad`, vmap": lambda: ours("vmap", jd.upgrad(), mesh, x),
    }


def measured(prepare: Callable[[], Prepared]) -> dict[str, float]:
    step, held = prepare()
    n = sum(p.numel() for p in network().parameters())
    step()  # the optimizer's state is made
    with Traffic() as traffic:
        step()
    between = sum(_local(leaf).numel() * 4 for leaf in tree_leaves(held()) if isinstance(leaf, Tensor))
    # Threads of gloo let go of what they sent at some time after it has arrived: the least of several runs.
    peak = between + min(peak_memory(step) for _ in range(3))
    share = 4 * n / dist.get_world_size()
    return {"memory": peak / share, "sent": traffic.sent / n, "collectives": traffic.calls}


def rank(me: int, count: int, folder: Path) -> None:
    meet(me, count, folder)
    x = torch.randn(EXAMPLES, WIDTH, generator=torch.Generator().manual_seed(me))
    mesh = init_device_mesh("cpu", (count,))
    found = {name: measured(prepare) for name, prepare in cases(mesh, x).items()}
    if me == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def table_of(count: int) -> dict[str, dict[str, float]]:
    """The figures of the first of so many ranks."""
    with TemporaryDirectory() as folder:
        for process in started(rank, [(me, count, Path(folder)) for me in range(count)]):
            process.join()
        return json.loads((Path(folder) / "found.json").read_text())


def main(width: str = str(WIDTH), layers: str = str(LAYERS), *counts: str) -> None:
    """Print the table, for so many layers of this width on so many ranks."""
    global WIDTH, LAYERS
    WIDTH, LAYERS = int(width), int(layers)
    print("| sharded | R | peak memory, n / R | sent, n | collectives |\n| --- | ---: | ---: | ---: | ---: |")
    for count in map(int, counts or ("2", "4")):
        for name, found in table_of(count).items():
            memory, sent, collectives = found.values()
            print(f"| {name} | {count} | {memory:.1f} | {sent:.1f} | {collectives:.0f} |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
