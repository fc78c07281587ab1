"""Fallbacks: announced once per reason, with no trace of the first; errors begin with the function called."""

import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from bounds import check_same
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
from zoo import NumpyCube

import functional_jd as jd
from functional_jd.torch_compat.callers import SlowPathWarning
from functional_jd.torch_compat.slow_path import attempt


class Refusing(torch.autograd.Function):
    """A function without a rule for vmap."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


def fails(message="mine"):
    raise RuntimeError(message)


def test_a_second_attempt_is_announced_with_place_reason_and_price():
    words = r"functional_jd: does it slowly, because test_slow_path\.py:\d+: RuntimeError: mine"
    with pytest.warns(SlowPathWarning, match=words):
        assert attempt(fails, lambda: 3, instead="does it slowly") == 3


def test_a_reason_is_said_once_and_another_again():
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        for message in ("one", "one", "two", "one"):
            attempt(lambda message=message: fails(message), lambda: 3, instead="does it slowly")
    assert [str(w.message).rsplit(" ", 1)[1] for w in seen] == ["one", "two"]
    assert all(w.filename == __file__ for w in seen)


@pytest.mark.parametrize("engine", ["gramian", "jacobian"])
def test_a_checkpoint_around_a_step_ends_its_second_run_when_it_has_what_it_needs(engine):
    method = {"losses": lambda w: w @ w.mT, "aggregator": jd.upgrad(), "optimizer": jd.sgd(0.1)}
    w = torch.tensor([[0.4, -0.3], [0.1, 0.8]], dtype=torch.float64, requires_grad=True)
    state = jd.train_state(w.detach(), **method)

    def stepped(w):
        return jd.step(state._replace(params=w), engine=engine, **method)[0].params.exp().sum()

    for f in (stepped, lambda w: stepped(w).sin()):
        (expected,) = torch.autograd.grad(f(w), w)
        (found,) = torch.autograd.grad(checkpoint(f, w, use_reentrant=False), w)
        assert torch.equal(found, expected)


def test_an_error_of_the_losses_themselves_comes_back_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeError, match="second") as caught:
            attempt(fails, lambda: fails("second"), instead="does it slowly")
    assert caught.value.__context__ is None


def out_of_memory_on_a_cpu():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50)
    return caught.value


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("mine"), KeyboardInterrupt(), out_of_memory_on_a_cpu()])
def test_out_of_memory_and_interruptions_are_never_swallowed(error):
    def stops():
        raise error

    with pytest.raises(type(error)):
        attempt(stops, lambda: 3, instead="does it slowly")


def norm_and_derivative():
    """A net with running statistics whose losses contain a derivative, which the Gramian engine cannot record."""
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).double()
    params = {name: p.detach() for name, p in net.named_parameters()}

    def losses(params, x):
        x = x.clone().requires_grad_()
        y = functional_call(net, params, (x,))
        slope = torch.autograd.grad(y.sum(), x, create_graph=True)[0]
        return torch.stack([y.square().mean(), slope.square().mean(), (y * nn.functional.dropout(y)).mean()])

    return net, params, losses


def test_losses_that_are_evaluated_again_move_their_buffers_and_draw_their_numbers_once():
    net, params, losses = norm_and_derivative()
    x = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    before = {name: b.clone() for name, b in net.named_buffers()}
    torch.manual_seed(3)
    with torch.enable_grad():
        expected = losses({name: p.clone().requires_grad_() for name, p in params.items()}, x).detach()
    once = {name: b.clone() for name, b in net.named_buffers()}
    draws = torch.get_rng_state()
    net.load_state_dict({**params, **before})
    torch.manual_seed(3)
    with pytest.warns(SlowPathWarning, match=r"gramian_fn: evaluates the losses again and forms all rows"):
        _, values, _ = jd.gramian_fn(losses)(params, x)
    check_same(values, expected)
    assert torch.equal(torch.get_rng_state(), draws)
    for name, buffer in net.named_buffers():
        check_same(buffer, once[name])


@pytest.mark.parametrize("fn", [jd.jacobian_fn, jd.gramian_fn])
def test_examples_that_vmap_refuses_count_their_calls_once(fn):
    calls, w = torch.zeros((), dtype=torch.int64), torch.ones(3)

    def loss(w, x):
        calls.add_(1)
        return Refusing.apply((w * x).sum())

    with pytest.warns(SlowPathWarning, match="test_slow_path.py"):
        fn(jd.per_example(loss))(w, torch.ones(4, 3))
    assert calls == 4


def test_losses_of_examples_called_by_themselves_say_that_vmap_refused():
    with pytest.warns(SlowPathWarning, match=r"per_example: evaluates one example after the other"):
        jd.per_example(lambda w, x: Refusing.apply((w * x).sum()))(torch.ones(3), torch.ones(4, 3))


def checkpointed(rate):
    def loss(w, x):
        hidden = checkpoint(lambda w: nn.functional.dropout(torch.tanh(w * x), rate), w, use_reentrant=False)
        return hidden.square().sum()

    return jd.per_example(loss)


def test_one_backward_pass_never_mixes_the_losses_of_one_draw_with_the_gradient_of_another():
    w, x = torch.ones(3, requires_grad=False), torch.randn(4, 3)
    _, pullback = jd.weighted_fn(checkpointed(0.5))(w, x)
    with pytest.raises(RuntimeError, match=r"weighted_fn: .*draw no random numbers.*engine='jacobian'"):
        pullback(torch.ones(4))
    rows, _ = jd.jacobian_fn(checkpointed(0.5))(w, x)
    assert rows.shape == (4, 3)


def test_one_backward_pass_through_checkpoints_of_examples_says_that_it_evaluates_again():
    w, x = torch.ones(3), torch.randn(4, 3)
    _, pullback = jd.weighted_fn(checkpointed(0.0))(w, x)
    with pytest.warns(SlowPathWarning, match=r"weighted_fn: evaluates the losses again, example by example"):
        direction, _ = pullback(torch.ones(4))
    torch.testing.assert_close(direction, jd.jacobian_fn(checkpointed(0.0))(w, x)[0].sum(0))


def test_what_evaluates_again_follows_the_autocast_of_the_first_time():
    w, x, dtypes = {"w": torch.ones(3, 2)}, torch.randn(4, 3), []

    def loss(params, x):
        hidden = x @ params["w"]
        dtypes.append(hidden.dtype)
        return checkpoint(lambda w: (hidden * w.mean()).tanh(), params["w"], use_reentrant=False).square().sum()

    with torch.autocast("cpu", torch.bfloat16):
        pullback = jd.weighted_fn(jd.per_example(loss))(w, x)[1]
    with pytest.warns(SlowPathWarning, match="weighted_fn: evaluates the losses again"):
        pullback(torch.ones(4))
    assert len(dtypes) > 4
    assert set(dtypes) == {torch.bfloat16}


def test_rows_that_vmap_refuses_say_so():
    losses = lambda w: [NumpyCube.apply(w).sum(), w.sum(), w.sin().sum(), w.cos().sum()]
    with pytest.warns(SlowPathWarning, match=r"jacobian_fn: differentiates one row after the other"):
        jd.jacobian_fn(losses)(torch.ones(3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jd.jacobian_fn(losses, mode="loop")(torch.ones(3))


LOSSES = lambda p, x: (p * x).sum().reshape(1)
NONE = lambda p, x: None
INTEGERS = torch.ones(3, dtype=torch.int64)


def step(losses):
    method = {"aggregator": jd.mean(), "optimizer": jd.sgd(0.1)}
    state = jd.train_state(torch.ones(3), torch.ones(3), losses=LOSSES, **method)
    return jd.step(state, torch.ones(3), losses=losses, **method)


CASES = {
    "a function": ("cagrad", lambda: jd.cagrad(-1.0)),
    "what a function returned": ("jacobian_fn", lambda: jd.jacobian_fn(LOSSES)(INTEGERS, 1.0)),
    "what that returned": ("gramian_fn", lambda: jd.gramian_fn(LOSSES)(torch.ones(3), 1.0)[2](torch.ones(5))),
    "a record": ("sgd", lambda: jd.sgd(0.1).init(INTEGERS)),
    "a rule inside": ("upgrad", lambda: jd.aggregate(jd.upgrad(torch.ones(3)), torch.ones(2, 3))),
    "an engine inside": ("step", lambda: step(NONE)),
    "one in the losses of another": ("jacobian_fn", lambda: step(lambda p, x: jd.jacobian_fn(NONE)(p, x)[0])),
    "under vmap": (
        "weighted_fn",
        lambda: torch.vmap(lambda x: jd.weighted_fn(NONE)(torch.ones(3), x))(torch.ones(2, 3)),
    ),
    "in a thread": ("step", lambda: ThreadPoolExecutor(1).submit(step, NONE).result()),
    "in a generator": ("steps", lambda: next(jd.steps(1, 2, 3))),
}


@pytest.mark.parametrize("case", CASES)
def test_errors_begin_with_the_function_that_was_called(case):
    name, call = CASES[case]
    with pytest.raises((TypeError, ValueError), match=rf"^{name}: "):
        call()
