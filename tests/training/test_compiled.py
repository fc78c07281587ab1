"""`compiled`: every bit of the function, one graph for each kind of arguments, and what it refuses."""

import contextlib
import copy
import os
import pickle
import random
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial, reduce

import numpy as np
import pytest
import torch
from bounds import check_same
from hypothesis import given
from hypothesis import strategies as st
from rule_table import RULES, two_calls
from torch.nn.functional import batch_norm
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

import functional_jd as jd

X = torch.randn(5, 4, 3, generator=torch.Generator().manual_seed(0))
PARAMS = {"w": X[0, :3, :2].clone(), "b": torch.zeros(2)}
LAYER, PLACE = torch.nn.LayerNorm(3), torch.tensor(1)
graph_of = partial(jd.compiled, backend="eager")


def losses(params, x):
    return (x @ params["w"] + params["b"] - 1).square().mean(0)


def equal(found, expected):
    for one, other in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        assert torch.equal(one, other)
        assert (one.dtype, one.stride()) == (other.dtype, other.stride())


def dropped(params, x):
    return torch.nn.functional.dropout(losses(params, x), 0.5)


COMMON = {"losses": losses, "aggregator": jd.upgrad(), "optimizer": jd.adamw(0.1)}
EXAMPLES = jd.per_example(lambda p, x: losses(p, x[None]).sum())
RESIDUALS = jd.per_example(lambda p, x: x @ p["w"].sum(1) + p["b"].sum() - 1)
TASKS = jd.multitask(
    lambda shared, x: (x @ shared["w"]).relu(), lambda own, h, x: {k: (h * own[k]).sum(1).square().mean() for k in "ab"}
)
METHODS = {
    "rows": {"engine": "jacobian"},
    "layers": {"engine": "gramian"},
    "weighted": {"aggregator": jd.mean(), "engine": "weighted"},
    "half": {"losses": jd.autocast(losses)},
    "examples": {"losses": EXAMPLES, "aggregator": jd.clipped(1.0)},
    "example engine": {"losses": EXAMPLES, "engine": "gramian"},
    "residuals": {"losses": RESIDUALS, "aggregator": jd.levenberg_marquardt(), "optimizer": jd.sgd(1.0)},
    "tasks": {"losses": TASKS},
    "momentum": {"optimizer": jd.sgd(0.1, momentum=0.9, nesterov=True)},
    "schedule": {"optimizer": jd.adamw(lambda taken: 0.1 / (1 + taken))},
    "keyed": {"losses": lambda p, key, x: jd.random.keyed(dropped)(key, p, x)},
    "search": {"optimizer": jd.line_search(jd.sgd(1.0), [0.1, 1.0])},
    "sums": {"aggregator": jd.nash_mtl()},
    "pytree": {"losses": lambda p, x: {"one": losses(p, x).sum(), "two": [losses(p, x)]}},
}


def begun(name):
    """The state and the step of a method, the batches that come after its first."""
    method = COMMON | METHODS[name]
    params = {"shared": {"w": PARAMS["w"]}, "heads": {k: torch.ones(2) for k in "ab"}} if name == "tasks" else PARAMS
    # In float32 a graph sums rows in float64, whether or not their weights cancel.
    params = tree_map(torch.Tensor.double, params)
    batches = [(jd.random.key(i), x) if name == "keyed" else (x,) for i, x in enumerate(X.double())]
    state = jd.train_state(params, *batches[0], scale=jd.scale_state(2.0), **method)
    return state, method, batches


@pytest.mark.parametrize("name", METHODS)
def test_every_bit_of_three_steps_is_that_of_the_step(name):
    state, method, batches = begun(name)
    take = graph_of(partial(jd.step, **method))
    other = state
    for batch in batches[:3]:
        found, expected = take(state, *batch), jd.step(other, *batch, **method)
        equal(found, expected)
        (state, _), (other, _) = found, expected
    assert len(take.graphs) == 1


