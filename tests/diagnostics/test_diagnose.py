"""Diagnostics against NumPy and SciPy, closed forms and exact counts; and which gradients are not finite."""

import math
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import scipy.optimize
import torch
from bounds import check_within, eps, half_the_digits
from hypothesis import example, given
from hypothesis import strategies as st
from sequences import integer_jacobians, random_rows

import functional_jd as jd
from functional_jd.aggregation.views import gramian
from functional_jd.core.heads import MultitaskJacobian
from functional_jd.diagnostics import Diagnosis, blame, describe, diagnose

jacobians = integer_jacobians()


# What inner products of rows leave of eigenvalues and lengths, as their condition is squared.
SQUARED = 2**22 * eps()


def assert_same(found, expected, by=SQUARED, least=1.0):
    for x, y in zip(found, expected, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        same = (x == y) | (x.isnan() & y.isnan())
        size = y.abs().nan_to_num(0, 0, 0).max().clamp(min=least)
        check_within(torch.where(same, 0, x), torch.where(same, 0, y), by * size)


def shortest(J):
    """The length of the shortest convex combination of rows, by non-negative least squares."""
    unit = np.abs(J).max() or 1.0
    system = np.vstack([J.T / unit, np.ones(len(J))])
    v = scipy.optimize.nnls(system, np.eye(len(system))[-1])[0]
    return np.linalg.norm(J.T @ v) / v.sum()


@given(jacobians, st.data())
def test_equal_to_numpy_and_scipy(J, data):
    x = torch.tensor(data.draw(st.lists(st.integers(-3, 3).map(float), min_size=J.shape[1], max_size=J.shape[1])))
    found, rows, m = diagnose([J], [x]), J.numpy(), len(J)
    lengths, length = np.linalg.norm(rows, axis=1), float(x.norm())
    inverse = np.divide(1, lengths, out=np.zeros(m), where=lengths > 0)
    s = np.linalg.svd(np.pad(rows, ((0, 0), (0, m))), compute_uv=False)[:m]  # wide, so that there are m of them
    s[s < 1e-9 * max(s[0], 1)] = 0
    p = s[s > 0] / (s.sum() or 1)
    expected = Diagnosis(
        norms=torch.from_numpy(lengths),
        cosines=torch.from_numpy(inverse[:, None] * (rows @ rows.T) * inverse),
        alignment=torch.from_numpy(rows @ x.double().numpy() * inverse / (length or 1)),
        conflict=found.conflict,  # counted below
        stationarity=torch.tensor(shortest(rows), dtype=torch.float64),
        rank=torch.tensor(np.exp(-(p * np.log(p)).sum()) if len(p) else 0.0, dtype=torch.float64),
        condition=torch.tensor(s[0] / s[-1] if s[-1] else math.inf, dtype=torch.float64),
        score=found.score,  # below
    )
    assert_same(found, expected, 16 * half_the_digits())


@given(jacobians)
def test_conflicting_pairs_are_counted_exactly(J):
    rows = [[Fraction(x) for x in row] for row in J.tolist()]
    pairs = [(a, b) for i, a in enumerate(rows) for b in rows[:i]]
    opposed = sum(sum(x * y for x, y in zip(a, b, strict=True)) < 0 for a, b in pairs)
    assert float(diagnose([J]).conflict) == pytest.approx(opposed / len(pairs) if pairs else 0.0, abs=8 * eps())


@given(jacobians)
def test_the_score_is_that_of_the_paper(J):
    """`2 |sum_i v_i / |v_i| / n|^2 - 1`, of n rows that are not zero."""
    rows = [row / row.norm() for row in J.unbind() if row.any()]
    expected = 2 * float((sum(rows) / len(rows)).square().sum()) - 1 if rows else 0.0
    assert float(diagnose([J]).score) == pytest.approx(expected, abs=64 * eps())


@given(jacobians, st.lists(st.integers(-40, 40), min_size=6, max_size=6), st.randoms())
def test_angles_do_not_see_lengths_and_order_does_not_matter(J, exponents, chance):
    factors = 2.0 ** torch.tensor(exponents[: len(J)], dtype=torch.float64)
    x = torch.ones(J.shape[1], dtype=torch.float64)
    plain, scaled = diagnose([J], [x]), diagnose([J * factors.unsqueeze(1)], [x])
    assert torch.equal(scaled.cosines, plain.cosines)
    assert torch.equal(scaled.alignment, plain.alignment)
    assert scaled.conflict == plain.conflict
    assert torch.equal(scaled.norms, plain.norms * factors)
    order = list(range(len(J)))
    chance.shuffle(order)
    moved = diagnose([J[order]], [x])
    expected = plain.norms[order], plain.cosines[order][:, order], plain.alignment[order], *plain[3:]
    assert_same(moved, Diagnosis(*expected))


@given(jacobians, st.integers(-200, 200))
@example(torch.eye(4, dtype=torch.float64)[:, 3:], -23)  # rows of zeros set no scale
def test_all_scales_with_the_jacobian(J, exponent):
    c, plain = 2.0**exponent, diagnose([J])
    expected = plain._replace(norms=plain.norms * c, stationarity=plain.stationarity * c)
    assert_same(diagnose([J * c]), expected, least=0.0)


def test_opposite_rows_are_stationary_and_their_mean_is_no_direction():
    row = random_rows(1, 7)
    found = diagnose(torch.cat([row, -row]))
    assert (found.stationarity, found.conflict, found.condition) == (0, 1, math.inf)
    assert found.alignment.tolist() == [0, 0]
    assert found.rank.item() == pytest.approx(1)


def test_orthogonal_rows_do_not_conflict_by_rounding():
    J = torch.linalg.qr(random_rows(200, 12))[0].T
    assert diagnose(J).conflict == 0
    assert diagnose(gramian(J).float()).conflict == 0
    assert (gramian(J) < 0).any()  # though rounding says so


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_low_precision_counts_as_the_numbers_it_holds(dtype):
    J = random_rows(4, 30).to(dtype)
    assert_same(diagnose(J), diagnose(J.double()), 0.0)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(diagnose(J), diagnose(J.double()), 0.0)


def test_jacobian_and_gramian_weights_and_direction_agree():
    J = {"w": random_rows(3, 2, 4), "b": random_rows(3, 5, seed=1)}
    weights = random_rows(3, seed=2)
    before = J["w"].clone(), weights.clone()
    expected = diagnose(J, jd.aggregation.combine(J, weights))
    assert_same(diagnose(J, weights), expected)
    assert torch.equal(J["w"], before[0])
    assert torch.equal(weights, before[1])
    assert_same(diagnose(gramian(J), weights), expected)
    assert_same(diagnose(gramian(J).float(), weights.float()), expected, 2**8 * eps(torch.float32))
    assert_same(diagnose(J), diagnose(J, torch.ones(3)))
    flat = torch.cat([J["w"].flatten(1), J["b"]], dim=1)
    assert_same(diagnose(flat, weights @ flat), expected)
    assert_same(diagnose(flat, weights), expected)


def test_what_the_engines_return_is_taken():
    heads = lambda p, z, x: {"right": (z @ p).square().mean(), "left": (z @ p).mean()}
    losses = jd.multitask(lambda shared, x: torch.tanh(x @ shared), heads)
    params = {"shared": random_rows(4, 3), "heads": random_rows(3, 2, seed=1)}
    x = random_rows(6, 4, seed=2)
    jacobian, values = jd.jacobian_fn(losses)(params, x)
    assert isinstance(jacobian, MultitaskJacobian)
    expected = diagnose(jacobian.shared)
    assert_same(diagnose(jacobian), expected)
    assert_same(diagnose(jacobian, jd.aggregation.combine(jacobian, torch.ones(2))), expected)
    assert_same(diagnose(jd.gramian_fn(losses)(params, x)[0]), expected, 2**8 * eps(torch.float32))
    assert jd.objective_names(values) == ["left", "right"]


def test_a_row_that_is_not_finite_leaves_what_is_said_of_the_others():
    J = random_rows(3, 6)
    sound = diagnose([J], [torch.ones(6)])
    for poison in (torch.nan, torch.inf):
        bad = J.clone()
        bad[1, 2] = poison
        found = diagnose([bad], [torch.ones(6)])
        assert torch.equal(found.norms[[0, 2]], sound.norms[[0, 2]])
        assert torch.equal(found.cosines[0, 2], sound.cosines[0, 2])
        assert torch.equal(found.alignment[[0, 2]], sound.alignment[[0, 2]])
        for value in (found.norms[1], found.alignment[1], found.cosines[1].sum()):
            assert not value.isfinite()
        for value in found[3:]:
            assert value.isnan()


@pytest.mark.parametrize("weights", [None, torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)])
def test_derivatives(weights):
    J = (random_rows(3, 4) + 0.5).requires_grad_()

    def smooth(J, x):
        found = diagnose([J], x)
        return (*found[:3], *found[4:])

    assert torch.autograd.gradcheck(lambda J: smooth(J, weights), (J,), check_forward_ad=True)
    x = random_rows(4, seed=3).requires_grad_()
    assert torch.autograd.gradcheck(lambda J, x: smooth(J, [x]), (J, x), check_forward_ad=True)
    assert not diagnose(J).conflict.requires_grad


