"""How far apart two ways of computing the same may come out, in units of the problem and not of one CPU.

A CPU adds up in an order of its own, by the width of its registers. So no test compares with a bare number what was
added up: bounds are the epsilon of the dtype times the sum of the absolute terms, times what the problem makes of it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

# What a solver counts as zero, a few hundred roundings: it may leave that much of a wrong sign.
_SOLVER = 512


def eps(dtype: torch.dtype = torch.float64) -> float:
    return torch.finfo(dtype).eps


def sum_bound(terms: Tensor, dim: int = 0, dtype: torch.dtype | None = None) -> Tensor:
    """Two sums of n products differ by less than `n eps sum |terms|`, whatever the order of additions.

    Higham, Accuracy and Stability of Numerical Algorithms, section 4.2: each is off by half of that at most.

    Args:
        terms: what is added up along `dim`.
        dtype: in which it was added up, that of the terms unless given.
    """
    return terms.shape[dim] * eps(dtype or terms.dtype) * terms.abs().sum(dim)


def product_bound(left: Tensor, right: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The same for every entry of `left @ right`."""
    return left.shape[-1] * eps(dtype or left.dtype) * (left.abs() @ right.abs())


def least_singular_value(rows: Tensor) -> float:
    """The least one, beside zero, of any set of rows; of all rows where they are more than eight.

    For independent rows that is the same: leaving rows out does not make it smaller.
    """
    m = len(rows)
    chosen = torch.arange(1, 2**m).unsqueeze(1).bitwise_and(2 ** torch.arange(m)).bool() if m <= 8 else torch.ones(1, m)
    values = torch.linalg.svdvals(rows * chosen.unsqueeze(-1))
    return float(values[values > 1e-10].min()) if (values > 1e-10).any() else 1.0


def cone_bound(rows: Tensor) -> float:
    """How far computed projections of unit vectors on a cone of rows may lie apart, whichever rows turn out active.

    Multipliers and the error of each grow as the least singular value shrinks.
    """
    return _SOLVER * eps() * max(1.0, 1 / least_singular_value(torch.nn.functional.normalize(rows, dim=1)) ** 2)


def projection_bound(rows: Tensor, multipliers: Tensor) -> float:
    """The same where the multipliers of independent unit rows are known: `(m + n) eps (1 + sum s) / sigma`.

    An entry of the Gramian is a sum of n products, of which m are added up times s. What that is off by is divided by
    sigma, the least singular value of the active rows.
    """
    active = rows[multipliers > 0]
    sigma = torch.linalg.svdvals(active).min() if len(active) else 1.0
    return float(sum(rows.shape) * eps() * (1 + multipliers.sum()) / sigma)


def gramian_bound(rows: Tensor, size: float | Tensor = 1.0) -> Tensor:
    """What a formula of the Gramian of independent rows may be off by: the condition of the unit rows, squared."""
    condition = torch.linalg.cond(torch.nn.functional.normalize(rows, dim=1, eps=0))
    return 64 * eps() * condition**2 * size


def half_the_digits(size: float | Tensor = 1.0) -> float:
    """What is left of a length that is known by its square only, or of the angle of nearly parallel rows."""
    return eps() ** 0.5 * float(size)