def test_the_method_may_be_given_in_each_call_and_fit_takes_what_is_compiled():
    state, step, take = jd.train_state(PARAMS, X[0], **COMMON), partial(jd.step, **COMMON), graph_of(jd.step)
    equal(jd.fit(graph_of(step), state, list(X[1:])), jd.fit(step, state, list(X[1:])))
    slower = COMMON | {"optimizer": jd.adamw(0.01)}
    for x, method, graphs in ((X[1], COMMON, 1), (X[2], COMMON, 1), (X[2], slower, 2)):
        equal(take(state, x, **method), jd.step(state, x, **method))
        assert len(take.graphs) == graphs


def test_modules_that_another_thread_calls_meanwhile_are_its_own():
    class Counter(torch.nn.Module):
        seen = torch.zeros(())

        def forward(self, x):
            self.seen = self.seen + 1
            return x

    module = Counter()

    def f(x):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(module, torch.ones(1)).result()
        return 2 * x

    assert jd.compiled(f, backend="eager")(torch.ones(2)).tolist() == [2, 2]
    assert module.seen == 2  # `f` is called twice


@pytest.mark.parametrize("name", RULES)
def test_every_bit_of_every_rule(name):
    f, args = two_calls(name)
    args = tree_map(torch.Tensor.double, args)
    # Eager code looks at values to choose a faster solver for cosines that are well-conditioned.
    check = torch.testing.assert_close if name in {"config", "imtl_g"} else equal
    check(graph_of(f)(*args), f(*args))


def after(params, optimizer, batches, last):
    """The losses after a start on the first batch and a step on each of the others."""
    method = COMMON | {"optimizer": optimizer}
    state = jd.train_state(params, batches[0], **method)
    for x in batches[1:]:
        state, _ = jd.step(state, x, **method)
    return losses(state.params, last).sum()


def test_a_compiled_transform_is_the_transform():
    take = partial(jd.step, **COMMON)
    starts = tree_map(lambda p: torch.stack([p, p + 1]), PARAMS)
    states = torch.vmap(lambda p: jd.train_state(p, X[0], **COMMON))(starts)
    many = torch.vmap(take, in_dims=(0, None))
    torch.testing.assert_close(graph_of(many)(states, X[1]), many(states, X[1]))

    after_one, after_two = (lambda rate, x, n=n: after(PARAMS, jd.sgd(rate), x[: 1 + n], x[3]) for n in (1, 2))
    rate = torch.tensor(0.1)
    twice = lambda f: torch.func.grad(torch.func.grad(f))
    for transform in (torch.func.grad, twice, lambda f: lambda r, x: torch.func.jvp(f, (r, x), (r, x))):
        torch.testing.assert_close(graph_of(transform(after_two))(rate, X), transform(after_two)(rate, X))
    equal(graph_of(torch.func.jacfwd(after_one))(rate, X), torch.func.jacfwd(after_one)(rate, X))
    along = lambda x: torch.func.jvp(LAYER, (x,), (x,))
    turned = lambda x: batch_norm(x.mT, None, None, training=True).mT.reshape(-1)
    for f in (along, turned):  # without values, the strides of the second are others
        equal(graph_of(f)(X), f(X))


def wave(p, x):
    return p["v"] @ torch.tanh(p["w"] @ x + p["b"])


def along_ones(f, x):
    return torch.func.jvp(f, (x,), (torch.ones_like(x),))[1]


DERIVATIVES = {
    "jvp": lambda p, x: along_ones(partial(wave, p), x).sum(),
    "jvp of jvp": lambda p, x: along_ones(partial(along_ones, partial(wave, p)), x).sum(),
    "jvp of grad": lambda p, x: along_ones(torch.func.grad(lambda x: wave(p, x).sum()), x).sum(),
    "jacfwd": lambda p, x: torch.func.jacfwd(partial(wave, p))(x).sum(),
    "hessian": lambda p, x: torch.func.hessian(lambda x: wave(p, x).sum())(x).diagonal().sum(),
    "columns": lambda p, x: along_ones(lambda x: p["v"] @ torch.tanh(p["w"] @ x[:, None] + p["b"][:, None]), x).sum(),
}


