"""Tracers beside torch.compile: make_fx, fake tensors, torch.export, control flow; and another default device."""

from functools import partial

import pytest
import torch
from rule_table import RULES, two_calls
from torch._higher_order_ops import cond, scan, while_loop
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

import functional_jd as jd

X = torch.randn(5, 4, 3, generator=torch.Generator().manual_seed(0))
PARAMS = {"w": X[0, :3, :2].clone(), "b": torch.zeros(2)}


def losses(params, x):
    return (x @ params["w"] + params["b"] - 1).square().mean(0)


METHODS = {
    "rows": {"losses": losses, "aggregator": jd.upgrad(), "engine": "jacobian"},
    "layers": {"losses": losses, "aggregator": jd.upgrad(), "engine": "gramian"},
    "weighted": {"losses": losses, "aggregator": jd.mean(), "engine": "weighted"},
    "half": {"losses": jd.autocast(losses), "aggregator": jd.upgrad()},
    "examples": {"losses": jd.per_example(lambda p, x: losses(p, x[None]).sum()), "aggregator": jd.clipped(1.0)},
}


def start(name):
    """The state, and a step of its leaves: all that tracers take."""
    method = METHODS[name] | {"optimizer": jd.adamw(0.1)}
    state = jd.train_state(PARAMS, X[0], scale=jd.scale_state(2.0), **method)
    leaves, structure = tree_flatten(state)

    def stepped(x, *leaves):
        state, _ = jd.step(tree_unflatten(leaves, structure), x, **method)
        return [leaf.clone() for leaf in tree_leaves(state)]  # control flow refuses results that are its arguments

    return leaves, stepped


def steps(stepped, leaves, batches):
    for x in batches:
        leaves = stepped(x, *leaves)
    return leaves


@pytest.mark.slow
def test_every_rule_traces_by_make_fx_and_runs_on_fake_tensors():
    for name in RULES:
        f, args = two_calls(name)
        traced = make_fx(f)(*args)
        later = tree_map(lambda x: 2 * x + 0.1, args)
        torch.testing.assert_close(traced(*later), f(*later), msg=lambda text, name=name: f"{name}: {text}")
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:  # the keys of random rules
            found = f(*tree_map(mode.from_tensor, args))
        assert [x.shape for x in tree_leaves(found)] == [x.shape for x in tree_leaves(f(*args))], name


def test_a_start_without_values_is_a_start():
    each = {"losses": lambda w, x: (x - w).square().mean(1), "optimizer": jd.sgd(0.1)}
    for rule in (jd.upgrad(), jd.nash_mtl(), jd.dwa(), jd.famo(), jd.pcgrad(jd.random.key(0))):
        with torch.device("meta"):
            assert jd.train_state(torch.ones(3), torch.ones(4, 3), aggregator=rule, **each).params.is_meta


def test_tensors_on_another_device_than_the_default_one_stay_there():
    state = jd.train_state(PARAMS, X[0], losses=losses, aggregator=jd.upgrad(), optimizer=jd.sgd(0.1))
    calls = {name: (f, args) for name in RULES for f, args in [two_calls(name)]}
    calls |= {name: (stepped, (X[0], *leaves)) for name in METHODS for leaves, stepped in [start(name)]}
    calls["constant"] = (lambda w, rows: jd.aggregate(jd.constant(w), rows), (X[0, :, 0], X[0]))
    calls["checkpoint"] = (lambda state: jd.from_checkpoint(jd.to_checkpoint(state), state), (state,))
    for name, (f, args) in calls.items():
        with torch.device("meta"):
            found = f(*args)
        torch.testing.assert_close(found, f(*args), msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("name", METHODS)
def test_a_step_traces_by_make_fx_and_runs_on_fake_tensors(name):
    leaves, stepped = start(name)
    traced = make_fx(stepped)(X[0], *leaves)
    torch.testing.assert_close(steps(traced, leaves, X), steps(stepped, leaves, X))
    mode = FakeTensorMode()
    fakes = tree_map(mode.from_tensor, [X[0], *leaves])
    with mode:
        found = stepped(*fakes)
    assert [x.shape for x in found] == [x.shape for x in leaves]


def scanned(f, leaves, batches):
    return scan(lambda carried, x: (list(f(x, *carried)), x.sum()), leaves, batches)[0]


def chosen(f, leaves, taken):
    return cond(torch.tensor(taken), f, lambda x, *old: [leaf.clone() for leaf in old], (X[0], *leaves))


def repeated(f, leaves):
    return while_loop(lambda k, *_: k < 3, lambda k, *old: (k + 1, *f(X[0], *old)), (torch.tensor(0), *leaves))[1:]


def test_control_flow_takes_a_step_that_make_fx_traced_and_raises_for_another():
    leaves, stepped = start("layers")
    traced = make_fx(stepped)(X[0], *leaves)
    torch.testing.assert_close(list(scanned(traced, leaves, X)), steps(stepped, leaves, X))
    for taken in (True, False):
        torch.testing.assert_close(list(chosen(traced, leaves, taken)), steps(stepped, leaves, X[:taken]))
    torch.testing.assert_close(list(repeated(traced, leaves)), steps(stepped, leaves, [X[0]] * 3))
    for flow, call, *given in (("scan", scanned, X), ("cond", chosen, True), ("while_loop", repeated)):
        torch.compiler.reset()
        with pytest.raises(Exception, match=rf"captured completely(.|\n)*{flow}"):
            call(stepped, leaves, *given)


@pytest.mark.parametrize("name", METHODS)
def test_many_steps_are_one_graph_of_one_step(name):
    leaves, stepped = start(name)
    traced = make_fx(stepped)(X[0], *leaves)
    torch.compiler.reset()
    compiled = torch.compile(partial(scanned, traced), fullgraph=True, backend="aot_eager")  # nothing changes in place
    torch.testing.assert_close(list(compiled(leaves, X)), steps(stepped, leaves, X))


class Module(torch.nn.Module):
    def __init__(self, f):
        super().__init__()
        self.f = f

    def forward(self, *args):
        return self.f(*args)


def exported(f, args):
    return torch.export.export(f, args, strict=False).module()


def test_torch_export_of_an_aggregation_aggregates_and_what_it_would_get_wrong_needs_make_fx():
    f, args = two_calls("stch")
    leaves, stepped = start("rows")
    for g, given in ((f, args), (stepped, (X[0], *leaves)), (jd.jacobian_fn(losses), (PARAMS, X[0]))):
        words = r"(scalarized|aggregate|step|jacobian_fn): .* torch\.export, .*make_fx\(f\)\(\*args"
        with pytest.raises(ValueError, match=words):
            torch.export.export(Module(g), given, strict=False)
        later = tree_map(lambda x: 2 * x, given)
        torch.testing.assert_close(exported(make_fx(g)(*given), given)(*later), g(*later))
    rows = torch.randn(3, 2, generator=torch.Generator().manual_seed(2))
    found = exported(Module(lambda rows: jd.aggregate(jd.upgrad(), rows)), (rows,))(2 * rows)
    assert type(found) is jd.aggregation.Aggregation
    torch.testing.assert_close(found, jd.aggregate(jd.upgrad(), 2 * rows))
