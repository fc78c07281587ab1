"""Which way back is taken: read from the graph, decided by shapes alone."""

import pytest
import torch
from torch import nn
from zoo import numbers

from functional_jd import jacobian as engine
from functional_jd.graphs import is_linear, nodes, widest
from functional_jd.jacobian import jacobian_fn
from functional_jd.pullback import arranged, linearize

SHAPES = {  # inputs of x @ a @ b: the widest gradient between them, the largest weight
    "images": [(70_000, 2), (2, 2), (2, 2)],
    "sequence": [(10_000, 2), (2, 3), (3, 2)],
    "weights": [(2, 300), (300, 100), (100, 2)],
    "small": [(4, 3), (3, 5), (5, 2)],
}


def point(name, kind=torch.float32):
    x, a, b = (numbers(*shape, seed=i, dtype=kind) for i, shape in enumerate(SHAPES[name]))
    return linearize(lambda ws: ([torch.tanh((x @ ws[0]) @ ws[1]).mean(0)], None), [a, b], differentiable=False)


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
    assert arranged(point(name), m, "auto", chunk_size) == expected
    for mode in ("vmap", "loop"):
        assert arranged(point(name), m, mode, chunk_size) == (mode, chunk_size)


def test_within_a_transform_rows_go_together_as_they_always_did():
    recorded = point("images")

    def f(scale):
        assert arranged(recorded, 40, "auto", None) == ("auto", None)
        assert arranged(recorded, 2, "auto", None) == ("auto", None)
        assert arranged(recorded, 1, "auto", None) == ("loop", None)
        return scale

    torch.vmap(f)(torch.ones(2))


def test_the_graph_tells_its_nodes_and_its_widest_gradient():
    w, x = torch.ones(50, 3, requires_grad=True), torch.ones(2, 50)
    y = (x @ w).tanh()
    assert [node.name() for node in nodes([y, y, x])] == [
        "TanhBackward0",
        "MmBackward0",
        "torch::autograd::AccumulateGrad",
    ]
    assert widest(nodes([y]), (w,)) == 6
    assert widest(nodes([y]), ()) == 150
    assert widest(nodes([(x @ w.mT.mT.mT.mT).sum()]), (w,)) == 6
    assert (nodes([x]), widest([], ())) == ([], 0)
    twice = y + y
    for _ in range(40):  # 2 ** 40 paths
        twice = twice + twice
    assert len(nodes([twice])) == 44


class Own(torch.autograd.Function):
    """A node of somebody's own."""

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        return gradient.detach()


def test_only_torchs_own_nodes_in_full_precision_are_surely_linear():
    w = torch.ones(3, requires_grad=True)
    assert is_linear(nodes([nn.functional.layer_norm(w, (3,)).exp()]))
    assert not is_linear(nodes([Own.apply(w).exp()]))
    assert not is_linear(nodes([w.half().exp().float()]))


@pytest.mark.parametrize(
    ("m", "options", "own", "taken"),
    [
        (256, {}, False, True),
        (255, {}, False, False),
        (256, {}, True, False),
        (256, {"mode": "vmap"}, False, False),
        (256, {"mode": "loop"}, False, False),
    ],
)
def test_columns_are_taken_from_four_rows_per_parameter_on(monkeypatch, m, options, own, taken):
    calls = []
    columns = engine._columns
    monkeypatch.setattr(engine, "_columns", lambda *args: calls.append(1) or columns(*args))
    w, x = numbers(64, dtype=torch.float32), numbers(m, 64, seed=1, dtype=torch.float32)
    f = jacobian_fn(lambda w: x @ (Own.apply(w) if own else w), **options)
    torch.testing.assert_close(f(w)[0], x)
    assert bool(calls) == taken
    calls.clear()
    torch.testing.assert_close(jacobian_fn(lambda w: x @ w)(torch.cat([w, w])[:64].requires_grad_())[0], x)
    assert not calls  # somebody may differentiate the rows
    jacobian_fn(lambda w: x @ w[:64])(numbers(65, dtype=torch.float32))
    assert not calls
