"""A skipped step is the identity to derivatives: those of a training with skipped steps are those without them."""

from functools import partial

import pytest
import torch
from bounds import check_same, check_within, eps
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

import functional_jd as jd

W = torch.tensor([0.3, -0.2], dtype=torch.float64)
GOOD = torch.tensor([[1.0, 0.7], [0.5, -0.9]], dtype=torch.float64)
BAD = torch.tensor([1e200, 1.0], dtype=torch.float64)  # whose square is infinite


def losses(w, x):
    h = (x * w).tanh()
    return torch.stack([(h.sum() - 1).square() + (x * w).square().sum(), (h * h + w).exp().sum() / 2])


def halves(w, x, dtype=torch.float16):
    h = (x.to(dtype) * w.to(dtype)).tanh()
    return torch.stack([(h.sum() - 1).square(), (h * h).sum()])


def ended(w, batches, lr=0.1, rule=jd.mgda, builder=lambda lr: jd.sgd(lr, momentum=0.9)):
    """The parameters after a step on each batch."""
    method = {"losses": losses, "aggregator": rule(), "optimizer": builder(lr)}
    state = jd.train_state(w, GOOD[0], **method)
    for x in batches:
        state, _ = jd.step(state, x, **method)
    return state.params


def cubed(*args, **kwargs):
    return ended(*args, **kwargs).pow(3).sum()


def summed(*args, **kwargs):  # no second derivative of its own
    return ended(*args, **kwargs).sum()


def reported(w, batches, engine):
    """What the steps that moved report, and where they end."""
    method = {"losses": losses, "aggregator": jd.natural_gradient(0.5), "optimizer": jd.sgd(0.1), "engine": engine}
    state, total = jd.train_state(w, GOOD[0], **method), 0
    for x in batches:
        state, info = jd.step(state, x, **method)
        total = total + torch.where(info.moved, info.losses.sum() + info.weights.sum(), 0)
    return state.params.pow(3).sum() + total


TRAININGS = {"cubed": cubed, "summed": summed}
TRAININGS |= {engine: partial(reported, engine=engine) for engine in ("jacobian", "gramian")}
DERIVATIVES = {
    "grad": grad,
    "jacfwd": jacfwd,
    "hessian": hessian,
    "reverse over reverse": lambda f: jacrev(grad(f)),
    "reverse over forward": lambda f: grad(lambda w: jvp(f, (w,), (torch.ones_like(w),))[1]),
    "vmap": lambda f: lambda w: vmap(grad(f))(torch.stack([w, 2 * w])),
}


@pytest.mark.parametrize("derivative", DERIVATIVES.values(), ids=DERIVATIVES)
@pytest.mark.parametrize("f", TRAININGS.values(), ids=TRAININGS)
def test_derivatives_are_those_of_the_training_without_the_skipped_steps(derivative, f):
    expected = derivative(lambda w: f(w, GOOD))(W)
    found = derivative(lambda w: f(w, [BAD, GOOD[0], BAD, GOOD[1]]))(W)
    check_same(found, expected)
    assert expected.abs().sum() > 0


@pytest.mark.parametrize("f", [cubed, summed])
def test_members_of_a_vmap_skip_each_for_itself(f):
    batches = torch.stack([BAD, GOOD[0]])

    def member(w, x):
        return f(w, [x, GOOD[1]])

    alone = [lambda w: f(w, GOOD[1:]), lambda w: f(w, GOOD)]
    for derivative in (grad, hessian):
        expected = torch.stack([derivative(one)(W) for one in alone])
        check_same(vmap(derivative(member), (None, 0))(W, batches), expected)
        check_same(derivative(lambda w: vmap(member, (None, 0))(w, batches).sum())(W), expected.sum(0))
    starts = torch.stack([W, 2 * W]).requires_grad_()  # the graph is outside of vmap
    expected = torch.stack([grad(one)(start) for one, start in zip(alone, (W, 2 * W), strict=True)])
    check_same(torch.autograd.grad(vmap(member)(starts, batches).sum(), starts)[0], expected)


