"""The direction of a batch in parts, next to that of the whole batch by `step`."""

from functools import partial

import pytest
import torch
from bounds import check_derivatives, check_same
from hypothesis import given
from hypothesis import strategies as st
from rule_table import RULES, rule_of
from simulated import simulated
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import FlopCounterMode
from zoo import numbers

import functional_jd as jd

NAMES = "abc"
RULES_OF_STEPS = [name for name in RULES if name not in {"krum", "grouped", "modo", "sdmgrad"}]


X, Y = numbers(12, 4), numbers(12, 3, seed=1)
SHARED = {"w": numbers(4, 5, seed=2), "b": numbers(5, seed=3)}
HEADS = {name: numbers(5, seed=4 + i) for i, name in enumerate(NAMES)}


def trunk(shared, x, *_):
    return torch.tanh(x @ shared["w"] + shared["b"])


def heads(own, h, x, y):
    return {name: (h @ own[name] - y[:, i]).square().mean() for i, name in enumerate(NAMES)}


def plain(shared, x, y):
    return heads(HEADS, trunk(shared, x), x, y)


KINDS = {
    "plain": (plain, SHARED),
    "multitask": (jd.multitask(trunk, heads), {"shared": SHARED, "heads": HEADS}),
    "per_example": (jd.per_example(lambda p, x, y: (trunk(p, x).sum() - y).square().mean()), SHARED),
}


def parts(n=4, of=(X, Y)):
    return list(zip(*(x.chunk(n) for x in of), strict=True))


def whole(losses, params, rule, scale=None):
    """What a step on the whole batch reports and moves."""
    how = {"losses": losses, "aggregator": rule, "optimizer": jd.sgd(1.0)}
    state = jd.train_state(params, X, Y, scale=scale, **how)
    new, info = jd.step(state, X, Y, **how)
    return tree_map(torch.sub, params, new.params), new, info


@pytest.mark.filterwarnings("ignore:train_state")
@pytest.mark.parametrize("shape", [None, (), (3,)], ids=["no scale", "one", "each"])
@pytest.mark.parametrize("kind", KINDS)
def test_parts_give_the_direction_of_the_whole_batch(kind, shape):
    if kind == "per_example" and shape == (3,):
        return
    losses, params = KINDS[kind]
    scale = None if shape is None else jd.scale_state(shape=shape)
    for name in RULES_OF_STEPS:
        if kind == "per_example" and name in ("constant", "constrained", "stch", "tchebycheff", "cosmos", "pbi", "epo"):
            continue
        rule = rule_of(name)
        direction, state, info = whole(losses, params, rule, scale)
        start = jd.train_state(params, X, Y, losses=losses, aggregator=rule, optimizer=jd.sgd(1.0)).aggregator
        found = jd.accumulate(losses, parts(), params=params, aggregator=rule, state=start, scale=scale)
        every = {name: (direction, info.losses, state.aggregator, state.scale)}  # half of the digits, for all rules
        check_same({name: (found.direction, found.losses, found.state, found.scale)}, every, roundings=2**26)
        assert found.moved