def residual_step(derivative):
    """A step of residuals that differentiate products of matrices and vectors, and its arguments."""
    draw = torch.Generator().manual_seed(0)
    shapes = {"w": (4, 3), "b": (4,), "v": (2, 4)}
    p = {name: torch.randn(*shape, generator=draw, dtype=torch.float64) for name, shape in shapes.items()}
    optimizer = jd.line_search(jd.sgd(1.0), [1.0, 0.1])
    rule = jd.natural_gradient()
    how = {"losses": jd.per_example(derivative), "aggregator": rule, "optimizer": optimizer, "engine": "jacobian"}
    return partial(jd.step, **how), (jd.train_state(p, X[0].double(), **how), X[0].double())


@pytest.mark.parametrize("derivative", DERIVATIVES.values(), ids=DERIVATIVES)
@pytest.mark.filterwarnings("error::functional_jd.SlowPathWarning")
def test_derivatives_inside_residuals_compile_on_the_fast_way(derivative):
    """Each of these was evaluated example by example, or refused: tangents had no device."""
    take, given = residual_step(derivative)
    equal(graph_of(take)(*given), take(*given))


@pytest.mark.inductor
@pytest.mark.filterwarnings("error::functional_jd.SlowPathWarning")
def test_inductor_compiles_derivatives_inside_residuals():
    """A tangent of zeros without memory ended the process."""
    for name in ("jvp", "hessian"):
        take, given = residual_step(DERIVATIVES[name])
        (found, _), (expected, _) = jd.compiled(take)(*given), take(*given)
        torch.testing.assert_close(found.params, expected.params)


def test_derivatives_of_forward_mode_compile_or_raise_with_a_cure():
    """Torch 2.11 needs values for them."""
    f = lambda p: torch.vmap(lambda x: DERIVATIVES["hessian"](p, x))(X[0].double())
    _, (state, _) = residual_step(DERIVATIVES["hessian"])
    for transform in (torch.func.jacrev, torch.func.jacfwd):
        with contextlib.suppress(RuntimeError):
            equal(graph_of(transform(f))(state.params), transform(f)(state.params))
            continue
        with pytest.raises(RuntimeError, match=r"compiled: expected operators .* The guide 'Compile'"):
            graph_of(transform(f))(state.params)


def test_derivatives_go_through_skipped_steps():
    batches = lambda x: (x[0], x[1], x[1] * torch.inf, x[2])
    derivative = torch.func.grad(lambda p, rate, x: after(p, jd.adamw(rate), batches(x), x[3]), argnums=(0, 1))
    found = graph_of(derivative)(PARAMS, torch.tensor(0.1), X)
    equal(found, derivative(PARAMS, torch.tensor(0.1), X))
    assert all(x.isfinite().all() and x.any() for x in tree_leaves(found))


@pytest.mark.parametrize(
    "schedule", [lambda taken: 0.1 if taken < 5 else 0.01, lambda taken: torch.tensor([0.1, 0.01])[taken.clamp(max=1)]]
)
def test_a_schedule_that_reads_the_steps_is_told_so(schedule):
    how = COMMON | {"optimizer": jd.adamw(schedule)}
    state = jd.train_state(PARAMS, X[0], **how)
    with pytest.raises(RuntimeError, match=r"choices do not depend on values.* The guide 'Compile'"):
        graph_of(partial(jd.step, **how))(state, X[0])
    cured = COMMON | {"optimizer": jd.adamw(lambda taken: torch.tensor([0.1, 0.01])[taken.clamp(max=1)[None]][0])}
    equal(graph_of(partial(jd.step, **cured))(state, X[0]), jd.step(state, X[0], **cured))


