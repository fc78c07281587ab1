"""What is found before a capture, and what a donated tensor does, without a GPU; `test_cuda.py` captures."""

from functools import partial

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

import functional_jd as jd
from functional_jd.training import captured
from functional_jd.training.captured import Donated, check_inputs, prepare_capture
from functional_jd.training.compiled import count_donated


def direction(rule, J):
    return jd.aggregate(rule, J).direction


def graph_of(f, *inputs):
    return make_fx(f, tracing_mode="fake")(*inputs)


WAITING = {
    "aten._linalg_eigh": lambda x: torch.linalg.eigh(x)[0],
    "aten._linalg_svd": lambda x: torch.linalg.svdvals(x),
    "aten.cholesky_solve": lambda x: torch.cholesky_solve(x, x),
    "aten._linalg_check_errors": torch.linalg.inv,
}


def test_constants_go_to_the_device_before_the_capture():
    """The device "meta" stands for an accelerator."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    half = graph.call_function(torch.ops.aten.full.default, ([], 0.5))
    there = graph.call_function(torch.ops.aten._to_copy.default, (half,), {"device": torch.device("meta")})
    product = graph.call_function(torch.ops.aten.mul.Tensor, (x, there))
    graph.output(product)
    for node, device in ((x, "meta"), (half, "cpu"), (there, "meta"), (product, "meta")):
        node.meta["val"] = torch.empty((), device=device)
    module = fx.GraphModule(torch.nn.Module(), graph)
    prepare_capture(module)
    assert "aten._to_copy.default" not in {str(node.target) for node in module.graph.nodes}
    assert module(torch.empty((), device="meta")).is_meta
    crossing = fx.Graph()
    x = crossing.placeholder("x")
    there = crossing.call_function(torch.ops.aten._to_copy.default, (x,), {"device": torch.device("meta")})
    crossing.output(there)
    x.meta["val"], there.meta["val"] = torch.empty(()), torch.empty((), device="meta")
    with pytest.raises(ValueError, match="must not wait"):
        prepare_capture(fx.GraphModule(torch.nn.Module(), crossing))


def test_what_waits_is_named_and_a_search_on_the_host_unless_it_has_a_form_for_devices():
    for name, f in WAITING.items():
        with pytest.raises(ValueError, match=f"^compiled: the function must not wait .*, found {name}"):
            prepare_capture(graph_of(f, torch.eye(3)))
    J = torch.randn(3, 4, dtype=torch.float64)
    for rule in (jd.upgrad(), jd.upgrad(solver="device"), jd.mean()):
        prepare_capture(graph_of(partial(direction, rule), J))
    with pytest.raises(ValueError, match="must not wait"):
        prepare_capture(graph_of(partial(direction, jd.config()), J))


def test_what_cannot_be_captured_or_donated_is_named():
    for backend in ("eager", "inductor"):
        with pytest.raises(ValueError, match=r"^compiled: donate must be False unless backend='cudagraphs'"):
            jd.compiled(torch.sin, backend=backend, donate=True)
    with pytest.raises(ValueError, match="all tensors must be on one CUDA device with backend='cudagraphs', found cpu"):
        check_inputs([torch.ones(2)])
    state = {"a": torch.ones(2), "b": (torch.ones(3), 1.0)}
    assert count_donated((state,), (state, "more")) == count_donated((state,), state) == 2
    for other in (state | {"b": (torch.ones(3, dtype=torch.float64), 1.0)}, {"a": torch.ones(2)}, "state"):
        with pytest.raises(ValueError, match="the first result must be like the first argument"):
            count_donated((state,), (other, state))


def test_a_donated_tensor_raises_when_it_is_read_and_sparse_results_are_not_joined():
    results = [torch.ones(2), torch.eye(2).to_sparse(), torch.zeros(())]
    groups, joined = captured.joined_bytes(results, 0)
    assert [places for places, *_ in groups] == [[0], [2]]
    assert joined.view(torch.float32).tolist() == [1.0, 1.0, 0.0]
    x, keeps = torch.ones(2), torch.zeros(1)
    x.__class__ = Donated
    for read in (lambda: x + 1, lambda: x.sum(), lambda: x.shape, lambda: torch.cat([x, keeps]), lambda: x[0]):
        with pytest.raises(RuntimeError, match=r"^compiled: the state must be the newest one.* has donated\."):
            read()


class Graph:
    """Stands in for a CUDA graph: a replay calls the operators again, and writes into the memory of their results."""

    def __init__(self):
        self.calls = []

    def replay(self):
        for func, args, kwargs, found in self.calls:
            for x, new in zip(tree_leaves(found), tree_leaves(func(*args, **kwargs)), strict=True):
                if x is not None and x.data_ptr() != new.data_ptr():
                    x.view(new.shape).copy_(new)  # squeezed in place since


class Capturing(TorchDispatchMode):
    def __init__(self, graph, **_):
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        self.graph.calls.append((func, args, kwargs or {}, found))
        return found


@pytest.fixture
def without_a_gpu(monkeypatch):
    """Graphs that are captured here run on the CPU."""
    monkeypatch.setattr(captured, "check_inputs", lambda _: None)
    for name, stand_in in {"CUDAGraph": Graph, "graph": Capturing, "Stream": torch.device}.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)


@pytest.mark.parametrize("donate", [False, True])
def test_steps_go_on_from_the_newest_state(without_a_gpu, donate):
    """Batches of two sizes share the state; each size has one graph."""
    losses = lambda p, x: {"a": (x @ p["w"]).square().mean(), "b": (p["w"] - 1).square().sum()}
    how = {"losses": losses, "aggregator": jd.upgrad(), "optimizer": jd.adamw(0.1)}
    batches = [torch.randn(size, 3, generator=torch.Generator().manual_seed(size)) for size in (4, 4, 5, 4, 5, 5)]
    expected = jd.train_state({"w": torch.ones(3)}, batches[0], **how)
    take = jd.compiled(partial(jd.step, **how), backend="cudagraphs", donate=donate)
    state = jd.train_state({"w": torch.ones(3)}, batches[0], **how)
    for x in batches:
        expected, info = jd.step(expected, x, **how)
        before, (state, found) = state, take(state, x)
        torch.testing.assert_close(found.losses, info.losses)
        torch.testing.assert_close(state.params["w"], expected.params["w"])
        if donate:
            for read in (before.params["w"].sum, *(partial(take, before, y) for y in batches[1:3])):
                with pytest.raises(RuntimeError, match="has donated"):
                    read()
        else:
            assert before.params["w"].isfinite().all()
    assert len(take.graphs) == 2
    state.params["w"] = torch.full((3,), 2.0)  # in the dict that was returned
    torch.testing.assert_close(take(state, x)[1].losses["b"], torch.tensor(3.0))


@pytest.mark.parametrize("where", ["replay", "copy"])
def test_a_call_that_fails_leaves_no_state_to_read(without_a_gpu, monkeypatch, where):
    def fail(*_):
        raise KeyboardInterrupt

    take = jd.compiled(lambda s, x: s + x, backend="cudagraphs", donate=True)
    states = [take(torch.zeros(3), torch.ones(3))]
    states.append(torch.full((3,), 5.0))
    monkeypatch.setattr(*{"replay": (Graph, "replay"), "copy": (captured, "copy_each")}[where], fail)
    with pytest.raises(KeyboardInterrupt):
        take(states[1], torch.ones(3))
    for state in states:
        with pytest.raises(RuntimeError, match="has donated"):
            state.sum()


def test_a_front_is_that_of_operators(without_a_gpu):
    losses = lambda p, x: torch.stack([(p - x).square().sum(), (p + 1).square().sum()])
    how = {"losses": losses, "optimizer": jd.adamw(0.05), "preferences": jd.fronts.lattice(2, 4)}
    train = partial(jd.fronts.train, torch.zeros(3), [(torch.full((3,), k),) for k in (1.0, 2.0, 3.0)], **how)
    for rule in (jd.tchebycheff, lambda u: jd.upgrad(preference=u, solver="device")):
        torch.testing.assert_close(train(rule=rule, compile="cudagraphs"), train(rule=rule, compile="eager"))


def test_a_state_whose_memory_another_training_takes_raises(without_a_gpu):
    """Two trainings by one function: the memory of the first state holds the second one."""
    take = jd.compiled(lambda state, x: (state + x, x.sum()), backend="cudagraphs", donate=True)
    first, _ = take(torch.zeros(2), torch.ones(2))
    assert first.tolist() == [1.0, 1.0]
    second, _ = take(torch.full((2,), 5.0), torch.ones(2))
    assert second.tolist() == [6.0, 6.0]
    with pytest.raises(RuntimeError, match="has donated"):
        first.sum()


def test_what_stands_in_donated_memory_is_copied_in_time(without_a_gpu):
    take = jd.compiled(lambda s, x: ({"a": s["a"] + x, "b": s["b"]}, s["a"]), backend="cudagraphs", donate=True)
    s, old = take({"a": torch.zeros(1), "b": torch.ones(1)}, torch.full((1,), 5.0))
    assert (s["a"], s["b"], old) == (5, 1, 0)
    s, old = take({"a": s["b"], "b": s["a"]}, torch.ones(1))
    assert (s["a"], s["b"], old) == (2, 5, 1)
    loss = (s["a"] * torch.ones(1, requires_grad=True)).sum()
    take(s, torch.ones(1))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_tensor_of_a_closure_that_moves_raises(without_a_gpu):
    held = torch.ones(2)
    take = jd.compiled(lambda x: x * held, backend="cudagraphs")
    assert take(torch.ones(2)).tolist() == [1.0, 1.0]
    held.mul_(3)
    assert take(torch.ones(2)).tolist() == [3.0, 3.0]
    held.data = torch.full((2,), 7.0)
    with pytest.raises(ValueError, match="tensors of closures must keep their memory"):
        take(torch.ones(2))


@pytest.mark.parametrize("reads_old", [False, True])
@pytest.mark.parametrize("skipped", [False, True])
def test_donated_parameters_move_where_they_are_unless_the_old_ones_are_read(skipped, reads_old):
    losses = lambda p, x: {"a": (p["w"] @ x).square().sum() + p["b"].sum(), "b": p["w"].abs().sum()}
    how = {"losses": losses, "aggregator": jd.mean(), "optimizer": jd.adamw(1e-2)}
    x = torch.full((3,), torch.inf if skipped else 1.0)
    state = jd.train_state({"w": torch.ones(2, 3), "b": torch.ones(2)}, torch.ones(3), **how)

    def take(state, x):
        new, info = jd.step(state, x, **how)
        return (new, info, new.params["w"] - state.params["w"]) if reads_old else (new, info)

    leaves, structure = tree_flatten((state, x))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    graph = graph_of(lambda *given: tree_leaves(take(*tree_unflatten(structure, given))), *tensors)
    donated = len(tree_leaves(state))
    given = [t.clone() for t in tensors]
    expected = graph(*given)
    kept = sum(x is y for x, y in zip(expected[:donated], given, strict=False))
    captured.write_donated(graph, donated)
    names = {str(node.target) for node in graph.graph.nodes}
    assert ("functional_jd.fused_adamw_in_place.default" in names) is not reads_old
    given = [t.clone() for t in tensors]
    found = graph(*given)
    assert all(torch.equal(a, b) or (a != a).any() for a, b in zip(found, expected, strict=True))
    moved = sum(x is y for x, y in zip(found[:donated], given, strict=False)) - kept
    assert moved == (0 if reads_old else 6)  # two leaves, two averages of each


def test_a_donated_tensor_that_is_a_direction_is_not_moved_where_it_is():
    """The kernel moves leaf by leaf: a direction that is another leaf would be moved before it is read."""
    optimizer = jd.adamw(1e-2)
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([-3.0, 4.0])
    state = optimizer.init((a, b))

    def take(a, b, first, second, third, fourth, steps):
        held = state._replace(steps=steps, first=(first, second), second=(third, fourth))
        new, moments = optimizer.update((b, a), held, (a, b))
        return [*new, *moments.first, *moments.second, moments.steps]

    given = [a, b, *state.first, *state.second, state.steps]
    graph = graph_of(take, *given)
    expected = take(*given)
    captured.write_donated(graph, len(given))
    assert "functional_jd.fused_adamw.default" in {str(node.target) for node in graph.graph.nodes}
    assert all(map(torch.equal, graph(*[x.clone() for x in given]), expected))
