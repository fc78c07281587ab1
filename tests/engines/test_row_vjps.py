"""Which way back is taken: read from the graph, decided by shapes alone."""

import pytest
import torch
from zoo import numbers

from functional_jd.core.torch_internals import graph_nodes, largest_gradient
from functional_jd.engines.choose import choose_rows
from functional_jd.engines.evaluate import Options
from functional_jd.engines.vjp import vjp

SHAPES = {  # inputs of x @ a @ b: the widest gradient between them, the largest weight
    "images": [(70_000, 2), (2, 2), (2, 2)],
    "sequence": [(10_000, 2), (2, 3), (3, 2)],
    "weights": [(2, 300), (300, 100), (100, 2)],
    "small": [(4, 3), (3, 5), (5, 2)],
}


def options(mode, chunk_size):
    return Options("here", False, None, False, mode, chunk_size)


def point(name, kind=torch.float32):
    x, a, b = (numbers(*shape, seed=i, dtype=kind) for i, shape in enumerate(SHAPES[name]))
    return vjp(lambda ws: ([torch.tanh((x @ ws[0]) @ ws[1]).mean(0)], None), [a, b], differentiable=False)


@pytest.mark.parametrize(
    ("name", "m", "chunk_size", "expected"),
    [
        *[(name, m, None, ("loop", None)) for name in SHAPES for m in (1, 2, 3)],
        ("images", 40, None, ("loop", None)),
        ("weights", 40, None, ("auto", None)),
        ("weights", 40, 5, ("auto", 5)),
        ("small", 40, None, ("auto", 40)),
        ("small", 40, 7, ("auto", 7)),
        ("sequence", 4, None, ("auto", 4)),
        ("sequence", 40, None, ("auto", 14)),  # 17 would fit: three groups of about the same size
        ("sequence", 40, 6, ("auto", 6)),
    ],
)
def test_auto_goes_by_the_size_of_what_passes_between_the_layers(name, m, chunk_size, expected):
    assert choose_rows(point(name), m, options("auto", chunk_size)) == expected
    for mode in ("vmap", "loop"):
        assert choose_rows(point(name), m, options(mode, chunk_size)) == (mode, chunk_size)


def test_within_a_transform_rows_go_together_as_they_always_did():
    recorded = point("images")

    def f(scale):
        assert choose_rows(recorded, 40, options("auto", None)) == ("auto", None)
        assert choose_rows(recorded, 2, options("auto", None)) == ("auto", None)
        assert choose_rows(recorded, 1, options("auto", None)) == ("loop", None)
        return scale

    torch.vmap(f)(torch.ones(2))


def test_the_graph_tells_its_nodes_and_its_widest_gradient():
    w, x = torch.ones(50, 3, requires_grad=True), torch.ones(2, 50)
    y = (x @ w).tanh()
    assert [node.name() for node in graph_nodes([y, y, x])] == [
        "TanhBackward0",
        "MmBackward0",
        "torch::autograd::AccumulateGrad",
    ]
    assert largest_gradient(graph_nodes([y]), (w,)) == 6
    assert largest_gradient(graph_nodes([y]), ()) == 150
    assert largest_gradient(graph_nodes([(x @ w.mT.mT.mT.mT).sum()]), (w,)) == 6
    assert (graph_nodes([x]), largest_gradient([], ())) == ([], 0)
    twice = y + y
    for _ in range(40):  # 2 ** 40 paths
        twice = twice + twice
    assert len(graph_nodes([twice])) == 44