@given(
    st.lists(st.tuples(st.integers(1, 3), st.booleans(), st.sampled_from([torch.float32, torch.float64])), max_size=6)
)
def test_shapes_strides_and_dtypes_have_graphs_of_their_own(kinds):
    f = graph_of(lambda x, y: {"sum": x + y, "other": (x @ y.T).view(-1)})
    seen = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for size, transposed, dtype in kinds:
            x = torch.randn(2, size, dtype=dtype) if not transposed else torch.randn(size, 2, dtype=dtype).T
            seen.add((size, transposed and size > 1, dtype))
            equal(f(x, x), {"sum": x + x, "other": (x @ x.T).view(-1)})
            equal(f(x, -x), {"sum": x - x, "other": (x @ -x.T).view(-1)})
    assert len(f.graphs) == len(seen)


def in_float32(x):
    with torch.autocast("cpu", enabled=False):
        return x @ x.T


def test_what_operators_follow_besides_has_graphs_of_its_own():
    f = graph_of(lambda x: x @ x.T + torch.ones(()))
    expected = f(X[0])
    with torch.autocast("cpu", torch.bfloat16):
        assert not torch.equal(f(X[0]), expected)
        equal(f(X[0]), X[0] @ X[0].T + torch.ones(()))
        equal(graph_of(in_float32)(X[0]), in_float32(X[0]))
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        equal(f(X[0]), X[0] @ X[0].T + torch.ones(()))
    finally:
        torch.set_default_dtype(before)
    with torch.inference_mode():
        equal(f(X[0]), expected)
    equal(f(X[0]), expected)
    exact = graph_of(lambda x: x * torch.tensor(torch.are_deterministic_algorithms_enabled()))
    equal(exact(X), 0 * X)
    torch.use_deterministic_algorithms(True)
    try:
        equal(exact(X), X)
    finally:
        torch.use_deterministic_algorithms(False)


def test_numbers_and_names_that_come_back_are_those_of_the_kind():
    f = graph_of(lambda x, n: {"doubled": n * x, "n": n, "none": None, "of": "two"})
    assert f(X[0, 0], 2)["n"] == 2
    found = f(X[0, 0], 3.0)
    assert (found["n"], found["none"], found["of"]) == (3.0, None, "two")
    equal(found["doubled"], 3 * X[0, 0])
    assert f(X[0, 0], True)["n"] is True  # equal to 1, but another kind
    f = graph_of(lambda x, n: x / n)  # numbers that are nearly equal have graphs of their own
    equal(f(X, 0.0), X / 0.0)
    equal(f(X, -0.0), X / -0.0)
    assert all(torch.equal(f(X, zero), X / zero) for zero in (np.float64(0.0), np.float64(-0.0)))
    assert all(f(X, torch.nan).isnan().all() for _ in range(2))
    assert len(f.graphs) == 5
    named = graph_of(lambda d: {name: 2 * x for name, x in d.items()})
    assert [*named({"a": X}), *named({"b": X})] == ["a", "b"]
    real, z = graph_of(lambda z: z.real + z.imag), torch.complex(X, X + 1)
    for each in (z, z.conj(), torch._neg_view(z)):
        equal(real(each), each.real + each.imag)
    twice = graph_of(lambda x, y: x - 2 * y)
    equal(twice(X, X), -X)  # the same tensor twice is two arguments
    equal(twice(X, 0 * X), X)