@pytest.mark.parametrize("J", [torch.eye(3).double(), torch.zeros(3, 4).double(), random_rows(1, 4).repeat(3, 1)])
def test_derivatives_are_finite_where_something_is_zero_or_equal(J):
    for field in ("norms", "cosines", "alignment", "stationarity", "rank"):
        slope = torch.func.grad(lambda J, field=field: getattr(diagnose([J]), field).sum())(J)
        assert slope.isfinite().all(), field


def test_vmap_is_a_loop():
    J, weights, x = random_rows(5, 3, 4), random_rows(5, 3, seed=1), random_rows(5, 4, seed=2)
    J[2, 1] = 0
    for f, inputs in (
        (lambda J, w: diagnose([J], w), (J, weights)),
        (lambda J, x: diagnose([J], [x]), (J, x)),
        (diagnose, (J @ J.mT, weights)),
    ):
        expected = Diagnosis(*map(torch.stack, zip(*map(f, *inputs), strict=True)))
        assert_same(torch.vmap(f)(*inputs), expected)


def test_compiles_in_one_graph():
    J = {"w": random_rows(3, 2, 4), "b": random_rows(3, 5, seed=1)}
    weights = random_rows(3, seed=2)
    compiled = torch.compile(diagnose, fullgraph=True, backend="aot_eager")
    assert_same(compiled(J, weights), diagnose(J, weights))
    assert_same(compiled(J, jd.aggregation.combine(J, weights)), diagnose(J, jd.aggregation.combine(J, weights)))
    assert_same(compiled(gramian(J), weights), diagnose(gramian(J), weights))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([[1.0, 2], [3, 4]],), "read as a Gramian"),
        (([[1.0, 2], [2, 1]],), "gramian=False"),
        (([[-1.0, 0], [0, 1]],), "read as a Gramian"),
        (([[1.0, 0], [0, 1]], [1.0, 2, 3]), r"weights must be \[2\] with a Gramian, found .* \[3\]"),
        (([[1.0, 0], [0, 1]], {"w": torch.ones(2)}), "pass the Jacobian"),
        (({"w": torch.ones(2, 3)}, [1.0, 2, 3]), "direction with the structure of params, found"),
        (({"w": torch.ones(2, 3)}, {"v": torch.ones(3)}), r"found {'v': \[3\]}"),
        (({"w": torch.ones(2, 3)}, {"w": torch.ones(2, 3)}), "entrywise"),
        (({"w": torch.ones(2, 3), "b": torch.ones(3)},), "2 in 'w'|3 in 'b'"),
        ((torch.ones(0, 0),), "at least one row"),
        ((torch.ones(2, 3), None, True), r"first argument must be .* \[m, m\] with gramian=True, found .* \[2, 3\]"),
        (({"w": torch.eye(2)}, None, True), "found dict"),
        (((),), r"found \(\): the rule of the step needs none.*gramian_fn.*jacobian_fn.*squared_norms_fn"),
    ],
)
def test_errors_say_what_to_do(arguments, message):
    rows, direction, gramian = [torch.tensor(x) if isinstance(x, list) else x for x in (*arguments, None, None)[:3]]
    with pytest.raises(ValueError, match=message):
        diagnose(rows, direction, gramian=gramian)


