"""weights_fn: the weights that `aggregate` would give to the rows, for loops that differentiate the weighted sum."""

from functools import partial

import pytest
import torch
from bounds import check_same
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import functional_jd as jd

NUMBERS = st.lists(st.integers(-8, 8).map(lambda i: i / 4), min_size=9, max_size=9)
RULES = {"no gradients": jd.mean(), "losses": jd.stch(0.5), "norms": jd.clipped(0.5), "gramian": jd.upgrad()}
RULES |= {"gramian and losses": jd.natural_gradient(0.5), "rows": jd.config(), "rows and losses": jd.excess_mtl()}
RULES |= {"a key": jd.random_weights(jd.random.key(0))}


def losses(params, x):
    """Three losses, and their gradients by hand: `2 (a - x_i)` and `2 b`."""
    return {"near": ((params["a"] - x) ** 2).sum(1) + (params["b"] ** 2).sum()}


def gradients(params, x):
    return {"a": 2 * (params["a"] - x), "b": 2 * params["b"].expand(3, 2)}


def problem(numbers):
    flat = torch.tensor(numbers, dtype=torch.float64)
    return {"a": flat[:2], "b": flat[2:4]}, torch.stack([flat[3:5], flat[5:7], flat[7:]])


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@settings(max_examples=10)
@given(numbers=NUMBERS)
def test_the_weighted_sum_of_the_losses_has_the_direction_of_the_rule_as_its_gradient(rule, numbers):
    params, x = problem(numbers)
    found = jd.weights_fn(losses, rule)(params, x)
    J, values = gradients(params, x), losses(params, x)
    expected = jd.aggregate(rule, J, losses=values)
    # Quarters have exact products and sums: the rule looks at the same Gramian. Norms are rounded once more.
    eps = torch.finfo(torch.float64).eps
    torch.testing.assert_close(found.weights, expected.weights, rtol=4 * eps, atol=0)
    torch.testing.assert_close(found.losses, values, rtol=0, atol=0)
    again = jd.weights_fn(losses, rule)(params, x, state=found.state).weights
    torch.testing.assert_close(again, jd.aggregate(rule, J, expected.state, losses=values).weights)
    taken = {k: p.clone().requires_grad_() for k, p in params.items()}
    (found.weights * losses(taken, x)["near"]).sum().backward()
    for name, leaf in taken.items():
        terms = (found.weights[:, None] * J[name]).abs().sum(0)
        error = (leaf.grad - expected.direction[name]).abs()
        assert (error <= 8 * eps * terms).all()


def test_of_multitask_losses_the_shared_gradient_is_the_direction_and_those_of_the_heads_are_weighted():
    w, x = torch.tensor([1.0, -2.0], dtype=torch.float64), torch.tensor([3.0, 0.5], dtype=torch.float64)
    own = {"one": torch.tensor([2.0, 1.0]).double(), "two": torch.tensor([-1.0, 0.25]).double()}
    params = {"shared": nn.Parameter(w), "heads": {k: nn.Parameter(p) for k, p in own.items()}}
    tasks = jd.multitask(lambda w, x: w * x, lambda p, h, x: {name: h @ p[name] for name in p})
    found = jd.weights_fn(tasks, jd.upgrad())(params, x)
    expected = jd.aggregate(jd.upgrad(), torch.stack([x * p for p in own.values()]))  # the trunk's gradients, by hand
    values = torch.stack([*tasks(params, x).values()])
    (found.weights * values).sum().backward()
    eps = torch.finfo(torch.float64).eps
    terms = sum(weight * (x * p).abs() for weight, p in zip(expected.weights, own.values(), strict=True))
    assert ((params["shared"].grad - expected.direction).abs() <= 8 * eps * terms).all()
    for weight, head in zip(expected.weights, params["heads"].values(), strict=True):
        torch.testing.assert_close(head.grad, weight * w * x, rtol=8 * eps, atol=0)
    assert not torch.allclose(params["heads"]["one"].grad, w * x), "step gives a head its whole gradient"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_weights_have_the_dtype_of_the_losses_but_no_less_than_float32(dtype):
    params, x = problem(range(9))
    exact = jd.aggregate(jd.config(), gradients(params, x)).weights
    own, x = {name: nn.Parameter(p.to(dtype)) for name, p in params.items()}, x.to(dtype)
    found = jd.weights_fn(losses, jd.config())(own, x, scale=jd.scale_state(2.0) if dtype == torch.float16 else None)
    assert found.weights.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(found.weights, exact.to(found.weights.dtype))  # quarters: exact rows in each dtype
    (found.weights @ losses(own, x)["near"].to(found.weights.dtype)).backward()
    assert all(p.grad.dtype == dtype for p in own.values())