@pytest.mark.filterwarnings("ignore:Sparse CS")
def test_writing_down_leaves_no_trace():
    moved, before = torch.zeros(3), torch.get_rng_state()
    recomputed = lambda x: checkpoint(torch.nn.functional.dropout, x, use_reentrant=False)
    for f, found in ((lambda x: x * torch.rand(()), "rand"), (recomputed, r"\w+")):
        words = rf"compiled: numbers must be drawn by a key, found aten\.{found}"
        with pytest.raises(ValueError, match=words):
            graph_of(f)(X)
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(ValueError, match=r"changes a tensor .3. that is no argument in place"):
        graph_of(lambda x: moved[:2].add_(x[0, 0, 0]))(X)
    for layout in (torch.sparse_csr, torch.sparse_csc):
        matrix, x = torch.eye(3).to_sparse(layout=layout), torch.ones(3, 1)
        assert graph_of(lambda m, x: (m @ x).sum())(matrix, x) == 3
        with pytest.raises(RuntimeError, match=r"tensors do not have strides.* pass CSR and CSC tensors as arguments"):
            graph_of(lambda x, matrix=matrix: (matrix @ x).sum())(x)


@dataclass(eq=False)
class Batch:
    x: torch.Tensor


class Tagged(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("f", "args", "error", "says"),
    [
        (lambda x: x.add_(1), (X,), ValueError, "changes argument 0 in place. Return the new value"),
        (lambda d: d["a"][0].t().mul_(2), ({"b": X, "a": X},), ValueError, "changes argument 0.a in place"),
        (lambda x: torch._foreach_add_([x], 1), (X,), ValueError, "changes argument 0 in place"),
        (lambda x: torch.mul(x, 2, out=x), (X,), ValueError, "changes argument 0 in place"),
        (lambda x: [row.zero_() for row in x], (X,), ValueError, "changes argument 0 in place"),
        (lambda x, m: batch_norm(x, m, m, training=True), (X[0], X[0, 0]), ValueError, "changes argument 1 in place"),
        (lambda x: x * float(x.numpy().sum()), (X,), RuntimeError, r"do not depend on values.*\.numpy\(\)"),
        (lambda x: (x, lambda: x), (X,), TypeError, "the result '1' must be a tensor, .*, found function. Return what"),
        (lambda b: b.x, (Batch(X),), TypeError, "argument 0 must be a tensor, .*, found Batch. Pass a dict"),
        (lambda x: x[x > 0].mean(), (X,), RuntimeError, r"do not depend on values.*found aten.* torch.where"),
        (lambda x: x if x.sum() > 0 else -x, (X,), RuntimeError, "do not depend on values"),
        (jd.jacobian_fn(lambda x: [x[x > 0].mean()] * 4), (X,), RuntimeError, "do not depend on values"),
        (lambda x: x * reduce(lambda y, _: y + y.sin(), range(99), x.sum()).item(), (X,), RuntimeError, r"\.item\(\)"),
        (lambda x: x[PLACE], (X,), RuntimeError, "value of a tensor that is not an argument"),
        (torch.sin, (X.as_subclass(Tagged),), TypeError, r"0 must be a plain tensor.* Tagged. torch.compile\(f\)"),
        (lambda x: x, (X.clone().requires_grad_(),), ValueError, "argument 0 must be a tensor without grad.*Detach it"),
    ],
)
def test_what_a_graph_would_get_wrong_is_refused(f, args, error, says):
    before = X.clone()
    g = graph_of(f)
    for _ in range(2):
        with pytest.raises(error, match=f"compiled: .*{says}"):
            g(*args)
    assert torch.equal(X, before)
    assert not g.graphs


@pytest.mark.parametrize(
    "transformed", [lambda f: torch.vmap(f)(X[0]), lambda f: torch.func.vjp(f, X[0, 0])], ids=["vmap", "vjp"]
)
def test_transforms_of_what_is_compiled_are_refused_and_the_cure_is_named(transformed):
    f = graph_of(lambda x: x.sum())
    f(X[0, 0])
    words = r"^compiled: expected a call outside of transforms and modes, found torch.func.*compiled\(torch\.func"
    with pytest.raises(ValueError, match=words):
        transformed(f)