@pytest.mark.parametrize(("rule", "builder"), [(jd.upgrad, jd.adamw), (jd.mean, jd.sgd)])
def test_derivatives_are_finite_differences(rule, builder):
    def f(w, lr):
        return cubed(w, [BAD, *GOOD, BAD], lr, rule, builder)

    inputs = W.clone().requires_grad_(), torch.tensor(0.05, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(f, inputs)
    (by_autograd,) = torch.autograd.grad(f(*inputs), inputs[1])
    check_same(grad(f, 1)(*inputs).detach(), by_autograd)
    alone = (cubed(W, batches, inputs[1], builder=builder) for batches in ([BAD, GOOD[0]], GOOD[:1]))
    check_same(*(torch.autograd.grad(value, inputs[1])[0] for value in alone))  # the rate alone requires grad


def test_what_a_skipped_step_reports_has_its_own_derivatives():
    method = {"losses": halves, "aggregator": jd.mean(), "optimizer": jd.sgd(0.1)}
    x = GOOD[0].float()
    state = jd.train_state(W.float(), x, scale=jd.scale_state(2.0**20), **method)

    def reported(w):
        _, info = jd.step(state._replace(params=w), x, **method)
        return info.losses[0], info.moved

    found, moved = grad(reported, has_aux=True)(W.float())
    assert not moved
    assert torch.equal(found, grad(lambda w: halves(w, x)[0])(W.float()))


@pytest.mark.parametrize("engine", ["jacobian", "gramian", "weighted"])
def test_an_unrolled_training_in_float16_that_starts_by_skipping(engine):
    rule = jd.mean() if engine == "weighted" else jd.upgrad()
    method = {"losses": halves, "aggregator": rule, "optimizer": jd.adamw(0.1)}
    x = GOOD[0].float()

    def f(w, scale, steps):
        state, moved = jd.train_state(w, x, scale=jd.scale_state(scale), **method), []
        for _ in range(steps):
            state, info = jd.step(state, x, engine=engine, **method)
            moved.append(info.moved)
        return state.params.square().sum(), moved

    found, moved = grad(f, has_aux=True)(W.float(), 2.0**17, 5)
    skipped = moved.index(True)
    expected, _ = grad(f, has_aux=True)(W.float(), 2.0 ** (17 - skipped), 5 - skipped)
    assert 0 < skipped < 4
    assert torch.equal(found, expected)
    assert expected.isfinite().all()


def test_forward_mode_in_float16_asks_for_a_smaller_scale():
    method = {"losses": halves, "aggregator": jd.upgrad(), "optimizer": jd.sgd(0.1)}
    x = GOOD[0].float()

    def stepped(w, losses, exponent):
        state = jd.train_state(w, x, scale=jd.scale_state(2.0**exponent), **method | {"losses": losses})
        state, info = jd.step(state, x, **method | {"losses": losses})
        return state.params, info.moved

    exact, _ = jacrev(lambda w: stepped(w, lambda w, x: halves(w, x, torch.float64), 0), has_aux=True)(W)
    found, moved = jacfwd(lambda w: stepped(w, halves, 10), has_aux=True)(W.float())
    check_within(found, exact, 2 * eps(torch.float16) * max(1, exact.abs().max()))
    lost, still_moved = jacfwd(lambda w: stepped(w, halves, 15), has_aux=True)(W.float())
    assert (moved & still_moved).all()
    assert not lost.isfinite().all()


def test_derivatives_through_a_skipped_step_that_is_traced_are_nan():
    method = {"losses": losses, "aggregator": jd.mgda(), "optimizer": jd.sgd(0.1)}
    once = torch.compile(lambda state, x: jd.step(state, x, **method), backend="eager", fullgraph=True)
    w = W.clone().requires_grad_()
    start = jd.train_state(W, GOOD[0], **method)._replace(params=w)
    torch.compiler.reset()
    for x, is_nan in ((GOOD[0], False), (BAD, True)):
        (slope,) = torch.autograd.grad(once(start, x)[0].params.sum(), w)
        assert slope.isnan().any() == is_nan