REMEMBERING = {name: getattr(jd, name) for name in ["pcd", "famo", "gradnorm", "excess_mtl", "uw", "imtl_l", "dwa"]} | {
    "cr_mogm": lambda: jd.cr_mogm(jd.upgrad()),
    "nash_mtl": lambda: jd.nash_mtl(every=3),
    "gradvac": lambda: jd.gradvac(jd.random.key(0)),
}


@pytest.mark.parametrize("build", REMEMBERING.values(), ids=REMEMBERING)
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_a_rule_remembers_no_batch_that_is_not_finite(build, bad):
    def losses(params, x):
        return torch.stack([(params["w"] - x).square().sum() + 0.1, (params["w"] + 2 * x).abs().sum() + 1])

    params, x = {"w": torch.tensor([1.0, 2.0, -1.0])}, torch.tensor([0.3, 0.1, 0.7])
    weights_of = jd.weights_fn(losses, build())
    found = weights_of(params, torch.tensor([0.3, bad, 0.7])).state
    assert found is None
    for shift in (0.0, 0.5, 1.0):  # as if the batch had not been
        weights, _, found = weights_of(params, x + shift, state=found)
        assert weights.isfinite().all()
        assert weights.abs().sum() > 0
    later = weights_of(params, x * bad, state=found)
    assert not later.losses.isfinite().all()
    torch.testing.assert_close(later.state, found, rtol=0, atol=0)


def test_parameters_that_no_loss_reaches_are_told():
    net = nn.ModuleDict({"body": nn.Linear(5, 6), "head": nn.Linear(6, 2)})
    body, x = jd.functional(net["body"]), torch.randn(8, 5)

    def losses(params, x):  # the head is called directly
        own = {name.removeprefix("body."): p for name, p in params.items() if name.startswith("body.")}
        return net["head"](body(own, {}, x)[0].tanh()).square().mean(0)

    params = dict(net.named_parameters())
    with pytest.warns(UserWarning, match=r"weights_fn: no loss reaches 'head\.bias', 'head\.weight' on this batch, so"):
        found = jd.weights_fn(losses, jd.config())(params, x)
    jd.weights_fn(losses, jd.config())(params, x, state=found.state)
    jd.weights_fn(losses, jd.config())({name: p for name, p in params.items() if name.startswith("body.")}, x)


def test_weights_that_carry_a_graph_to_a_leaf_are_told_and_those_of_modules_are_constants():
    params, x = problem(range(9))
    taken = {name: p.clone().requires_grad_() for name, p in params.items()}
    with pytest.warns(UserWarning, match=r"weights_fn: the weights carry a graph to '\w+', .*weights\.detach\(\)"):
        found = jd.weights_fn(losses, jd.upgrad())(taken, x)
    assert found.weights.requires_grad, "they can be differentiated"
    again = jd.weights_fn(losses, jd.upgrad())(taken, x, state=found.state)  # said once
    assert again.weights.requires_grad
    fast = {name: 2 * p for name, p in taken.items()}  # computed from others, whose derivatives are asked for
    jd.weights_fn(losses, jd.upgrad())(fast, x).weights.sum().backward()
    torch.func.grad(lambda p: jd.weights_fn(losses, jd.upgrad())(p, x).weights.square().sum())(params)
    jd.weights_fn(losses, jd.mean())(taken, x)
    own = {name: nn.Parameter(p) for name, p in params.items()}
    constant = jd.weights_fn(losses, jd.upgrad())(own, x)
    assert not constant.weights.requires_grad
    assert all(p.grad is None for p in own.values())
    assert torch.equal(constant.weights, found.weights)


