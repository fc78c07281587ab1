"""The step: equal to the picture, pure, skipped when not finite, the same under every transform."""

import subprocess
import sys
from functools import partial

import pytest
import torch
import torch._dynamo.testing
from bounds import check_same
from gramian_by_hand import Largest
from torch import nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map
from two_tasks import close, method, same, two_tasks
from zoo import Passed

import functional_jd as fj
from functional_jd.aggregation.aggregate import start
from functional_jd.aggregation.lifts import scalarized
from functional_jd.engines.by_name import ENGINES


def of_kind(kind, outputs, loss, params, heads, *batch):
    """Objectives of the kind on the parameters, from outputs for each example; heads are multiplied with these."""
    if kind == "multitask":
        tasks = fj.multitask(outputs, lambda h, z, *batch: list(loss(z * h["v"], *batch)))
        return {"shared": params, "heads": {"v": heads}}, tasks, batch
    of_one = lambda p, *batch: loss(outputs(p, *batch), *batch)
    by_name = lambda p, *batch: dict(zip("dcab", of_one(p, *batch), strict=False))
    return params, fj.per_example(of_one) if kind == "per_example" else by_name, batch


def regression(kind):
    """Three objectives of each kind, on four parameters."""
    x, y = torch.tensor([[1.0, 2.0], [-1.0, 0.5], [3.0, -2.0]]), torch.tensor([1.0, -1.0, 0.5])
    params, heads = {"w": torch.tensor([[0.5, -1.0], [2.0, 0.25]])}, torch.tensor([1.0, -2.0, 0.5])
    outputs = lambda p, x, y: torch.tanh(x @ p["w"]).sum(-1)
    return of_kind(kind, outputs, lambda z, x, y: (z - y) ** 2 + 0.1, params, heads, x, y)


KINDS = ["plain", "per_example", "multitask"]
geometric = partial(scalarized, lambda v: v.log().mean().exp())


def seeded(make):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make()


def batch_losses():
    """One objective per example, on layers whose rows need not be formed, and on one whose rows do."""
    layers = lambda: nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 1))
    net, x, y = seeded(lambda: (layers(), torch.randn(5, 6), torch.randn(5, 1)))
    params = {name: p.detach() for name, p in net.named_parameters()}
    return params, fj.per_example(lambda p, x, y: (functional_call(net, p, (x,)) - y).square().sum()), (x, y)


