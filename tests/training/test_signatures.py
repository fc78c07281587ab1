"""What is said where losses or a step do not take what a batch holds."""

from functools import partial, wraps
from typing import NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader

import functional_jd as fj

X = torch.ones(4, 3)
W = {"w": torch.ones(3)}
METHOD = {"aggregator": fj.upgrad(), "optimizer": fj.sgd(0.1)}
SPREAD = r"If the batch is a tuple, spread it: \*batch; a dict is one argument"


def losses(params, x, y):
    return {"a": (params["w"] * x).sum(), "b": (params["w"] * y).square().sum()}


def carrying(params, buffers, x, label, depth):
    return losses(params, x, label + depth), buffers


MISTAKES = {
    "a tuple": ((X, X), "one argument, a tuple: losses.. missing 1 required .* 'y'"),
    "a list": ([X, X], "one argument, a list: losses.. missing 1 required .* 'y'"),
    "a dict": ({"x": X, "y": X}, "one argument, a dict: losses.. missing 1 required .* 'y'"),
}


@pytest.mark.parametrize(("batch", "words"), MISTAKES.values(), ids=MISTAKES)
@pytest.mark.parametrize("wrap", [lambda f: f, fj.autocast, lambda f: partial(f)], ids=["plain", "autocast", "partial"])
def test_a_batch_that_was_not_spread_is_told_where_training_starts(batch, words, wrap):
    with pytest.raises(TypeError, match=rf"^train_state: expected a batch of 'x', 'y', .* found {words}\. {SPREAD}"):
        fj.train_state(W, batch, losses=wrap(losses), **METHOD)


@pytest.mark.parametrize(("batch", "words"), MISTAKES.values(), ids=MISTAKES)
def test_a_batch_that_was_not_spread_is_told_in_a_step(batch, words):
    how = METHOD | {"losses": losses}
    state = fj.train_state(W, X, X, **how)
    with pytest.raises(TypeError, match=rf"^step: expected a batch of 'x', 'y', .* found {words}\. {SPREAD}"):
        fj.step(state, batch, **how)
    with pytest.raises(TypeError, match=rf"found {words}\. {SPREAD}"):
        fj.fit(partial(fj.step, **how), state, [[batch]])


@pytest.mark.parametrize("batch", [(X, X, X), [X, X, X], {"x": X, "label": X, "depth": X}])
def test_a_batch_beside_buffers_that_was_not_spread_is_told(batch):
    how, buffers = METHOD | {"losses": carrying}, {"n": torch.zeros(())}
    words = rf"expected a batch of 'x', 'label', 'depth', .* after 'params' and 'buffers', found one .*\. {SPREAD}"
    with pytest.raises(TypeError, match=f"^train_state: {words}"):
        fj.train_state(W, batch, buffers=buffers, **how)
    state = fj.train_state(W, X, X, X, buffers=buffers, **how)
    with pytest.raises(TypeError, match=f"^step: {words}"):
        fj.step(state, batch, **how)


def test_a_loader_of_dicts_is_told_what_the_losses_take():
    how = METHOD | {"losses": losses}
    loader = DataLoader([{"x": x, "y": x} for x in X], batch_size=2)
    with pytest.raises(TypeError, match=rf"^step: expected a batch of 'x', 'y', .* a dict: .*\. {SPREAD}") as stopped:
        fj.fit(partial(fj.step, **how), fj.train_state(W, X, X, **how), loader)
    assert isinstance(stopped.value.state, fj.TrainState)


@pytest.mark.parametrize("start", [True, False])
def test_arguments_too_many_or_too_few_are_counted(start):
    how = METHOD | {"losses": losses}
    call = partial(fj.train_state if start else fj.step, W if start else fj.train_state(W, X, X, **how), **how)
    where = "train_state" if start else "step"
    with pytest.raises(TypeError, match=f"^{where}: expected a batch of 'x', 'y', .*'params', found 3 arguments: "):
        call(X, X, X)
    with pytest.raises(TypeError, match=f"^{where}: expected a batch of 'x', 'y', .* found 0 arguments: .* missing 2"):
        call()
    tasks = METHOD | {"losses": fj.multitask(lambda shared, x: x @ shared["w"], lambda own, h, x: (h * own).sum())}
    both = {"shared": W, "heads": torch.ones(4)}
    arguments = both if start else fj.train_state(both, X, **tasks)
    with pytest.raises(TypeError, match=f"^{where}: expected a batch of 'x', as .* 'shared', found 2 arguments: "):
        (fj.train_state if start else fj.step)(arguments, X, X, **tasks)


def failing(params, x, y):
    def inner(z, u):
        return z + u

    return inner(x)


def longer(params, x, y, z):
    return losses(params, x, y)


@wraps(longer)
def given_more(params, x, y):
    return failing(params, x, y)


@pytest.mark.parametrize("inside", [failing, given_more, fj.autocast(failing), lambda p, *batch: failing(p, *batch)])
def test_an_error_from_inside_the_losses_is_their_own(inside):
    state = fj.train_state(W, X, X, losses=losses, **METHOD)
    for call in (partial(fj.train_state, W), partial(fj.step, state)):
        with pytest.raises(TypeError, match=r"^failing.<locals>.inner\(\) missing 1 .* argument: 'u'$"):
            call(X, X, losses=inside, **METHOD)


