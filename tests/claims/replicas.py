"""Two processes with other data each: do parameters stay equal? The peer's loop as it is, and with the cure."""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel
from torchjd.aggregation import UPGrad
from torchjd.autojac import backward, jac_to_grad

WAYS = ("backward() beside DistributedDataParallel", "with dist.all_reduce(p.grad, AVG) before the step")


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


def measure() -> dict[str, str]:
    """The figures of the row `several processes`; five steps of SGD."""
    found = {}
    for way, cured in zip(WAYS, (False, True), strict=True):
        with TemporaryDirectory() as folder:
            spawn(_train, (cured, folder), nprocs=2)
            one, other = (torch.load(Path(folder) / f"{rank}.pt")["weight"] for rank in (0, 1))
        found[f"TorchJD, {way}"] = f"replicas apart by {float((one - other).norm() / one.norm()):.1%}"
    return found
