"""Squared norms against rows multiplied out: every mixture of factors, every model, price, scale and transform."""

import pytest
import torch
from bounds import check_stable, check_within, eps
from gramian_by_hand import F, Largest, expectation, single, weights_for
from jacobian_by_hand import KINDS, case_of, leaves
from torch.utils import _pytree
from zoo import MODELS, Case, mlp, numbers

from functional_jd import gramian_fn, squared_norms_fn
from functional_jd.engines.gramian import products
from functional_jd.engines.kinds import kind as from_rows
from functional_jd.objectives import per_example
from functional_jd.torch_compat.callers import here

# Slow operators are no errors.
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")


def priced(patch, lean):
    patch.setattr(products, "position_norms_are_cheaper", lambda *_: lean)


# Model by model


def found(case, **how):
    torch.manual_seed(0)
    squares, _, pullback = squared_norms_fn(case.losses, **how)(case.params, *case.args)
    assert squares.dtype == torch.float64
    return squares, [x.double().reshape(-1) for x in leaves(pullback(weights_for(case))[0])]


def agree(result, expected, weights, dtype=torch.float64):
    """Entries of a row are a few hundred roundings of its length off. `dtype`: the least precise in the model."""
    (squares, direction), (gramian, true_direction) = result, expected
    check_within(squares, gramian.diagonal(), 2**10 * eps(dtype) * gramian.diagonal())
    true_direction = torch.cat(true_direction)
    lengths = weights.abs() @ gramian.diagonal().sqrt() + true_direction.norm()  # the last for heads, without rows here
    check_within(torch.cat(direction), true_direction, 2**10 * eps(dtype) * lengths)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["mlp", "tied", "reused", "conv2d", "layer_norm", "embedding", "encoder"])
def test_norms_in_float32_are_right_to_one_in_a_million(name, kind, monkeypatch):
    """With tied weights too."""
    case = single(case_of(name, kind))
    wide_case = _pytree.tree_map(lambda x: x.double() if x.is_floating_point() else x, (case.params, case.args))
    expected = expectation(case._replace(params=wide_case[0], args=wide_case[1]))[0].diagonal().sqrt()
    for lean in (True, False):
        priced(monkeypatch, lean)
        norms = found(case)[0].sqrt()
        assert ((norms - expected).abs() / expected).max() <= 16 * eps(torch.float32)


def test_an_embedding_that_is_the_output_layer_too_needs_no_rows():
    params = {"table": numbers(512, 16)}

    def loss(p, tokens):
        return torch.tanh(F.linear(F.embedding(tokens, p["table"]).tanh(), p["table"])).square().mean()

    case = Case(params, per_example(loss), (torch.randint(512, (6, 3), generator=torch.Generator().manual_seed(0)),))
    rows = torch.cat([r.flatten(1) for r in rows_of_examples(case)], 1)
    with Largest() as largest:
        squares, _, pullback = squared_norms_fn(case.losses)(case.params, *case.args)
        direction, _ = pullback(torch.ones(6, dtype=torch.float64))
    assert largest.numel < 6 * 512 * 16
    agree((squares, [direction["table"].flatten()]), (rows @ rows.mT, [rows.sum(0)]), torch.ones(6).double())


def rows_of_examples(case):
    """Example by example."""
    points = _pytree.tree_map(lambda x: x.clone().requires_grad_(), case.params)
    each = [case.losses.loss(points, *(arg[i] for arg in case.args)) for i in range(len(case.args[0]))]
    gradients = [torch.autograd.grad(value, leaves(points)) for value in each]
    return [torch.stack(column) for column in zip(*gradients, strict=True)]


@pytest.mark.parametrize("kind", KINDS)
def test_no_inner_products_of_different_rows_are_formed(kind, monkeypatch):
    case = case_of("mlp", kind)
    expected = expectation(case)
    fail = lambda *_: pytest.fail("formed the Gramian")
    monkeypatch.setattr("functional_jd.engines.gramian.products._inner_products", fail)
    monkeypatch.setattr("functional_jd.engines.gramian.products.inner_products", fail)
    agree(found(case), expected, weights_for(case))


# Transforms


def small(kind):
    return KINDS[kind](mlp((2, 3, 3)))


ways = pytest.mark.parametrize(
    ("take", "lean"), [(squared_norms_fn, True), (squared_norms_fn, False), (gramian_fn, True)]
)


@ways
@pytest.mark.parametrize("kind", KINDS)
def test_derivatives_are_those_of_finite_differences(kind, take, lean, monkeypatch):
    priced(monkeypatch, lean)
    case = small(kind)
    flat, spec = _pytree.tree_flatten(case.params)

    def number(*flat):
        products, _, pullback = take(case.losses)(_pytree.tree_unflatten(list(flat), spec), *case.args)
        # Weights that depend on the norms, as those of clipping do.
        direction, _ = pullback(1 / (1 + (products.diagonal() if products.ndim > 1 else products)))
        size = sum((x**2).sum() for x in leaves(direction))
        return (products * numbers(*products.shape, seed=5)).sum() + size

    assert torch.autograd.gradcheck(number, [x.clone().requires_grad_() for x in flat])
    tangents = [numbers(*x.shape, seed=20 + i) for i, x in enumerate(flat)]

    def backward(*flat):
        points = [x.clone().requires_grad_() for x in flat]
        slopes = torch.autograd.grad(number(*points), points)
        return slopes, sum((g * t).sum() for g, t in zip(slopes, tangents, strict=True))

    functional = torch.func.grad(number, argnums=tuple(range(len(flat))))(*flat)
    forward = torch.func.jvp(number, tuple(flat), tuple(tangents))[1]
    check_stable((functional, forward), backward, *flat)


def test_falls_back_under_the_name_that_was_called(monkeypatch):
    names, by_rows = [], from_rows.products_and_pullback
    noted = lambda *given, **how: names.append(here()) or by_rows(*given, **how)
    monkeypatch.setattr(from_rows, "products_and_pullback", noted)
    name = next(name for name in MODELS if not MODELS[name]().examples and MODELS[name]().single)
    case = case_of(name, "by_example")
    squared_norms_fn(case.losses)(case.params, *case.args)
    assert names == ["squared_norms_fn"]
