"""Where autocast is off, no mode sees the ops of the losses, and nothing of torch stays replaced."""

import threading

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import functional_jd as jd
from functional_jd.precision.autocast import with_op_tables
from functional_jd.torch_compat import noticing
from functional_jd.torch_compat.torch_internals import has_mode, innermost_mode, is_compiled


class Seen(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


RULES = {"mean": jd.mean, "upgrad": jd.upgrad}


def stored():
    return [vars(home).get(name) for home, name, _ in noticing._PLACES]


OWN = stored()


def plain(seen):
    def losses(params, x):
        seen.append(innermost_mode())
        h = torch.tanh(x @ params["w"])
        return torch.stack([h.square().mean(), h.abs().mean()])

    return losses, {"w": torch.ones(3, 2)}


def multitask(seen):
    def features(shared, x):
        seen.append(innermost_mode())
        return torch.tanh(x @ shared["w"])

    def heads(own, h, x):
        seen.append(innermost_mode())
        return torch.stack([(h @ own["v"]).square().mean(), h.abs().mean()])

    return jd.multitask(features, heads), {"shared": {"w": torch.ones(3, 2)}, "heads": {"v": torch.ones(2)}}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", [plain, multitask])
def test_no_mode_sees_the_ops_of_an_eager_step(kind, rule):
    seen, x = [], torch.ones(4, 3)
    losses, params = kind(seen)
    method = {"losses": losses, "aggregator": RULES[rule](), "optimizer": jd.sgd(0.1)}
    state = jd.train_state(params, x, **method)
    for engine in ("auto", "jacobian", *(["weighted"] if rule == "mean" else [])):
        seen.clear()
        state, info = jd.step(state, x, engine=engine, **method)
        assert info.moved
        assert seen
        assert set(seen) == {None}
    assert stored() == OWN


def test_functions_of_torch_are_back_after_an_error_and_after_the_last_thread():
    inside, leave = threading.Event(), threading.Event()

    def waits():
        inside.set()
        assert leave.wait(60)

    def fails():
        assert stored() != OWN
        with_op_tables(lambda: None)()
        assert stored() != OWN
        raise ArithmeticError

    thread = threading.Thread(target=with_op_tables(waits))
    thread.start()
    assert inside.wait(60)
    with pytest.raises(ArithmeticError):
        with_op_tables(fails)()
    assert stored() != OWN
    x = torch.ones(2, 2)
    with torch.autocast("cpu", torch.bfloat16):  # this thread evaluates no losses: native autocast
        assert innermost_mode() is None
        assert x.mm(x).exp().dtype == torch.bfloat16
    leave.set()
    thread.join()
    assert stored() == OWN


def test_an_autocast_that_is_not_left_leaves_no_mode():
    on = torch.autocast("cpu", torch.bfloat16)

    def losses(x):
        on.__enter__()
        return x.mm(x).exp()

    try:
        assert with_op_tables(losses)(torch.ones(2, 2)).dtype == torch.float32
        assert innermost_mode() is None
    finally:
        on.__exit__(None, None, None)


def test_autocast_around_a_whole_function_is_noticed():
    decorated = torch.autocast("cpu", torch.bfloat16)(lambda x: x.mm(x).exp())
    assert with_op_tables(decorated)(torch.ones(2, 2)).dtype == torch.float32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x):
        return checkpoint(lambda x: self.inner(torch.sin(x)).exp(), x, use_reentrant=False)


@pytest.mark.parametrize("autocast", [False, True])
def test_checkpoints_run_again_with_the_same_tensors_and_tables(autocast):
    module, x = Block(), torch.ones(3, 2)
    params = {name: p.detach() + 1 for name, p in module.named_parameters()}

    def losses(params, x, call):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return call(params, x).float().mean(0)

    again = lambda params, x: torch.func.functional_call(module, params, (x,))
    kept = lambda p, x: nn.functional.linear(torch.sin(x), p["inner.weight"], p["inner.bias"]).exp()
    (found, values), (expected, same) = (jd.jacobian_fn(losses)(params, x, call) for call in (again, kept))
    assert torch.equal(values, same)
    assert all(torch.equal(found[name], expected[name]) for name in params)