def moved(inputs: Any, seed: int, by: float) -> Any:
    """A pytree whose floating-point numbers are moved by a fraction of themselves, up or down."""
    draw = torch.Generator().manual_seed(seed)

    def move(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        return x * (1 + by * (2 * torch.randint(2, x.shape, generator=draw) - 1).to(x.dtype))

    return tree_map(move, inputs)


def check_stable(found: Any, f: Callable[..., Any], *inputs: Any, roundings: int = 256) -> None:
    """What was found is `f(*inputs)`, up to what some roundings of the inputs and of the result do to it.

    The condition of the problem is measured: two stable ways of computing the same agree as far as it allows.

    Args:
        found: pytree of tensors.
        f: another way to compute it. Pytrees are compared leaf by leaf, each to the size of its largest entry.
        inputs: pytrees; their float64 tensors are moved.
        roundings: by how many epsilons.
    """
    by = roundings * eps()
    expected, *others = [tree_leaves(f(*at)) for at in (inputs, *[moved(inputs, seed, by) for seed in (1, 2, 3)])]
    leaves = tree_leaves(found)
    assert len(leaves) == len(expected)
    for k, (x, y) in enumerate(zip(leaves, expected, strict=True)):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        if not y.is_floating_point() or not y.numel():
            assert torch.equal(x, y)
            continue
        # Each of the two ways is off by as much.
        check_within(x, y, by * y.abs().max() + 2 * max((other[k] - y).abs().max() for other in others))


def check_products(found: Tensor, rows: Tensor, others: Tensor, dtype: torch.dtype = torch.float64) -> None:
    """Inner products of rows of models, whose entries are a few hundred roundings of their row's length off.

    Args:
        found: `[m, k]`.
        rows: `[m, n]`, computed in another way.
        others: `[k, n]`, the same.
        dtype: the least precise one in which the rows were computed.
    """
    lengths = rows.double().norm(dim=1)[:, None] * others.double().norm(dim=1)
    check_within(found, rows.double() @ others.double().mT, 2**10 * eps(dtype) * lengths)


def check_same(found: Any, expected: Any, dtype: torch.dtype | None = None, roundings: int = 2**8) -> None:
    """Two pytrees hold the same, to a few hundred roundings of the largest entry of a leaf.

    Args:
        found: what was computed in another way, or on a device.
        expected: what it is compared with.
        dtype: the least precise dtype that is computed in, unless results tell.
        roundings: how many of them.
    """
    leaves, structure = tree_flatten(found)
    others, other_structure = tree_flatten(expected)
    assert structure == other_structure
    size = lambda y: float(y.detach().double().nan_to_num(0, 0, 0).abs().max())
    has_digits = lambda y: isinstance(y, Tensor) and y.is_floating_point() and y.numel() > 0
    largest = max(map(size, filter(has_digits, others)), default=0.0)
    for x, y in zip(leaves, others, strict=True):
        if not isinstance(y, Tensor):
            assert type(x) is type(y)
            assert x == y or not isinstance(y, int | float | str)
            continue
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        if not has_digits(y):
            assert torch.equal(x, y)
            continue
        # What cancels, such as the gradient of a bias before a norm, leaves rounding of what was added up.
        unit = max(eps(each) for each in (y.dtype, dtype or y.dtype))
        bound = unit * (roundings * size(y) + 4 * largest)
        torch.testing.assert_close(x.double(), y.double(), rtol=0, atol=bound, equal_nan=True)


def check_within(found: Tensor, expected: Tensor, bound: Tensor | float) -> None:
    """Every entry lies within its own bound of what is expected."""
    error = (found.double() - expected.double()).abs()
    if not error.numel():
        return
    bound = torch.as_tensor(bound, dtype=torch.float64).expand_as(error)
    worst = torch.where(error == 0, 0, error / bound).max()
    assert (error <= bound).all(), f"off by {error.max():.3g}, {worst:.3g} times what rounding explains"


def differences(f: Callable[[Tensor], Tensor], x: Tensor, step: float = 2.0**-14) -> Tensor:
    """The derivatives of f at x, by central differences."""
    steps = step * torch.eye(x.numel(), dtype=x.dtype).reshape(-1, *x.shape)
    slopes = torch.stack([(f(x + e) - f(x - e)) / (2 * step) for e in steps], dim=-1)
    return slopes.reshape((*slopes.shape[:-1], *x.shape))


def check_derivatives(found: Tensor, f: Callable[[Tensor], Tensor], x: Tensor, condition: float = 1.0) -> None:
    """Derivatives are differences, up to what steps of twice the length change and what rounding adds.

    Differences are off by the square of the step times a third derivative. Twice the step shows four times as much.

    Args:
        found: derivatives of f at x.
        f: a function of a float64 tensor.
        x: where.
        condition: how many times its rounding a value of f is off.
    """
    step = 2.0**-14
    slopes, wider = differences(f, x, step), differences(f, x, 2 * step)
    check_within(found, slopes, (wider - slopes).abs() + condition * 64 * eps() * f(x).abs().max() / step)
