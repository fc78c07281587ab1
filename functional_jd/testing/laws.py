"""The laws of aggregation rules, as functions of a rule and a Jacobian that raise `AssertionError`.

A(J) is the direction of `aggregate(rule, J)`. A rule with state starts with `state=None`, and is tested in a later step
too, after one with other rows, or where a law compares rules on changed rows, with these. Tolerances are relative to
the reach, `sum_i |weights_i J_i|`, which bounds the error of the direction for a given relative error of the weights.
The relative tolerance is 2^-26, the square root of the precision of float64, because a solver loses half of its digits
on a singular Gramian of small integers. Errors below 2^-40 of the largest entry of the Jacobian are always allowed, as
weights may cancel to a reach of zero.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from scipy.optimize import nnls
from torch import Tensor

from functional_jd.aggregation.aggregate import Aggregation, Aggregator, aggregate, start
from functional_jd.aggregation.combine import weights_by_leaf
from functional_jd.core.rows import per_row
from functional_jd.core.safe import nonzero
from functional_jd.core.tree import tree_leaves, tree_map
from functional_jd.core.types import AffineWeights, Jacobian, Losses, Tree
from functional_jd.testing.measures import (
    TOLERANCE,
    Law,
    also_later,
    check_case,
    check_close,
    check_same,
    distance_from_hull,
    element,
    flat,
    has_rest,
    lowered,
    matrix,
    reach_of,
    reordered,
    rescaled,
    rotated,
    split_columns,
    states_of,
    structure_of,
    unit_rows_if_direction_is_zero,
    variants,
    watched,
    with_first_entry,
)

_LOW = (torch.float16, torch.bfloat16, torch.float32)


def pure(rule: Aggregator, jacobian: Jacobian, *others: Jacobian, losses: Losses = None) -> None:
    """The same arguments give the same bits in every call, and nothing that the rule is given or closes over changes.

    The global random number generator of torch is not used: randomness comes from the key in the state. Exact.

    Source: the definition of a pure function.
    """
    check_case(rule, jacobian, others, losses)
    arguments = tree_map(torch.clone, (jacobian, others, losses))
    rng_state = torch.get_rng_state()
    first = aggregate(watched(rule), jacobian, None, *others, losses=losses)
    state = tree_map(torch.clone, first.state)
    second = aggregate(rule, jacobian, first.state, *others, losses=losses)
    check_same(first.state, state, "the state that was passed has changed")
    check_same(aggregate(rule, jacobian, None, *others, losses=losses), first, "a second call gives other bits")
    check_same(aggregate(rule, jacobian, state, *others, losses=losses), second, "the same state gives other bits")
    check_same((jacobian, others, losses), arguments, "an argument has changed")
    check_same(torch.get_rng_state(), rng_state, "the global random number generator was used")


def shaped(rule: Aggregator, jacobian: Jacobian, *others: Jacobian, losses: Losses = None) -> None:
    """The direction is like params; weights are `[m]`, for all rows or those below a key, or broadcast to the Jacobian;
    the state keeps its structure.

    Weights have at least 32 bits. Exact.

    Source: the contract of `aggregate`; a state of changing structure or shapes recompiles and cannot be batched.
    """
    check_case(rule, jacobian, others, losses)
    result = aggregate(rule, jacobian, None, *others, losses=losses)
    row = tree_map(lambda leaf: leaf[0], jacobian)
    assert structure_of(result.direction) == structure_of(row), "the direction is not shaped like params"
    if isinstance(result.weights, Tensor) and result.weights.ndim == 1:
        assert result.weights.shape == tree_leaves(jacobian)[0].shape[:1], "not one weight per row"
    else:
        tree_map(_broadcast, jacobian, weights_by_leaf(result.weights, jacobian))
    for weight in tree_leaves(result.weights):
        assert weight.dtype in (torch.float32, torch.float64), f"weights are {weight.dtype}, not at least float32"
    before = start(rule, jacobian, *others, losses=losses)
    assert structure_of(result.state) == structure_of(before), "the state changes its structure, a shape or a dtype"
    strides = [[leaf.contiguous().stride() == leaf.stride() for leaf in tree_leaves(s)] for s in (before, result.state)]
    assert strides[0] == strides[1], "the state changes its strides, which compiles anew: .clone() what is a view"


def finite(rule: Aggregator, jacobian: Jacobian, *others: Jacobian, losses: Losses = None) -> None:
    """Finite Jacobians, degenerate or not, give finite weights, direction and state, in three steps. Exact.

    Source: the contract of `aggregate`.
    """
    check_case(rule, jacobian, others, losses)
    state = None
    for case in variants(jacobian, others, losses):
        result = _step(rule, state, *case)
        state = result.state
        for name, value in result._asdict().items():
            assert all(leaf.isfinite().all() for leaf in tree_leaves(value)), f"not finite: the {name}"


def batched(rule: Aggregator, jacobian: Jacobian, *others: Jacobian, losses: Losses = None) -> None:
    """`vmap` over Jacobians and states equals a loop: `vmap(A)([J1, J2, J3]) = [A(J1), A(J2), A(J3)]`.

    To 2^-26 of the reach, because batched products are rounded differently.

    Source: the contract of `aggregate`.
    """
    check_case(rule, jacobian, others, losses)
    cases = variants(jacobian, others, losses)
    batch = tree_map(lambda *leaves: torch.stack(leaves), *cases)
    first = torch.vmap(partial(_step, rule, None))(*batch)
    second = torch.vmap(partial(_step, rule))(first.state, *batch)
    for i, case in enumerate(cases):
        expected = _step(rule, None, *case)
        check_close(element(first, i), expected, case[0], "vmap differs from the loop")
        expected = _step(rule, expected.state, *case)
        check_close(element(second, i), expected, case[0], "vmap differs from the loop in the second step")


def compiled(rule: Aggregator, jacobian: Jacobian, *others: Jacobian, losses: Losses = None) -> None:
    """`torch.compile(fullgraph=True)` gives the same results, with one graph for all values and states.

    To 2^-26 of the reach, as a compiler may reorder sums. Uses the backend "aot_eager", without code generation.

    Source: the contract of `aggregate`.
    """
    check_case(rule, jacobian, others, losses)
    cases = variants(jacobian, others, losses)
    # Cloned, because torch.compile would recognise a tensor from the closure of the rule, and specialise on it.
    state = tree_map(torch.clone, start(rule, jacobian, *others, losses=losses))
    f = _compiled_steps(rule)
    f(state, *cases[0])
    with torch.compiler.set_stance("fail_on_recompile"):
        for case in (*cases, *cases):
            found, initial_state = f(state, *case)
            expected = _step(rule, state, *case)
            check_close(found, expected, case[0], "the compiled rule differs")
            assert structure_of(initial_state) == structure_of(state), "the initial state of the compiled rule differs"
            state = expected.state


@also_later
def tree_equals_flat(rule: Aggregator, jacobian: Jacobian, *others: Jacobian, losses: Losses = None) -> None:
    """The direction does not depend on how parameters are split into tensors: `flat(A(tree)) = A(flat(tree))`.

    Every leaf is split into a dict of a matrix, a list and a 0-dimensional parameter. To 2^-26 of the reach, because
    the Gramian is summed leaf by leaf.

    Source: the contract of `aggregate`.
    """
    check_case(rule, jacobian, others, losses)
    expected = aggregate(rule, jacobian, None, *others, losses=losses)
    trees = [tree_map(split_columns, rows) for rows in (jacobian, *others)]
    found = aggregate(rule, trees[0], None, *trees[1:], losses=losses)
    check_close(found, expected, jacobian, "the direction depends on how parameters are stored")


@also_later
def low_precision(rule: Aggregator, jacobian: Jacobian, *others: Jacobian, losses: Losses = None) -> None:
    """For float16, bfloat16 and float32 Jacobians the direction is that in float64, rounded.

    `A(J) = round(A(double(J)))`, to the smallest number of the dtype plus the larger of four units in the last place
    and 2^-14 of the reach, because entrywise weights are float32, and may amplify its rounding. Row norms are scaled to
    lie between 2^-8 and 2^8, within the range of all dtypes.

    Source: the contract of `aggregate`.
    """
    check_case(rule, jacobian, others, losses)
    for dtype in _LOW:
        low = lowered((jacobian, *others), dtype)
        wide = [tree_map(torch.Tensor.double, rows) for rows in low]
        found = aggregate(rule, low[0], None, *low[1:], losses=losses)
        expected = aggregate(rule, wide[0], None, *wide[1:], losses=losses)
        assert {leaf.dtype for leaf in tree_leaves(found.direction)} == {dtype}, f"the direction is not {dtype}"
        relative = max(4 * torch.finfo(dtype).eps, 2.0**-14)
        subnormal = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        check_close(found, expected, wide[0], f"{dtype} gives another direction", relative, subnormal)


def non_finite(rule: Aggregator, jacobian: Jacobian, *others: Jacobian, losses: Losses = None) -> None:
    """A non-finite Jacobian gives a non-finite direction, not an exception, so that the step can be skipped.

    One entry of one Jacobian is nan, inf or -inf, in the first or in the second step. Exact.

    Source: the contract of `aggregate`.
    """
    check_case(rule, jacobian, others, losses)
    matrices = (jacobian, *others)
    later_state = aggregate(rule, jacobian, None, *others, losses=losses).state
    for value, row in ((torch.nan, 0), (torch.inf, -1), (-torch.inf, 0)):
        for index in range(len(matrices)):
            changed = list(matrices)
            changed[index] = tree_map(lambda leaf, v=value, r=row: with_first_entry(leaf, v, r), changed[index])
            for state in (None, later_state):
                direction = aggregate(rule, changed[0], state, *changed[1:], losses=losses).direction
                assert not flat(direction).isfinite().all(), f"{value} in row {row} gives a finite direction"


@also_later
def permutation_equivariant(rule: Aggregator, jacobian: Jacobian, *others: Jacobian, losses: Losses = None) -> None:
    """The direction does not depend on the order of the objectives: `A(P J) = A(J)` for permutations P.

    Weights are not compared, since they need not be unique. To 2^-26 of the reach.

    Source: no paper; the order of the losses is arbitrary.
    """
    check_case(rule, jacobian, others, losses)
    expected = aggregate(rule, jacobian, None, *others, losses=losses)
    m = tree_leaves(jacobian)[0].shape[0]
    for order in (torch.arange(m).flip(0), torch.arange(m).roll(1)):
        permuted = [reordered(order, rows) for rows in (jacobian, *others)]
        values = None if losses is None else reordered(order, tree_leaves(losses)[0])
        found = aggregate(rule, permuted[0], None, *permuted[1:], losses=values)
        check_close(found, expected, jacobian, f"the order of the rows matters: {order.tolist()}")


def non_conflicting(rule: Aggregator, jacobian: Jacobian, *others: Jacobian, losses: Losses = None) -> None:
    """To first order, a step increases no loss: `J A(J) >= 0`.

    To 2^-26 of `|g_i|` times the reach, for row g_i. For Jacobians of less precision eps, with norms as in
    `low_precision`: to 64 eps of `|g_i| |A(J)|`, however large the weights are, and the smallest number of the dtype.

    Source: Quinton & Rey, arXiv 2406.16232, among the desired properties.
    """
    check_case(rule, jacobian, others, losses)
    for state in states_of(rule, jacobian, others, losses):
        result = aggregate(rule, jacobian, state, *others, losses=losses)
        J, direction = matrix(jacobian), flat(result.direction)
        products, reach = J @ direction, reach_of(jacobian, result.weights)
        allowed = TOLERANCE * torch.linalg.vector_norm(J, dim=1) * torch.linalg.vector_norm(reach)
        assert (products >= -allowed).all(), f"rows are conflicted with: J direction = {products.tolist()}"
    for dtype in _LOW:
        low = lowered((jacobian, *others), dtype)
        rows, direction = matrix(low[0]), flat(aggregate(rule, low[0], None, *low[1:], losses=losses).direction)
        eps, smallest = torch.finfo(dtype).eps, torch.finfo(dtype).smallest_normal
        rounding = 64 * eps * (direction.norm() + len(direction) * smallest) + 2.0**-40 * rows.abs().max()
        assert (rows @ direction >= -rounding * rows.norm(dim=1)).all(), f"rows of {dtype} are conflicted with"


@also_later
def homogeneous(rule: Aggregator, jacobian: Jacobian, *others: Jacobian, losses: Losses = None) -> None:
    """The direction scales as the losses do: `A(c J) = c A(J)` for `c > 0`, here 2^-40, 3 and 2^40.

    To 2^-26 of the reach, because scaling by 3 is rounded. A direction of fixed length is not homogeneous.

    Source: Quinton & Rey, arXiv 2406.16232: linearity under scaling of the rows implies it.
    """
    check_case(rule, jacobian, others, losses)
    expected = aggregate(rule, jacobian, None, *others, losses=losses)
    for c in (2.0**-40, 3.0, 2.0**40):
        scaled = [rescaled(rows, c) for rows in (jacobian, *others)]
        found = aggregate(rule, scaled[0], None, *scaled[1:], losses=losses)
        found = found._replace(direction=tree_map(lambda leaf, c=c: leaf / c, found.direction))
        check_close(found, expected, jacobian, f"the Jacobian times {c:g} does not give {c:g} times the direction")


@also_later
def linear_under_row_scaling(rule: Aggregator, jacobian: Jacobian, *others: Jacobian, losses: Losses = None) -> None:
    """The direction is linear in the scales of the rows: `A(diag(a + b) J) = A(diag(a) J) + A(diag(b) J)`, `a, b > 0`.

    To 2^-26 of the sum of both reaches.

    Source: Quinton & Rey, arXiv 2406.16232, among the desired properties.
    """
    check_case(rule, jacobian, others, losses)
    a = torch.arange(1, len(tree_leaves(jacobian)[0]) + 1, dtype=torch.float64)
    b = 2 ** a.flip(0)
    total, *terms = ([rescaled(rows, c) for rows in (jacobian, *others)] for c in (a + b, a, b))
    found = aggregate(rule, total[0], None, *total[1:], losses=losses).direction
    results = [aggregate(rule, term[0], None, *term[1:], losses=losses) for term in terms]
    reaches = [reach_of(term[0], result.weights) for term, result in zip(terms, results, strict=True)]
    error = flat(found) - flat(results[0].direction) - flat(results[1].direction)
    allowed = TOLERANCE * (reaches[0] + reaches[1]).max() + 2.0**-40 * matrix(total[0]).abs().max()
    assert error.abs().max() <= allowed, "the direction is not linear in the scales of the rows"


def on_the_simplex(rule: Aggregator, jacobian: Jacobian, *others: Jacobian, losses: Losses = None) -> None:
    """Weights are on the simplex, for every entry if they are entrywise: `weights >= 0`, `sum_i weights_i = 1`.

    To 2^-20, as weights may be float32. If a leaf of the weights has a `rest`, the direction is a convex
    combination of the rows, to 2^-20 of the largest entry; such weights are found by non-negative least squares.

    Source: Desideri, Comptes Rendus Mathematique 350, 2012: the convex hull of the gradients.
    """
    check_case(rule, jacobian, others, losses)
    for state in states_of(rule, jacobian, others, losses):
        result = aggregate(rule, jacobian, state, *others, losses=losses)
        if has_rest(jacobian, result.weights):
            J, direction = matrix(jacobian), flat(result.direction)
            largest = nonzero(J.abs().max())
            is_near = direction.isfinite().all() and distance_from_hull(J / largest, direction / largest) <= 2.0**-20
            assert is_near, "not a convex combination of rows"
            continue
        for leaf in tree_leaves(result.weights):
            assert (leaf >= -(2.0**-20)).all(), f"negative weights: {leaf.tolist()}"
            assert ((leaf.sum(0) - 1).abs() <= 2.0**-20).all(), f"weights do not add up to one: {leaf.tolist()}"


def weakly_stationary(rule: Aggregator, jacobian: Jacobian, *others: Jacobian, losses: Losses = None) -> None:
    """The direction is zero at Pareto stationary points only: `A(J) = 0` implies `w'J = 0` for some `w >= 0`, `w != 0`.

    Zero means below 2^-40 of the reach in every entry. Row norms are scaled to lie between 2^-8 and 2^8, since sums of
    rows of very different norms lose the small rows. Finds w by non-negative least squares.

    Source: Desideri, Comptes Rendus Mathematique 350, 2012.
    """
    check_case(rule, jacobian, others, losses)
    for J in unit_rows_if_direction_is_zero(rule, jacobian, others, losses):
        distance = distance_from_hull(J, torch.zeros_like(J[0]))
        assert distance <= TOLERANCE, "the direction is zero, but the Jacobian is not Pareto stationary"


def strongly_stationary(rule: Aggregator, jacobian: Jacobian, *others: Jacobian, losses: Losses = None) -> None:
    """The direction is zero at strongly stationary points only: `A(J) = 0` implies `w'J = 0` for some `w > 0`.

    Stronger than `weakly_stationary`: a single zero gradient must not stop the others. Tolerances and w as there.

    Source: TorchJD, the library of Quinton & Rey, which tests UPGrad under this name. MGDA does not obey it.
    """
    check_case(rule, jacobian, others, losses)
    for J in unit_rows_if_direction_is_zero(rule, jacobian, others, losses):
        _, residual = nnls(J.mT.numpy(), -J.sum(0).numpy())  # w = 1 + v with v >= 0, since w can be rescaled
        assert residual <= TOLERANCE, "the direction is zero, but the Jacobian is not strongly stationary"


@also_later
def rotation_blind(rule: Aggregator, jacobian: Jacobian, *others: Jacobian, losses: Losses = None) -> None:
    """The rule is equivariant to rotations of the parameters: `A(J Q) = A(J) Q` for `Q Q' = 1`.

    Q rotates every leaf, exactly, by a matrix with entries 1/2 and -1/2. To 2^-26 of the reach.

    Source: holds for every function of the Gramian.
    """
    check_case(rule, jacobian, others, losses)
    expected = aggregate(rule, jacobian, None, *others, losses=losses)
    matrices = [tree_map(rotated, rows) for rows in (jacobian, *others)]
    found = aggregate(rule, matrices[0], None, *matrices[1:], losses=losses)
    direction = tree_map(lambda leaf: rotated(leaf.unsqueeze(0)), expected.direction)
    check_close(found, expected._replace(direction=direction), jacobian, "a rotation changes the weights")


ALWAYS: tuple[Law, ...] = (pure, shaped, finite, batched, compiled, tree_equals_flat, low_precision, non_finite)
"""The laws that every rule obeys."""

BY_CLAIM: tuple[Law, ...] = (
    permutation_equivariant,
    non_conflicting,
    homogeneous,
    linear_under_row_scaling,
    on_the_simplex,
    weakly_stationary,
    strongly_stationary,
    rotation_blind,
)
"""The laws that a rule obeys if its paper claims so."""


def _broadcast(leaf: Tensor, given: Tensor | AffineWeights) -> Tensor:
    """The weights of a leaf, one for each entry; a RuntimeError where they do not fit."""
    weights = given.weights if isinstance(given, AffineWeights) else given
    return (per_row(weights, leaf) if weights.ndim == 1 else weights).expand(leaf.shape)


def _step(
    rule: Aggregator, state: Tree, jacobian: Jacobian, others: tuple[Jacobian, ...], losses: Losses
) -> Aggregation:
    return aggregate(rule, jacobian, state, *others, losses=None if isinstance(losses, tuple) else losses)


@lru_cache(maxsize=1)
def _compiled_steps(rule: Aggregator) -> Callable[..., Any]:
    """Compile a step of a rule and its initial state into one graph; cached for more Jacobians of the same shape."""
    torch.compiler.reset()  # the graphs of other rules count against the recompile limit

    def f(state: Tree, jacobian: Jacobian, others: tuple[Jacobian, ...], losses: Losses) -> tuple[Aggregation, Tree]:
        given = None if isinstance(losses, tuple) else losses
        return _step(rule, state, jacobian, others, losses), start(rule, jacobian, *others, losses=given)

    return torch.compile(f, fullgraph=True, backend="aot_eager", dynamic=False)
