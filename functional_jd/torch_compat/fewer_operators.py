"""The same results by fewer operators: graphs that torch runs one by one pay for each of them."""

from collections.abc import Callable, Sequence
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from functional_jd.torch_compat.graphs import base_of, written_bases

_BETWEEN_RANKS = ("_c10d_functional.", "c10d.", "_dtensor.")
"""Operators for which the other ranks wait, whether this one needs them or not."""

_SMALL = 1024
"""A constant of more entries is made again in each call: to read it takes as long, and it would be kept."""


def with_fewer_operators(graph: fx.GraphModule) -> Callable[..., Any]:
    """Return a function that does what a graph does, bit by bit, without operators of which nothing is used, and those
    of constants, whose values are kept. What is changed in place, what is returned and what ranks send stays.
    """
    apart = {*written_bases(graph), *(base_of(node) for node in graph.graph.output_node().all_input_nodes)}
    values: dict[fx.Node, Any] = {}
    with torch.no_grad():
        for node in graph.graph.nodes:
            if node.op == "get_attr" and isinstance(getattr(graph, str(node.target), None), Tensor):
                values[node] = getattr(graph, str(node.target))
                continue
            constant = _is_pure(node) and all(x in values for x in node.all_input_nodes) and _size(node) <= _SMALL
            if constant and not any(base_of(x) in apart for x in (node, *node.all_input_nodes)):
                args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*args, **kwargs)
    for node, value in values.items():
        if node.op == "call_function" and isinstance(value, Tensor) and any(x not in values for x in node.users):
            name = f"_kept_{node.name}"
            graph.register_buffer(name, value, persistent=False)
            with graph.graph.inserting_before(node):
                node.replace_all_uses_with(graph.graph.get_attr(name))
    graph.graph.eliminate_dead_code(lambda node: not _is_pure(node))
    graph.recompile()
    return graph.forward


def _is_pure(node: fx.Node) -> bool:
    target: Any = node.target
    if node.op == "get_attr" or target is getitem:
        return True
    if node.op != "call_function" or node.is_impure() or str(target).startswith(_BETWEEN_RANKS):
        return False
    schema = getattr(target, "_schema", None)
    return schema is not None and not schema.is_mutable and torch.Tag.nondeterministic_seeded not in target.tags


def _size(node: fx.Node) -> int:
    value = node.meta.get("val")
    parts: Sequence[Any] = value if isinstance(value, list | tuple) else [value]
    return max((x.numel() if isinstance(x, Tensor) else _SMALL + 1 for x in parts), default=0)