@given(st.integers(1, 6), st.sampled_from(["mean", "upgrad"]), st.sampled_from([*KINDS]))
def test_any_number_of_parts_gives_one_direction(n, rule, kind):
    losses, params = KINDS[kind]
    split = [(X[i::n][: 12 // n], Y[i::n][: 12 // n]) for i in range(n)] if 12 % n == 0 else parts(1)
    if kind == "per_example":  # of any size
        split = [*zip(X.tensor_split(n), Y.tensor_split(n), strict=True)]
    found, expected = (jd.accumulate(losses, p, params=params, aggregator=rule_of(rule)) for p in (split, parts(1)))
    check_same(found.direction, expected.direction)


def test_no_row_is_made_for_a_rule_that_needs_none():
    work = []
    for rule in (jd.mean(), jd.upgrad()):
        with FlopCounterMode(display=False) as counter:
            jd.accumulate(plain, parts(), params=SHARED, aggregator=rule, state=())
        work.append(counter.get_total_flops())
    with FlopCounterMode(display=False) as counter:
        jd.weighted_fn(plain)(SHARED, X, Y)[1](torch.ones(3))
    assert work[0] == counter.get_total_flops() < work[1]


@pytest.mark.parametrize("rule", [jd.mean(), jd.upgrad(), jd.imtl_l()])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_a_part_that_is_not_finite_flags_its_loss_alone_and_moves_nothing(rule, poison):
    scale = jd.scale_state(shape=3)
    start = jd.accumulate(plain, parts(), params=SHARED, aggregator=rule, scale=scale)
    bad = Y.clone()
    bad[5, 1] = poison
    went_on = {"state": start.state, "scale": start.scale}
    found = jd.accumulate(plain, parts(of=(X, bad)), params=SHARED, aggregator=rule, **went_on)
    assert found.finite.tolist() == [True, False, True]
    assert not found.moved
    torch.testing.assert_close((found.state, found.scale), (start.state, start.scale), rtol=0, atol=0)


SINGLE = {
    "plain": (lambda p, x, y: heads(tree_map(torch.Tensor.float, HEADS), trunk(p, x), x, y), SHARED),
    "multitask": KINDS["multitask"],
}


@pytest.mark.parametrize("shape", [None, (), (3,)], ids=["no scale", "one", "each"])
@pytest.mark.parametrize("rule", ["mean", "upgrad", "uw", "config"])
@pytest.mark.parametrize("kind", SINGLE)
def test_a_part_that_is_not_finite_can_be_left_out_alone(kind, rule, shape):
    losses, params = SINGLE[kind]
    params, x, y = tree_map(torch.Tensor.float, (params, X, Y))
    scale = None if shape is None else jd.scale_state(2.0**100, shape=shape)
    call = lambda of, **more: jd.accumulate(losses, of, params=params, aggregator=rule_of(rule), scale=scale, **more)
    start = call(parts(of=(x, y))).state
    flags = lambda *expected: list(expected) if shape == (3,) else all(expected)
    high, bad = y.clone(), y.clone()
    bad[4, 1], high[4, 1] = torch.nan, 2.0**40
    for spoiled in (bad, high):  # a loss that is not finite, and one whose gradient overflows with this scale
        halved = spoiled is high
        if halved and (shape is None or rule == "uw"):  # which weighs losses before there is a gradient
            continue
        found = call(parts(of=(x, spoiled)), state=start, skip="part")
        given = parts(of=(x, y))
        expected = call([given[0], *given[2:]], state=start)
        check_same(found.direction, expected.direction)
        check_same((found.losses, found.state), (expected.losses, expected.state))
        assert found.moved
        if halved and rule == "mean" and kind == "plain":  # one pass, whose overflow has no owner
            assert not found.finite.any()
        else:
            assert found.finite.tolist() == flags(True, False, True)
        lower = found.scale.scale < 2.0**100
        assert shape is None or torch.equal(lower, ~found.finite if halved else found.finite & False)
    every, again = (call(p, state=start, skip="part") for p in ([(x, torch.full_like(y, torch.nan))], parts(of=(x, y))))
    assert not every.moved
    torch.testing.assert_close(every.state, start, rtol=0, atol=0)
    torch.testing.assert_close(again[:-1], call(parts(of=(x, y)), state=start)[:-1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_means_of_losses_and_rows_in_half_precision_neither_drift_nor_overflow(dtype):
    half = lambda p, x: (p["w"] * x).mean().to(dtype)
    how = {"params": {"w": torch.tensor([29952.0])}, "aggregator": jd.famo(), "scale": jd.scale_state(1.0)}
    found = jd.accumulate(half, [(torch.ones(1),)] * 512, **how)
    assert found.moved
    assert found.losses == torch.tensor(29952.0, dtype=dtype)
    rows = lambda p, c: torch.stack([(p * c).sum().float(), (p * c.flip(0)).sum().float()])
    many = [((torch.tensor([1.0, 3.0]) * (1 + k / 128)).bfloat16(),) for k in range(9)]
    found = jd.accumulate(rows, many, params=torch.ones(2).bfloat16(), aggregator=jd.upgrad())
    assert found.direction.tolist() == [2.0625, 2.0625]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_share_of_the_parts_that_are_left_has_the_digits_of_the_rows(dtype):
    """Two of three is no binary fraction."""
    cast = lambda tree: tree_map(lambda x: x.to(dtype), tree)
    own, given = cast(SHARED), [cast((x, y)) for x, y in zip(X.split(4), Y.split(4), strict=True)]
    low = lambda shared, x, y: heads(cast(HEADS), trunk(shared, x), x, y)
    call = lambda parts, **more: jd.accumulate(low, parts, params=own, aggregator=jd.upgrad(), **more)
    found = call([given[0], (given[1][0] * torch.nan, given[1][1]), given[2]], skip="part")
    expected = call([given[0], given[2]])
    assert found.moved
    check_same((found.direction, found.losses), (expected.direction, expected.losses))


def test_buffers_of_a_part_that_is_left_out_go_with_it_and_weights_that_are_not_finite_leave_out_none():
    scale, bad = jd.scale_state(2.0, shape=3), Y.clone()
    negative = lambda p, x, y: {name: loss - 100 for name, loss in plain(p, x, y).items()}
    found = jd.accumulate(negative, parts(), params=SHARED, aggregator=jd.geometric_mean(), scale=scale, skip="part")
    assert not torch.stack([found.moved, *found.finite]).any()
    assert torch.equal(found.scale.scale, scale.scale)
    count = lambda p, n, x, y: (plain(p, x, y), n + len(x))
    bad[11] = torch.nan
    for skip, counted in (("part", 9), ("step", 0)):
        how = {"params": SHARED, "aggregator": jd.mean(), "buffers": torch.zeros(()), "skip": skip}
        assert jd.accumulate(count, parts(of=(X, bad)), **how).buffers == counted


@pytest.mark.parametrize("skip", ["step", "part"])
def test_each_scale_follows_its_own_loss_and_a_lost_first_batch_leaves_no_memory(skip):
    losses = lambda p, c: torch.stack([p.half().sum().float() * c, p.sum()])
    grown, floor = jd.scale_state(2.0**10, growth_interval=4, shape=2), jd.scale_state(2.0**-14, growth_interval=4)
    how = {"params": torch.ones(3), "aggregator": jd.upgrad(), "skip": skip}
    for count in (1, 2, 3, 0):
        grown = jd.accumulate(losses, [(torch.tensor(1.0),), (torch.tensor(1e3),)], scale=grown, **how).scale
        assert grown.growth_tracker.tolist() == [0, count]
    assert grown.scale[1] == 2.0**11
    kept = jd.accumulate(losses, [(torch.tensor(3e9),)], scale=floor._replace(growth_tracker=torch.tensor(3)), **how)
    assert kept.scale.growth_tracker == 0
    lost = [(torch.tensor(c),) for c in (torch.nan, 1e3, 1.0)]  # one is not finite, one overflows
    found = jd.accumulate(losses, lost, scale=jd.scale_state(2.0**10, shape=2), **how)
    assert found.scale.scale.tolist() == [2.0 ** (9 if skip == "part" else 10), 2.0**10]
    for rule in map(rule_of, ("gradnorm", "relobralo", "softadapt")):
        call = partial(jd.accumulate, plain, params=SHARED, aggregator=rule, skip=skip)
        lost = call([(x * torch.nan, y) for x, y in parts()])
        assert lost.state is None
        check_same(call(parts(), state=lost.state), call(parts()))


def test_buffers_and_keys_go_from_part_to_part():
    def counted(params, buffers, x, y):
        noise = jd.random.normal(buffers["key"], x.shape, dtype=x.dtype)
        later = jd.random.split(buffers["key"])[0]
        return plain(params, x + 0.1 * noise, y), {"count": buffers["count"] + len(x), "key": later}

    buffers = {"count": torch.zeros(()), "key": jd.random.key(0)}
    for rule in (jd.mean(), jd.stch(), jd.upgrad()):
        found = jd.accumulate(counted, parts(), params=SHARED, aggregator=rule, buffers=buffers)
        assert found.buffers["count"] == 12
        now, total = buffers, 0
        for x, y in parts():
            values, now = counted(SHARED, now, x, y)
            total = total + torch.stack([*values.values()]) / 4
        assert torch.equal(found.buffers["key"], now["key"])
        torch.testing.assert_close(torch.stack([*found.losses.values()]), total)


def test_one_part_is_the_step_with_buffers_of_a_trunk_too():
    def features(shared, key, x, y):
        now, key = jd.random.split(key)
        return trunk(shared, x + 0.1 * jd.random.normal(now, x.shape, dtype=x.dtype)), key

    losses = jd.multitask(features, lambda own, h, key, x, y: (heads(own, h, x, y), key))
    params, key = KINDS["multitask"][1], jd.random.key(0)
    for rule in (jd.mean(), jd.upgrad()):
        how = {"losses": losses, "aggregator": rule, "optimizer": jd.sgd(1.0)}
        state, _ = jd.step(jd.train_state(params, X, Y, buffers=key, **how), X, Y, **how)
        found = jd.accumulate(losses, parts(1), params=params, aggregator=rule, buffers=key)
        moved = tree_map(torch.sub, params, found.direction)
        check_same((moved, found.buffers), (state.params, state.buffers))


def test_transforms_and_compiled():
    take = lambda params, factor: jd.accumulate(
        lambda p, x, y: plain(p, x * factor, y), parts(), params=params, aggregator=jd.upgrad()
    ).direction["b"]
    last = lambda y: jd.accumulate(plain, [parts()[0], (X[:3], y)], params=SHARED, aggregator=jd.mean()).direction["b"]
    ys = torch.stack([Y[:3], Y[3:6]])  # a batch of one part alone
    torch.testing.assert_close(torch.vmap(last)(ys), torch.stack(list(map(last, ys))))
    factors = torch.tensor([0.5, 1.0], dtype=torch.float64)
    batched = torch.vmap(take, (None, 0))(SHARED, factors)
    torch.testing.assert_close(batched, torch.stack([take(SHARED, f) for f in factors]))
    torch.testing.assert_close(jd.compiled(take, backend="eager")(SHARED, factors[0]), batched[0])
    slope = torch.func.grad(lambda f: take(SHARED, f).sum())(factors[0])
    check_derivatives(slope, lambda factor: take(SHARED, factor).sum(), factors[0])


@pytest.mark.parametrize("rule", [jd.mean(), jd.upgrad(), jd.uw()])
def test_on_an_accelerator(rule):
    with simulated() as device:
        own, params, of_device, scale = device.put((HEADS, SHARED, parts(), jd.scale_state(shape=3)))
        there = lambda p, x, y: heads(own, trunk(p, x), x, y)
        found = jd.accumulate(there, of_device, params=params, aggregator=rule, scale=scale)
        here = jd.accumulate(plain, parts(), params=SHARED, aggregator=rule, scale=jd.scale_state(shape=3))
        check_same(device.get(found), here)


def test_what_is_refused():
    usual = {"params": SHARED, "aggregator": jd.upgrad()}
    call = lambda p, losses=plain, **more: jd.accumulate(losses, p, **(usual | more))
    some = lambda params, x, y: plain(params, x, y) if x[0, 0] == X[0, 0] else {"a": plain(params, x, y)["a"]}
    check_same(call(map(list, parts())).direction, call(parts()).direction)  # as loaders return them
    held = parts()[0][0].clone()
    cases = [
        (lambda: call([]), TypeError, "parts must be at least one tuple"),
        (lambda: call(parts(), lambda p, b, x, y: (plain(p, x, y), b.add_(1)), buffers=X), ValueError, "in place"),
        (lambda: call([X, X]), TypeError, "parts must be at least one tuple"),
        (lambda: call((held.copy_(x), y) for x, y in parts()), ValueError, "parts must have memory of their own"),
        (lambda: call(parts(), params={"w": torch.nn.Parameter(X, False)}), ValueError, "frozen 'w'"),
        (lambda: call(parts(), some), ValueError, r"the same losses.*return 0 \* another loss"),
        (lambda: call(parts(), KINDS["per_example"][0], scale=jd.scale_state(shape=3)), ValueError, r"no scale \[m\]"),
        (lambda: call(parts(), KINDS["per_example"][0], skip="part"), ValueError, "no skip='part', found one"),
        (lambda: call(parts(), skip="all"), ValueError, "skip must be one of step, part"),
        (lambda: call(parts(), scale=jd.scale_state(shape=2)), ValueError, r"of shape \[\] or \[3\]"),
    ]
    for make, kind, words in cases:
        with pytest.raises(kind, match=words):
            make()
    net = torch.nn.Linear(3, 2)
    params, x = {name: p.detach() for name, p in net.named_parameters()}, torch.ones(4, 3)
    with pytest.raises(ValueError, match="accumulate: the losses must depend on the parameters, found no loss"):
        call([(x,)] * 2, lambda p, x: net(x).square().mean(0), params=params)


@pytest.mark.parametrize("rule", [jd.mean, jd.uw, jd.geometric_mean, jd.upgrad])
def test_losses_may_contain_derivatives_by_their_batch(rule):
    def losses(p, x):
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(torch.tanh(x * p["w"]).sum(), x, create_graph=True)
        return {"equation": (slope - 1).square().mean(), "edge": (p["w"] - 1).square().mean()}

    params, x = {"w": torch.full((3,), 0.3, dtype=torch.float64)}, torch.linspace(0.1, 1, 6, dtype=torch.float64)
    whole = lambda p, x: {k: sum(losses(p, part)[k] for part in x.chunk(2)) / 2 for k in ("equation", "edge")}
    found = jd.accumulate(losses, [(part,) for part in x.chunk(2)], params=params, aggregator=rule())
    expected = jd.accumulate(whole, [(x,)], params=params, aggregator=rule())
    check_same(found.direction["w"], expected.direction["w"])
    assert not found.losses["equation"].requires_grad


@pytest.mark.parametrize("rule", [jd.stch, jd.dwa])
def test_losses_that_are_evaluated_twice_find_batch_and_generators_as_they_were(rule):
    generator = torch.Generator().manual_seed(0)

    def losses(params, x, y):
        return plain(params, x.mul_(2 + torch.rand((), generator=generator)), y)

    x = X.clone()
    found = jd.accumulate(losses, [(x, Y)], params=SHARED, aggregator=rule())
    factor = 2 + torch.rand((), generator=torch.Generator().manual_seed(0))
    check_same(x, factor * X)
    expected = jd.accumulate(plain, [(factor * X, Y)], params=SHARED, aggregator=rule())
    check_same((found.losses, found.weights, found.direction), (expected.losses, expected.weights, expected.direction))
