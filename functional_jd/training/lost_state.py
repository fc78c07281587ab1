"""What losses move and no step carries on: statistics, other buffers, numbers of modules, keys."""

import warnings
from typing import cast

import torch
from torch import Tensor

from functional_jd.core.tree import tree_leaves, tree_names
from functional_jd.core.types import PLAIN_TENSORS, Tree
from functional_jd.engines.plan import Plan
from functional_jd.objectives.buffers import is_key, may_be_key
from functional_jd.random import split
from functional_jd.torch_compat.slow_path import user_level
from functional_jd.torch_compat.watching import StateJournal

# Of so many parts of a key, which split(key, n) begins with whatever n is, losses may draw with any.
_PARTS = 8


def warn_of_lost_state(
    plan: Plan, journal: StateJournal, moved: dict[str, Tensor], drawn: list[Tensor], buffers: Tree
) -> None:
    """Warn of what an evaluation of the losses has moved and does not come back among its buffers.

    Args:
        plan: how training starts.
        journal: what the evaluation changed.
        moved: by name, the buffers that modules returned with new values.
        drawn: the keys that `keyed` drew with.
        buffers: those that the losses returned.
    """
    _warn_of_buffers(plan.where, journal, moved, buffers)
    _warn_of_numbers(plan.where, journal)
    _warn_of_keys(plan, drawn, buffers)


def _warn_of_buffers(where: str, journal: StateJournal, moved: dict[str, Tensor], buffers: Tree) -> None:
    """Warn of statistics that normalization moved, and of other buffers that a module returned with new values."""
    returned = [x for x in tree_leaves(buffers) if isinstance(x, Tensor)]  # pyright: ignore[reportUnnecessaryIsInstance]
    memory = {y.untyped_storage().data_ptr() for y in returned if type(y) in PLAIN_TENSORS}

    def comes_back(x: Tensor) -> bool:
        in_a_row = type(x) in PLAIN_TENSORS and x.untyped_storage().data_ptr() in memory  # of a buffer that is returned
        return in_a_row or any(x.shape == y.shape and torch.equal(x, y) for y in returned)

    averages = [x for x in journal.averages if not torch.equal(x, cast(Tensor, journal.before[id(x)][2]))]
    if not all(map(comes_back, averages)):
        found = (
            "normalization in training mode moves its running statistics, and the losses do not return them: they are"
        )
    elif lost := [name for name, x in moved.items() if not comes_back(x)]:
        found = f"a module moves its buffer {lost[0]!r}, and the losses do not return it: it is"
    else:
        return
    warnings.warn(
        f"{where}: {found} lost, or changed behind the step. Take output, buffers = functional(module)(params, "
        "buffers, ...), return (losses, buffers), and pass buffers=dict(module.named_buffers()); or call "
        "module.eval().",
        UserWarning,
        stacklevel=user_level(),
    )


def _warn_of_numbers(where: str, journal: StateJournal) -> None:
    """Warn of numbers of modules that a call moves, and that `functional` puts back: counters, temperatures."""
    for module, name, home, old in journal.numbers:
        new = home.get(name)
        if home is not vars(module) and type(new) in (int, float) and new != old:
            warnings.warn(
                f"{where}: expected a forward that leaves the numbers of its module, found that "
                f"{type(module).__name__} moves {name!r} from {old:g} to {new:g}. functional puts it back, so every "
                f"step starts from {old:g}. Where losses depend on it, let steps carry it as a buffer: "
                f"self.register_buffer({name!r}, torch.tensor({old!r})).",
                UserWarning,
                stacklevel=user_level(),
            )
            return


def _warn_of_keys(plan: Plan, drawn: list[Tensor], buffers: Tree) -> None:
    """Warn of keys among the buffers that `keyed` drew with, and that come back as they were. Of losses of single
    examples, the step itself moves the keys.
    """
    if not drawn or not tree_leaves(buffers):
        return
    if plan.kind.rows_are_examples:
        # Behind the keys of the examples, or, in a kind of somebody's own, behind the parameters.
        given = next((x for x in plan.args[1:3] if tree_names(x) == tree_names(buffers)), ())
        _warn_of_shared_keys(plan.where, drawn, given)
        return
    returned = dict(zip(tree_names(buffers), tree_leaves(buffers), strict=True))
    for name, key in zip(tree_names(plan.args[1]), tree_leaves(plan.args[1]), strict=True):
        after = returned.get(name)
        if any(key is x for x in drawn) and isinstance(after, Tensor) and torch.equal(key, after):
            warnings.warn(
                f"{plan.where}: the losses draw with the key {name!r} of the buffers, and return it as it was: every "
                "step draws the same numbers. Split it, `now, key = functional_jd.random.split(key)`: draw with `now` "
                "and return `key`.",
                UserWarning,
                stacklevel=user_level(),
            )


def _warn_of_shared_keys(where: str, drawn: list[Tensor], buffers: Tree) -> None:
    """Warn of keys among the buffers that are not named so, and with which all examples draw the same numbers."""
    for name, key in zip(tree_names(buffers), tree_leaves(buffers), strict=True):
        if not may_be_key(key) or is_key(name, key, buffers):
            continue
        parts = [key, *split(key, _PARTS)]  # counters are never equal to what was drawn with
        if any(torch.equal(part, x) for part in parts for x in drawn):
            warnings.warn(
                f"{where}: all examples draw the same numbers with the key {name!r} of the buffers. Give it a name "
                "that ends in 'key': each example gets its own then. To share one on purpose, pass it in the batch, "
                "with in_dims None.",
                UserWarning,
                stacklevel=user_level(),
            )
            return