class Tied(nn.Module):
    """An embedding that is the last layer too, with averages behind it that stand."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(7, 4), nn.BatchNorm1d(7).eval()

    def forward(self, tokens):
        return self.norm(nn.functional.linear(self.embed(tokens).tanh(), self.embed.weight))


@pytest.mark.parametrize("first", ["model", "weights"])
@pytest.mark.parametrize("call", ["functional", "functional_call"])
def test_a_graph_that_the_model_has_already_made_stays_valid(first, call):
    net, tokens = Tied(), torch.arange(5)
    apply = jd.functional(net) if call == "functional" else lambda p, b, x: (torch.func.functional_call(net, p, x), b)
    of = lambda output: output.square().mean(0)[:2]
    losses = lambda params, tokens: of(apply(params, dict(net.named_buffers()), tokens)[0])
    output = net(tokens) if first == "model" else None
    weights, values, _ = jd.weights_fn(losses, jd.upgrad())(dict(net.named_parameters()), tokens)
    found = of(net(tokens) if output is None else output)
    (weights * found).sum().backward()
    torch.testing.assert_close(found, values)
    rows = jd.jacobian_fn(losses)({name: p.detach() for name, p in net.named_parameters()}, tokens)[0]
    expected = jd.aggregation.combine(rows, weights)
    torch.testing.assert_close({name: p.grad for name, p in net.named_parameters()}, expected)


@pytest.mark.parametrize("shape", [(), 3], ids=["one scale", "a scale each"])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_scale_keeps_the_gradients_of_float16_and_is_not_in_the_weights(rule, shape):
    params, x = problem([3, 1, -2, 5, 7, -4, 2, 6, -3])
    tiny = 2.0**-14  # of the losses: float16 ends at 2**-24, and rounds below 2**-14
    small = lambda params, x: {"near": losses(params, x)["near"] * tiny}
    halves = lambda params, x: {"near": (losses(params, x)["near"].float() * tiny).double()}
    own = {name: p.half() for name, p in params.items()}
    expected = jd.aggregate(rule, {k: g * tiny for k, g in gradients(params, x).items()}, losses=small(params, x))
    found = jd.weights_fn(halves, rule)(own, x.half(), scale=jd.scale_state(2.0**12, shape=shape))
    # Quarters and powers of two: rows and losses are exact in float16 with the scale.
    check_same(found.weights, expected.weights)
    torch.testing.assert_close(found.losses, small(params, x), rtol=0, atol=0)


def in_halves(build):
    """The weights of float16 parameters, whose gradients overflow with a scale of 2^16, and the start of training."""
    params, x = problem([3, 1, -2, 5, 7, -4, 2, 6, -3])
    f = jd.weights_fn(lambda params, x: {"near": losses(params, x)["near"].float()}, build())
    weights_of = partial(f, {name: p.half() for name, p in params.items()}, x.half())
    return weights_of, lambda shape=(): weights_of(scale=jd.scale_state(1.0, shape=shape))


@pytest.mark.parametrize("shape", [(), 3], ids=["one scale", "a scale each"])
@pytest.mark.parametrize("build", [jd.upgrad, jd.gradnorm, jd.excess_mtl, lambda: jd.cr_mogm(jd.upgrad())])
def test_a_scale_that_is_too_large_gives_weights_that_are_not_finite_and_no_memory(build, shape):
    weights_of, started = in_halves(build)
    first = started(shape)
    found = weights_of(state=first.state, scale=jd.scale_state(2.0**16, shape=shape))
    assert first.weights.isfinite().all()
    assert not found.weights.isfinite().any()
    assert found.losses["near"].isfinite().all()
    torch.testing.assert_close(found.state, first.state, rtol=0, atol=0)


@pytest.mark.parametrize(
    "build", [jd.mean, jd.dwa, jd.famo, jd.uw, jd.imtl_l, lambda: jd.random_weights(jd.random.key(0))]
)
def test_a_rule_that_looks_at_no_gradient_remembers_a_batch_whose_gradients_overflow(build):
    weights_of, started = in_halves(build)
    first = started()
    found, expected = (weights_of(state=first.state, scale=s) for s in (jd.scale_state(2.0**16), None))
    assert found.weights.isfinite().all()
    assert torch.equal(found.weights, expected.weights)
    torch.testing.assert_close(found.state, expected.state, rtol=0, atol=0)


def test_losses_that_do_not_reach_the_parameters_are_refused_or_named():
    net, x = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout()), torch.randn(8, 2)
    params, apply = dict(net.named_parameters()), jd.functional(net)
    direct = lambda params, x: {"a": net(x).square().mean(), "b": (net(x) - 1).square().mean()}
    mixed = lambda params, x: {"a": apply(params, dict(net.named_buffers()), x)[0].square().mean(), "b": net(x).mean()}
    before, draws = {name: b.clone() for name, b in net.named_buffers()}, torch.get_rng_state()
    with pytest.raises(ValueError, match="weights_fn: the losses must depend on the parameters, found no loss"):
        jd.weights_fn(direct, jd.upgrad())(params, x)
    # The look leaves no trace: what was refused was not evaluated, as far as module and generator can tell.
    assert torch.equal(torch.get_rng_state(), draws)
    assert all(torch.equal(b, before[name]) for name, b in net.named_buffers())
    with pytest.raises(ValueError, match=r"also use the tensor that '0\.bias' starts from"):
        jd.weights_fn(mixed, jd.upgrad())(params, x)
    partly = lambda params, x: {"a": mixed(params, x)["a"], "b": x.mean()}
    with pytest.warns(UserWarning, match="found 'b' without a gradient.*their weights mean nothing"):
        jd.weights_fn(partly, jd.upgrad())(params, x)


def test_parameters_that_are_frozen_are_refused_later_too():
    net, x = nn.Linear(2, 2), torch.randn(4, 2)
    weigh = jd.weights_fn(lambda params, x: jd.functional(net)(params, {}, x)[0].square().mean(0), jd.config())
    state = weigh(dict(net.named_parameters()), x).state
    net.bias.requires_grad_(False)
    with pytest.raises(ValueError, match=r"weights_fn: all parameters must require grad.*found frozen 'bias'"):
        weigh(dict(net.named_parameters()), x, state=state)
    apply, params = jd.functional(net.requires_grad_()), {name: p.detach() for name, p in net.named_parameters()}
    net.requires_grad_(False)  # as trainers of two networks do
    assert jd.weights_fn(lambda p, x: (p["x"] * apply(params, {}, x)[0]).mean(0), jd.mean())({"x": x}, x).weights.all()
    with pytest.raises(ValueError, match=r"functional: requires_grad of the module must stay .* found 'weight' frozen"):
        jd.weights_fn(lambda p, x: apply(p, {}, x)[0].square().mean(0), jd.mean())(params, x)
    (hooked := nn.Parameter(x)).register_hook(torch.zeros_like)
    with pytest.warns(UserWarning, match=r"weights_fn: parameters must have no hooks, found one of 'x'"):
        jd.weights_fn(lambda p, x: p["x"].square().mean(0), jd.mean())({"x": hooked}, x)


def test_rules_that_weigh_single_entries_and_numbers_as_scales_are_refused():
    params, x = problem(range(9))
    with pytest.raises(ValueError, match="weights_fn: aggregator must be a rule that weights rows"):
        jd.weights_fn(losses, jd.graddrop(jd.random.key(0)))(params, x)
    for dtype in (torch.float32, torch.float64):  # a rule that weighs more rows than there are
        four = jd.Aggregator(jd.views.gramian, lambda _: (), lambda G, memory: (torch.ones(4, dtype=dtype), memory))  # noqa: B023
        words = r"weights_fn: aggregator must .* rows, 3 of them, found torch.float\d+ \[4\]"
        with pytest.raises(ValueError, match=words):
            jd.weights_fn(losses, four)(params, x)
        with pytest.raises(ValueError, match=r"aggregate: expected one weight per row, \[2\], found \[4\]"):
            jd.aggregate(four, torch.eye(2, 3, dtype=dtype))
    with pytest.raises(TypeError, match="weights_fn: aggregator must be a rule"):
        jd.weights_fn(losses, jd.upgrad)
    with pytest.raises(TypeError, match=r"weights_fn: scale must be a ScaleState, found 1024.*scale_state\("):
        jd.weights_fn(losses, jd.upgrad())(params, x, scale=1024.0)


@pytest.mark.parametrize(
    "rule", [RULES["losses"], RULES["gramian"], jd.nash_mtl()], ids=["losses", "gramian", "memory"]
)
def test_composes_with_transforms(rule):
    params, x = problem(range(9))
    weigh = lambda params, x: jd.weights_fn(losses, rule)(params, x).weights
    by_hand = lambda params, x: jd.aggregate(rule, gradients(params, x), losses=losses(params, x)).weights
    for transformed in (
        lambda f: torch.vmap(f, (None, 0))(params, torch.stack([x, x + 1])),
        lambda f: torch.func.jvp(lambda x: f(params, x), (x,), (x * x,)),
        lambda f: torch.func.grad(lambda p: f(p, x)[0])(params),
    ):
        torch.testing.assert_close(transformed(weigh), transformed(by_hand))
    for compiled in (torch.compile(weigh, fullgraph=True, backend="eager"), jd.compiled(weigh, backend="eager")):
        torch.testing.assert_close(compiled(params, x), weigh(params, x))
    scaled = lambda scale: jd.weights_fn(losses, rule)(params, x, scale=scale).weights
    scale = jd.scale_state(2.0**10, shape=3)
    several = jd.scale_state(2.0**10)._replace(scale=torch.tensor([2.0**3, 2.0**20]))
    dims = jd.scale_state()._replace(scale=0, **dict.fromkeys(jd.scale_state()._fields[1:]))
    compiled = torch.compile(scaled, fullgraph=True, backend="eager") if rule is RULES["gramian"] else scaled
    for found in (torch.vmap(scaled, (dims,))(several), compiled(scale)):
        torch.testing.assert_close(found, weigh(params, x).expand_as(found))
