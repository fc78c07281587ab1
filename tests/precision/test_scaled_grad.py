"""A scale for derivatives inside losses: forces in float16 against float64, overflows, transforms, mistakes."""

from functools import partial

import pytest
import torch
from bounds import check_within, eps
from hypothesis import given
from hypothesis import strategies as st
from torch.func import grad, jvp, vmap

import functional_jd as fj
from functional_jd.precision import scaled_grad

UNITS = {1e-5: 2.0**17, 1e-7: 2.0**23}
# All numbers are positive, so that no terms cancel: every rounding moves a result by half an epsilon of itself at most.
# x, w and their product are rounded, then squared; so are this square, v and the product with it: 9 roundings of an
# activation, and by the same count 18 of a force. A gradient of squared forces passes each of these steps three times.
OF_FORCES, OF_ROWS = 20, 64


def positive(*shape, seed=0, dtype=torch.float64):
    numbers = torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (0.1 + 0.2 * numbers).to(dtype)


PARAMS = {"w": positive(3, 8), "v": positive(8, 8, seed=1)}
X = positive(5, 3, seed=2) * 4


def energy(x, params, unit):
    """Half precision computes numbers of order 1, and derivatives of order `unit`."""
    return unit * ((x @ params["w"]).square() @ params["v"]).square().mean()


low = lambda tree: {name: leaf.float() for name, leaf in tree.items()}
bound = lambda expected, roundings: roundings * eps(torch.float16) / 2 * expected


@pytest.mark.parametrize("unit", UNITS)
def test_forces_of_small_energies_live_in_float16(unit):
    expected = grad(energy)(X, PARAMS, unit)
    half = fj.autocast(energy)
    check_within(scaled_grad(half, UNITS[unit])(X.float(), low(PARAMS), unit), expected, bound(expected, OF_FORCES))
    lost = (grad(half)(X.float(), low(PARAMS), unit).double() - expected).abs()
    assert (lost > bound(expected, OF_FORCES)).any()


def losses(params, x, unit, factor=None):
    derivative = grad if factor is None else partial(scaled_grad, factor=factor)
    forces = derivative(energy)(x, params, unit)
    return {"energy": energy(x, params, unit) / unit, "force": (forces / unit).square().mean()}


@pytest.mark.parametrize("unit", UNITS)
def test_rows_of_losses_of_forces_are_those_of_float64_to_the_roundings_of_float16(unit):
    exact, _ = fj.jacobian_fn(losses)(PARAMS, X, unit)
    scale = torch.full((2,), 2.0**10)
    half, given = fj.autocast(partial(losses, factor=UNITS[unit])), (low(PARAMS), X.float(), unit)
    rows, _, finite = fj.jacobian_fn(half, scale=scale)(*given)
    dead, _, _ = fj.jacobian_fn(fj.autocast(losses), scale=scale)(*given)
    assert finite.all()
    for name in PARAMS:
        allowed = bound(exact[name], OF_ROWS)
        check_within(rows[name], exact[name], allowed)
        assert ((dead[name][1] - exact[name][1]).abs() > allowed[1]).any()


def test_an_overflow_inside_skips_the_step_and_no_scale_backs_off():
    unit, x, params = 1e-5, X.float(), low(PARAMS)
    half = lambda factor: fj.autocast(partial(losses, unit=unit, factor=factor))
    how = {"aggregator": fj.upgrad(), "optimizer": fj.sgd(0.1)}
    scale = fj.scale_state(2.0**10, shape=(2,))
    state = fj.train_state(params, x, losses=half(UNITS[unit]), scale=scale, **how)
    stuck, info = fj.step(state, x, losses=half(2.0**60), **how)
    assert not info.moved
    assert info.finite.tolist() == [True, False]
    assert not info.losses["force"].isfinite()
    assert torch.equal(stuck.params["w"], params["w"])
    assert torch.equal(stuck.scale.scale[1], state.scale.scale[1])
    moved, info = fj.step(stuck, x, losses=half(UNITS[unit]), **how)
    assert info.moved
    assert not torch.equal(moved.params["w"], params["w"])