def wide_losses(kind, n=1 << 18):
    """Four objectives of each kind on one matrix of n numbers."""
    w, x = seeded(lambda: (torch.randn(256, n // 256) / 16, torch.randn(4, 256)))
    outputs = lambda p, x: torch.tanh(x @ p["w"]).square().mean(-1)
    return of_kind(kind, outputs, lambda z, x: z, {"w": w}, torch.arange(1.0, 5.0), x)


def normed_tasks():
    params, features, top, batch = two_tasks(partial(nn.LayerNorm, 5))
    return params, fj.multitask(features, top), batch


def test_the_step_is_the_composition_by_hand():
    params, features, top, batch = two_tasks()
    how = method(params, features, top)
    state = fj.train_state(params, *batch, scale=fj.scale_state(shape=(2,)), **how)
    after, info = fj.step(state, *batch, **how)

    jacobian, values, finite = fj.jacobian_fn(how["losses"], scale=state.scale)(params, *batch)
    direction, weights, memory = fj.aggregate(how["aggregator"], jacobian, state.aggregator)
    moved, moments = how["optimizer"].update(direction, state.optimizer, params)
    assert same(after, fj.TrainState(moved, (), moments, memory, fj.update_scale(state.scale, finite)))
    assert same(info, fj.StepInfo(values, weights, finite, finite.all(), fj.views.gramian(jacobian)))


@pytest.mark.filterwarnings("ignore:train_state. parameters must be in float32")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_inputs_stay_and_the_same_inputs_give_the_same_bits_in_the_same_dtype(dtype):
    params, features, top, batch = two_tasks(dtype=dtype)
    how = method(params, features, top)
    state = fj.train_state(params, *batch, scale=fj.scale_state(2.0**8), **how)
    copy = tree_map(torch.clone, (state, batch))
    first, second = fj.step(state, *batch, **how), fj.step(state, *batch, **how)
    assert same((state, batch), copy)
    assert same(first, second)
    assert [leaf.dtype for leaf in tree_leaves(first[0])] == [leaf.dtype for leaf in tree_leaves(state)]
    assert not same(first[0].params, params)


@pytest.mark.parametrize("kind", ["two tasks", *KINDS])
def test_one_graph_serves_every_scale(kind):
    take, scale, tolerance = partial(fj.step, engine="weighted"), fj.scale_state(growth_interval=2, shape=(3,)), {}
    if kind == "two tasks":
        params, features, top, batch = two_tasks(partial(nn.LayerNorm, 5))
        how, batches = method(params, fj.autocast(features), fj.autocast(top)), [batch] * 12
        take, scale = fj.step, fj.scale_state(2.0**24, growth_interval=2, shape=(2,))
        tolerance = {"rtol": 1e-2, "atol": 1e-2}
    else:
        params, losses, (x, y) = regression(kind)
        how = {"losses": losses, "aggregator": geometric(), "optimizer": fj.sgd(0.1)}
        batches = [(x * k, y) for k in (1.0, 1.0, torch.inf, 0.5, torch.nan, 1.0)]
    state = fj.train_state(params, *batches[0], scale=scale, **how)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled, eager, flags = torch.compile(take, fullgraph=True, backend=counter), state, set()
    for batch in batches:
        state, info = compiled(state, *batch, **how)
        eager, _ = take(eager, *batch, **how)
        flags.add(info.finite.all().item())
        assert counter.frame_count == 1  # what the first call compiled is all
    assert flags == {True, False}  # scales backed off, and grew
    close(state, eager, **tolerance) if tolerance else check_same(state, eager)


@pytest.mark.parametrize(
    ("rule", "weights"),
    [(fj.mean(), [0.25] * 4), (scalarized(torch.prod), [24.0, 12.0, 8.0, 6.0]), (fj.cr_mogm(fj.total()), [1.0] * 4)],
)
def test_a_rule_that_looks_at_no_row_costs_one_backward_pass_and_its_start_none(rule, weights):
    passes = []
    losses = lambda p: list(Passed.apply(p, passes) * torch.arange(1.0, 5.0))
    how = {"losses": losses, "aggregator": rule, "optimizer": fj.sgd(0.1)}
    state = fj.train_state(torch.ones(4), **how)
    assert not passes
    fj.step(state, **how)
    assert [x.tolist() for x in passes] == [[w * k for w, k in zip(weights, (1, 2, 3, 4), strict=True)]]


@pytest.fixture
def engines(monkeypatch):
    """The names of the engines that were taken, in order."""
    taken = []

    def noted(name, engine):
        def observe(plan):
            taken.extend([name] * (not plan.starting))
            return engine.observe(plan)

        return engine._replace(observe=observe)

    for name, engine in list(ENGINES.items()):
        monkeypatch.setitem(ENGINES, name, noted(name, engine))
    return taken


@pytest.mark.parametrize("shape", [(), (4,)])
@pytest.mark.parametrize("kind", KINDS)
def test_auto_takes_the_gramian_engine_where_the_jacobian_is_large(engines, kind, shape):
    least = 1 << (14 if kind == "per_example" else 17)
    for n, expected in ((least, "gramian"), (least // 2, "jacobian")):
        params, losses, batch = wide_losses(kind, n)
        how = {"losses": losses, "aggregator": fj.upgrad(), "optimizer": fj.sgd(0.1)}
        state = fj.train_state(params, *batch, scale=fj.scale_state(shape=shape), **how)
        engines.clear()  # of what the state starts from
        chosen, info = fj.step(state, *batch, **how)
        forced, other = fj.step(state, *batch, engine="jacobian", **how)
        assert engines == [expected, "jacobian"]
        check_same((chosen, info), (forced, other), torch.float32)
        assert not same(chosen.params, state.params)
        bad = [x.index_fill(0, torch.tensor([1]), float("inf")) for x in batch]
        (after, flags), (_, others) = (fj.step(state, *bad, engine=e, **how) for e in ("auto", "jacobian"))
        assert torch.equal(flags.finite, others.finite)
        assert same(after[:4], state[:4])


@pytest.mark.parametrize("kind", ["per_example", "multitask"])
@pytest.mark.parametrize("rule", [fj.upgrad, fj.nash_mtl, partial(fj.cr_mogm, fj.mgda())])
def test_a_rule_that_looks_at_the_gramian_starts_and_steps_without_a_jacobian(rule, kind):
    params, losses, batch = wide_losses(kind)
    how = {"losses": losses, "aggregator": rule(), "optimizer": fj.adamw(1e-3)}
    with Largest() as made:
        state = fj.train_state(params, *batch, scale=fj.scale_state(), **how)
        fj.step(state, *batch, **how)
    assert made.numel <= 1 << 18  # what the parameters take
    jacobian, values = fj.jacobian_fn(losses)(params, *batch)
    check_same(state.aggregator, start(how["aggregator"], jacobian, losses=values))


def test_a_guarded_update_chooses_as_select_does():
    params, features, top, batch = two_tasks()
    words, adamw = [], fj.adamw(1e-2)

    def guarded(moving, direction, state, params):
        words.append(moving)
        return adamw.guarded_update(moving, direction, state, params)

    how = method(params, features, top, optimizer=adamw._replace(guarded_update=guarded))
    plain = how | {"optimizer": adamw._replace(guarded_update=None)}
    state = fj.train_state(params, *batch, scale=fj.scale_state(), **how)
    for k in (1.0, float("nan"), float("inf"), 2.0):
        bent = [x * k for x in batch]
        ours, theirs = fj.step(state, *bent, **how), fj.step(state, *bent, **plain)
        assert same(ours, theirs)
        state = ours[0]
    assert [bool(word) for word in words] == [True, False, False, True]


REPLICAS = {
    "two tasks": (normed_tasks, fj.upgrad, "jacobian", (2,)),
    "layers": (batch_losses, fj.upgrad, "gramian", ()),
}
REPLICAS |= {
    kind: (partial(regression, kind), lambda: fj.cr_mogm(geometric(), momentum=0.5), "weighted", (3,)) for kind in KINDS
}


@pytest.mark.parametrize("name", REPLICAS)
def test_replicas_by_vmap_equal_replicas_in_a_loop(name):
    make, rule, engine, shape = REPLICAS[name]
    params, losses, batch = make()
    how = {"losses": losses, "aggregator": rule(), "optimizer": fj.adamw(1e-2)}
    take = partial(fj.step, engine=engine, **how)
    replicas = [fj.train_state(params, *batch, scale=fj.scale_state(2.0**k, shape=shape), **how) for k in range(3)]
    batches = tuple(torch.stack([x, x + 1, x * 2]) for x in batch)
    stack = lambda *leaves: torch.stack(leaves)
    alone = [take(state, *own) for state, own in zip(replicas, zip(*batches, strict=True), strict=True)]
    together = torch.vmap(take)(tree_map(stack, *replicas), *batches)
    check_same(together, tree_map(stack, *alone), torch.float32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["scalarized", "upgrad"])
def test_a_derivative_through_steps_is_right(name, kind):
    params, losses, batch = regression(kind)
    params, batch = tree_map(lambda x: x.double(), (params, batch))

    def two_steps(bend, *leaves):
        p = torch.utils._pytree.tree_unflatten(leaves, torch.utils._pytree.tree_structure(params))
        preferred = fj.upgrad(torch.stack([bend, 2 * bend, bend**2]))
        rule = preferred if name == "upgrad" else scalarized(lambda v: torch.logsumexp(bend * v, 0))
        how = {"losses": losses, "aggregator": rule, "optimizer": fj.sgd(0.1, momentum=0.5)}
        state = fj.train_state(p, *batch, **how)
        for _ in range(2):
            state, _info = fj.step(state, *batch, **how)
        return torch.cat([x.reshape(-1) for x in tree_leaves(state.params)])

    inputs = (torch.tensor(0.7, dtype=torch.float64), *tree_leaves(params))
    torch.autograd.gradcheck(two_steps, [x.clone().requires_grad_() for x in inputs])
    numbers = tuple(range(len(inputs)))
    close(torch.func.jacfwd(two_steps, numbers)(*inputs), torch.func.jacrev(two_steps, numbers)(*inputs))


def test_bad_input_is_named():
    params, features, top, batch = two_tasks()
    how = method(params, features, top)
    state, torch_own = fj.train_state(params, *batch, **how), torch.optim.SGD([torch.ones(1)])
    take = lambda **changes: fj.step(state, *batch, **(how | changes))
    begin = lambda params=params, **changes: fj.train_state(params, *batch, **(how | changes))
    number, wide = lambda p, *_: 1.0, fj.scale_state(shape=(3,))
    for run, error, words in (
        (lambda: take(engine="turbo"), ValueError, "step: engine must be one of .*found 'turbo'"),
        (lambda: take(engine="gramian", aggregator=fj.mean()), ValueError, "step: engine='gramian' .* no gradients"),
        (lambda: take(engine="weighted"), ValueError, "step: engine='weighted' serves .*inner products of rows"),
        (lambda: take(aggregator=fj.upgrad), TypeError, r"step: aggregator must be a rule.*function.*upgrad\(\)"),
        (lambda: begin(optimizer=torch_own), TypeError, "train_state: optimizer must be a pair.*found SGD.*from_torch"),
        (lambda: take(aggregator=fj.modo()), ValueError, "step: the rule must use one batch.*by hand"),
        (lambda: begin(scale=wide), ValueError, r"scale must be of shape \[\] or \[2\].*found \[3\]"),
        (lambda: begin({"n": torch.ones(2).long()}), TypeError, "train_state: all leaves must be floating-point.*'n'"),
        (lambda: begin(losses=number), TypeError, "losses must be floating-point tensors, found 1.0"),
    ):
        with pytest.raises(error, match=words):
            run()


def test_auto_counts_heads_where_it_knows_no_better_and_engines_show_a_rule_the_same_in_a_skipped_step():
    tasks = fj.multitask(lambda shared, x: x, lambda heads, h, x: [])
    for count, expected in ((127, False), (128, True)):
        heads = {f"{i}.{name}": torch.empty(1) for i in range(count) for name in ("weight", "bias")}
        state = fj.TrainState({"shared": torch.empty(1 << 16), "heads": heads}, (), (), (), fj.precision.no_scale())
        assert (fj.chosen_engine(state, losses=tasks, aggregator=fj.upgrad()).engine == "gramian") == expected
    losses = fj.per_example(lambda p, x, y: ((p["w"] @ x - y) ** 2).sum())
    w, x, y = (torch.randn(*shape, dtype=torch.float64) for shape in ((2, 3), (4, 3), (4, 2)))
    how = {"losses": losses, "aggregator": fj.upgrad(), "optimizer": fj.adamw()}
    state = fj.train_state({"w": w}, x, y, **how)
    y[1, 0] = torch.nan
    by_jacobian, by_gramian = (fj.step(state, x, y, engine=engine, **how)[1] for engine in ("jacobian", "gramian"))
    torch.testing.assert_close(by_jacobian.weights, by_gramian.weights)
    assert not (by_jacobian.finite | by_gramian.finite)


def test_a_compiled_step_and_one_over_replicas_choose_as_an_eager_step_does(engines):
    params, losses, batch = wide_losses("per_example")
    how = {"losses": losses, "aggregator": fj.upgrad(), "optimizer": fj.sgd(0.1)}
    state, take = fj.train_state(params, *batch, scale=fj.scale_state(), **how), partial(fj.step, **how)
    expected = take(state, *batch)
    torch._dynamo.reset()
    check_same(torch.compile(take, backend="aot_eager", fullgraph=True)(state, *batch), expected)
    replicas = torch.vmap(take, in_dims=(0, None))(tree_map(lambda x: torch.stack([x, x]), state), *batch)
    check_same(tree_map(lambda x: x[1], replicas), expected)
    assert set(engines) == {"gramian"}
    assert fj.chosen_engine(state, *batch, losses=losses, aggregator=fj.upgrad()).engine == "gramian"


# Two objectives are solved in closed form, in another graph.
@pytest.mark.parametrize(
    ("kind", "rule", "sizes"), [("plain", fj.mean, (3, 4, 5, 9, 2)), ("per_example", fj.upgrad, (3, 4, 5, 9, 12))]
)
def test_batches_of_other_sizes_take_two_graphs(kind, rule, sizes):
    params, losses, batch = regression(kind)
    if kind == "plain":  # as many objectives as ever: a mean over the batch
        losses = lambda p, x, y: torch.stack([((x @ p["w"]).sum(-1) - y).square().mean(), p["w"].square().sum()])
    how = {"losses": losses, "aggregator": rule(), "optimizer": fj.sgd(0.1)}
    state = fj.train_state(params, *batch, **how)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(partial(fj.step, **how), fullgraph=True, backend=counter)
    factors = torch.linspace(1, 2, 12)
    for n in sizes:
        larger = [x.repeat(4, *[1] * (x.ndim - 1))[:n] for x in batch]
        larger[0] = larger[0] * factors[:n, None]
        check_same(compiled(state, *larger), fj.step(state, *larger, **how))
    assert counter.frame_count <= 2


def test_losses_in_one_half_precision_inside_autocast_of_the_other():
    losses = lambda p: {"a": p.square().sum().to(torch.bfloat16), "b": p.sum()}
    how = {"losses": losses, "aggregator": fj.upgrad(), "optimizer": fj.sgd(0.5)}
    params = torch.tensor([1.0, 2.0])
    with torch.autocast("cpu", torch.float16):
        state, info = fj.step(fj.train_state(params, **how), **how)
    assert info.moved
    # Gradients (2, 4) and (1, 1) do not conflict: half the step along their mean.
    assert torch.equal(state.params, params - 0.5 * torch.tensor([1.5, 2.5]))


GONE = """
import sys, weakref
import torch
import functional_jd as fj

seen, alive, module = [], [], sys.modules["functional_jd.training.step"]
inner, own = fj.sgd(0.1), module.select

def update(direction, state, params):
    seen.append(weakref.ref(direction["w"]))
    return inner.update(direction, state, params)

def choose(*given):
    alive.append(seen[-1]() is not None)
    return own(*given)

losses = lambda params, x: (params["w"] - x).square()
method = {"losses": losses, "aggregator": fj.upgrad(), "optimizer": fj.Optimizer(inner.init, update)}
state = fj.train_state({"w": torch.ones(3)}, torch.zeros(3), **method)
module.select = choose
fj.step(state, torch.zeros(3), **method)
assert alive and not any(alive), alive
"""


def test_the_direction_is_gone_before_the_step_chooses():
    """It is as large as the parameters, and as what `select` makes. In a process where nothing else has run."""
    done = subprocess.run([sys.executable, "-c", GONE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


OTHER_DTYPES = {
    "params": (TypeError, "step: every leaf .* found torch.float64.* in 'params'"),
    "memory": (TypeError, "step: every leaf .* found torch.float64.* in 'optimizer'"),
    "rule": (ValueError, "step: the memory that the rule's update returns .* found torch.float64"),
    "names": (ValueError, "step: the memory that the rule's update returns .* expected Tensor, found dict"),
}


@pytest.mark.parametrize("changed", OTHER_DTYPES)
def test_a_dtype_that_changes_is_named(changed):
    bent = lambda name, x: x.double() if changed == name else x

    def update(direction, memory, params):
        return bent("params", params - direction), bent("memory", memory + 1)

    def weigh(G, memory):
        return torch.ones(2) / 2, {"n": memory} if changed == "names" else bent("rule", memory + 1)

    how = {
        "losses": lambda w: torch.stack([w.sum(), (w - 1).square().sum()]),
        "aggregator": fj.Aggregator(fj.views.gramian, lambda G: torch.zeros(2), weigh),
        "optimizer": fj.Optimizer(lambda params: torch.zeros(()), update),
    }
    state = fj.train_state(torch.ones(3), **how)
    error, words = OTHER_DTYPES[changed]
    with pytest.raises(error, match=f"^{words}"):
        fj.step(state, **how)
