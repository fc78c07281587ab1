"""The lean road under transforms, under compile, and where somebody differentiates: same numbers, no rows."""

import pytest
import torch
from bounds import check_same
from gramian_by_hand import (
    STEPS,
    STRANGE,
    Largest,
    agree,
    expectation,
    found,
    model_of,
    network,
    priced,
    refuse_all_rows,
    weights_for,
    wide,
)
from hypothesis import given
from hypothesis import strategies as st
from jacobian_by_hand import CASES, KINDS, case_of, leaves
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils import _pytree
from zoo import MODELS, numbers

from functional_jd import gramian_fn

F = nn.functional

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")


def run(case, params=None):
    params = case.params if params is None else params
    gramian, _, pullback = gramian_fn(case.losses)(params, *case.args)
    return gramian, [x.double().reshape(-1) for x in leaves(pullback(weights_for(case))[0])]


def asking(case):
    """Somebody differentiates the parameters."""
    params = _pytree.tree_map(lambda x: x.clone().requires_grad_(), case.params)
    torch.manual_seed(0)
    gramian, direction = run(case, params)
    assert gramian.requires_grad
    return gramian.detach(), [x.detach() for x in direction]


def replicas(case):
    """The second of two; both have the same parameters, which vmap does not know."""
    one = lambda factor: run(case, _pytree.tree_map(lambda x: x * factor.to(x.dtype), case.params))
    if not torch.compiler.is_compiling():
        torch.manual_seed(0)
    gramian, direction = torch.vmap(one, randomness="same")(torch.ones(2))
    return gramian[1], [x[1] for x in direction]


def compiled(case, backend="aot_eager"):
    torch._dynamo.reset()
    return torch.compile(lambda params: run(case, params), fullgraph=True, backend=backend)(case.params)


AROUND = {"asking": asking, "replicas": replicas}
ANYWHERE = AROUND | {"alone": found}
everywhere = pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)


@everywhere
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_equals_the_inner_products_of_the_rows(name, kind, around, monkeypatch):
    model = MODELS[name]()
    if name == "numpy_backward" or (
        around is replicas and not (model.func and (model.examples or kind != "by_example"))
    ):
        pytest.skip("torch cannot differentiate it so")
    case = case_of(name, kind)
    # The batching rule of `prelu` fails in two dimensions of examples.
    if model.func and model.examples and name not in ("dropout", "prelu"):
        refuse_all_rows(monkeypatch)
    agree(around(case), expectation(case), *((torch.float32, 4) if name == "mixed" else ()))


# One of each make; the kinds in turn, since a compiler takes its time, and most of it for tasks.
COMPILED = {"plain": ["reused", "fused_attention"], "tasks": ["tied"]}
COMPILED["by_example"] = ["in_place", "scalars", "batch_norm_eval"]


COMPILING = [(name, kind, "aot_eager") for kind in COMPILED for name in COMPILED[kind]]
COMPILING += [pytest.param("mlp", "by_example", "inductor", marks=pytest.mark.inductor)]


@pytest.mark.parametrize(("name", "kind", "backend"), COMPILING)
def test_compiles_to_one_graph_with_the_same_numbers(name, kind, backend):
    case = case_of(name, kind)
    agree(compiled(case, backend), expectation(case))


def test_compiles_over_replicas():
    """Not of tasks: the compiler would trace the same calls once more per task."""
    case = case_of("reused", "by_example")
    torch._dynamo.reset()
    agree(torch.compile(lambda: replicas(case), fullgraph=True, backend="aot_eager")(), expectation(case))


@given(
    steps=st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.sampled_from("uv")), min_size=1, max_size=5),
    kind=st.sampled_from(sorted(KINDS)),
    around=st.sampled_from(sorted(ANYWHERE)),
    lean=st.booleans(),
    seed=st.integers(0, 99),
)
def test_networks_at_random_that_share_weights_equal_the_plain_loop(steps, kind, around, lean, seed):
    if around != "alone":
        steps = [step for step in steps if step[0] != "hidden"]  # a custom function in the old manner
    case = network(steps, kind, seed)
    with pytest.MonkeyPatch.context() as patch:
        priced(patch, lean)
        agree(ANYWHERE[around](case), expectation(case))


def changed_copy(params, x):
    """What was a part of a leaf is none any more, by way of a view of it."""
    w = params["w"].half().double()
    w.view(-1)[0].mul_(3)
    return torch.tanh(F.linear(x, w)) @ params["v"]


def changed_source(params, x):
    x = x * 1
    y = F.linear(x, params["w"].detach()) + F.linear(x, params["v"]).detach()
    x.zero_()
    return y * params["w"][0] * params["v"][0]


def strided(params, x):
    return x @ params["w"].as_strided((3, 2), (1, 1)) @ params["v"][:2]


ODD = STRANGE | {f.__name__: f for f in (changed_copy, changed_source, strided)}


