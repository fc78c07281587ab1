"""What changes gradients on their way past a recorded layer, which is then not recorded."""

import pytest
import torch

import functional_jd as fj

EPS = torch.finfo(torch.float64).eps
X = torch.arange(1.0, 9.0, dtype=torch.float64).reshape(2, 4).sin()


def on_parameter(w):
    if w.requires_grad:
        w.register_hook(lambda g: 3 * g)
    return X @ w


def on_view(w):
    view = w.t().mT
    if view.requires_grad:
        view.register_hook(lambda g: 3 * g)
    return X @ view


def before_node(w):
    h = X @ w
    if h.grad_fn is not None:
        h.grad_fn.register_prehook(lambda gradients: tuple(3 * g for g in gradients))
    return h


def after_node(w):
    h = X @ w
    if h.grad_fn is not None:
        h.grad_fn.register_hook(lambda gradients, _: tuple(g if g is None else 3 * g for g in gradients))
    return h


HOOKS = (on_parameter, on_view, before_node, after_node)


@pytest.mark.parametrize("hooked", HOOKS)
def test_hooks_beside_recorded_layers_act(hooked):
    """The row of `sum(c h)` is `3 X' c`, whatever the way."""
    c = torch.stack([X[:, :2].cos(), X[:, 2:]])
    params = {"w": torch.ones(4, 2, dtype=torch.float64)}
    losses = lambda params: (hooked(params["w"]) * c).sum((1, 2))
    with pytest.warns(fj.SlowPathWarning, match="hook"):
        gramian, _, pullback = fj.gramian_fn(losses)(params)
    rows = 3 * (X.mT @ c).flatten(1)
    terms = 3 * (X.abs().mT @ c.abs()).flatten(1)
    # Two products of a row, four of an inner product, and as many sums.
    assert ((gramian - rows @ rows.T).abs() <= 32 * EPS * terms @ terms.T).all()
    assert ((pullback(torch.ones(2))[0]["w"].flatten() - rows.sum(0)).abs() <= 32 * EPS * terms.sum(0)).all()


@pytest.mark.parametrize("shape", [(1,), (3, 2), ()])
def test_a_bias_that_torch_broadcasts_is_not_recorded(shape):
    params = {"w": torch.ones(2, 4, dtype=torch.float64), "b": torch.ones(shape, dtype=torch.float64)}
    x = torch.cat([X, X[:1]])
    losses = lambda params: torch.nn.functional.linear(x, params["w"], params["b"]).flatten()
    gramian, _, _ = fj.gramian_fn(losses)(params)
    rows = fj.jacobian_fn(losses, mode="loop")(params)[0]
    flat = torch.cat([row.reshape(len(row), -1) for row in rows.values()], 1)
    assert ((gramian - flat @ flat.T).abs() <= 16 * EPS * flat.abs() @ flat.abs().T).all()


def frozen_by_attribute(tensors, wanted):
    for x in tensors:
        x.requires_grad = wanted


def frozen_by_method(tensors, wanted):
    for x in tensors:
        x.requires_grad_(wanted)


FREEZES = (frozen_by_attribute, frozen_by_method)


@pytest.mark.parametrize("fn", [fj.gramian_fn, fj.squared_norms_fn])
@pytest.mark.parametrize("freeze", FREEZES)
def test_a_parameter_that_is_frozen_for_one_loss_has_no_gradient_there(freeze, fn):
    """As a critic is for the loss of the actor, and a discriminator for that of the generator."""
    params = {"actor": X.mT @ X[:, :2], "critic": X[:, 1:3]}

    def losses(params):
        critic = params["critic"]
        freeze([critic], False)
        actor = (X @ params["actor"] @ critic).sum()
        freeze([critic], True)
        return {"actor": actor, "critic": (X[:, 2:] @ critic).square().sum()}

    check_frozen(fn, losses, params, ())


@pytest.mark.filterwarnings("ignore::functional_jd.SlowPathWarning")
@pytest.mark.parametrize("fn", [fj.gramian_fn, fj.squared_norms_fn])
@pytest.mark.parametrize("freeze", FREEZES)
def test_a_parameter_that_is_frozen_for_a_part_of_an_examples_loss_has_no_gradient_there(freeze, fn):
    params = {"actor": X.mT @ X[:, :2], "critic": X[:, 1:3]}

    def loss(params, x):
        critic = params["critic"]
        freeze([critic], False)
        actor = (x @ params["actor"] @ critic).sum()
        freeze([critic], True)
        return actor + (x[:2] @ critic).square().sum()

    check_frozen(fn, fj.per_example(loss), params, (X,))


def check_frozen(fn, losses, params, batch):
    products, _, pullback = fn(losses)(params, *batch)
    points = {name: p.clone().requires_grad_() for name, p in params.items()}
    values = [losses.loss(points, x) for x in batch[0]] if batch else list(losses(points).values())
    rows = [torch.autograd.grad(y, list(points.values()), retain_graph=True, materialize_grads=True) for y in values]
    rows = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
    expected = rows @ rows.T
    torch.testing.assert_close(products, expected if fn is fj.gramian_fn else expected.diagonal())
    found = pullback(torch.ones(2))[0]
    torch.testing.assert_close(torch.cat([found[name].flatten() for name in params]), rows.sum(0))
