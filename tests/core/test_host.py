"""What goes to the host and comes back: one copy each way, the same numbers, where they stood; and every rule there."""

import sys
from types import SimpleNamespace

import pytest
import torch
from rule_table import RULES, rule_of
from simulated import simulated
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

import functional_jd as jd
from functional_jd.aggregation.aggregate import aggregate, apply_rule, where_it_runs
from functional_jd.aggregation.observation import Observation
from functional_jd.core.host import is_capturing, run_on_host
from functional_jd.solvers import lcp
from functional_jd.solvers.pivoting import solve_by_pivots

# Of the rules that are built for a number of rows.
ROWS = dict.fromkeys(("constant", "constrained", "cosmos", "epo", "pbi"), 3)
KINDS = (torch.bool, torch.float64, torch.int32, torch.float16, torch.uint8, torch.int64, torch.complex128)


def ill_conditioned(m, condition=1e7):
    """Rows `[m, m + 3]` of this condition number, of which some conflict."""
    generator = torch.Generator().manual_seed(m)
    left, right = (torch.linalg.qr(torch.randn(n, m, generator=generator, dtype=torch.float64))[0] for n in (m, m + 3))
    return left * torch.logspace(0, -torch.tensor(condition).log10(), m, dtype=torch.float64) @ right.mT


def observed(name, m):
    """What a rule may need: rows, those of another batch, losses."""
    J = ill_conditioned(m).float()
    rows = {"trunk": J[:, :2], "head": J[:, 2:]} if name == "grouped" else J
    other = tree_map(lambda leaf: leaf.flip(1), rows)
    return rows, other, torch.linspace(0.5, 2, m)


def equal(found, expected):
    return all(torch.equal(x, y) for x, y in zip(tree_leaves(found), tree_leaves(expected), strict=True))


def updated(rule, received, state, device):
    """Weights and state of a rule from what it receives, which is not counted."""
    device.reset()
    rule_there = lambda received, state: apply_rule(rule, received, state, fixed=False)
    return where_it_runs(rule, Observation(None), rule_there, received, state, apart=False)


def test_tensors_of_all_kinds_go_in_one_copy_and_come_back_in_one():
    tensors = {str(kind): torch.arange(7).to(kind).mul(3) for kind in KINDS} | {"none": torch.ones(0, 2)}
    tensors["flat"] = torch.arange(6.0).view(2, 3).mT
    with simulated() as device:
        inputs = device.put(tensors)
        device.reset()
        found = run_on_host(lambda tree: tree_map(lambda x: x.flip(0), tree), inputs)
        assert (device.copies_to_host, device.copies_from_host) == (1, 1)
        assert device.launches == 2  # what is transposed is straightened, then all are joined
        assert all(x.device.type == "sim" for x in found.values())
        assert equal(device.get(found), {name: x.flip(0) for name, x in tensors.items()})
        assert all(x.dtype == tensors[name].dtype and x.shape == tensors[name].shape for name, x in found.items())


def test_what_comes_back_as_it_went_is_what_was_given():
    with simulated() as device:
        x, y = device.put((torch.ones(2), torch.zeros(3)))
        device.reset()
        same, _, again = run_on_host(lambda x, y: (x, y * 2, y), x, y)
        assert same is x
        assert again is y
        one, other = run_on_host(lambda x: (x + 1,) * 2, x)
        assert one is other
        assert device.bytes_from_host == 12 + 8


def test_what_stands_on_the_host_is_left_there():
    with simulated() as device:
        x, y = device.put(torch.ones(2)), torch.full((2,), 3.0)
        found = run_on_host(lambda x, y: x + y, x, y)
        assert device.bytes_to_host == 8
        assert torch.equal(device.get(found), torch.full((2,), 4.0))


def test_without_float64_the_host_computes_in_it():
    with simulated(float64=False) as device:
        x, n = device.put((torch.tensor([1.0, 1e-9]), torch.tensor([3])))
        seen = []
        run = lambda x, n: seen.append(x.dtype) or (x.sum() - 1, n)
        found, _ = run_on_host(run, x, n)
        assert seen == [torch.float64]
        assert found.dtype == torch.float32
        assert device.get(found) == pytest.approx(1e-9)


def test_results_may_be_differentiated_by_what_is_enclosed():
    c = torch.tensor(2.0, requires_grad=True)
    with simulated() as device:
        found, _ = run_on_host(lambda x: (c * x, x + 1), device.put(torch.tensor([3.0])))
        found.sum().backward()
    assert c.grad == 3


def test_capture_is_noticed():
    with simulated() as device:
        x = device.put(torch.ones(1))
        assert not is_capturing(x)
        device.capturing = True
        assert is_capturing(x)
    assert not is_capturing(torch.ones(1))


@pytest.mark.parametrize("m", [2, 5, 32])
@pytest.mark.parametrize("name", [name for name in RULES if rule_of(name).on_host])
def test_a_rule_on_the_host_costs_a_launch_and_a_copy_each_way(name, m):
    rule = jd.epo([1 / m] * m) if name == "epo" else rule_of(name)  # which has one preference for each
    rows, other, losses = observed(name, m)
    state = aggregate(rule, rows, None, other, losses=losses).state
    with simulated() as device:
        received = device.put(rule.view(rows, other, losses=losses))
        found = updated(rule, received, device.put(state), device)
        assert device.launches <= 1  # tensors that are joined
        assert (device.copies_to_host, device.copies_from_host) == (1, 1)
        assert all(x.device.type == "sim" for x in tree_leaves(found))
        assert equal(device.get(found), rule.update(device.get(received), state))