class Kept(torch.nn.Module):
    """Makes a tensor in its first call, as modules with positions do, and another in each."""

    kept = None

    def forward(self, x):
        self.kept = torch.arange(1.0, 4.0) if self.kept is None else self.kept
        self.mean = x.mean()
        return x * self.kept


def test_what_a_module_keeps_has_values_and_a_teacher_without_gradients_none():
    module, weight = Kept(), torch.nn.Parameter(torch.ones(3))
    equal(graph_of(lambda x: module(x))(X), X * torch.arange(1.0, 4.0))
    equal(module.mean, X.mean())
    equal(module(X), X * torch.arange(1.0, 4.0))
    equal(module.kept, torch.arange(1.0, 4.0))

    def f(x):
        with torch.no_grad():
            target = 2 * x * weight
        return (x * weight - target).square().sum()

    found = graph_of(f)(X)
    assert not found.requires_grad
    equal(found, f(X).detach())


def test_inside_modes_the_cure_is_named_and_inside_another_graph_it_is_the_function():
    dropped = lambda x: torch.nn.functional.dropout(x, 0.5)
    keyed = jd.random.keyed(graph_of(dropped))
    with pytest.raises(ValueError, match=r"compiled: expected a call outside of .* modes.*compiled\(random.keyed\(f\)"):
        keyed(jd.random.key(0), X)
    inside = graph_of(jd.random.keyed(dropped))
    for seed in range(3):
        equal(inside(jd.random.key(seed), X), jd.random.keyed(dropped)(jd.random.key(seed), X))
    with torch.device("cpu"):
        equal(graph_of(lambda x: x + torch.ones(3))(X), X + 1)
    inner = graph_of(lambda x: 2 * x)
    torch.compiler.reset()
    for outer in (graph_of, partial(torch.compile, fullgraph=True, backend="eager")):
        equal(outer(lambda x: inner(x) + 1)(X), 2 * X + 1)
    assert not inner.graphs


def test_threads_may_share_it_and_copies_compile_anew():
    f = graph_of(lambda x: (x @ x.T).exp())
    sizes = [1 + k % 3 for k in range(12)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda size: f(X[0, :size]), sizes))
    for size, each in zip(sizes, found, strict=True):
        equal(each, (X[0, :size] @ X[0, :size].T).exp())
    assert len(f.graphs) == 3
    f = graph_of(torch.sin)
    equal(f(X), X.sin())
    for other in (copy.deepcopy(f), copy.copy(f), pickle.loads(pickle.dumps(f))):
        assert not other.graphs
        equal(other(X), X.sin())


def test_arguments_are_checked():
    with pytest.raises(TypeError, match="compiled: f must be a function, found Tensor"):
        jd.compiled(X.float())
    with pytest.raises(ValueError, match=r"compiled: backend must be one of inductor, .* found 'triton'.* a function"):
        jd.compiled(losses, backend="triton")
    with pytest.raises(TypeError, match="compiled: an argument must be a tensor or hashable, found set"):
        graph_of(lambda x, how: x)(X, how={"names": {1}})


@pytest.mark.parametrize("cell", [torch.nn.GRUCell(3, 5), torch.nn.RNN(3, 5)])
def test_examples_that_vmap_does_not_take_compile_one_by_one(cell):
    first = lambda found: found if isinstance(found, torch.Tensor) else first(found[0])
    loss = lambda p, x: first(torch.func.functional_call(cell, p, (x[None],))).square().sum()
    params, f = {name: p.detach() for name, p in cell.named_parameters()}, jd.jacobian_fn(jd.per_example(loss))
    with pytest.warns(jd.SlowPathWarning):
        found, expected = graph_of(f)(params, X[0]), f(params, X[0])
    check_same(found, expected)


