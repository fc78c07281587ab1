"""Graphs of operators: what they change, draw and hold."""

import pytest
import torch

from functional_jd.random import key, keyed
from functional_jd.torch_compat import graphs

X = torch.arange(6.0).reshape(2, 3)
HELD = torch.ones(3)


def changed(f, *args):
    bases = graphs.written_bases(graphs.written(f, args))
    return [node.name for node in bases if node.op in ("placeholder", "get_attr")]


def test_what_changes_in_place_is_found_through_views_and_lists():
    assert changed(lambda x, y: [x + y], X, X) == []
    assert changed(lambda x, y: [x.clone().add_(y)], X, X) == []
    assert changed(lambda x, y: [x.T[0].add_(1), y], X, X) == ["x_1"]
    assert changed(lambda x, y: [torch.add(x, 1, out=y)], X, X) == ["y_1"]
    assert changed(lambda x, y: [row.mul_(2) for row in y.unbind()], X, X) == ["y_1", "y_1"]
    held = torch.zeros(3)
    assert len(changed(lambda x, y: [held.add_(x[0])], X, X)) == 1


def test_draws_are_those_without_a_key():
    drawn = lambda f, *args: [str(node.target) for node in graphs.draws(graphs.written(f, args))]
    assert drawn(lambda x: [torch.rand_like(x) + x.normal_()], X) == ["aten.rand_like.default", "aten.normal_.default"]
    assert drawn(lambda k, x: [keyed(torch.rand_like)(k, x)], key(0), X) == []
    assert drawn(lambda x: [torch._higher_order_ops.map(torch.rand_like, x)], X) == ["aten.rand_like.default"]


@pytest.mark.parametrize(("probability", "drawn"), [(0.0, 0), (0.1, 1)])
def test_attention_draws_where_it_drops(probability, drawn):
    q = torch.randn(1, 2, 5, 4)
    attend = torch.nn.functional.scaled_dot_product_attention
    graph = graphs.written(lambda q: [attend(q, q, q, dropout_p=probability)], [q])
    assert min(1, len(list(graphs.draws(graph)))) == drawn


def test_tensors_of_closures_become_inputs_and_numbers_stay():
    graph = graphs.written(lambda x: [x * HELD + torch.tensor(0.5) + HELD.sum()], [X])
    constants = graphs.with_inputs_for_constants(graph)
    assert [c is HELD for c in constants] == [True]
    assert torch.equal(graph(X, 2 * HELD)[0], 2 * X + 6.5)


def test_a_graph_has_the_derivatives_that_were_taken():
    f = lambda x: [torch.func.grad(lambda x: x.sin().sum())(x)]
    assert torch.equal(graphs.written(f, [X])(X)[0], X.cos())


def test_zeros_of_forward_mode_are_on_the_device_of_the_inputs():
    vectors = lambda x: torch.vmap(lambda row: torch.func.jvp(lambda r: HELD.diag() @ r, (row,), (row,))[1])(x)
    each_matrix = lambda x, w: torch.vmap(torch.vmap(lambda r, w: torch.func.jvp(lambda r: w @ r, (r,), (r,))[1]))(x, w)
    w = torch.arange(24.0).reshape(2, 3, 2, 2)
    inputs = [torch.stack([X, X]).reshape(2, 3, 2), w]
    for f, given in ((vectors, [X]), (each_matrix, inputs)):
        graph = graphs.written(lambda *args, f=f: [f(*args)], given)
        values = [node.meta["val"] for node in graph.graph.nodes if isinstance(node.meta.get("val"), torch.Tensor)]
        assert {value.device.type for value in values} == {"cpu"}
        assert torch.equal(graph(*given)[0], f(*given))


def test_control_flow_is_written_down():
    scan = pytest.importorskip("torch._higher_order_ops").scan
    both = lambda carry, row: ([carry[0] + row[0]], [carry[0] * row[0]])
    running = lambda x: scan(both, [x[0].clone()], [x])[1]
    graph = graphs.written(running, [X])
    assert any("scan" in str(node.target) for node in graph.graph.nodes)
    assert torch.equal(graph(X)[0], running(X)[0])


def test_modes_are_those_that_functions_see():
    assert graphs.function_modes() == []
    with torch.device("cpu"):
        assert graphs.function_modes() == []
        with torch.overrides.TorchFunctionMode():
            assert len(graphs.function_modes()) == 1
