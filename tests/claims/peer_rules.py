"""The rules of TorchJD, each with its arguments: defaults, or where it has none, those of its tests."""

from collections.abc import Callable

import torch
from torch import Tensor
from torchjd import aggregation as peer
from torchjd import scalarization

Rule = Callable[[Tensor], Tensor]
# By what it is called with; a fresh one for each question. Rules for at least four rows are asked with four.
AGGREGATORS: dict[str, Callable[[int], Rule]] = {
    "AlignedMTL()": lambda m: peer.AlignedMTL(),
    "CAGrad(0.5)": lambda m: peer.CAGrad(0.5),
    "ConFIG()": lambda m: peer.ConFIG(),
    "Constant(1, 2, ...)": lambda m: peer.Constant(torch.arange(1.0, m + 1)),
    "DualProj()": lambda m: peer.DualProj(),
    "ExcessMTL()": lambda m: peer.ExcessMTL(),
    "FairGrad(1)": lambda m: peer.FairGrad(1.0),
    "GradDrop()": lambda m: peer.GradDrop(),
    "GradVac()": lambda m: peer.GradVac(),
    "IMTLG()": lambda m: peer.IMTLG(),
    "Krum(1)": lambda m: peer.Krum(1),
    "MGDA()": lambda m: peer.MGDA(),
    "Mean()": lambda m: peer.Mean(),
    "NashMTL(m)": lambda m: peer.NashMTL(m),
    "PCD()": lambda m: peer.PCD(),
    "PCGrad()": lambda m: peer.PCGrad(),
    "Random()": lambda m: peer.Random(),
    "Sum()": lambda m: peer.Sum(),
    "TrimmedMean(1)": lambda m: peer.TrimmedMean(1),
    "UPGrad()": lambda m: peer.UPGrad(),
}
# Weightings without an aggregator of their own.
WEIGHTINGS = ("CRMOGMWeighting", "MoDoWeighting", "SDMGradWeighting")
SCALARIZERS = [name for name in scalarization.__all__ if name != "Scalarizer"]
# Scalarizers whose idea is no rule above.
ONLY_SCALARIZERS = ("COSMOS", "DWA", "FAMO", "GeometricMean", "IMTLL", "PBI", "STCH", "UW")


def jacobian(m: int = 4, n: int = 6, seed: int = 0) -> Tensor:
    """Rows in general position, of length about one."""
    return torch.randn(m, n, generator=torch.Generator().manual_seed(seed)) / n**0.5


def reason(error: BaseException) -> str:
    """Type and first line of an error."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:90]}"
