"""Weights of losses that carry a graph, beside `weights_fn`, `aggregate` and rows made by hand."""

import pytest
import torch
from bounds import check_same, check_within, eps
from hypothesis import given
from hypothesis import strategies as st
from rule_table import RULES, rule_of
from torch import nn
from torch.func import functional_call
from zoo import Passed

import functional_jd as jd

# Those that weigh whole rows of three losses on one batch.
NAMES = [name for name in RULES if name not in {"krum", "grouped", "modo", "sdmgrad"}]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def model(dtype=torch.float64):
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def batch(dtype=torch.float64):
    return torch.randn(16, 4, dtype=dtype), torch.randn(16, 3, dtype=dtype)


def losses_of(net, x, y):
    return (net(x) - y).square().mean(0)


def rows_by_hand(losses, points):
    rows = [torch.autograd.grad(value, points, retain_graph=True, materialize_grads=True) for value in losses]
    return [torch.stack(column) for column in zip(*rows, strict=True)]


@pytest.mark.parametrize("name", NAMES)
def test_the_weighted_sum_has_the_gradient_that_aggregate_returns(name):
    net, data = model(), batch()
    rule, parameters = rule_of(name), [*net.parameters()]
    losses = losses_of(net, *data)
    rows = rows_by_hand(losses, parameters)
    expected = jd.aggregate(rule, rows, losses=losses.detach())
    if not isinstance(expected.weights, torch.Tensor):
        with pytest.raises(ValueError, match="weigh: aggregator must be a rule that weights rows"):
            jd.weigh(losses, parameters, rule)
        return
    weights, state, finite = jd.weigh(losses, iter(parameters), rule)
    assert torch.equal(jd.weigh(losses, dict(net.named_parameters()).values(), rule).weights, weights)
    torch.testing.assert_close(weights, expected.weights, rtol=0, atol=0)
    torch.testing.assert_close(state, expected.state, rtol=0, atol=0)
    assert finite.tolist() == [True] * 3
    again = jd.weigh(losses, parameters, rule, state=state).weights
    torch.testing.assert_close(again, jd.aggregate(rule, rows, expected.state, losses=losses.detach()).weights)
    (weights * losses).sum().backward()
    terms = [weights.abs() @ leaf.abs().flatten(1) for leaf in rows]
    for parameter, direction, size in zip(parameters, expected.direction, terms, strict=True):
        check_within(parameter.grad.flatten(), direction.flatten(), 64 * eps() * (1e-9 + size))


@given(st.lists(st.floats(-8, 8), min_size=3, max_size=3), st.booleans())
def test_a_scale_changes_flags_and_never_weights(powers, each):
    net, data = model(torch.float32), batch(torch.float32)
    losses = losses_of(net, *data)
    scale = jd.scale_state(shape=3 if each else ())
    scale = scale._replace(scale=torch.exp2(torch.tensor(powers if each else powers[0]).round()))
    found = jd.weigh(losses, net.parameters(), jd.upgrad(), scale=scale)
    assert found.finite.shape == scale.scale.shape
    torch.testing.assert_close(found.weights, jd.weigh(losses, net.parameters(), jd.upgrad()).weights, rtol=0, atol=0)


@pytest.mark.parametrize("rule", [jd.upgrad(), jd.config(), jd.mean(), jd.imtl_l()])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_a_loss_that_is_not_finite_flags_itself_alone_and_is_forgotten(rule, poison):
    net, data = model(), batch()
    losses = losses_of(net, *data)
    memory = jd.weigh(losses, net.parameters(), rule).state
    bad = losses * torch.tensor([1.0, poison, 1.0])
    weights, state, finite = jd.weigh(bad, net.parameters(), rule, state=memory, scale=jd.scale_state(shape=3))
    assert finite.tolist() == [True, False, True]
    torch.testing.assert_close(state, memory, rtol=0, atol=0)
    assert not (weights * bad).sum().isfinite()
    assert not jd.weigh(bad, net.parameters(), rule, scale=jd.scale_state()).finite
    scale = jd.update_scale(jd.scale_state(shape=3), finite)
    assert scale.scale.tolist() == [2.0**16, 2.0**15, 2.0**16]


def test_float16_gradients_below_its_range_are_kept_by_the_scale():
    """The rows are 2^-26 and 2^-27, of which float16 has neither; the weights are those of float64."""
    w = torch.full((4,), 0.5, requires_grad=True)
    h = w.half()
    losses = {"a": (h * 2.0**-12).float().sum() * 2.0**-14, "b": (h[:2] * 2.0**-12).float().sum() * -(2.0**-15)}
    rows = torch.tensor([[2.0**-26] * 4, [-(2.0**-27)] * 2 + [0.0] * 2], dtype=torch.float64)
    found = jd.weigh(losses, [w], jd.upgrad(), scale=jd.scale_state(2.0**16, shape=2))
    torch.testing.assert_close(found.weights, jd.aggregate(jd.upgrad(), rows).weights.float())


