"""Searches as operators: tracers see one; off the CPU they go to the host, or take a fixed number of steps."""

from functools import partial

import pytest
import torch
from sequences import rows_of_condition
from simulated import simulated
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map

import functional_jd as jd
from functional_jd.solvers.search import may_be_differentiated, per_problem

rows = partial(rows_of_condition, condition=10.0)
capped = partial(jd.mgda, cap=0.3)
SEARCHES = {
    "upgrad": jd.upgrad,
    "dualproj": jd.dualproj,
    "mgda": jd.mgda,
    "mgda with a cap": capped,
    "cagrad": lambda **how: jd.cagrad(0.5, **how),
    "fairgrad": lambda **how: jd.fairgrad(2.0, **how),
    "nash_mtl": jd.nash_mtl,
    "pcd": jd.pcd,
}
each_search = pytest.mark.parametrize("build", SEARCHES.values(), ids=SEARCHES)


def searches(graph):
    return [str(node.target) for node in graph.nodes if "functional_jd" in str(node.target)]


@each_search
@pytest.mark.parametrize("tracing", ["real", "fake", "symbolic"])
def test_a_tracer_sees_one_operator(build, tracing):
    J = rows(5)
    weights = lambda J: jd.aggregate(build(), J).weights
    traced = make_fx(weights, tracing_mode=tracing)(J)
    assert len(searches(traced.graph)) == (2 if build in (jd.pcd, capped) else 1)
    assert torch.equal(traced(2 * J + 1), weights(2 * J + 1))


@pytest.mark.parametrize("solver", ["host", "device"])
def test_exported_it_is_one_operator_that_may_be_captured_only_on_the_device(solver):
    class Module(torch.nn.Module):
        def forward(self, J):
            return jd.aggregate(jd.upgrad(solver=solver), J).weights

    program = torch.export.export(Module(), (rows(4),), strict=False)
    assert torch.equal(program.module()(rows(4)), Module()(rows(4)))
    (node,) = [node for node in program.graph.nodes if "functional_jd" in str(node.target)]
    assert (torch.Tag.cudagraph_unsafe in node.target.tags) == (solver == "host")


@each_search
def test_fake_tensors_have_no_values_to_search_with(build):
    with FakeTensorMode() as mode:
        found = jd.aggregate(build(), mode.from_tensor(rows(5)))
    assert found.weights.shape == (5,)
    assert jd.aggregate(build(), rows(5).to("meta")).weights.is_meta


@each_search
def test_under_transforms_one_copy_serves_all_problems(build):
    batch = torch.stack([rows(5), rows(5).flip(0), 2 * rows(5) + 1])
    several = torch.vmap(lambda J: jd.aggregate(build(), J).weights)
    expected = several(batch)
    with simulated() as device:
        inputs = device.put(batch)
        device.reset()
        found = several(inputs)
        # Shares come back with three more tensors; `pcd` and a cap search twice.
        assert device.copies_to_host == device.copies_from_host == (2 if build in (jd.pcd, capped) else 1)
        assert torch.equal(device.get(found), expected)


def test_in_inference_mode_the_numbers_are_the_same():
    with simulated() as device:
        there = device.put(rows(4))
        with torch.inference_mode():
            found = jd.aggregate(jd.upgrad(), there).weights
    assert torch.equal(device.get(found), jd.aggregate(jd.upgrad(), rows(4)).weights)


def test_a_number_for_each_problem_is_made_where_they_are():
    with simulated() as device:
        vectors = device.put(torch.ones(3, 2, dtype=torch.float64))
        device.reset()
        found = per_problem(0.5, vectors)
        assert (device.launches, device.copies_from_host) == (1, 0)
        assert torch.equal(device.get(found), torch.full((3, 1), 0.5, dtype=torch.float64))
    each = tree_map(lambda x: per_problem(x, torch.ones(3, 2)), [torch.tensor(2.0), torch.ones(3, 1).double()])
    assert [x.shape for x in each] == [(3, 1), (3, 1)]
    assert all(x.dtype == torch.float32 for x in each)


def test_vmap_alone_asks_for_no_derivative():
    seen = []

    def looked(x):
        seen.append(may_be_differentiated(x))
        return x.sum()

    x = torch.ones(3, 2)
    torch.vmap(looked)(x)
    torch.vmap(torch.vmap(looked))(x[None])
    with torch.no_grad():
        torch.vmap(looked)(x.clone().requires_grad_())
    assert seen == [False] * 3
    seen.clear()
    torch.vmap(looked)(x.clone().requires_grad_())  # the graph is outside of the vmap
    torch.func.grad(lambda x: torch.vmap(looked)(x).sum())(x)
    torch.vmap(torch.func.grad(looked))(x)
    torch.vmap(lambda x: torch.func.jvp(looked, (x,), (x,)))(x)
    with forward_ad.dual_level():
        torch.vmap(looked)(forward_ad.make_dual(x, x))
    assert seen == [True] * 5
