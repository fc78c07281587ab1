"""The same results by fewer operators: graphs that torch runs one by one pay for each of them."""

from collections.abc import Callable, Sequence
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from functional_jd.torch_compat.graphs import base_of, is_overload, written_bases

_BETWEEN_RANKS = ("_c10d_functional.", "c10d.", "_dtensor.")
"""Operators for which the other ranks wait, whether this one needs them or not."""

_SMALL = 1024
"""A constant of more entries is made anew in each call: to read it takes as long, and it would be kept."""


def with_fewer_operators(graph: fx.GraphModule) -> Callable[..., Any]:
    """Return a function that does what a graph does, bit by bit, without what changes nothing.

    Left out are operators that return their argument as it is, those that compute what another one has computed, those
    of constants, whose values are kept, and those of which nothing is used. What is changed in place is left alone,
    and so are what is returned, which belongs to the caller, and what ranks send.
    """
    nodes = graph.graph
    apart = written_bases(graph) | {base_of(node) for node in nodes.output_node().all_input_nodes}
    _join(nodes, apart)
    _keep_constants(graph, apart)
    for node in reversed(list(nodes.nodes)):
        if not node.users and _is_pure(node):
            nodes.erase_node(node)
    graph.recompile()
    return graph.forward


def _join(nodes: fx.Graph, apart: set[Any]) -> None:
    """Let nodes that are the same use one value."""
    first: dict[Any, fx.Node] = {}
    for node in list(nodes.nodes):
        if not _is_pure(node) or _is_apart(node, apart):
            continue
        source = _unchanged(node)
        if source is None:  # an argument's text has names of nodes, which are unique, and numbers with all their digits
            source = first.setdefault((node.target, repr(node.args), repr(node.kwargs)), node)
        if source is not node:
            node.replace_all_uses_with(source)
            nodes.erase_node(node)


def _keep_constants(graph: fx.GraphModule, apart: set[Any]) -> None:
    """Compute what depends on no input once."""
    values: dict[fx.Node, Any] = {}
    with torch.no_grad():
        for node in graph.graph.nodes:
            if node.op == "get_attr" and isinstance(getattr(graph, str(node.target), None), Tensor):
                values[node] = getattr(graph, str(node.target))
            elif _is_pure(node) and not _is_apart(node, apart) and all(x in values for x in node.all_input_nodes):
                args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
                if _size(node) <= _SMALL:
                    values[node] = node.target(*args, **kwargs)
    for node, value in values.items():
        if node.op == "call_function" and isinstance(value, Tensor) and any(x not in values for x in node.users):
            name = f"_kept_{node.name}"
            graph.register_buffer(name, value, persistent=False)
            with graph.graph.inserting_before(node):
                node.replace_all_uses_with(graph.graph.get_attr(name))


def _is_pure(node: fx.Node) -> bool:
    if node.op != "call_function" or node.is_impure():
        return False
    target: Any = node.target
    if str(target).startswith(_BETWEEN_RANKS):
        return False
    seeded = torch.Tag.nondeterministic_seeded
    return target is getitem or (is_overload(target) and not target._schema.is_mutable and seeded not in target.tags)


def _is_apart(node: fx.Node, apart: set[Any]) -> bool:
    return any(base_of(x) in apart for x in (node, *node.all_input_nodes))


def _size(node: fx.Node) -> int:
    value = node.meta.get("val")
    parts: Sequence[Any] = value if isinstance(value, list | tuple) else [value]
    return max((x.numel() if isinstance(x, Tensor) else _SMALL + 1 for x in parts), default=0)


def _unchanged(node: fx.Node) -> fx.Node | None:
    """The argument that a node returns as it is; `None` if it changes something."""
    name, source = str(node.target), node.args[0] if node.args else None
    if name == "aten.cat.default" and isinstance(source, list | tuple) and len(source) == 1:
        source = source[0]
    elif name == "aten.permute.default":
        order: Any = node.args[1]
        source = source if list(order) == sorted(order) else None
    elif name not in _SAME_AT_SAME_SHAPE:
        return None
    if not isinstance(source, fx.Node):
        return None
    before, after = source.meta.get("val"), node.meta.get("val")
    if not isinstance(before, Tensor) or not isinstance(after, Tensor):
        return None
    # Another order in memory would be another order of sums.
    return source if (before.shape, before.stride()) == (after.shape, after.stride()) else None


_SAME_AT_SAME_SHAPE = (
    "aten.view.default",
    "aten._unsafe_view.default",
    "aten.expand.default",
    "aten.detach.default",
    "aten.alias.default",
)