def test_weights_that_cancel_are_the_smallest_of_the_same_direction():
    """In float32, autograd would sum weights of 1e6; the direction may not conflict by more than its rounding."""
    draw = torch.Generator().manual_seed(0)
    J = torch.randn(20, 10, generator=draw)
    w = torch.zeros(10, requires_grad=True)
    losses = J @ w
    weights, _, _ = jd.weigh(losses, [w], jd.upgrad())
    (weights * losses).sum().backward()
    slack = 8 * 20 * eps(torch.float32) * J.norm(dim=1).max() * (weights.abs() @ J.norm(dim=1))
    assert (J @ w.grad >= -slack).all()


def test_sparse_gradients_are_rows_as_dense_ones_are():
    dense, ids = nn.Embedding(5, 3), torch.tensor([0, 1, 1])
    sparse = nn.Embedding.from_pretrained(dense.weight.detach().clone(), freeze=False, sparse=True)
    found, expected = (
        jd.weigh((e(ids) - torch.arange(3.0)).square().mean(0), e.parameters(), jd.upgrad()).weights
        for e in (sparse, dense)
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize("scale", [None, jd.scale_state(8.0), jd.scale_state(8.0, shape=3)])
def test_numbers_and_leaves_that_one_loss_alone_reaches_have_rows(scale):
    s, w = (torch.tensor(x, requires_grad=True) for x in (2.0, [1.0, -1.0]))
    losses = {"a": s.square(), "b": torch.stack([s * w.sum(), (w - 3).square().sum()])}
    rows = [torch.tensor([4.0, 0.0, 0.0]), torch.tensor([[0.0, 0.0], [2.0, 2.0], [-4.0, -8.0]])]
    found = jd.weigh(losses, [s, w], jd.upgrad(), scale=scale)
    torch.testing.assert_close(found.weights, jd.aggregate(jd.upgrad(), rows).weights.float())
    assert found.finite.all()
    endless = jd.weigh(torch.stack([s + w.sum(), (s - 2).sqrt() + w.sum()]), [s, w], jd.upgrad())  # in one leaf
    assert not endless.finite[1]


def test_features_give_the_weights_of_rows_at_the_features_and_a_compiled_loop_the_same():
    net, (x, y) = model(), batch()
    features = net[:2](x)
    losses = (net[2](features) - y).square().mean(0)
    expected = jd.aggregate(jd.upgrad(), rows_by_hand(losses, [features])).weights
    torch.testing.assert_close(jd.weigh(losses, None, jd.upgrad(), features=features).weights, expected)
    torch.compiler.reset()
    compiled = torch.compile(losses_of, backend="aot_eager")
    found, expected = (jd.weigh(f(net, x, y), net.parameters(), jd.upgrad()).weights for f in (compiled, losses_of))
    torch.testing.assert_close(found, expected)


def test_losses_by_name_and_parameters_by_name_beside_weights_fn():
    net, data = model(), batch()
    by_name = lambda f, x, y: dict(zip("cab", losses_of(f, x, y), strict=True))
    params = dict(net.named_parameters())
    pure = lambda params, x, y: by_name(lambda x: functional_call(net, params, (x,)), x, y)
    expected = jd.weights_fn(pure, jd.nash_mtl())(params, *data)
    found = jd.weigh(pure(params, *data), params, jd.nash_mtl())
    torch.testing.assert_close((found.weights, found.state), (expected.weights, expected.state))


def test_no_row_is_made_for_a_rule_that_needs_none_and_no_grad_is_written():
    net, (x, y) = model(), batch()
    seen = []
    losses = (Passed.apply(net(x), seen) - y).square().mean(0)
    for rule, passes in ((jd.mean(), 0), (jd.uw(), 0), (jd.upgrad(), 3)):
        seen.clear()
        jd.weigh(losses, net.parameters(), rule)
        assert len(seen) == passes
    assert all(parameter.grad is None for parameter in net.parameters())


def test_what_is_refused():
    net, data = model(), batch()
    losses = losses_of(net, *data)
    call = lambda losses=losses, parameters=None, rule=None, **more: jd.weigh(
        losses, [*net.parameters()] if parameters is None else parameters, rule or jd.upgrad(), **more
    )
    other, twice = [torch.ones(2, requires_grad=True)], torch.ones(2).double()
    fixed = {"a": losses[0], "kl": torch.ones(())}
    foreign = jd.weigh(losses[:2], net.parameters(), jd.imtl_l()).state
    cases = [
        (lambda: call(fixed), ValueError, "must carry a graph, found no graph in 'kl'"),
        (lambda: call(torch.stack([losses[0], twice[0]])), ValueError, "must carry a graph, found no graph in '1'"),
        (lambda: call(parameters=[losses.detach()]), ValueError, "parameters must be tensors that"),
        (lambda: call(parameters=other), ValueError, "losses must depend on the parameters or features given"),
        (lambda: call(features=losses.detach()), ValueError, "features must be tensors that require grad"),
        (lambda: call(scale=jd.scale_state(shape=2)), ValueError, r"scale must be of shape \[\] or \[3\]"),
        (lambda: call(scale=2.0**16), TypeError, "scale must be a ScaleState"),
        (lambda: call(rule=jd.upgrad), TypeError, "aggregator must be a rule"),
        (lambda: call(losses=()), ValueError, "at least one loss"),
        (lambda: call(state=foreign, rule=jd.imtl_l()), ValueError, "weigh: the state must be one of this rule"),
        (lambda: torch.func.grad(lambda s: call(losses * s).weights.sum())(twice[0]), ValueError, "transforms"),
        (lambda: torch.vmap(lambda s: call(losses * s).weights)(twice), ValueError, "outside of transforms"),
    ]
    for make, kind, words in cases:
        with pytest.raises(kind, match=words):
            make()


@pytest.mark.parametrize("rule", [jd.upgrad(), jd.mean(), jd.nash_mtl(), jd.dwa()])
def test_a_loss_that_is_not_finite_makes_all_weights_nan_also_where_its_gradient_is_finite(rule):
    net, (x, y) = model(), batch()
    y[3, 1] = torch.nan
    two = lambda out: torch.stack([(out[:, 0] - y[:, 0]).square().mean(), (out[:, 1] - y[:, 1]).abs().mean()])
    found = jd.weigh(two(net(x)), net.parameters(), rule)
    assert found.finite.tolist() == [True, False]
    params = dict(net.named_parameters())
    weights, _, state = jd.weights_fn(lambda p, x: two(functional_call(net, p, x)), rule)(params, x)
    assert (found.weights.isnan() & weights.isnan()).all()
    assert not any([state, found.state])
    assert all(row.isfinite().all() for row in rows_by_hand(two(net(x)), [*net.parameters()]))


def test_weights_that_two_modules_share_count_once():
    """As parameters of both, the rows would have their gradient twice, and steps would move it apart."""
    encoder, decoder = nn.Embedding(6, 4).double(), nn.Linear(4, 6).double()
    decoder.weight = encoder.weight
    ids = torch.arange(6)

    def losses_at(params):
        hidden = functional_call(encoder, params["encoder"], ids).tanh()
        answer = functional_call(decoder, params["decoder"], hidden)
        return {"next": nn.functional.cross_entropy(answer, ids.roll(1)), "size": hidden.square().mean()}

    named = {"encoder": dict(encoder.named_parameters()), "decoder": dict(decoder.named_parameters())}
    losses = losses_at(named)
    rows = rows_by_hand(losses.values(), [encoder.weight, decoder.bias])
    found = jd.weigh(losses, [*encoder.parameters(), *decoder.parameters()], jd.config())
    check_same(found.weights, jd.aggregate(jd.config(), rows).weights)

    values = {part: {name: p.detach() for name, p in own.items()} for part, own in named.items()}
    method = {"losses": losses_at, "aggregator": jd.config()}
    for params in (named, values):
        for start in (
            lambda given: jd.train_state(given, optimizer=jd.sgd(0.1), **method),
            lambda given: jd.weights_fn(**method)(given),
            lambda given: jd.accumulate(losses_at, [()], params=given, aggregator=jd.config()),
        ):
            with pytest.raises(ValueError, match=r"tied weights once, found 'encoder.weight' again"):
                start(params)
    equal = torch.zeros(2)  # one tensor may be the start of two
    square = lambda p: torch.stack([p["a"].square().sum(), (p["b"] - 1).square().sum()])
    jd.train_state({"a": equal, "b": equal}, losses=square, aggregator=jd.mean(), optimizer=jd.sgd(0.1))
    nowhere = {"a": torch.zeros(2, device="meta"), "b": torch.zeros(2, device="meta")}  # without memory to share
    jd.train_state(nowhere, losses=square, aggregator=jd.mean(), optimizer=jd.sgd(0.1))


def test_weights_are_constants_whatever_the_state_carries():
    net, memory = model(), None
    for _ in range(2):
        losses = losses_of(net, *batch())
        weights, memory, _ = jd.weigh(losses, net.parameters(), jd.famo(), state=memory)
        assert not any(x.requires_grad for x in (weights, *memory))
        (weights * losses).sum().backward()
        memory = jd.famo_after_step(memory, losses_of(net, *batch()))