def test_vmap_inside_losses_takes_repaired_ops():
    x, y = torch.ones(3, 3, 3, dtype=torch.float64), torch.ones(3, 3, dtype=torch.float64)
    scales = torch.arange(1.0, 4.0, dtype=torch.float64)
    weights = torch.arange(81.0, dtype=torch.float64).reshape(3, 3, 3, 3)

    def losses(params, write):
        each = lambda c, w: (write(c * params["x"], c * params["y"]) * w).sum()
        return torch.vmap(each)(scales, weights)

    written = lambda x, y: torch.select_scatter(x, y, 1, -2)
    joined = lambda x, y: torch.cat([x[:, :1], y[:, None], x[:, 2:]], 1)
    found, expected = (jd.jacobian_fn(losses)({"x": x, "y": y}, write)[0] for write in (written, joined))
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_compiled_losses_follow_the_tables():
    torch.compiler.reset()

    def losses(x):
        with torch.autocast("cpu", torch.bfloat16):
            return x.mm(x).exp()

    compiled = torch.compile(losses, backend="eager", fullgraph=True)
    assert with_op_tables(compiled)(torch.ones(2, 2)).dtype == torch.float32


def test_torch_looks_up_what_is_replaced_while_losses_run(monkeypatch):
    called = []

    def seen(home, name):
        own = getattr(home, name)

        def replaced(*args, **kwargs):
            called.append(name)
            return own(*args, **kwargs)

        static = isinstance(vars(home)[name], staticmethod)
        monkeypatch.setattr(home, name, staticmethod(replaced) if static else replaced)

    places = [(torch.autocast, "__enter__"), (torch.autocast, "__exit__"), (noticing.CheckpointFrame, "save_inputs")]
    places += [(noticing.ReentrantCheckpoint, "forward"), (noticing.vmap_home, "vmap_impl")]
    places += [(torch.inference_mode, "__enter__")]
    for home, name in places:
        seen(home, name)
    x = torch.ones(2, requires_grad=True)
    runs = [lambda: torch.autocast("cpu").__enter__().__exit__(None, None, None), lambda: torch.vmap(torch.sin)(x)]
    runs += [lambda reentrant=reentrant: checkpoint(torch.sin, x, use_reentrant=reentrant) for reentrant in (0, 1)]
    runs += [torch.inference_mode(False)(lambda: None)]
    found = []
    for run in runs:
        called.clear()
        run()
        found.append([name for name in called if name[0] != "_"] or called[:])
    assert found == [["__enter__", "__exit__"], ["vmap_impl"], ["save_inputs"], ["forward"], ["__enter__"]]


def test_modes_and_compiled_functions_are_recognised():
    assert not has_mode(Seen)
    with Seen(), Seen():
        assert has_mode(Seen)
    compiled = [torch.compile(torch.sin, backend="eager"), torch.compile(nn.Identity(), backend="eager")]
    assert [is_compiled(f) for f in (torch.sin, nn.Identity(), *compiled)] == [False, False, True, True]
    kinds = []

    def notes(x):
        with torch.autocast("cpu", torch.bfloat16):
            return x.mm(x)

    own = torch.autocast.__enter__
    try:
        torch.autocast.__enter__ = lambda self: (kinds.append(type(self)), own(self))[1]
        torch.compiler.reset()
        torch.compile(notes, backend="eager", fullgraph=True)(torch.ones(2, 2))
    finally:
        torch.autocast.__enter__ = own
    assert kinds[-1] is noticing.AutocastOfGraphs


def half(params, x):
    with torch.autocast("cpu", torch.bfloat16):
        return (x @ params["w"]).float().square().mean(0)


def test_what_others_put_in_the_place_of_torch_is_called_and_stays(monkeypatch):
    own, entered = torch.autocast.__enter__, []

    def counted(self):
        entered.append(self)
        return own(self)

    monkeypatch.setattr(torch.autocast, "__enter__", counted)
    jd.jacobian_fn(half)({"w": torch.ones(3, 2)}, torch.ones(4, 3))
    assert len(entered) == 1
    assert vars(torch.autocast)["__enter__"] is counted


def test_a_replacement_that_begins_inside_losses_and_ends_after_them_leaves_torch_working():
    patch, params, x = pytest.MonkeyPatch(), {"w": torch.ones(3, 2)}, torch.ones(4, 3)

    def losses(params, x):
        patch.setattr(torch.autocast, "__enter__", torch.autocast.__enter__)
        return half(params, x)

    expected, _ = jd.jacobian_fn(half)(params, x)
    jd.jacobian_fn(losses)(params, x)
    patch.undo()
    rows, _ = jd.jacobian_fn(half)(params, x)
    assert torch.equal(rows["w"], expected["w"])
    assert stored() == OWN
