"""Skipped steps in a row: a warning, then an error that carries the last good state."""

import warnings
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from functional_jd.core.arguments import check_integer, here
from functional_jd.core.names import objective_names
from functional_jd.core.tree import all_finite, tree_leaves
from functional_jd.torch_compat.callers import user_level
from functional_jd.training.state import StepInfo, TrainState

WARN_AFTER, _READ_EVERY = 20, 10  # a scale settles in fewer skipped steps


class TrainingStalled(RuntimeError):  # noqa: N818, as StopIteration
    """Raised by `fit` and `steps` when too many steps in a row were skipped.

    Attributes:
        state: the state after the last step that was taken, its scale included; the state at the start, if none was.
    """

    def __init__(self, message: str, state: Any = None):
        super().__init__(message)
        self.state = state


class SkipWatch:
    """Counts the steps that were skipped in a row, exactly.

    The flags stay on the device, and are read ten at a time, or when the count may reach one of its two limits.
    """

    def __init__(self, patience: int | None):
        if patience is not None:
            check_integer("patience", patience, 1, "It counts steps; None never stops.")
        self.name, self.patience = here(), patience
        # Of all steps since the last one that is known to be taken: the scale before, the flags, the answer.
        self.run: list[tuple[Any, Tensor, Tensor]] = []
        self.skipped = 0  # how many of them, from the first on, are known to be skipped

    def follow(self, scale: Any, state: Any, info: Any) -> None:
        """Count a step, given the scale before it. Raise TrainingStalled for the last of `patience` skipped steps."""
        if not isinstance(info, StepInfo):
            return
        self.run.append((scale, info.finite, was_taken(info)))
        if len(self.run) - self.skipped < _READ_EVERY and len(self.run) not in (WARN_AFTER, self.patience):
            return
        self._read()
        if self.skipped == self.patience:
            good = state._replace(scale=self.run[0][0]) if isinstance(state, TrainState) else state
            last = "The attribute `state` of this exception is the state after the last step that was taken."
            raise TrainingStalled(f"{self._account(info)} {last}", good)
        if self.skipped == WARN_AFTER:
            end = "" if self.patience is None else f" Training stops after {self.patience} of them."
            warnings.warn(self._account(info) + end, RuntimeWarning, stacklevel=user_level())

    def _read(self) -> None:
        for taken in torch.stack([answer for *_, answer in self.run[self.skipped :]]).tolist():
            self.skipped += 1
            if taken:
                del self.run[: self.skipped]
                self.skipped = 0

    def _account(self, info: StepInfo) -> str:
        """The losses or rows that were not finite, and what may help."""
        leaves = [leaf.detach().reshape(-1).cpu().double() for leaf in tree_leaves(info.losses)]
        names, values = objective_names(info.losses), torch.cat(leaves).tolist()
        bad = [name for name, value in zip(names, values, strict=True) if not isfinite(value)]
        skipped = f"{self.name}: the last {len(self.run)} steps were skipped. In the last step,"
        if not bad and not all_finite(info.weights):
            shown = ", ".join(f"{x:.4g}" for x in values)
            return (
                f"{skipped} losses and rows were finite and the weights of the rule were not, for the losses {shown}. "
                "Some rules need positive losses: their docstrings tell which."
            )
        found = (
            f"losses were not finite themselves: {', '.join(bad)}"
            if bad
            else "losses were finite and derivatives were not: diagnose(jacobian) names the row. The unused branch of "
            "torch.where has a derivative too: replace its argument as well"
        )
        rows = "Pass scale_state(shape=(m,)), one scale per objective, to see which rows were not finite"
        if info.finite.shape == (len(names),):
            counts = (~torch.stack([finite for _, finite, _ in self.run])).sum(0).tolist()
            shown = [f"{name} ({count} times)" for name, count in zip(names, counts, strict=True) if count]
            rows = f"Rows that were not finite: {', '.join(shown)}"
        return f"{skipped} {found}. {rows}."


def was_taken(info: StepInfo) -> Tensor:
    """Whether a step was taken, bool `[]`; of a batch of steps under vmap, whether any of them was."""
    return info.moved.any() if isinstance(info.moved, Tensor) else info.finite.all()