@given(st.integers(-40, 40), st.integers(0, 99))
def test_powers_of_two_change_no_bit_where_nothing_underflows(exponent, seed):
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    for factor in (2.0**exponent, torch.tensor(2.0**exponent)):
        assert torch.equal(scaled_grad(energy, factor)(x, PARAMS, 1.0), grad(energy)(x, PARAMS, 1.0))


def test_arguments_are_those_of_grad_and_half_comes_out_as_float32():
    both = scaled_grad(energy, 8.0, argnums=(-2, 1))(X, PARAMS, unit=1.0)
    torch.testing.assert_close(both, grad(energy, argnums=(0, 1))(X, PARAMS, 1.0))
    found, aux = scaled_grad(lambda x: (x.square().sum(), {"x": x}), 4.0, has_aux=True)(X)
    assert torch.equal(found, 2 * X)
    assert torch.equal(aux["x"], X)
    found = scaled_grad(lambda x: 2.0**-10 * (x * 2.0**-20).sum(), 2.0**12)(torch.ones(2, dtype=torch.float16))
    assert found.dtype == torch.float32


def test_transforms():
    f = lambda x: (torch.sin(x) * x).sum()
    ours, theirs = scaled_grad(f, 2.0**9), grad(f)
    torch.testing.assert_close(vmap(ours)(X), theirs(X))
    torch.testing.assert_close(jvp(ours, (X,), (X,)), jvp(theirs, (X,), (X,)))
    torch.testing.assert_close(grad(lambda x: ours(x).square().sum())(X), grad(lambda x: theirs(x).square().sum())(X))
    torch.testing.assert_close(scaled_grad(lambda x: ours(x).sum(), 4.0)(X), grad(lambda x: theirs(x).sum())(X))
    factors = torch.tensor([0.5, 3.0], dtype=torch.float64)
    swept, slope = jvp(lambda at: vmap(lambda a: scaled_grad(f, a)(X))(at), (factors,), (torch.ones_like(factors),))
    torch.testing.assert_close(swept, torch.stack([theirs(X)] * 2))
    assert slope.abs().max() <= 8 * eps() * swept.abs().max() / 0.5  # nothing depends on the factor
    torch.compiler.reset()
    compiled = torch.compile(lambda x: grad(lambda x: ours(x).square().sum())(x), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(X), grad(lambda x: theirs(x).square().sum())(X))


def test_mistakes_are_named_with_their_cure():
    with pytest.raises(TypeError, match="scaled_grad: f must be a function, found Tensor"):
        scaled_grad(X, 2.0)
    for factor, kind, found in (("2", TypeError, "'2'"), (0.0, ValueError, "0.0"), (-1, ValueError, "-1")):
        with pytest.raises(kind, match=f"scaled_grad: factor must be .*found {found}.*A power of two"):
            scaled_grad(energy, factor)
    with pytest.raises(ValueError, match=r"scaled_grad: factor must be a number or a tensor \[\]"):
        scaled_grad(energy, torch.ones(2))
    with pytest.raises(ValueError, match=r"scaled_grad: f must be .*one real number, found torch.float64 \[5, 3\]"):
        scaled_grad(torch.sin, 2.0)(X)
    with pytest.raises(TypeError, match="scaled_grad: argnums must be a position"):
        scaled_grad(energy, 2.0, argnums="x")
    with pytest.raises(ValueError, match=r"scaled_grad: argnums must be positions among the 1 arguments, found 1"):
        scaled_grad(torch.sum, 2.0, argnums=1)(X)
    with pytest.raises(TypeError, match=r"scaled_grad: f must be .*\(scalar, aux\).*Or leave has_aux out"):
        scaled_grad(torch.sum, 2.0, has_aux=True)(X)