def test_no_gramian_is_nan_where_values_are_not_known():
    found = torch.vmap(diagnose)(torch.stack([torch.eye(2), torch.tensor([[1.0, 2], [3, 4]])]))
    assert found.norms[0].tolist() == [1, 1]
    assert all(value[1].isnan().all() for value in found)


def test_a_square_jacobian_can_be_said_to_be_one():
    J, x = random_rows(4, 3, 3), random_rows(4, 3, seed=1)
    bare = partial(diagnose, gramian=False)
    for rows, direction in zip(J, x, strict=True):
        assert_same(bare(rows, direction), diagnose([rows], [direction]))
        assert_same(bare(rows), diagnose([rows]))
        assert_same(bare(rows, jd.aggregation.combine(rows, direction)), diagnose([rows], direction))
        assert_same(diagnose(gramian(rows), direction, gramian=True), diagnose(gramian(rows), direction))
    assert_same(torch.vmap(bare)(J, x), torch.vmap(lambda J, x: diagnose([J], [x]))(J, x))
    wide = random_rows(2, 3)
    assert_same(bare(wide, torch.ones(2)), diagnose(wide))  # no direction has two entries: these are weights


@given(jacobians.filter(lambda J: len(J) == J.shape[1]), st.data())
def test_a_symmetric_jacobian_is_not_taken_for_its_gramian(J, data):
    J, x = J @ J.mT, torch.tensor(data.draw(st.lists(st.integers(-3, 3), min_size=len(J), max_size=len(J)))).double()
    found, along = diagnose(J, x, gramian=False), J @ x
    torch.testing.assert_close(found.norms, J.norm(dim=1))
    assert torch.equal(found.alignment.sign(), along.sign())


