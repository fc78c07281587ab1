"""The weighted engine against weighted rows of plain autograd: every model, kind of losses, scale and transform."""

import pytest
import torch
from bounds import check_derivatives, check_same, check_within, eps
from gramian_by_hand import WEIGHTS, expectation, weights_for
from hypothesis import given
from hypothesis import strategies as st
from jacobian_by_hand import every_kind, flat, leaves, moved, rows_of, same
from torch.utils import _pytree
from torch.utils.flop_counter import FlopCounterMode
from zoo import BATCH, Passed, mlp, numbers, tasks

from functional_jd import multitask, per_example, scale_state, weighted_fn

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")


def direction_of(case, params, weights, **how):
    return weighted_fn(case.losses, **how)(params, *case.args)[1](weights)[0]


@given(st.lists(st.tuples(st.integers(-30, 30), st.sampled_from([0.0, 1.0, -3.0, 1e-3, 1e3])), min_size=1, max_size=5))
def test_no_cotangent_exceeds_its_scale_and_one_comes_within_a_factor_of_two(pairs):
    found = []
    scale = torch.tensor([2.0**k for k, _ in pairs])
    weights = torch.tensor([w for _, w in pairs], dtype=torch.float64)
    pullback = weighted_fn(lambda p: Passed.apply(p * 2, found), scale=scale)(torch.ones(len(pairs)))[1]
    direction, finite = pullback(weights)
    assert finite.all()
    check_within(direction, 2 * weights, 8 * eps(torch.float32) * weights.abs())
    shares = found[0].abs() / scale
    assert shares.max() <= 1
    assert shares.max() > 0.5 or not weights.any()


def test_one_shared_scale_multiplies_the_weights_as_it_multiplies_a_weighted_loss():
    found = []
    weights = torch.tensor([0.25, 3.0], dtype=torch.float64)
    weighted_fn(lambda p: Passed.apply(p, found), scale=scale_state(16.0))(torch.ones(2))[1](weights)
    assert found[0].tolist() == [4.0, 48.0]


def test_the_scale_saves_what_float16_would_lose():
    w, x = torch.ones(4), torch.full((3, 4), 1e-4)
    losses = lambda w, x: ((x.half() @ w.half()).float() * 1e-4).reshape(3)
    lost, kept = (weighted_fn(losses, scale=s)(w, x)[1](torch.ones(3).double() / 3)[0] for s in (None, scale_state()))
    assert not torch.allclose(lost, torch.full((4,), 1e-8), rtol=0.01, atol=0)
    torch.testing.assert_close(kept, torch.full((4,), 1e-8), rtol=0.01, atol=0)


@pytest.mark.parametrize("shape", [(), (2,)])
@pytest.mark.parametrize("where", ["trunk", "head", "plain"])
def test_an_overflow_gives_zeros_there_and_flags_its_owner_where_it_is_known(where, shape):
    grow = lambda p, x: p * x
    if where == "plain":
        losses, params = lambda p, x: torch.stack([p.sum(), grow(p, x).sum()]), torch.ones(3)
    else:
        inner, outer = (grow, torch.mul) if where == "trunk" else (torch.mul, grow)
        losses = multitask(
            lambda s, x: inner(s, x if where == "trunk" else 1.0),
            lambda h, z, x: {"calm": z.sum(), "wild": outer(h, x if where == "head" else 1.0) * z.detach().sum()},
        )
        params = {"shared": torch.ones(3), "heads": torch.ones(())}
    _, pullback = weighted_fn(losses, scale=scale_state(shape=shape))(params, torch.tensor(1e38))
    direction, finite = pullback(torch.ones(2, dtype=torch.float64))
    assert finite.shape == shape
    known = shape and where != "plain"  # which of the heads overflowed
    assert finite.tolist() == ([True, False] if known else [False] * 2 if shape else False)
    assert all(x.isfinite().all() for x in leaves(direction))
    overflowed = direction if where == "plain" else direction["shared" if where == "trunk" else "heads"]
    assert (overflowed == 0).all()


@pytest.mark.parametrize("scale", [None, scale_state(), scale_state(shape=(2,))], ids=["none", "one", "each"])
def test_tiny_and_huge_weights_neither_vanish_nor_overflow_and_others_are_flagged(scale):
    _, pullback = weighted_fn(lambda p: p * 2, scale=scale)(torch.ones(2))
    for size in (1e-30, 1e-36, 1e30) if scale is None or scale.scale.ndim else ():
        weights = torch.tensor([size, -size / 2], dtype=torch.float64)
        direction, finite = pullback(weights)
        check_within(direction, 2 * weights, 8 * eps(torch.float32) * weights.abs())
        assert finite.all()
    for poison in (torch.nan, torch.inf):
        assert not pullback(torch.tensor([1.0, poison], dtype=torch.float64))[1].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@every_kind
def test_the_direction_has_the_shapes_of_params_in_at_least_float32(kind, dtype):
    case = kind(mlp())
    params, args = _pytree.tree_map(lambda x: x.to(dtype), (case.params, case.args))
    direction, _ = weighted_fn(case.losses)(params, *args)[1](weights_for(case))
    assert [x.shape for x in leaves(direction)] == [x.shape for x in leaves(params)]
    assert {x.dtype for x in leaves(direction)} == {torch.promote_types(dtype, torch.float32)}
    found = [x.double().reshape(-1) for x in leaves(direction)]
    same(found, expectation(case)[1], rtol=0.05, atol=0.5 if dtype.itemsize == 2 else 1e-5)