def test_a_start_compiles_with_what_its_losses_move_and_in_anomaly_mode():
    net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    params, apply = {name: p.detach() for name, p in net.named_parameters()}, jd.functional(net)

    def moved(p, b, x):
        found, b = apply(p, b, x)
        return (found - 1).square().mean(0), b

    def two(params, buffers, x):
        method = COMMON | {"losses": moved}
        state, _ = jd.step(jd.train_state(params, x, buffers=buffers, **method), x, **method)
        return state, jd.accumulate(moved, [(x,)], params=params, aggregator=jd.upgrad(), buffers=buffers).direction

    given = params, dict(net.named_buffers()), X[0]
    with torch.autograd.set_detect_anomaly(True):
        check_same(graph_of(two)(*given), two(*given))


def test_collectives_that_a_graph_would_not_wait_for_are_refused():
    dist = pytest.importorskip("torch.distributed")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match=r"f must not call torch.distributed, found c10d.allreduce_"):
            graph_of(lambda x: (y := x.clone(), dist.all_reduce(y))[0])(X)
    finally:
        dist.destroy_process_group()


def test_operators_that_return_nothing_stay():
    def f(x):
        torch._foreach_add_(many := [2 * x, 3 * x], 1.0)
        return many[0] + many[1]

    equal(graph_of(f)(X), f(X))


def test_checks_of_operators_stay():
    g = graph_of(torch.linalg.cholesky)
    g(torch.eye(2))
    with pytest.raises(RuntimeError, match="positive-definite"):
        g(-torch.eye(2))


def test_many_graphs_are_told():
    f = graph_of(lambda x, rate: rate * x)
    for n in range(1, 8):  # without a warning
        f(torch.ones(n, 4), rate=2.0)
    words = r"compiled: 8 graphs of one function exist. Pad batches .*, pass numbers"
    with pytest.warns(RuntimeWarning, match=words) as seen:
        f(torch.ones(4), rate=8.0)
    assert seen[0].filename == __file__


@pytest.mark.inductor
@pytest.mark.parametrize("name", ["layers", "weighted", "tasks", "half"])
def test_machine_code_takes_the_same_steps(name):
    state, method, batches = begun(name)
    take = jd.compiled(partial(jd.step, **method))
    other = state
    for batch in batches[:3]:
        (state, info), (other, expected) = take(state, *batch), jd.step(other, *batch, **method)
    how = (torch.float16, 2) if name == "half" else (torch.float32,)
    check_same(state, other, *how)
    check_same(info.losses, expected.losses, *how)


@pytest.mark.inductor
def test_machine_code_writes_by_index_into_no_expanded_tensor():
    loss = jd.per_example(lambda p, x: (p * x).index_select(0, torch.tensor([0, 1])).sum())
    rows = lambda p, x: jd.jacobian_fn(loss)(p, x)[0]
    equal(jd.compiled(rows)(torch.ones(3), torch.ones(4, 3)), torch.tensor([[1.0, 1.0, 0.0]]).repeat(4, 1))
    one_row = lambda p: p.expand(2, 3).slice_scatter(torch.ones(1, 3), 0, 1, 2)  # wrong on torch 2.11
    equal(jd.compiled(one_row)(torch.zeros(3)), torch.tensor([[0.0] * 3, [1.0] * 3]))


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_tensors_of_closures_are_seen_as_they_are(backend):
    factor, weight, x = torch.tensor(2.0), torch.nn.Parameter(torch.ones(200)), torch.ones(3, 200)
    f = jd.compiled(lambda x: (factor * x + weight + torch.tensor(0.5), factor), backend=backend)
    equal(f(x)[0], 2 * x + 1.5)
    factor.fill_(3)
    weight.data = torch.zeros(200)
    equal(f(x)[0], 3 * x + 0.5)
    assert not f(x)[0].requires_grad
    f(x)[1].add_(1)
    assert f(x)[1] == 4, "the closure itself, as in eager code"
    factor.data = torch.full((200,), 5.0)  # of another shape
    equal(f(x)[0], 5 * x + 0.5)
    equal(
        jd.compiled(lambda x: weight * factor * x, backend=backend)(x), weight * factor * x
    )  # two constants come first


