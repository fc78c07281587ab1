"""Image models of timm, beside an ordinary loop."""

import pytest
from inputs import classes, library, numbers
from plain_loops import ADAMW, N_STEPS, SGD, Problem, by_rule, check_trains_alike
from torch.nn.functional import cross_entropy, mse_loss

import functional_jd as fj


def convnext(drop_path=0.1):
    timm = library("timm")
    sizes = {"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 16), "num_classes": 4}

    def losses(net, x, label, size):
        out = net(x)
        return {"class": cross_entropy(out[:, :3], label), "size": mse_loss(out[:, 3], size)}

    batches = zip(numbers(N_STEPS, 4, 3, 32, 32), classes(N_STEPS, 4, 3), numbers(N_STEPS, 4), strict=True)
    make = lambda: timm.models.ConvNeXt(drop_path_rate=drop_path, **sizes)
    return Problem(make, losses, list(batches), draws=drop_path > 0)


@pytest.mark.parametrize(
    ("optimizers", "compiled"),
    [(SGD, False), (ADAMW, False), pytest.param(SGD, True, marks=pytest.mark.slow)],
    ids=["sgd", "adamw", "compiled"],
)
def test_convnext_trains_as_an_ordinary_loop(optimizers, compiled):
    check_trains_alike(convnext(), optimizers, compiled=compiled)


@pytest.mark.parametrize("engine", ["jacobian", "gramian"])
def test_convnext_trains_by_rows_as_rows_of_an_ordinary_loop(engine):
    check_trains_alike(convnext(), SGD, fj.upgrad(), by_rule(fj.upgrad()), engine=engine)
