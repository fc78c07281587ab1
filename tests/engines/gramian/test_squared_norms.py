"""Squared norms against rows multiplied out: every mixture of factors, every model, price, scale and transform."""

import pytest
import torch
from bounds import check_stable, check_within, eps
from gramian_by_hand import F, Largest, both_prices, expectation, priced, single, weights_for
from jacobian_by_hand import KINDS, case_of, leaves
from torch.utils import _pytree
from zoo import MODELS, Case, mlp, numbers

from functional_jd import cross_gramian_fn, gramian_fn, per_example, squared_norms_fn
from functional_jd.engines.kinds import kind as from_rows
from functional_jd.torch_compat.callers import here

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")


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
        priced(monkeypatch, lean, 16)
        norms = found(case)[0].sqrt()
        assert ((norms - expected).abs() / expected).max() <= 16 * eps(torch.float32)


def test_an_embedding_that_is_the_output_layer_too_needs_no_rows():
    params = {"table": numbers(512, 16)}
    loss = lambda p, tokens: torch.tanh(F.linear(F.embedding(tokens, p["table"]).tanh(), p["table"])).square().mean()
    case = Case(params, per_example(loss), (torch.randint(512, (6, 3), generator=torch.Generator().manual_seed(0)),))
    value = lambda p, i: case.losses.loss(p, case.args[0][i])
    rows = torch.cat([torch.func.grad(value)(params, i)["table"].reshape(1, -1) for i in range(6)])
    with Largest() as largest:
        squares, _, pullback = squared_norms_fn(case.losses)(case.params, *case.args)
        direction, _ = pullback(torch.ones(6, dtype=torch.float64))
    assert largest.numel < 6 * 512 * 16
    agree((squares, [direction["table"].flatten()]), (rows @ rows.mT, [rows.sum(0)]), torch.ones(6).double())


@pytest.mark.parametrize("kind", KINDS)
def test_no_inner_products_of_different_rows_are_formed(kind, monkeypatch):
    case = case_of("mlp", kind)
    expected = expectation(case)
    fail = lambda *_: pytest.fail("formed the Gramian")
    monkeypatch.setattr("functional_jd.engines.gramian.products._inner_products", fail)
    monkeypatch.setattr("functional_jd.engines.gramian.products.inner_products", fail)
    agree(found(case), expected, weights_for(case))


def crossed(losses):
    """Inner products with the rows of the examples in another order, with other targets; nothing is pulled back."""
    take = cross_gramian_fn(losses, scale=torch.tensor(4.0))
    return lambda params, x, y: (take(params, (x, y), (x.flip(0), 0.5 * y.roll(1, 0))), None, None)


@both_prices
@pytest.mark.parametrize("take", [squared_norms_fn, gramian_fn, crossed])
@pytest.mark.parametrize("kind", KINDS)
def test_composes_with_every_transform(kind, take, lean, monkeypatch):
    priced(monkeypatch, lean, 16)
    case = KINDS[kind](mlp((2, 3, 3)))
    flat, spec = _pytree.tree_flatten(case.params)
    counted = numbers(*take(case.losses)(case.params, *case.args)[0].shape, seed=5)

    def number(*flat):
        products, _, pullback = take(case.losses)(_pytree.tree_unflatten(list(flat), spec), *case.args)
        total = (products * counted).sum()
        if pullback is None:
            return total
        # Weights that depend on the norms, as those of clipping do.
        direction, _ = pullback(1 / (1 + (products.diagonal() if products.ndim > 1 else products)))
        return total + sum((x**2).sum() for x in leaves(direction))

    assert torch.autograd.gradcheck(number, [x.clone().requires_grad_() for x in flat])
    tangents = [numbers(*x.shape, seed=20 + i) for i, x in enumerate(flat)]

    def backward(*flat):
        points = [x.clone().requires_grad_() for x in flat]
        slopes = torch.autograd.grad(number(*points), points)
        return slopes, sum((g * t).sum() for g, t in zip(slopes, tangents, strict=True))

    functional = torch.func.grad(number, argnums=tuple(range(len(flat))))(*flat)
    forward = torch.func.jvp(number, tuple(flat), tuple(tangents))[1]
    check_stable((functional, forward), backward, *flat)
    several = [torch.stack([x, 2 * x]) for x in flat]
    loop = lambda *several: torch.stack([number(*(x[i] for x in several)) for i in range(2)])
    check_stable(torch.vmap(number)(*several), loop, *several)


def test_falls_back_under_the_name_that_was_called(monkeypatch):
    names, by_rows = [], from_rows.products_and_pullback
    noted = lambda *given, **how: names.append(here()) or by_rows(*given, **how)
    monkeypatch.setattr(from_rows, "products_and_pullback", noted)
    name = next(name for name in MODELS if not MODELS[name]().examples and MODELS[name]().single)
    case = case_of(name, "by_example")
    squared_norms_fn(case.losses)(case.params, *case.args)
    assert names == ["squared_norms_fn"]