def test_a_frozen_module_may_normalise_by_its_statistics():
    teacher, x = torch.nn.BatchNorm1d(3).eval(), torch.arange(12.0).view(4, 3)
    f = lambda x: teacher(x).square().mean()
    equal(jd.compiled(f, backend="eager")(x), f(x))
    teacher.train()
    with pytest.raises(ValueError, match="the function must be pure, found that it changes a tensor"):
        jd.compiled(f, backend="eager")(x)


@pytest.mark.parametrize("way", ["functional", "functional_call"])
def test_the_modes_of_modules_choose_the_graph(way):
    nn = torch.nn
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)))

    def called(params, buffers, x):
        moved = {name: b.clone() for name, b in buffers.items()}
        return torch.func.functional_call(net, (params, moved), (x,)), moved

    pure = jd.functional(net) if way == "functional" else called

    def losses(params, buffers, x):
        output, moved = pure(params, buffers, x)
        return {"a": output[:, 0].exp().mean(), "b": output[:, 1].square().mean()}, moved

    x = torch.randn(8, 4)
    method = {"losses": losses, "aggregator": jd.mean(), "optimizer": jd.sgd(lr=0.1)}
    params, buffers = dict(net.named_parameters()), dict(net.named_buffers())
    state = jd.train_state({name: p.detach() for name, p in params.items()}, x, buffers=buffers, **method)
    step = jd.compiled(jd.step, backend="eager")
    found = []
    for change in (net.eval, net.train, net[2].eval, net.eval, net.train):
        change()
        (after, _), (expected, _) = step(state, x, **method), jd.step(state, x, **method)
        torch.testing.assert_close((after.params, after.buffers), (expected.params, expected.buffers), rtol=0, atol=0)
        found.append(len(step.graphs))
    assert found == [1, 2, 3, 3, 3], "one for each set of modes"
    scripted, draws = torch.jit.script(nn.Dropout()).eval(), random.getstate()
    net.forward = lambda x: scripted(x) * (1 + net[2].training)  # of a part that is not called
    f = graph_of(lambda x: net(x) * random.random() ** 0)
    for change in (net[2].eval, net[2].train):
        change()
        equal(f(x), net(x))
    assert random.getstate() == draws


PROCESS = """
import sys
from pathlib import Path

import torch
from torch._dynamo.utils import counters

import functional_jd as jd

torch.set_num_threads(1)
path = Path(sys.argv[1])
if path.exists():
    torch.compiler.load_cache_artifacts(path.read_bytes())
x = torch.linspace(-1, 1, 24).reshape(8, 3)
how = {
    "losses": lambda params, x: ((x @ params["w"]).tanh() + params["b"] - 1).square().mean(0),
    "aggregator": jd.upgrad(),
    "optimizer": jd.adamw(0.1),
}
state = jd.train_state({"w": torch.ones(3, 2), "b": torch.zeros(2)}, x, scale=jd.scale_state(shape=(2,)), **how)
expected, _ = jd.step(state, x, **how)
found, _ = torch.compile(jd.step, fullgraph=True)(state, x, **how)
for name in found.params:
    torch.testing.assert_close(found.params[name], expected.params[name])
if not path.exists():
    artifacts = torch.compiler.save_cache_artifacts()
    path.write_bytes(artifacts[0])
print(counters["aot_autograd"]["autograd_cache_hit"], counters["inductor"]["fxgraph_cache_miss"])
"""


@pytest.mark.inductor
def test_what_one_process_compiled_another_takes_as_bytes(tmp_path):
    found = []
    for cache in ("first", "second"):  # folders of two machines
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / cache)}
        command = [sys.executable, "-W", "ignore", "-c", PROCESS, str(tmp_path / "artifacts")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        found.append([int(count) for count in done.stdout.split()])
    assert found == [[0, 1], [1, 0]]  # hits and misses
