"""Backward passes that lose gradients are refused."""

import pytest
import torch

import functional_jd as fj


class Recomputed(torch.autograd.Function):
    """Runs a function without a graph and again in its backward, as reversible models do."""

    @staticmethod
    def forward(ctx, x, f):
        ctx.f = f
        ctx.save_for_backward(x)
        return f(x)

    @staticmethod
    def backward(ctx, *gradients):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.f(x), *gradients)
        return x.grad, None


PARAMS = {"w": torch.ones(3, 3, dtype=torch.float64), "u": torch.eye(3, dtype=torch.float64)}
BATCH = torch.arange(6.0, dtype=torch.float64).reshape(2, 3)


def loss(params, x):
    return Recomputed.apply(x @ params["u"], lambda h: (h @ params["w"]).tanh()).square().sum()


def losses(params, x):
    return {"a": loss(params, x), "b": loss(params, x + 1)}


def multitask():
    features = lambda shared, x: Recomputed.apply(x @ shared["u"], lambda h: h @ shared["w"])
    heads = lambda own, h, x: {name: (own[name] * h).sum() for name in own}
    return fj.multitask(features, heads), {"shared": PARAMS, "heads": {name: torch.ones(3).double() for name in "ab"}}


KINDS = {"plain": (losses, PARAMS), "examples": (fj.per_example(loss), PARAMS), "multitask": multitask()}


@pytest.mark.filterwarnings("ignore::functional_jd.SlowPathWarning")
@pytest.mark.filterwarnings("ignore:train_state. no loss reaches:UserWarning")  # the graph does not show it
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rule", "engine"), [("upgrad", "jacobian"), ("upgrad", "gramian"), ("mean", "auto")])
def test_a_step_refuses_a_backward_pass_that_adds_to_the_leaves(kind, rule, engine):
    objective, params = KINDS[kind]
    how = {"losses": objective, "aggregator": getattr(fj, rule)(), "optimizer": fj.sgd(0.1)}
    with pytest.raises(ValueError, match=r"^(train_state|step): .* torch\.autograd\.backward"):
        fj.step(fj.train_state(params, BATCH, **how), BATCH, engine=engine, **how)


@pytest.mark.parametrize("take", [fj.jacobian_fn, fj.gramian_fn])
def test_the_error_names_the_function_that_was_called(take):
    with pytest.raises(ValueError, match=f"^{take.__name__}: "):
        take(losses)(PARAMS, BATCH)
    assert all(p.grad is None for p in PARAMS.values())


@pytest.mark.parametrize("engine", ["jacobian", "gramian", "weighted"])
@pytest.mark.parametrize("freeze", [lambda x: x.requires_grad_(False), lambda x: setattr(x, "requires_grad", False)])
def test_a_parameter_that_losses_leave_frozen_has_the_gradient_of_what_came_before(freeze, engine):
    """As a discriminator stays for the loss of the generator, until its own turn comes."""

    def losses(params):
        real = (BATCH @ params["w"]).square().mean()
        freeze(params["w"])
        return {"real": real, "fake": (BATCH @ params["u"] @ params["w"]).mean()}

    points = {name: x.clone().requires_grad_() for name, x in PARAMS.items()}
    real = (BATCH @ points["w"]).square().mean()
    fake = (BATCH @ points["u"] @ PARAMS["w"]).mean()
    expected = torch.autograd.grad(real + fake, list(points.values()))
    rule = fj.total()
    how = {"losses": losses, "aggregator": rule, "optimizer": fj.sgd(1.0), "engine": engine}
    if engine == "gramian":
        how["aggregator"] = fj.aggregation.Aggregator(fj.views.gramian, rule.init, lambda view, s: (torch.ones(2), s))
    after, _ = fj.step(fj.train_state(PARAMS, **how), **how)
    for x, y, g in zip(PARAMS.values(), after.params.values(), expected, strict=True):
        torch.testing.assert_close(x - y, g)