def test_losses_that_were_entered_are_not_told_what_they_take():
    """Their signature is that of what they wrap, which takes something else."""

    @wraps(longer)
    def shorter(params, x, y):
        return losses(params, x, y)

    state = fj.train_state(W, X, X, losses=shorter, **METHOD)
    assert fj.step(state, X, X, losses=shorter, **METHOD)[1].moved


def carrying_tasks():
    """A trunk that takes any number of arguments, and heads that count theirs, both with buffers."""

    def trunk(shared, state, x, *labels):
        return state["gain"] * x @ shared["w"], state

    def heads(own, h, state, x, y):
        return {"a": (h * own).sum(), "b": (h - y[:, 0]).square().sum()}, state

    return trunk, heads


@pytest.mark.parametrize("wrap", [lambda f: f, lambda f: fj.autocast(f, torch.bfloat16)], ids=["plain", "autocast"])
def test_losses_that_take_anything_are_told_of_the_buffers_that_they_did_not_receive(wrap):
    trunk, heads = carrying_tasks()
    params, buffers = {"shared": W, "heads": torch.ones(4)}, {"gain": torch.ones(())}
    tasks = wrap(fj.multitask(trunk, heads))
    words = (
        r"(?s)^too many indices.*no buffers were passed, and the losses received the batch as 'state', after params\."
    )
    with pytest.raises(IndexError, match=rf"{words} If these are buffers, pass buffers=dict\("):
        fj.train_state(params, X, X, losses=tasks, **METHOD)
    assert fj.train_state(params, X[:1].expand(4, 3), X[:1].expand(4, 3), buffers=buffers, losses=tasks, **METHOD)
    plain = wrap(lambda params, state, *batch: (losses(params, *batch[: int(state["count"])]), state))
    with pytest.raises(IndexError, match=words):
        fj.train_state(W, X, X, losses=plain, **METHOD)


def test_heads_that_take_one_argument_more_are_told_of_buffers():
    _, heads = carrying_tasks()
    tasks = fj.multitask(lambda shared, *batch: batch[0] @ shared["w"], heads)
    both = {"shared": W, "heads": torch.ones(4)}
    with pytest.raises(
        TypeError, match=r"(?s)heads\(\) missing 1 .*no buffers were passed, and the heads take one argum"
    ):
        fj.train_state(both, X, X, losses=tasks, **METHOD)


@pytest.mark.parametrize(
    "first", [lambda p, x, y: x["name"], lambda p, *batch: batch[0]["name"]], ids=["counted", "unnamed"]
)
def test_an_error_is_no_sign_of_buffers_where_every_argument_is_of_the_batch(first):
    with pytest.raises(IndexError) as raised:
        fj.train_state(W, X, X, losses=first, **METHOD)
    assert not getattr(raised.value, "__notes__", [])
    state = fj.train_state(W, X, X, losses=losses, **METHOD)
    with pytest.raises(IndexError) as raised:
        fj.step(state, X, X, losses=lambda p, x, *batch: x["name"], **METHOD)
    assert not getattr(raised.value, "__notes__", [])
    with pytest.raises(KeyError) as raised:
        fj.train_state(W, X, X, buffers={"n": X}, losses=lambda p, buffers, *batch: buffers["m"], **METHOD)
    assert not getattr(raised.value, "__notes__", [])


def test_a_step_without_its_method_is_told_to_be_bound():
    state = fj.train_state(W, X, X, losses=losses, **METHOD)
    words = r"^{}: expected a step .* takes 'losses', 'aggregator', 'optimizer' too\. Bind .* functools\.partial"
    with pytest.raises(TypeError, match=words.format("fit")) as stopped:
        fj.fit(fj.step, state, [(X, X)])
    assert stopped.value.state is state
    with pytest.raises(TypeError, match=words.format("steps")):
        next(iter(fj.steps(fj.step, state, [(X, X)])))


def test_a_step_of_ones_own_is_told_how_batches_are_spread():
    def own(state, batch):
        return fj.step(state, *batch, losses=losses, **METHOD)

    state = fj.train_state(W, X, X, losses=losses, **METHOD)
    with pytest.raises(TypeError, match=r"^fit: expected a step .* 2 of its arguments: .* is spread: .*wrap it"):
        fj.fit(own, state, [(X, X)])
    fj.fit(own, state, [[(X, X)]])
    with pytest.raises(TypeError, match=r"^failing.<locals>.inner\(\) missing"):
        fj.fit(lambda state, x, y: failing(state, x, y), state, [(X, X)])


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


def test_losses_of_a_named_tuple_are_told_to_wrap_it():
    how = METHOD | {"losses": lambda params, batch: losses(params, batch.x, batch.y)}
    state = fj.train_state(W, Pair(X, X), **how)
    with pytest.raises(TypeError, match=r"^step: .* 'batch', .* found 2 arguments: .* or wrap it: \(batch,\)\."):
        fj.fit(partial(fj.step, **how), state, [Pair(X, X)])
    ended = fj.fit(partial(fj.step, **how), state, [(Pair(X, X),)])
    expected, _ = fj.step(state, Pair(X, X), **how)
    torch.testing.assert_close(ended.params, expected.params, rtol=0, atol=0)
    spread = METHOD | {"losses": losses}
    torch.testing.assert_close(fj.fit(partial(fj.step, **spread), state, [Pair(X, X)]).params, expected.params)
