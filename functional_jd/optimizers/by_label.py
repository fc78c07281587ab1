"""Groups of parameters, each with an optimizer of its own."""

from collections.abc import Callable, Mapping

from torch import Tensor

from functional_jd.core.arguments import check_function, check_mapping
from functional_jd.core.tree import floating_leaves, tree_names
from functional_jd.core.types import Direction, Params, Tree
from functional_jd.optimizers.base import Optimizer, check_inner
from functional_jd.precision.loss_scale import select


def by_label(optimizers: Mapping[str, Optimizer], labels: Callable[[str, Tensor], str]) -> Optimizer:
    """Give every parameter the optimizer of its label: what the param groups of `torch.optim` are for.

    Args:
        optimizers: the optimizers by label.
        labels: `labels(name, leaf) -> label`, with dotted names such as `"encoder.0.weight"`. It is called in every
            step, so it must depend on the name, shape and dtype only, not on the values.

    Returns:
        An `Optimizer`. Its state is a dict with the state of each optimizer, whose params are a dict `{name: leaf}`.

    Raises:
        ValueError: when training starts, an unknown label, a label without leaves, or two leaves with one name.

    Guarantees:
        Every group moves as if it were alone.

    Differences: from `torch.optim`, where a parameter that is in no group stays where it is without a word.

    Example:
        Without weight decay on norms and biases, and with another rate for the trunk:

        >>> def labels(name, leaf):
        ...     return "trunk" if name.startswith("shared") else "plain" if leaf.ndim < 2 else "decayed"
        >>> optimizer = by_label(
        ...     {"trunk": adamw(1e-4), "plain": adamw(1e-3, weight_decay=0.0), "decayed": adamw(1e-3)}, labels
        ... )
    """
    cure = 'Pass for instance {"decayed": adamw(1e-3), "plain": adamw(1e-3, weight_decay=0.0)}.'
    check_mapping("optimizers", optimizers, cure)
    check_function("labels", labels, "Pass labels(name, leaf) -> label.")
    if not optimizers:
        raise ValueError(f"by_label: optimizers must be at least one, found none. {cure}")
    for label, optimizer in optimizers.items():
        check_inner(optimizer, f"the optimizer {label!r}")
    optimizers = dict(optimizers)

    def init(params: Params) -> Tree:
        leaves, _ = floating_leaves(params)
        groups = _groups(params, leaves, optimizers, labels)
        return {label: optimizers[label].init(_chosen(leaves, group)) for label, group in groups.items()}

    def step(moving: Tensor | None, direction: Direction, state: Tree, params: Params) -> tuple[Params, Tree]:
        leaves, structure = floating_leaves(params)
        directions, new_leaves = structure.flatten_up_to(direction), list(leaves)
        new_state: dict[str, Tree] = {}
        for label, group in _groups(params, leaves, optimizers, labels).items():
            optimizer, old = optimizers[label], _chosen(leaves, group)
            given = _chosen(directions, group), state[label], old
            if moving is None:
                new = optimizer.update(*given)
            elif optimizer.guarded_update is not None:
                new = optimizer.guarded_update(moving, *given)
            else:
                new = select(moving, optimizer.update(*given), (old, state[label]))
            new_state[label] = new[1]
            for name, index in group.items():
                new_leaves[index] = new[0][name]
        return structure.unflatten(new_leaves), new_state

    guarded = step if any(optimizer.guarded_update for optimizer in optimizers.values()) else None
    return Optimizer(init, lambda direction, state, params: step(None, direction, state, params), guarded)


def _groups(
    params: Params, leaves: list[Tensor], optimizers: dict[str, Optimizer], labels: Callable[[str, Tensor], str]
) -> dict[str, dict[str, int]]:
    """Return for each label the names of its leaves, and which leaves they are."""
    names = tree_names(params)
    if len(set(names)) < len(names):
        twice = sorted(name for name in set(names) if names.count(name) > 1)
        raise ValueError(
            f"by_label: every leaf must have a name of its own, found {twice} twice. Rename the keys with dots."
        )
    groups: dict[str, dict[str, int]] = {label: {} for label in optimizers}
    for index, (name, leaf) in enumerate(zip(names, leaves, strict=True)):
        label = labels(name, leaf)
        if label not in groups:
            raise ValueError(
                f"by_label: every leaf must have one of the labels {list(optimizers)}, found {label!r} for {name!r}. "
                "Add an optimizer for it, or return another label."
            )
        groups[label][name] = index
    if unused := [label for label, group in groups.items() if not group]:
        raise ValueError(
            f"by_label: every label must be that of some leaf, found no leaf for {unused} among {names}. "
            "Compare the names with those that labels expects, or leave the optimizer out."
        )
    return groups


def _chosen(leaves: list[Tensor], group: dict[str, int]) -> dict[str, Tensor]:
    return {name: leaves[index] for name, index in group.items()}
