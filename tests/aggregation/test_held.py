"""A rule every few steps: `fresh` is the rule, `repeated` its last weights, in every loop and transform."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.func import grad, jvp, vmap
from two_tasks import method, same, two_tasks

import functional_jd as fj
from functional_jd.aggregation.lifts import HeldState
from functional_jd.testing.strategies import jacobians

RULES = {"upgrad": fj.upgrad, "famo": fj.famo, "config": fj.config}
RULES["random_weights"] = lambda: fj.random_weights(fj.random.key(0))


@pytest.mark.parametrize("name", RULES)
@given(st.lists(st.tuples(jacobians(3), st.booleans()), min_size=1, max_size=6))
def test_weights_are_those_of_the_last_fresh_call(name, calls):
    rule = RULES[name]()
    fresh, repeated = fj.held(rule)
    losses = torch.ones(3)
    memory = state = last = None
    for J, again in calls:
        if again and state is not None:
            found = fj.aggregate(repeated, J, state)
            assert found.state is state
        else:
            expected = fj.aggregate(rule, J, memory, losses=losses)
            memory, last = expected.state, expected.weights
            found = fj.aggregate(fresh, J, state, losses=losses)
            assert same(found.state.inner, memory)
        state = found.state
        assert torch.equal(found.weights, last) or last.isnan().any()
        assert same(found.direction, fj.aggregation.combine(J, last)) or last.isnan().any()


def trained(take_fresh, take_repeated, state, batch, pattern):
    infos = []
    for again in pattern:
        state, info = (take_repeated if again else take_fresh)(state, *batch)
        infos.append(info)
    return state, infos


@pytest.mark.parametrize("engine", ["auto", "jacobian", "weighted"])
def test_steps_repeat_the_weights_and_cost_no_rows(engine):
    params, features, top, batch = two_tasks(dtype=torch.float64)
    fresh, repeated = fj.held(fj.upgrad())
    how = method(params, features, top)
    first, later = (how | {"aggregator": rule} for rule in (fresh, repeated))
    state = fj.train_state(params, *batch, **first)
    start = state.aggregator.weights
    take = partial(fj.step, **first), partial(fj.step, **later, engine=engine)
    final, infos = trained(*take, state, batch, [True, False, True, True])
    assert torch.equal(infos[0].weights, start)
    assert torch.equal(infos[2].weights, infos[1].weights)
    assert torch.equal(infos[3].weights, infos[1].weights)
    assert infos[1].gramian.shape == (2, 2)
    # The same steps by rules with these weights written in.
    by_hand = state._replace(aggregator=())
    for info in infos:
        constant = fj.constant(info.weights.tolist())
        by_hand, _ = fj.step(by_hand, *batch, **(how | {"aggregator": constant}), engine="jacobian")
    eps = torch.finfo(torch.float64).eps
    torch.testing.assert_close(final.params, by_hand.params, rtol=2**12 * eps, atol=2**12 * eps)


def test_transforms():
    J = torch.tensor([[1.0, -2, 0], [-1, 1, 3]], dtype=torch.float64)
    fresh, repeated = fj.held(fj.upgrad())

    def two(J):
        state = fj.aggregate(fresh, J).state
        return fj.aggregate(repeated, J.flip(1), state).direction

    expected = lambda J: fj.aggregation.combine(J.flip(1), fj.aggregate(fj.upgrad(), J).weights)
    batch = torch.stack([J, 2 * J.flip(0)])
    torch.testing.assert_close(vmap(two)(batch), torch.stack([expected(each) for each in batch]))
    size = lambda f: lambda J: f(J).square().sum()
    torch.testing.assert_close(grad(size(two))(J), grad(size(expected))(J))
    torch.testing.assert_close(jvp(two, (J,), (J.flip(0),)), jvp(expected, (J,), (J.flip(0),)))
    torch.compiler.reset()
    compiled = torch.compile(two, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(J), expected(J))


@pytest.mark.parametrize("m", [1, 2, 3])
def test_what_does_not_fit_is_refused(m):
    J = torch.eye(m, 3, dtype=torch.float64)
    fresh, repeated = fj.held(fj.upgrad())
    state = fj.aggregate(fresh, J).state
    with pytest.raises(ValueError, match=r"^held: the second rule .* cannot start\. Give the first"):
        fj.aggregate(repeated, J)
    other = HeldState(torch.ones(m + 1, dtype=torch.float64), ())
    with pytest.raises(ValueError, match=rf"^aggregate: state must be .* with {m} weights, found .*\[{m + 1}\]"):
        fj.aggregate(repeated, J, other)
    with pytest.raises(ValueError, match=r"^aggregate: state must be .* found "):
        fj.aggregate(repeated, J, torch.ones(m))
    assert torch.equal(fj.aggregate(repeated, J, state).weights, state.weights)
    with pytest.raises(ValueError, match="rule must have one weight per row"):
        fj.aggregate(fj.held(fj.trimmed_mean(0))[0], J)
