"""The progress bar of `fit`."""

import torch
from torch import Tensor

from functional_jd.core.names import objective_names
from functional_jd.core.tree import tree_leaves
from functional_jd.core.types import Losses
from functional_jd.training.skips import was_taken
from functional_jd.training.state import StepInfo


class Bar:
    """A bar of tqdm that leaves values on the device until it is drawn.

    Args:
        length: the number of steps, or 0 if it is not known.
        compiling: whether the first step takes long because torch.compile runs in it: the bar says so until then.
    """

    def __init__(self, length: int, compiling: bool):
        try:
            from tqdm import tqdm
        except ImportError as error:
            raise ImportError(
                "fit: progress=True draws a bar with tqdm, which is not installed. "
                "Install it (pip install tqdm), or follow the steps with on_step."
            ) from error
        self.bar = tqdm(total=length or None, unit="step", desc="compiling" if compiling else None)
        self.compiling = compiling
        self.losses: Losses = None
        self.unread: list[Tensor] = []
        self.skipped = 0

    def advance(self, info: StepInfo) -> None:
        # The flags and losses only: the rest of an info may be as large as a Jacobian.
        self.losses = info.losses
        self.unread.append(was_taken(info))
        if self.compiling:
            self.compiling = False
            self.bar.set_description(refresh=False)
        if self.bar.update():
            self.read()

    def read(self) -> None:
        if self.unread:
            self.skipped += torch.stack(self.unread).logical_not().sum().item()
            self.bar.set_postfix(_summary(self.losses) | {"skipped": str(self.skipped)}, refresh=False)
            self.unread.clear()

    def close(self) -> None:
        self.read()
        self.bar.close()


def _summary(losses: Losses) -> dict[str, str]:
    """A few losses by name; of more, the mean, or the root of the mean square if they have both signs as residuals."""
    values = torch.cat([leaf.detach().reshape(-1).cpu().double() for leaf in tree_leaves(losses)])
    if len(values) <= _FEW:
        return {name: f"{value:.4g}" for name, value in zip(objective_names(losses), values.tolist(), strict=True)}
    if values.min() < 0 < values.max():
        return {"rms": f"{values.square().mean().sqrt():.4g}"}
    return {"loss": f"{values.mean():.4g}"}


_FEW = 4
"""Up to so many losses have room in the bar."""