@pytest.mark.parametrize("rule", [jd.upgrad, jd.dualproj, jd.mgda])
def test_a_rule_stays_where_one_launch_can_search(rule, monkeypatch):
    """The simulated device stands for a GPU, and the search that looks at no value for the launch."""
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda x: x.device.type == "sim"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(lcp, "_LAUNCHES", True)
    monkeypatch.setattr(lcp, "_MOST_ROWS_OF_A_LAUNCH", 4)

    def launch(M, q, free, inverses):
        assert not inverses
        found = solve_by_pivots(M.repeat_interleave(q.shape[1], 0), q[0], free[0], looks=False)
        return found[0].view_as(q), found[1]

    stand_in = SimpleNamespace(solve_in_one_launch=launch)
    monkeypatch.setitem(sys.modules, "functional_jd.solvers.one_launch", stand_in)
    losses = lambda w, x: (x @ w).square()
    for m, solver, copies in ((4, "auto", 0), (5, "auto", 1), (4, "host", 1)):
        with simulated() as device:
            there = device.put(ill_conditioned(m, 10.0))
            w = device.put(torch.linspace(-1, 1, m + 3, dtype=torch.float64))
            device.reset()
            found = aggregate(rule(solver=solver), there)
            assert (device.copies_to_host, device.copies_from_host) == (copies, copies)
            torch.testing.assert_close(device.get(found.weights), aggregate(rule(), ill_conditioned(m, 10.0)).weights)
            device.reset()
            jd.weights_fn(losses, rule(solver=solver))(w, there)
            assert device.copies_from_host == 1  # where weights that cancel become smaller
    assert [rule().on_host, jd.cr_mogm(rule()).on_host, jd.mgda(cap=0.5).on_host] == ["auto", "auto", True]


def test_what_aggregate_returns_from_the_host_can_be_saved():
    with simulated() as device:
        found = aggregate(jd.nash_mtl(), device.put(ill_conditioned(3)))
        again = aggregate(jd.nash_mtl(), device.put(ill_conditioned(3)), found.state)
        own = [x.untyped_storage() for x in (again.weights, *tree_leaves(again.state))]
        # Several dtypes in one storage are refused by torch.save.
        assert len({x.data_ptr() for x in own}) == len(own)


def test_groups_go_to_the_host_together():
    rule = jd.grouped({"a": jd.upgrad(), "b": jd.cagrad(0.5), "c": jd.mean(), "d": jd.mean()})
    rows = {key: ill_conditioned(4) for key in "abcd"}
    with simulated() as device:
        there = device.put(rows)
        device.reset()
        found = aggregate(rule, there)
        assert (device.copies_to_host, device.copies_from_host) == (1, 1)
        assert found.weights["c"] is found.weights["d"]  # so that one backward pass serves both
        assert equal(device.get(found), aggregate(rule, rows))


def test_a_preference_is_copied_once():
    rows = ill_conditioned(3)
    for given in ([1.0, 2.0, 3.0], "on the device"):
        for build in (jd.upgrad, jd.constant):
            with simulated() as device:
                preference = device.put(torch.tensor([1.0, 2.0, 3.0])) if isinstance(given, str) else given
                rule, there = build(preference), device.put(rows)
                found = [aggregate(rule, there)]
                device.reset()
                found.append(aggregate(rule, there))
                assert device.copies_to_host == device.copies_from_host == bool(rule.on_host)
                for one in found:
                    assert equal(device.get(one), aggregate(build([1.0, 2.0, 3.0]), rows))


@pytest.mark.parametrize("build", [lambda c: jd.cagrad(c), lambda c: jd.fairgrad(c), lambda c: jd.nash_mtl(c)])
@pytest.mark.parametrize("where", ["cpu", "sim"])
def test_hyper_parameters_may_be_tensors_wherever_they_stand(build, where):
    rows = ill_conditioned(4)
    with simulated() as device:
        found = aggregate(build(torch.tensor(0.5).to(where)), device.put(rows))
        torch.testing.assert_close(device.get(found.weights), aggregate(build(0.5), rows).weights)


def test_the_rule_of_a_user_stays_on_the_device_unless_it_asks():
    places = []

    def weigh(G):
        places.append(G.device.type)
        return G.sum(1)

    rows = ill_conditioned(3)
    with simulated() as device:
        for on_host in (False, True):
            aggregate(jd.stateless(jd.views.gramian, weigh, on_host=on_host), device.put(rows))
    assert places == ["sim", "cpu"]


# What needs rows, or draws, stays on the device.
WITHOUT_ROWS = [name for name in RULES if rule_of(name).view.products != "rows" and name != "random_weights"]


@pytest.mark.parametrize("name", WITHOUT_ROWS)
def test_without_float64_weights_are_those_of_the_host(name):
    rule, m = rule_of(name), ROWS.get(name, 5)
    rows, _, losses = observed(name, m)
    rows = tree_map(lambda leaf: leaf.flip(0) + 1, rows)
    with simulated(float64=False) as device:
        received = tree_map(lambda x: device.put(x.float()), rule.view(rows, losses=losses))
        state = tree_map(lambda x: device.put(x.float() if x.is_floating_point() else x), rule.init(received))
        found = device.get(updated(rule, received, state, device))
        received = device.get(received)
    wide = lambda tree: tree_map(lambda x: x.double() if x.is_floating_point() else x, tree)
    expected = rule.update(wide(received), wide(device.get(state)))
    on_host = rule.on_host or rule.view.inner_products_suffice
    for x, y in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        if on_host:
            assert torch.equal(x, y.to(x.dtype))
        else:
            torch.testing.assert_close(x, y.to(x.dtype))
