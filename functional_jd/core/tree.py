"""Flattening and mapping of pytrees. The only module that imports optree.

Dict keys are sorted, so two dicts with the same keys have the same structure, whatever their insertion order. An
`OrderedDict` keeps its order. A class is a container if it is registered with torch's pytree or with optree's namespace
`"functional_jd"`.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import optree
import torch
from optree.utils import total_order_sorted
from torch import Tensor

from functional_jd.core.arguments import described, here
from functional_jd.core.foreach import largest_magnitude
from functional_jd.core.sharding import agreed, is_sharded, shard_of, sharded_as
from functional_jd.core.types import PLAIN_TENSORS, Tree
from functional_jd.torch_compat.torch_internals import constant_while_tracing, pytree_nodes

NAMESPACE = "functional_jd"
TENSORS = set(PLAIN_TENSORS)

_DICTS = {dict, OrderedDict, defaultdict}

Structure = Any
"""The structure of a pytree. `unflatten(leaves)` builds the pytree with these leaves. `flatten_up_to(tree)` returns the
leaves of another pytree with this structure (dicts match by key), and raises ValueError for another structure.
"""


def tree_flatten(tree: Tree) -> tuple[list[Tensor], Structure]:
    """Return the leaves of a pytree and its structure."""
    if torch.compiler.is_compiling():
        _register_all_with_optree()
        found: list[Any] = []
        return found, _traced(tree, found)
    leaves, structure = optree.tree_flatten(tree, namespace=NAMESPACE)
    kinds = set(map(type, leaves))
    if kinds <= TENSORS or not (unregistered := kinds & pytree_nodes.keys()):
        return leaves, structure  # pyright: ignore[reportReturnType]
    for container in unregistered:
        _register_with_optree(container)
    return tree_flatten(tree)


def tree_leaves(tree: Tree) -> list[Tensor]:
    """Return the leaves of a pytree: of plain containers in half the time of optree's walk, which serves all else."""
    leaves: list[Any] = []
    rest: list[Any] = [tree]  # the next one last
    while rest:
        part = rest.pop()
        kind = type(part)
        if kind is Tensor or kind is torch.nn.Parameter:
            leaves.append(part)
        elif kind is dict:
            try:
                rest.extend(map(part.__getitem__, sorted(part)[::-1]))
            except TypeError:  # keys of several classes, which optree sorts in its own way
                return tree_flatten(tree)[0]
        elif kind is list or kind is tuple:
            rest.extend(part[::-1])
        elif part is not None:
            return tree_flatten(tree)[0]
    return leaves


