"""What `train_state` says of the first values of the losses, and of losses that are squares or residuals."""

import warnings
from typing import Any

import torch

from functional_jd.core.agreement import function_names
from functional_jd.core.names import objective_names
from functional_jd.core.tree import tree_leaves
from functional_jd.core.types import Losses
from functional_jd.engines.plan import Plan
from functional_jd.optimizers.base import Optimizer
from functional_jd.torch_compat.slow_path import user_level

_FOR_RESIDUALS = ("levenberg_marquardt", "natural_gradient")
# Of residuals, which have both signs, these lower the signed values, beyond zero. By the names that `function_names`
# finds in a rule: in `total` and `constant` it finds none of their own.
_FOR_LOSSES = (
    *("mean", "upgrad", "dualproj", "mgda", "pcgrad", "cagrad", "config", "imtl_g", "nash_mtl", "aligned_mtl"),
    "fairgrad",
)
_ADAM = {"adamw", "Adam", "AdamW"}
_REDUCTIONS = {"MeanBackward0", "MeanBackward1", "SumBackward0", "SumBackward1", "StackBackward0", "DivBackward0"}


def warn_of_residuals(plan: Plan, optimizer: Optimizer, values: Losses) -> None:
    """Warn where a rule for residuals gets squares, or its steps another length."""
    rule = next((name for name in function_names(plan.rule) if name in _FOR_RESIDUALS), None)
    if rule is None:
        return
    found: list[str] = []
    if any(_is_square(leaf.grad_fn) for leaf in tree_leaves(values)):
        found.append("losses that are squares: return the residuals themselves, one per example or point")
    if not _ADAM.isdisjoint(function_names(optimizer)):
        found.append("Adam, which undoes the length of its steps: take line_search(sgd(1.0), rates)")
    if found:
        warnings.warn(
            f"{plan.where}: {rule} expects residuals and a rate of 1, found {'; and '.join(found)}.",
            UserWarning,
            stacklevel=user_level(),
        )


def _is_square(node: Any) -> bool:
    """Whether a loss is a square, or a sum or mean of squares, by the last ops of its graph."""
    while node is not None and node.name() in _REDUCTIONS:
        node = node.next_functions[0][0]
    square = node is not None and node.name() == "PowBackward0" and node._saved_exponent == 2
    return square or (node is not None and node.name() == "MseLossBackward0")


def warn_of_values(plan: Plan, values: Losses) -> None:
    """Warn of values that are not finite, and of examples that look like residuals under a rule that adds them up."""
    joined = torch.cat([leaf.detach().reshape(-1).cpu().double() for leaf in tree_leaves(values)])
    finite = joined.isfinite().tolist()
    if not all(finite):
        lost = [repr(name) for name, yes in zip(objective_names(values), finite, strict=True) if not yes]
        warnings.warn(
            f"{plan.where}: the losses start with values that are not finite, in {', '.join(lost[:3])}"
            f"{' and others' * (len(lost) > 3)}: every step on such a batch is skipped. Look at the batch and at the "
            "first parameters.",
            UserWarning,
            stacklevel=user_level(),
        )
    rule = next((name for name in function_names(plan.rule) if name in _FOR_LOSSES), None)
    if plan.kind.rows_are_examples and rule is not None and (joined < 0).any() and (joined > 0).any():
        warnings.warn(
            f"{plan.where}: {rule}() makes losses small and may make them negative, found examples of both signs. If "
            "these are residuals, their signs cancel: return squares, or take natural_gradient() or "
            "levenberg_marquardt(), which are for residuals.",
            UserWarning,
            stacklevel=user_level(),
        )