@every_kind
def test_the_pullback_can_be_called_again_with_the_same_bits(kind):
    case = kind(mlp())
    before = [x.clone() for x in leaves(case.params)]
    weights = weights_for(case)
    _, pullback = weighted_fn(case.losses)(case.params, *case.args)
    first, other, second = pullback(weights)[0], pullback(weights + 1)[0], pullback(weights, last=True)[0]
    assert all(torch.equal(x, y) for x, y in zip(leaves(first), leaves(second), strict=True))
    assert not all(torch.equal(x, y) for x, y in zip(leaves(first), leaves(other), strict=True))
    assert all(torch.equal(x, y) for x, y in zip(leaves(case.params), before, strict=True))


def test_the_last_call_frees_what_the_forward_pass_saved():
    _, pullback = weighted_fn(lambda p, x: torch.tanh(x @ p).square().sum(0))(numbers(3, 2), numbers(4, 3, seed=1))
    pullback(WEIGHTS[:2])
    _, finite = pullback(WEIGHTS[:2], last=True)
    assert finite
    with pytest.raises(RuntimeError, match="second time"):
        pullback(WEIGHTS[:2])


@every_kind
def test_one_backward_pass_is_all_it_costs(kind):
    case = kind(mlp((64, 64, 3)))
    with FlopCounterMode(display=False) as forward:
        case.losses(case.params, *case.args)
    with FlopCounterMode(display=False) as all_of_it:
        weighted_fn(case.losses)(case.params, *case.args)[1](weights_for(case))
    assert forward.get_total_flops() > 0
    assert (
        all_of_it.get_total_flops() <= 3 * forward.get_total_flops()
    )  # forward, and two products for each on the way back


@every_kind
def test_derivatives_in_params_and_weights_are_those_of_finite_differences(kind):
    case = kind(mlp())
    weights = weights_for(case)
    tangent = _pytree.tree_map(lambda x: numbers(*x.shape, seed=5), (case.params, weights))

    def f(params, weights):
        return _pytree.tree_map(
            torch.sin, direction_of(case, params, weights, scale=scale_state(8.0, shape=len(WEIGHTS[: len(weights)])))
        )

    f64 = lambda params, weights: direction_of(case, params, weights)
    for g in (f64, f):
        at, zero = (lambda t, g=g: flat(g(*moved((case.params, weights), tangent, t)))), torch.zeros(()).double()
        check_derivatives(flat(torch.func.jvp(g, (case.params, weights), tangent)[1]), at, zero)
        probes = [torch.ones_like(x) for x in leaves(g(case.params, weights))]
        asking = _pytree.tree_map(lambda x: x.clone().requires_grad_(), (case.params, weights))
        slopes = torch.autograd.grad(leaves(g(*asking)), leaves(asking), probes)
        total = sum((s * v).sum() for s, v in zip(slopes, leaves(tangent), strict=True))
        check_derivatives(total, lambda t, at=at: at(t).sum(), zero)
        pulled = torch.func.grad(lambda a, g=g: sum(x.sum() for x in leaves(g(*a))))((case.params, weights))
        check_same(leaves(pulled), [s.detach() for s in slopes])


@every_kind
def test_weights_alone_can_be_differentiated(kind):
    case = kind(mlp())
    weights = weights_for(case).clone().requires_grad_()
    direction, _ = weighted_fn(case.losses)(case.params, *case.args)[1](weights)
    shared = direction["shared"] if kind is tasks else direction
    (slope,) = torch.autograd.grad(sum(x.sum() for x in leaves(shared)), weights)
    rows = rows_of(case.losses, case.params, *case.args)
    rows = rows[len(leaves(case.params["heads"])) :] if kind is tasks else rows
    torch.testing.assert_close(slope, sum(r.reshape(len(r), -1).sum(1) for r in rows))


def test_weights_of_another_form_are_refused():
    pullback = weighted_fn(lambda w: w)(torch.ones(3))[1]
    with pytest.raises(ValueError, match=r"one tensor \[3\].*found torch.float64 \[2\]"):
        pullback(torch.ones(2, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"found dict.*need the Jacobian"):
        pullback({"w": torch.ones(3)})


def test_what_a_loss_learns_of_the_graph_is_what_a_loop_over_the_examples_says():
    seen = []

    def loss(p, x):
        own = torch.vmap(lambda e: seen.append(e.requires_grad) or (e * p).sum())(x[None])
        with torch.no_grad():
            seen.append((x * p).requires_grad)
        seen.extend([x.requires_grad, p.requires_grad, (x * p).requires_grad])
        return own.sum()

    p = numbers(3)
    weighted_fn(per_example(loss))(p, numbers(BATCH, 3))
    together = seen.copy()
    seen.clear()
    loss(p.requires_grad_(), numbers(3))
    assert together == seen


@pytest.mark.filterwarnings("ignore::functional_jd.SlowPathWarning")
def test_a_loss_that_freezes_a_parameter_freezes_it_for_its_own_example_alone():
    x, params = numbers(2, 4), {"actor": numbers(4, 2), "critic": numbers(2, 2)}

    def loss(p, x):
        own = (x[2:] @ p["critic"]).square().sum()
        p["critic"].requires_grad_(False)  # a loop over the examples follows, as vmap refuses this
        return own + (x @ p["actor"] @ p["critic"]).sum()

    plain = lambda p: (x[:, 2:] @ p["critic"]).square().sum() + (x @ p["actor"] @ p["critic"].detach()).sum()
    direction, _ = weighted_fn(per_example(loss))(params, x)[1](torch.ones(2))
    check_same(direction, torch.func.grad(plain)(params))