@pytest.mark.parametrize("around", ANYWHERE.values(), ids=ANYWHERE)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("predict", ODD.values(), ids=ODD)
def test_uses_that_no_tap_may_take_alone_count(predict, kind, around, monkeypatch):
    if predict.__name__ == "penalty" and around is replicas:
        pytest.skip("plain autograd within torch.func")
    case = KINDS[kind](model_of(predict))
    for lean in (True, False) if around is found else (True,):
        if around is found:
            priced(monkeypatch, lean)
        agree(around(case), expectation(case))


@pytest.mark.parametrize("name", ["functional_penalty", "mapped", "half_frozen", "overwritten"])
def test_uses_that_no_tap_may_take_alone_count_when_compiled(name):
    case = KINDS["by_example" if name == "half_frozen" else "plain"](model_of(ODD[name]))
    agree(compiled(case), expectation(case))


@pytest.mark.parametrize("kind", KINDS)
def test_replicas_form_no_rows(kind):
    case, m = wide(kind)

    def one(factor):
        params = _pytree.tree_map(lambda x: x * factor, case.params)
        gramian, _, pullback = gramian_fn(case.losses)(params, *case.args)
        return gramian, leaves(pullback(torch.ones(m, dtype=torch.float64))[0])

    with Largest() as largest:
        torch.vmap(one)(torch.ones(1, dtype=torch.float64))
    assert largest.numel < m * 64 * 64


@pytest.mark.parametrize("kind", ["plain", "by_example"])
def test_a_compiled_graph_holds_no_rows(kind):
    (case, m), sizes = wide(kind), []

    def look(graph, _inputs):
        graph.graph.eliminate_dead_code()
        for node in graph.graph.nodes:
            sizes.extend(x.numel() for x in _pytree.tree_leaves(node.meta.get("val")) if isinstance(x, torch.Tensor))
        return graph

    def f(params):
        gramian, _, pullback = gramian_fn(case.losses)(params, *case.args)
        return gramian, leaves(pullback(torch.ones(m, dtype=torch.float64))[0])

    torch._dynamo.reset()
    torch.compile(f, fullgraph=True, backend=aot_autograd(fw_compiler=look))(case.params)
    assert 64 * 64 <= max(sizes) < m * 64 * 64


def observed(losses):
    def take(w, x):
        gramian, _, pullback = gramian_fn(losses)(w, x)
        return gramian, pullback(torch.ones(4, dtype=w.dtype))[0]

    return take


def test_a_transposed_batch_is_used_twice_when_compiled():
    w, x = numbers(4, 4), numbers(4, 3, seed=1)
    run = observed(lambda w, x: sum(y + y @ w for y in (x.mT, x.T, x.transpose(0, 1))).square().sum(0))
    # d losses_j / d w_kj = 18 sum_i (x' + x' w)_ij x_ki, which only column j of w moves.
    y = x.transpose(0, 1)
    columns = 18 * y.transpose(0, 1) @ (y + y @ w)
    torch._dynamo.reset()
    gramian, direction = torch.compile(run, backend="eager", fullgraph=True)(w, x)
    torch.testing.assert_close(gramian, columns.square().sum(0).diag())
    torch.testing.assert_close(direction, columns)


def test_another_batch_is_not_compiled_again():
    run = observed(lambda w, x: (x.view(3, 4) + torch.cat([x, x])[:3] @ w[:, :4]).square().sum(0))
    torch._dynamo.reset()
    take = torch.compile(run, backend="eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed in range(4):
            w, x = numbers(4, 5, seed=seed), numbers(3, 4, seed=seed + 10)
            torch.testing.assert_close(take(w, x), run(w, x))


@pytest.mark.parametrize("mask", ["bool", "float"])
def test_an_attention_with_padding_compiles_in_a_full_graph(mask):
    """torch checks a mask of padding with a message that its compiler cannot trace."""
    draw = torch.Generator().manual_seed(0)
    attention = nn.MultiheadAttention(4, 2, batch_first=True).double()
    x = torch.randn(3, 5, 4, generator=draw).double()
    padding = torch.arange(5) >= torch.tensor([[5], [3], [4]])
    options = {"attn_mask": torch.ones(5, 5, dtype=torch.bool).triu(1), "is_causal": True, "need_weights": False}
    if mask == "float":
        padding, options = torch.zeros(3, 5).double().masked_fill(padding, -2.0), {}

    def losses(params, x):
        out, _ = torch.func.functional_call(attention, params, (x, x, x), {"key_padding_mask": padding, **options})
        return out.square().mean((0, 1))

    params = {name: p.detach() for name, p in attention.named_parameters()}
    torch._dynamo.reset()
    found = torch.compile(lambda p, x: gramian_fn(losses)(p, x)[0], backend="aot_eager", fullgraph=True)(params, x)
    rows = torch.cat([row.flatten(1) for row in torch.func.jacrev(losses)(params, x).values()], 1)
    check_same(found, rows @ rows.mT)
