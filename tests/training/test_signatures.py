"""Notes on errors of losses and steps that do not take what a batch holds."""

import re
from functools import partial
from typing import NamedTuple

import pytest
import torch

import functional_jd as fj

X = torch.ones(4, 3)
W = {"w": torch.ones(3)}
METHOD = {"aggregator": fj.upgrad(), "optimizer": fj.sgd(0.1)}


def losses(params, x, y):
    return {"a": (params["w"] * x).sum(), "b": (params["w"] * y).square().sum()}


def carrying(params, buffers, x, label, depth):
    return losses(params, x, label + depth), buffers


def notes(call):
    """The error that a call raises, in one text with its notes."""
    with pytest.raises(TypeError) as raised:
        call()
    return "\n".join([str(raised.value), *getattr(raised.value, "__notes__", [])])


BATCHES = {"a tuple": ((X, X),), "a dict": ({"x": X, "y": X},), "too many": (X, X, X), "none": ()}


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("wrap", [lambda f: f, fj.autocast, lambda f: partial(f)], ids=["plain", "autocast", "partial"])
def test_a_note_has_what_the_losses_take_and_receive(batch, wrap):
    how = METHOD | {"losses": wrap(losses)}
    state = fj.train_state(W, X, X, **how)
    received = rf"losses\(params, x, y\) received params and {len(batch)} arguments of the batch\. Spread"
    for where, call in (("train_state", partial(fj.train_state, W)), ("step", partial(fj.step, state))):
        assert re.search(rf"losses\(\) (missing|takes) .*\n{where}: {received}", notes(partial(call, *batch, **how)))


def test_a_note_counts_buffers_and_names_them_if_there_are_none():
    how, buffers = METHOD | {"losses": carrying}, {"n": torch.zeros(())}
    call = partial(fj.train_state, W, (X, X, X), **how)
    assert "received params, buffers and 1 arguments of the batch" in notes(partial(call, buffers=buffers))
    assert "if the losses take buffers, pass buffers=dict(module.named_buffers())" in notes(call)


def test_an_error_from_inside_the_losses_has_no_note():
    def failing(params, x, y):
        return (lambda z, u: z + u)(x)

    state = fj.train_state(W, X, X, losses=losses, **METHOD)
    for call in (partial(fj.train_state, W), partial(fj.step, state)):
        assert notes(partial(call, X, X, losses=failing, **METHOD)).endswith("argument: 'u'")


def test_a_step_without_its_method_or_with_a_whole_batch_has_a_note():
    state = fj.train_state(W, X, X, losses=losses, **METHOD)
    own = lambda state, batch: fj.step(state, *batch, losses=losses, **METHOD)
    words = r"{}: step\(state, .*\) received the state and 2 arguments .*Bind .*functools\.partial.*wrap it: \(batch,\)"
    for where, run in (("fit", fj.fit), ("steps", lambda *args: list(fj.steps(*args)))):
        for step in (fj.step, own):
            assert re.search(words.format(where), notes(partial(run, step, state, [(X, X)])))
    fj.fit(own, state, [[(X, X)]])


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


def test_losses_of_a_named_tuple_take_it_wrapped():
    how = METHOD | {"losses": lambda params, batch: losses(params, batch.x, batch.y)}
    state = fj.train_state(W, Pair(X, X), **how)
    assert "received params and 2 arguments" in notes(lambda: fj.fit(partial(fj.step, **how), state, [Pair(X, X)]))
    ended = fj.fit(partial(fj.step, **how), state, [(Pair(X, X),)])
    expected, _ = fj.step(state, Pair(X, X), **how)
    torch.testing.assert_close(ended.params, expected.params, rtol=0, atol=0)
    spread = METHOD | {"losses": losses}
    torch.testing.assert_close(fj.fit(partial(fj.step, **spread), state, [Pair(X, X)]).params, expected.params)