def test_the_table_names_the_rows():
    J = torch.tensor([[3.0, 4], [-3, 4], [0, -2]])
    names = jd.objective_names({"left": torch.zeros(()), "image": torch.zeros(2)})
    lines = describe(diagnose(J), names).splitlines()
    assert lines[0].startswith("Diagnosis: 67% of the pairs conflict, distance to stationarity 0, effective rank")
    assert lines[1].split() == ["objective", "norm", "direction", *names]
    assert lines[2].split() == ["image[0]", "5", "+0.80", "+1.00", "+0.28", "-0.80"]
    assert len({len(line) for line in lines[1:]}) == 1
    assert repr(diagnose(J)) == describe(diagnose(J), ["0", "1", "2"])
    assert describe(diagnose(J.clone().requires_grad_()), names).splitlines() == lines  # and no warning
    with pytest.raises(ValueError, match="one name for each of 3 objectives, found 2"):
        describe(diagnose(J), names[:2])


def test_the_table_of_many_rows_stays_small():
    J = random_rows(100, 3)
    lines = describe(diagnose(J)).splitlines()
    assert len(lines) == 22
    assert max(map(len, lines)) < 120
    row, cosines = lines[2].split(), diagnose(J).cosines[0]
    assert row[-2:] == [f"{cosines[1:].min():+.2f}", str(int(cosines[1:].argmin()) + 1)]


def test_a_diagnosis_shows_itself_everywhere():
    seen = []

    def look(J):
        found = diagnose([J])
        seen.append(repr(found))
        return found

    batch = torch.vmap(look)(random_rows(2, 3, 4))
    torch.func.grad(lambda J: look(J).norms.sum())(random_rows(3, 4))
    assert len(seen) == 2
    assert "tensor [3, 3]" in seen[0]
    assert "tensor [2, 3, 3]" in repr(batch)


@pytest.mark.parametrize(
    ("dtype", "m", "told"), [(torch.float64, 2, 1.2e7), (torch.float64, 20, 4e6), (torch.float32, 2, 500)]
)
def test_the_condition_is_told_up_to_what_inner_products_tell(dtype, m, told):
    bound = (16 * m * torch.finfo(dtype).eps) ** -0.5
    assert bound == pytest.approx(told, rel=0.07)
    for factor, finite in ((0.99, True), (1.01, False)):
        lengths = torch.ones(m, dtype=torch.float64)
        lengths[0] = factor * bound
        condition = diagnose(torch.diag(lengths**2).to(dtype), gramian=True).condition.item()
        assert condition == (pytest.approx(factor * bound, rel=64 * half_the_digits()) if finite else math.inf)


PARAMS = {"w": torch.ones(2), "b": torch.ones(2)}


def overflowing(params, x):
    return {"calm": params["w"].sum() * x, "both": (params["w"] * params["b"]).sum(), "wild": (x * params["b"]).sum()}


def test_an_overflow_is_found_by_objective_and_parameter():
    found = blame(overflowing, PARAMS, torch.tensor(1e30), scale=jd.scale_state(2.0**40, shape=3))
    assert jd.objective_names(overflowing(PARAMS, torch.ones(()))) == ["both", "calm", "wild"]
    assert {name: x.tolist() for name, x in found.items()} == {"w": [True, False, True], "b": [True, True, False]}
    assert all(x.all() for x in blame(overflowing, PARAMS, torch.tensor(1e30)).values())


def test_losses_that_are_blamed_do_not_spoil_one_another():
    """Rows that are differentiated together are NaN here, as 0 x inf."""
    root = lambda params: {"root": (params["w"] - 1).sum().sqrt(), "line": (params["w"] - 1).sum()}
    assert blame(root, {"w": torch.ones(1)})["w"].tolist() == [True, False]


def test_blame_of_tasks_and_examples():
    tasks = jd.multitask(lambda s, x: s["w"] * x, lambda own, h, x: {n: (own[n] * h).sum() for n in "ab"})
    params = {"shared": {"w": torch.ones(2)}, "heads": {"a": torch.ones(2), "b": torch.full((2,), 1e30)}}
    scale = jd.scale_state(shape=2)._replace(scale=torch.tensor([1.0, 2.0**40]))
    assert blame(tasks, params, torch.ones(2), scale=scale)["w"].tolist() == [True, False]
    loss = jd.per_example(lambda params, x: (x * params["w"]).sum().sqrt())
    assert blame(loss, {"w": torch.ones(1)}, torch.tensor([[1.0], [0.0]]))["w"].tolist() == [True, False]


def test_what_blame_does_not_take():
    with pytest.raises(ValueError, match=r"blame: the scale must be of shape \[\] or \[3\]"):
        blame(overflowing, PARAMS, torch.ones(()), scale=jd.scale_state(shape=2))
