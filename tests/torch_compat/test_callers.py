"""Errors begin with the public function that the user called, wherever in the package they are raised."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import functional_jd as jd

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
