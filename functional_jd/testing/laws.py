"""The laws of aggregation rules, as functions: each takes a rule and a Jacobian, and objects by an `AssertionError`.

A(J) is the direction of `aggregate(rule, J)`. A rule that remembers starts anew (`state=None`), and takes a few steps
where its memory matters. Tolerances are relative to the reach, `sum_i |weights_i J_i|`: what adding up the rows can
round off when the weights are right to a share of themselves. That share is 2^-26, the root of float64's precision: a
singular Gramian of small integers leaves a solver half of its digits. Where weights themselves cancel, to a reach of
nothing, 2^-40 of the largest entry of the Jacobian counts as nothing.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, TypeAlias

import torch
from scipy.optimize import nnls
from torch import Tensor

from functional_jd.aggregation.aggregate import Aggregation, Aggregator, aggregate, start
from functional_jd.core.tree import tree_leaves, tree_map
from functional_jd.core.types import AffineWeights, Jacobian, Losses, Tree
from functional_jd.testing.measures import (
    TOLERANCE,
    check_close,
    check_same,
    cut,
    element,
    flat,
    form,
    matrix,
    narrowed,
    poisoned,
    reach_of,
    reordered,
    rescaled,
    turned,
)

Law: TypeAlias = Callable[..., None]
"""`law(rule, jacobian, *others, losses=None)`, others and losses for the rules that look at them."""

Case: TypeAlias = tuple[Jacobian, tuple[Jacobian, ...], Losses]
"""A Jacobian, others, and losses."""


def pure(rule: Aggregator, jacobian: Jacobian, *others: Jacobian, losses: Losses = None) -> None:
    """The same arguments give the same bits, whatever happened in between; nothing that is handed over changes.

    Nor does torch's own generator of random numbers move: chance comes from the key in the state. Exact.

    Source: what a pure function is.
    """
    given = tree_map(torch.clone, (jacobian, others, losses))
    chance = torch.get_rng_state()
    first = aggregate(rule, jacobian, None, *others, losses=losses)
    memory = tree_map(torch.clone, first.state)
    second = aggregate(rule, jacobian, first.state, *others, losses=losses)
    check_same(aggregate(rule, jacobian, None, *others, losses=losses), first, "the second call gives other bits")
    check_same(aggregate(rule, jacobian, memory, *others, losses=losses), second, "the same state gives other bits")
    check_same(first.state, memory, "the state that was handed over has changed")
    check_same((jacobian, others, losses), given, "what was handed over has changed")
    check_same(torch.get_rng_state(), chance, "torch's generator of random numbers has moved")


def shaped(rule: Aggregator, jacobian: Jacobian, *others: Jacobian, losses: Losses = None) -> None:
    """The direction is like params; weights are `[m]`, or spread to the Jacobian; the state keeps its form.

    Weights are floats of at least 32 bits. Exact.

    Source: the contract of `aggregate`; a state that changes its form recompiles and cannot be batched.
    """
    result = aggregate(rule, jacobian, None, *others, losses=losses)
    row = tree_map(lambda leaf: leaf[0], jacobian)
    assert form(result.direction) == form(row), "the direction is not shaped like params"
    if isinstance(result.weights, Tensor) and result.weights.ndim == 1:
        assert result.weights.shape == tree_leaves(jacobian)[0].shape[:1], "not one weight per row"
    else:
        tree_map(lambda leaf, weight: _on_rows(weight).expand(leaf.shape), jacobian, result.weights)
    for weight in tree_leaves(result.weights):
        assert weight.dtype in (torch.float32, torch.float64), f"weights are {weight.dtype}, not at least float32"
    before = start(rule, jacobian, *others, losses=losses)
    assert form(result.state) == form(before), "the state changes its structure, a shape or a dtype"


def finite(rule: Aggregator, jacobian: Jacobian, *others: Jacobian, losses: Losses = None) -> None:
    """A finite Jacobian gives finite weights, direction and state, degenerate or not, three steps long. Exact.

    Source: the contract of `aggregate`.
    """
    state = None
    for _ in range(3):
        result = aggregate(rule, jacobian, state, *others, losses=losses)
        state = result.state
        for name, value in result._asdict().items():
            assert all(leaf.isfinite().all() for leaf in tree_leaves(value)), f"not finite: the {name}"


def batched(rule: Aggregator, jacobian: Jacobian, *others: Jacobian, losses: Losses = None) -> None:
    """`vmap` over Jacobians, and over their states, is the loop: `vmap(A)([J1, J2, J3]) = [A(J1), A(J2), A(J3)]`.

    To 2^-26 of the reach: products of batches round otherwise than single ones.

    Source: the contract of `aggregate`.
    """
    cases = _variants(jacobian, others, losses)
    batch = tree_map(lambda *leaves: torch.stack(leaves), *cases)
    together = torch.vmap(partial(_step, rule, None))(*batch)
    later = torch.vmap(partial(_step, rule))(together.state, *batch)
    for i, case in enumerate(cases):
        alone = _step(rule, None, *case)
        check_close(element(together, i), alone, case[0], "vmap differs from the loop")
        alone = _step(rule, alone.state, *case)
        check_close(element(later, i), alone, case[0], "vmap differs from the loop in the second step")


def compiled(rule: Aggregator, jacobian: Jacobian, *others: Jacobian, losses: Losses = None) -> None:
    """`torch.compile(fullgraph=True)` gives the same numbers, and one graph serves every value and every state.

    To 2^-26 of the reach: a compiler may add up in another order. Traced by "aot_eager", which generates no code.

    Source: the contract of `aggregate`.
    """
    cases = _variants(jacobian, others, losses)
    # A copy: a start that hands over the rule's own tensor would be recognised, and compiled by itself.
    state = tree_map(torch.clone, start(rule, jacobian, *others, losses=losses))
    f = _compile(rule)
    f(state, *cases[0])
    with torch.compiler.set_stance("fail_on_recompile"):
        for case in (*cases, *cases):
            found, begun = f(state, *case)
            expected = _step(rule, state, *case)
            check_close(found, expected, case[0], "the compiled rule differs")
            assert form(begun) == form(state), "the compiled rule starts otherwise"
            state = expected.state


def tree_equals_flat(rule: Aggregator, jacobian: Jacobian, *others: Jacobian, losses: Losses = None) -> None:
    """Parameters in one vector or in many tensors: `flat(A(tree)) = A(flat(tree))`.

    Every leaf is cut in a dict of a matrix, a list and a 0-dimensional parameter. To 2^-26 of the reach: the Gramian is
    added up leaf by leaf.

    Source: the contract of `aggregate`.
    """
    expected = aggregate(rule, jacobian, None, *others, losses=losses)
    pieces = [tree_map(cut, rows) for rows in (jacobian, *others)]
    found = aggregate(rule, pieces[0], None, *pieces[1:], losses=losses)
    check_close(found, expected, jacobian, "the direction depends on how parameters are stored")


def low_precision(rule: Aggregator, jacobian: Jacobian, *others: Jacobian, losses: Losses = None) -> None:
    """float16, bfloat16 and float32 Jacobians are taken at their value: the direction is that of float64, rounded.

    `A(J) = round(A(double(J)))`, to four units in the last place of the dtype or 2^-14 of the reach, if that is more:
    entrywise weights are float32, and may amplify its rounding; and to the smallest number of the dtype. Row norms are
    brought within 2^-8 and 2^8, to fit all.

    Source: the contract of `aggregate`.
    """
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        low = [tree_map(lambda leaf, dtype=dtype: leaf.to(dtype), narrowed(rows)) for rows in (jacobian, *others)]
        wide = [tree_map(torch.Tensor.double, rows) for rows in low]
        found = aggregate(rule, low[0], None, *low[1:], losses=losses)
        expected = aggregate(rule, wide[0], None, *wide[1:], losses=losses)
        assert {leaf.dtype for leaf in tree_leaves(found.direction)} == {dtype}, f"the direction is not {dtype}"
        share = max(4 * torch.finfo(dtype).eps, 2.0**-14)
        subnormal = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        check_close(found, expected, wide[0], f"{dtype} gives another direction", share, subnormal)


def non_finite(rule: Aggregator, jacobian: Jacobian, *others: Jacobian, losses: Losses = None) -> None:
    """A Jacobian that is not finite gives a direction that is not, never an exception: the step can be skipped.

    One entry of one Jacobian is nan, inf or -inf, in the first step or in the second. Exact.

    Source: the contract of `aggregate`.
    """
    matrices = (jacobian, *others)
    memory = aggregate(rule, jacobian, None, *others, losses=losses).state
    for poison, row in ((torch.nan, 0), (torch.inf, -1), (-torch.inf, 0)):
        for which in range(len(matrices)):
            bad = list(matrices)
            bad[which] = tree_map(lambda leaf, p=poison, r=row: poisoned(leaf, p, r), bad[which])
            for state in (None, memory):
                direction = aggregate(rule, bad[0], state, *bad[1:], losses=losses).direction
                assert not flat(direction).isfinite().all(), f"{poison} in row {row} is hidden"


def permutation_equivariant(rule: Aggregator, jacobian: Jacobian, *others: Jacobian, losses: Losses = None) -> None:
    """The order of the objectives does not matter: `A(P J) = A(J)` for permutations P, as weights follow their rows.

    Compared are directions, since weights need not be unique. To 2^-26 of the reach.

    Source: no paper; a loss has no number, only a name.
    """
    expected = aggregate(rule, jacobian, None, *others, losses=losses)
    m = tree_leaves(jacobian)[0].shape[0]
    for order in (torch.arange(m).flip(0), torch.arange(m).roll(1)):
        permuted = [reordered(order, rows) for rows in (jacobian, *others)]
        values = None if losses is None else tree_leaves(losses)[0][order]
        found = aggregate(rule, permuted[0], None, *permuted[1:], losses=values)
        check_close(found, expected, jacobian, f"the order of the rows matters: {order.tolist()}")


def non_conflicting(rule: Aggregator, jacobian: Jacobian, *others: Jacobian, losses: Losses = None) -> None:
    """No objective gets worse, to first order: `J A(J) >= 0`.

    To 2^-26 of `|g_i|` times the reach, for row g_i.

    Source: Quinton & Rey, arXiv 2406.16232, among the properties that they ask for.
    """
    result = aggregate(rule, jacobian, None, *others, losses=losses)
    J, direction = matrix(jacobian), flat(result.direction)
    progress = J @ direction
    lost = TOLERANCE * torch.linalg.vector_norm(J, dim=1) * torch.linalg.vector_norm(reach_of(jacobian, result.weights))
    assert (progress >= -lost).all(), f"rows are conflicted with: J direction = {progress.tolist()}"


def homogeneous(rule: Aggregator, jacobian: Jacobian, *others: Jacobian, losses: Losses = None) -> None:
    """The unit of the losses does not matter: `A(c J) = c A(J)` for `c > 0`, here 2^-40, 3 and 2^40.

    To 2^-26 of the reach: powers of two are exact, three rounds. A direction of fixed length is not homogeneous.

    Source: Quinton & Rey, arXiv 2406.16232: linearity under scaling of the rows implies it.
    """
    expected = aggregate(rule, jacobian, None, *others, losses=losses)
    for c in (2.0**-40, 3.0, 2.0**40):
        scaled = [rescaled(rows, c) for rows in (jacobian, *others)]
        found = aggregate(rule, scaled[0], None, *scaled[1:], losses=losses)
        found = found._replace(direction=tree_map(lambda leaf, c=c: leaf / c, found.direction))
        check_close(found, expected, jacobian, f"the Jacobian times {c:g} does not give {c:g} times the direction")


def linear_under_row_scaling(rule: Aggregator, jacobian: Jacobian, *others: Jacobian, losses: Losses = None) -> None:
    """A short gradient counts less, in proportion: `A(diag(a + b) J) = A(diag(a) J) + A(diag(b) J)` for `a, b > 0`.

    To 2^-26 of the reaches of both.

    Source: Quinton & Rey, arXiv 2406.16232, among the properties that they ask for.
    """
    m = tree_leaves(jacobian)[0].shape[0]
    a = torch.arange(1, m + 1, dtype=torch.float64)
    b = 2 ** a.flip(0)
    whole, *parts = ([rescaled(rows, c) for rows in (jacobian, *others)] for c in (a + b, a, b))
    found = aggregate(rule, whole[0], None, *whole[1:], losses=losses).direction
    halves = [aggregate(rule, part[0], None, *part[1:], losses=losses) for part in parts]
    reaches = [reach_of(part[0], half.weights) for part, half in zip(parts, halves, strict=True)]
    error = flat(found) - flat(halves[0].direction) - flat(halves[1].direction)
    allowed = TOLERANCE * (reaches[0] + reaches[1]).max() + 2.0**-40 * matrix(whole[0]).abs().max()
    assert error.abs().max() <= allowed, "the direction is not linear in the scales of the rows"


def on_the_simplex(rule: Aggregator, jacobian: Jacobian, *others: Jacobian, losses: Losses = None) -> None:
    """The direction is a mean of the rows, entry by entry if weights are: `weights >= 0` and they add up to one.

    To 2^-20, as weights may be float32.

    Source: Desideri, Comptes Rendus Mathematique 350, 2012: the convex hull of the gradients.
    """
    weights = aggregate(rule, jacobian, None, *others, losses=losses).weights
    for leaf in tree_leaves(weights):
        assert (leaf >= -(2.0**-20)).all(), f"negative weights: {leaf.tolist()}"
        assert ((leaf.sum(0) - 1).abs() <= 2.0**-20).all(), f"weights do not add up to one: {leaf.tolist()}"


def weakly_stationary(rule: Aggregator, jacobian: Jacobian, *others: Jacobian, losses: Losses = None) -> None:
    """Training stops at Pareto stationary points only: `A(J) = 0` implies `w'J = 0` for some `w >= 0`, w not zero.

    Zero means below 2^-40 of the reach in every entry; row norms are brought within 2^-8 and 2^8, since sums of larger
    ratio lose the small rows. The w is looked for by non-negative least squares.

    Source: Desideri, Comptes Rendus Mathematique 350, 2012.
    """
    J = _rows_of_a_standstill(rule, jacobian, others, losses)
    if J is not None:
        system = torch.cat([J.mT, torch.ones(1, len(J), dtype=torch.float64)])
        _, residual = nnls(system.numpy(), [0.0] * (len(system) - 1) + [1.0])
        assert residual <= TOLERANCE, "the direction is zero, but the Jacobian is not Pareto stationary"


def strongly_stationary(rule: Aggregator, jacobian: Jacobian, *others: Jacobian, losses: Losses = None) -> None:
    """Training stops only where every objective takes part: `A(J) = 0` implies `w'J = 0` for some `w > 0`.

    Stronger than `weakly_stationary`: one gradient that vanishes must not stop the others. Zero, scales and w as there.

    Source: what TorchJD, the library of Quinton & Rey, tests of UPGrad under this name. MGDA does not obey.
    """
    J = _rows_of_a_standstill(rule, jacobian, others, losses)
    if J is not None:
        _, residual = nnls(J.mT.numpy(), -J.sum(0).numpy())  # w = 1 + v with v >= 0, as any multiple of w will do
        assert residual <= TOLERANCE, "the direction is zero, but not every objective is at rest"


def rotation_blind(rule: Aggregator, jacobian: Jacobian, *others: Jacobian, losses: Losses = None) -> None:
    """The axes of parameter space do not matter: `A(J Q) = A(J) Q` for `Q Q' = 1`; only the Gramian is looked at.

    Q rotates within every leaf, by a matrix of halves, which is exact. To 2^-26 of the reach.

    Source: what a function of the Gramian can see.
    """
    expected = aggregate(rule, jacobian, None, *others, losses=losses)
    matrices = [tree_map(turned, rows) for rows in (jacobian, *others)]
    found = aggregate(rule, matrices[0], None, *matrices[1:], losses=losses)
    back = tree_map(lambda leaf: leaf.unsqueeze(0), expected.direction)
    check_close(found, expected._replace(direction=tree_map(turned, back)), jacobian, "the axes matter")


ALWAYS: tuple[Law, ...] = (
    pure,
    shaped,
    finite,
    batched,
    compiled,
    tree_equals_flat,
    low_precision,
    non_finite,
)
"""What every rule obeys."""

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
"""What a rule obeys if its paper says so."""


def _on_rows(weight: Tensor | AffineWeights) -> Tensor:
    return weight.weights if isinstance(weight, AffineWeights) else weight


def _variants(jacobian: Jacobian, others: tuple[Jacobian, ...], losses: Losses) -> list[Case]:
    """Three different cases of the same shapes; absent losses are an empty tuple, which transforms pass over."""
    changes = (lambda x: x.contiguous(), lambda x: x.flip(0), lambda x: 2 * x.roll(1, 0))
    return [tree_map(change, (jacobian, others, () if losses is None else losses)) for change in changes]


def _step(
    rule: Aggregator, state: Tree, jacobian: Jacobian, others: tuple[Jacobian, ...], losses: Losses
) -> Aggregation:
    return aggregate(rule, jacobian, state, *others, losses=None if losses == () else losses)


@lru_cache(maxsize=1)
def _compile(rule: Aggregator) -> Callable[..., Any]:
    """One step and the start of a rule, in one graph; kept, so that more Jacobians of one shape need no other."""
    torch.compiler.reset()  # the graphs of another rule count against the limit of this one

    def f(state: Tree, *case: Any) -> tuple[Aggregation, Tree]:
        jacobian, others, losses = case
        later, first = (_step(rule, memory, jacobian, others, losses) for memory in (state, None))
        return later, first.state

    return torch.compile(f, fullgraph=True, backend="aot_eager", dynamic=False)


def _rows_of_a_standstill(
    rule: Aggregator, jacobian: Jacobian, others: tuple[Jacobian, ...], losses: Losses
) -> Tensor | None:
    """The unit rows, if the direction is zero."""
    narrow = [narrowed(rows) for rows in (jacobian, *others)]
    result = aggregate(rule, narrow[0], None, *narrow[1:], losses=losses)
    if (flat(result.direction).abs() > 2.0**-40 * reach_of(narrow[0], result.weights)).any():
        return None
    return torch.nn.functional.normalize(matrix(narrow[0]), dim=1)
