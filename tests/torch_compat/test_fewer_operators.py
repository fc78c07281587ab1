"""Graphs with fewer operators: the same bits, and nothing shared that a caller may change."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore

import functional_jd as jd
from functional_jd.core.collectives import collective
from functional_jd.torch_compat import graphs
from functional_jd.torch_compat.fewer_operators import with_fewer_operators

X = torch.arange(6.0).reshape(2, 3) - 2.5


def operators_of(f, *args):
    """The graph of a function as it is, what runs in its place, and the operators of that."""
    whole, graph = graphs.written(f, args), graphs.written(f, args)
    run = with_fewer_operators(graph)
    return whole, run, [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


def check(f, *args, left):
    whole, run, operators = operators_of(f, *args)
    for x, y in zip(run(*args), whole(*args), strict=True):
        assert torch.equal(x, y)
        assert x.stride() == y.stride()
    assert operators == [f"aten.{name}" for name in left]


def test_what_is_not_used_is_not_computed():
    check(lambda x: [(x.sin(), x.cos())[0]], X, left=["sin.default"])


def test_constants_are_kept():
    check(lambda x: [x * torch.eye(3)[:2] + torch.arange(3).cos()], X, left=["mul.Tensor", "add.Tensor"])
    check(lambda x: [torch.where(x > 0, x, 0.0)], X, left=["gt.Scalar", "where.self"])
    large = torch.zeros(40, 40)
    check(lambda x: [x + torch.ones(40, 40)], large, left=["ones.default", "add.Tensor"])


def test_constants_that_are_returned_belong_to_the_caller():
    _, run, _ = operators_of(lambda x: [torch.zeros(3), torch.ones(3)[:2], x.sin()], X)
    for returned in run(X):
        returned.fill_(7)
    assert [float(x.sum()) for x in run(X)[:2]] == [0, 2]


def test_results_that_are_equal_belong_to_the_caller_each():
    _, run, _ = operators_of(lambda x: [x.sin(), x.sin(), x.cos()[0], x.cos()[0]], X)
    a, b, c, d = run(X)
    a.zero_()
    c.zero_()
    assert torch.equal(b, X.sin())
    assert torch.equal(d, X[0].cos())


@pytest.mark.parametrize(
    "f",
    [
        lambda x: [x.sin().add_(x.sin())],
        lambda x: [(y := x.sin(), z := x.sin(), y.mul_(2), z + y)[3]],
        lambda x: [(y := torch.zeros(2, 3), y.add_(x), torch.zeros(2, 3) + y)[2]],
        lambda x: [(y := x.sin().view(2, 3), y.mul_(2), x.sin().view(2, 3) + y)[2]],
        lambda x: [(y := (x @ x.mT).unsqueeze(0), y.squeeze_(0), y + x @ x.mT)[2]],
        lambda x: [(y := torch.empty(2, 3), torch.add(x, 1, out=y), y * y)[2]],
        lambda x: [(a := x.sin(), b := a[0], a[1].fill_(5), b + x.sin()[1] + a.sum())[3]],
    ],
)
def test_what_is_changed_in_place_is_left_alone(f):
    whole, run, _ = operators_of(f, X)
    for _ in range(2):
        assert torch.equal(run(X)[0], whole(X)[0])


UNARY = [torch.sin, lambda x: x.mT, lambda x: x.view(-1).view(x.shape), lambda x: x.clone(), lambda x: x.detach()]
UNARY += [lambda x: x[:1].expand(x.shape[0], -1), lambda x: x.sum(0, keepdim=True).expand(x.shape)]
UNARY += [lambda x: x + torch.ones(()), lambda x: torch.where(x > 0, x, 0)]
IN_PLACE = [
    lambda x: x.mul_(1.5),
    lambda x: x[0].add_(1),
    lambda x: x.t_().contiguous(),
    lambda x: x.view(-1)[:2].fill_(3),
]
steps = st.lists(st.tuples(st.integers(0, 14), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=14)


@given(steps, st.sets(st.integers(0, 9), min_size=1, max_size=3))
def test_any_program_of_views_copies_and_changes_in_place(program, returned):
    def f(x):
        values = [x.clone()]
        for kind, i, j in program:
            a, b = values[i % len(values)], values[j % len(values)]
            if kind < len(UNARY):
                values.append(UNARY[kind](a))
            elif kind < len(UNARY) + len(IN_PLACE):
                if a.is_contiguous():  # expanded ones refuse
                    IN_PLACE[kind - len(UNARY)](a)
            else:
                values.append(a @ b)
        return [values[i % len(values)] for i in returned]

    x = torch.linspace(-1, 1, 9).reshape(3, 3)
    whole, run, _ = operators_of(f, x)
    for _ in range(2):
        for found, expected in zip(run(x), whole(x), strict=True):
            assert torch.equal(found, expected)
        for found in {id(y): y for y in run(x)}.values():
            if found.is_contiguous():
                found.fill_(9)


def test_the_search_of_a_rule_is_one_operator_without_refinement_under_vmap_alone():
    gramians = torch.eye(3).double().expand(4, 3, 3)
    weights = torch.vmap(lambda G: jd.mgda().update(G, ())[0])
    _, _, operators = operators_of(lambda G: [weights(G)], gramians.contiguous())
    assert "functional_jd.complementarity_solution.default" in operators
    derivative = torch.func.grad(lambda G: weights(G)[:, 0].sum())
    _, _, operators = operators_of(lambda G: [derivative(G)], gramians.contiguous())
    assert "functional_jd.complementarity_search.default" in operators


def test_ranks_send_as_often_as_the_losses_say():
    """Another rank may not have twins, and waits for both."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        name = dist.group.WORLD.group_name
        twice = lambda x: [collective("sum", x, name, 2) + collective("sum", x, name, 2)]
        unused = lambda x: [(collective("sum", x, name, 2), x.sin())[1]]
        for f, times in ((twice, 2), (unused, 1)):
            _, _, operators = operators_of(f, X)
            assert operators.count("_c10d_functional.all_reduce.default") == times
    finally:
        dist.destroy_process_group()