def tree_map(f: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """Apply `f` leaf by leaf; `rest` must have the structure of `tree` (dicts match by key)."""
    leaves, structure = tree_flatten(tree)
    return structure.unflatten(list(map(f, leaves, *map(structure.flatten_up_to, rest))))


def own_containers(tree: Any) -> Any:
    """Return the same leaves in other containers, so that what a function adds to dicts and lists stays with it."""
    try:
        return tree_map(lambda leaf: leaf, tree)
    except TypeError:  # a class that is made of other arguments
        return tree


def detach_tree(tree: Tree) -> Tree:
    """Return the pytree whose tensors are detached; other leaves stay."""
    leaves, structure = tree_flatten(tree)
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.requires_grad:  # pyright: ignore[reportUnnecessaryIsInstance]
            leaves[index] = leaf.detach()
    return structure.unflatten(leaves)


def tree_names(tree: Tree) -> list[str]:
    """Return the names of the leaves, such as `"layers.0.weight"`: keys, indices, fields; "value" of one tensor."""
    _, structure = tree_flatten(tree)
    return [name or "value" for name, kind in named_nodes(structure) if kind is None]


def named_nodes(structure: Structure) -> list[tuple[str, Any]]:
    """The name and the class of each node of a pytree with this structure, in order; the class of a leaf is None."""
    found: list[tuple[str, Any]] = []

    def visit(spec: Any, path: tuple[str, ...]) -> None:
        kind = spec.type
        found.append((".".join(path), kind))
        fields = dict(enumerate(getattr(kind, "_fields", ())))
        both = (spec.names, spec.parts) if isinstance(spec, Traced) else (spec.entries(), spec.children())
        for word, child in zip(*both, strict=True):
            visit(child, (*path, str(fields.get(word, word))))

    visit(structure, ())
    return found


def described_leaves(tree: Tree) -> list[str]:
    """Name, dtype and shape of each leaf."""
    pairs = zip(tree_names(tree), tree_leaves(tree), strict=True)
    return [f"{name} {str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}" for name, leaf in pairs]


def all_finite(tree: Tree) -> Tensor:
    """Whether every value of a pytree of floating-point tensors is finite, bool `[]`; `isfinite` takes ten times."""
    leaves = tree_leaves(tree)
    sharded = any_sharded(leaves)
    largest = largest_magnitude(list(map(shard_of, leaves)) if sharded else leaves)
    if largest is None:
        largest = torch.zeros((), device=leaves[0].device if sharded else None)
    return agreed(largest < torch.inf, leaves) if sharded else largest < torch.inf


def shards_of(tree: Tree) -> Tree:
    """The pytree with this rank's shard instead of each `DTensor`."""
    return tree_map(shard_of, tree)


def tree_sharded_as(shards: Tree, like: Tree, rows: int = 0) -> Tree:
    """The pytree of shards with the layouts of another, leaf by leaf: see `sharded_as`."""
    return tree_map(lambda leaf, shard: sharded_as(shard, leaf, rows), like, shards)


def any_sharded(leaves: list[Any]) -> bool:
    """Whether some leaf is a `DTensor`."""
    if torch.compiler.is_compiling() or TENSORS.issuperset(map(type, leaves)):  # a step asks so often that it counts
        return False
    return any(map(is_sharded, leaves))


def check_layouts(leaves: list[Any], tree: Tree) -> None:
    """Raise ValueError if a leaf of a pytree is a `DTensor` that cannot be opened to shards."""
    for index, leaf in enumerate(leaves if any_sharded(leaves) else ()):
        for placement in leaf.placements if is_sharded(leaf) else ():
            if type(placement).__name__ not in ("Shard", "Replicate"):  # subclasses cut in another order
                raise ValueError(
                    f"{here()}: expected DTensors with the placements Shard and Replicate, found {placement} in "
                    f"{tree_names(tree)[index]!r}. Redistribute it: leaf.redistribute(placements=[Replicate()])."
                )


def tree_difference(expected: Tree, found: Tree) -> str:
    """Return where a pytree differs from another in structure, shapes or dtypes, in words; `""` where it does not."""
    if type(expected) is not type(found):
        return f"expected {type(expected).__name__}, found {type(found).__name__}"
    (leaves, structure), (others, other_structure) = tree_flatten(expected), tree_flatten(found)
    if not (structure.is_like(other_structure) if isinstance(structure, Traced) else structure == other_structure):
        names = sorted(set(tree_names(expected)) ^ set(tree_names(found)))
        return f"expected another structure, found one that differs in {names[:3]}"
    for index, (x, y) in enumerate(zip(leaves, others, strict=True)):
        if getattr(x, "shape", None) != getattr(y, "shape", None) or getattr(x, "dtype", 0) != getattr(y, "dtype", 0):
            return f"expected {described(x)}, found {described(y)} in {tree_names(expected)[index]!r}"
    return ""


def floating_leaves(params: Tree, *, part: str = "", some: bool = True) -> tuple[list[Tensor], Structure]:
    """Return the leaves and the structure of a pytree of floating-point tensors; raise for any other."""
    leaves, structure = tree_flatten(params)
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or leaf.layout != torch.strided:
            raise TypeError(
                f"{here()}{part}: all leaves must be floating-point tensors, found {described(leaf)} in "
                f"{tree_names(params)[index]!r}. Pass dict(module.named_parameters()), dense, and complex ones as "
                "torch.view_as_real(p). Pass buffers and settings as further arguments of the losses."
            )
    if not (torch.compiler.is_compiling() or TENSORS.issuperset(map(type, leaves))):
        check_layouts(leaves, params)
    if some and not leaves:
        cure = "Pass for instance dict(module.named_parameters())."
        raise ValueError(f"{here()}{part}: expected at least one parameter tensor, found an empty tree. {cure}")
    return leaves, structure


class Traced(NamedTuple):
    """A structure that torch.compile traces in half the time of optree's, and with empty dicts."""

    type: Any  # None for a leaf
    context: Any
    names: tuple[Any, ...]
    put: Any  # `put(context, parts)`
    parts: list[Any]

    def flatten_up_to(self, tree: Any) -> list[Any]:
        if self.type is None:
            return [tree]
        parts, found = _opened(tree)
        if self.type in _DICTS and type(tree) in _DICTS and {*self.names} == {*tree}:
            parts = [tree[name] for name in self.names]
        elif self.type is not found[0] or self[1:3] != found[1:3]:
            raise ValueError(f"expected {self.type.__name__} of {self.names}, found {described(tree)}.")
        return [leaf for own, part in zip(self.parts, parts, strict=True) for leaf in own.flatten_up_to(part)]

    def is_like(self, other: Any) -> bool:
        """Whether it is the same structure, in whatever order dicts have their keys."""
        alike = self.type is other.type and self[1:3] == other[1:3]
        return alike and all(x.is_like(y) for x, y in zip(self.parts, other.parts, strict=True))

    def unflatten(self, leaves: list[Any]) -> Any:
        if not torch.compiler.is_compiling():
            raise RuntimeError(
                f"{here()}: expected a call that torch.compile traces as one graph, found a break, as a checkpoint in "
                "the losses makes one. Compile with fullgraph=True, which tells the place, or compile the losses alone."
            )
        return self.built(iter(leaves))

    def built(self, rest: Iterator[Any]) -> Any:
        return next(rest) if self.type is None else self.put(self.context, [x.built(rest) for x in self.parts])


def _traced(tree: Any, leaves: list[Any]) -> Traced:
    """The structure of a pytree; its leaves are appended."""
    parts, found = _opened(tree)
    if found[0] is None:
        leaves.append(tree)
    return Traced(*found, parts=[_traced(part, leaves) for part in parts])


def _opened(tree: Any) -> tuple[list[Any], Any]:
    """The parts of one node, and the other fields of its structure."""
    kind = cast(Any, type(tree))
    if kind is dict or kind is defaultdict:
        names, blank = total_order_sorted(tree), dict.fromkeys(tree)
        make = dict if kind is dict else lambda items: defaultdict(tree.default_factory, items)
        put = lambda _, parts: make(blank | dict(zip(names, parts, strict=True)))
        return [tree[name] for name in names], (kind, None, tuple(names), put)
    if kind is list or kind is tuple:
        return list(tree), (kind, None, tuple(range(len(tree))), lambda _, parts: kind(parts))
    if kind in TENSORS or optree.register_pytree_node.get(kind, namespace=NAMESPACE) is None:
        return [], (None, None, (), None)
    parts, context, names, put = optree.tree_flatten_one_level(tree, namespace=NAMESPACE)
    return list(parts), (kind, context, tuple(names), put)


@constant_while_tracing
def _register_all_with_optree() -> None:
    """Register all containers of torch's pytree: a tracer reads the registry once, and would miss later ones."""
    for container in pytree_nodes.keys():  # noqa: SIM118
        if optree.register_pytree_node.get(container, namespace=NAMESPACE) is None:
            _register_with_optree(container)


def _register_with_optree(container: type) -> None:
    """Register a container of torch's pytree with optree, and the names of its parts, if it has any."""
    node = pytree_nodes[container]

    def flatten(value: Any) -> tuple[Any, Any, Any]:
        keyed: Any = node.flatten_with_keys_fn
        names = None if keyed is None else [str(key).strip(".[]'") for key, _ in keyed(value)[0]]
        return *node.flatten_fn(value), names

    def unflatten(context: Any, children: Any) -> Any:
        return node.unflatten_fn(list(children), context)

    optree.register_pytree_node(container, flatten, unflatten, namespace=NAMESPACE)
