"""Heads of several tasks: their gradient under loss scales, and which row is blamed for an overflow."""

from functools import partial

import pytest
import torch
from bounds import check_within, eps
from zoo import Passed

import functional_jd as fj

MODES = ["loop", "vmap", "auto"]
X = torch.tensor([[1.0, 2.0], [3.0, -1.0], [0.5, 1.0]])
PARAMS = {
    "shared": {"w": torch.tensor([[0.5, -1.0], [1.0, 0.25]])},
    "heads": {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([-1.0, 0.5]), "both": torch.tensor(0.5)},
}


def losses(size=1.0):
    """Two tasks, with one parameter of the heads in common; the gradient of the second head is as large as `size`."""
    return fj.multitask(
        lambda shared, x: x @ shared["w"],
        lambda own, h, x: {
            "calm": (h @ own["a"]).square().sum() * own["both"],
            "wild": (h.detach() @ own["b"]).sum() * size + (h @ own["a"].detach()).sum() + own["both"],
        },
    )


OVERFLOWS = {
    "heads": losses(1e30),
    # Features of order one with derivatives of 1e30.
    "trunk": fj.multitask(
        lambda s, x: (h := x @ s["w"]) + 1e30 * (h - h.detach()),
        lambda own, h, x: {"a": (h @ own["a"]).sum(), "b": (own["b"] + own["a"]).sum() * own["both"]},
    ),
}


@pytest.mark.parametrize("shape", [(), (2,)])
@pytest.mark.parametrize("where", OVERFLOWS)
@pytest.mark.parametrize(("engine", "rule"), [("weighted", fj.mean), (fj.engines.features_engine(), fj.upgrad)])
def test_an_overflow_in_heads_or_trunk_skips_a_step_without_rows(where, engine, rule, shape):
    how = {"losses": OVERFLOWS[where], "aggregator": rule(), "optimizer": fj.sgd(0.1), "engine": engine}
    for exponent, moves in ((100, False), (2, True)):
        state = fj.train_state(PARAMS, X, scale=fj.scale_state(2.0**exponent, shape=shape), **how)
        after, info = fj.step(state, X, **how)
        assert info.moved == info.finite.all() == moves
        if where == "trunk":  # no row is to blame
            assert info.finite.tolist() == ([moves] * 2 if shape else moves)
            assert (after.scale.scale < state.scale.scale).tolist() == ([not moves] * 2 if shape else not moves)
        assert torch.equal(after.params["shared"]["w"], PARAMS["shared"]["w"]) != moves


OF_PRODUCTS = [(engine, rule) for engine in ("jacobian", "gramian") for rule in (fj.upgrad(), fj.clipped(1.0))]


@pytest.mark.parametrize(
    ("engine", "rule"), [*OF_PRODUCTS, ("auto", fj.mgda()), ("auto", fj.mgda(cap=0.5)), ("jacobian", fj.mean())]
)
@pytest.mark.parametrize(
    ("scale", "finite", "backed_off"), [(1e9, False, 5e8), ([8.0, 1e9], [True, False], [8.0, 5e8])]
)
def test_heads_that_overflow_skip_a_step_and_their_scale_backs_off(rule, engine, scale, finite, backed_off):
    """The rows of the trunk are finite, and so are their products; with one scale, only the sum of heads is known."""
    how = {"losses": losses(1e30), "aggregator": rule, "optimizer": fj.sgd(0.1), "engine": engine}
    start = fj.scale_state(shape=torch.tensor(scale).shape)._replace(scale=torch.tensor(scale))
    after, info = fj.step(fj.train_state(PARAMS, X, scale=start, **how), X, **how)
    assert not info.moved
    assert info.finite.tolist() == finite
    assert after.scale.scale.tolist() == backed_off
    for name, p in PARAMS["heads"].items():
        assert torch.equal(after.params["heads"][name], p)


@pytest.mark.parametrize("engine", ["auto", "jacobian", "gramian"])
@pytest.mark.parametrize("rule", [fj.upgrad, fj.mgda, partial(fj.mgda, cap=0.7)])
def test_heads_whose_sum_overflows_skip_a_step_with_a_scale_each(rule, engine):
    """Each row is finite, and so are the products of those of the trunk."""
    heads = lambda own, h, x: {"a": own["both"] * 2e38 + h.sum(), "b": own["both"] * 3e38 + h.sum()}
    tasks = fj.multitask(lambda s, x: x @ s["w"], heads)
    how = {"losses": tasks, "aggregator": rule(), "optimizer": fj.sgd(1e-38), "engine": engine}
    params = PARAMS | {"heads": {"both": torch.tensor(0.0)}}
    state = fj.train_state(params, X, scale=fj.scale_state(1.0, shape=(2,)), **how)
    after, info = fj.step(state, X, **how)
    assert not info.moved
    assert after.params["heads"]["both"] == 0


@pytest.mark.parametrize("mode", ["loop", "vmap"])
def test_heads_in_half_precision_are_added_in_float32(mode):
    """Without a scale, rows have the dtypes of the parameters, and their sum is in float32."""
    tasks = fj.multitask(lambda w, x: w * x, lambda v, h, x: [256 * v * h.to(v), v * h.to(v), v * h.to(v)])
    params, x = {"shared": torch.tensor(1.0), "heads": torch.tensor(1.0, dtype=torch.bfloat16)}, torch.tensor(1.0)
    found = fj.jacobian_fn(tasks, mode=mode)(params, x)[0].heads
    assert (found.dtype, found) == (torch.bfloat16, 258)  # 256 + 1 is 256 in bfloat16
    for scale in (torch.tensor(8.0), None):
        direction, _ = fj.gramian_fn(tasks, scale=scale)(params, x)[-1](torch.ones(3))
        assert (direction["heads"].dtype, direction["heads"]) == (torch.float32, 258)


@pytest.mark.parametrize("mode", MODES)
def test_an_overflow_that_no_feature_can_tell_is_not_hidden(mode):
    heads = lambda own, h, x: {"calm": own["a"].sum(), "wild": own["b"].sum() * 1e30}
    tasks = fj.multitask(lambda s, x: x @ s["w"], heads)
    for wild, fine in ((1e9, False), (8.0, True)):
        finite = fj.jacobian_fn(tasks, mode=mode, scale=torch.tensor([8.0, wild]))(PARAMS, X)[2]
        assert finite.all() == fine


@pytest.mark.parametrize("scale", [None, ()])
def test_the_heads_are_differentiated_once_for_groups_with_different_weights(scale):
    passes = []

    def tasks(counted):
        return fj.multitask(
            lambda shared, x: (x @ shared["w"] + shared["b"]).tanh(),
            lambda own, h, x: {name: (h @ counted(own[name]) - 1).square().mean() for name in "ab"},
        )

    params = {"shared": {"w": X[:2], "b": X[2]}, "heads": {"a": X[0], "b": X[1]}}
    weights = {"w": [1.0, 3.0], "b": [2.0, -1.0]}
    rule = fj.grouped({key: fj.constant(torch.tensor(own)) for key, own in weights.items()})
    losses = tasks(lambda x: Passed.apply(x, passes))
    method = {"losses": losses, "aggregator": rule, "optimizer": fj.sgd(1.0), "engine": "weighted"}
    state = fj.train_state(params, X, **method, scale=None if scale is None else fj.scale_state(8.0))
    passes.clear()
    new, _ = fj.step(state, X, **method)
    assert len(passes) == 2  # once in each head
    rows = torch.func.jacrev(tasks(lambda x: x))(params, X)
    for key, own in weights.items():
        moved = sum(w * rows[name]["shared"][key] for w, name in zip(own, "ab", strict=True))
        torch.testing.assert_close(new.params["shared"][key], params["shared"][key] - moved)
    for name in "ab":
        torch.testing.assert_close(new.params["heads"][name], params["heads"][name] - rows[name]["heads"][name])


@pytest.mark.parametrize("first", [torch.no_grad, lambda: torch.autocast("cpu", enabled=False)], ids=["no_grad", "any"])
def test_the_heads_of_a_second_pullback_are_as_if_it_were_the_first(first):
    losses = fj.multitask(lambda shared, x: x @ shared, lambda own, h, x: [(h * own["a"]).sum() ** 2, h.sum()])
    params = {"shared": torch.ones(2, 3), "heads": {"a": torch.ones(3, requires_grad=True)}}

    def slope(earlier):
        _, pullback = fj.weighted_fn(losses)(params, torch.ones(4, 2))
        with first():
            for weights in earlier:
                torch.func.grad(lambda w: pullback(w)[0]["shared"].sum())(weights)
                pullback(weights)
        return torch.autograd.grad(pullback(torch.ones(2))[0]["heads"]["a"].sum(), params["heads"]["a"])[0]

    assert torch.equal(slope([torch.ones(2)]), slope([]))


TRUNK, ROWS = torch.tensor([[0.5, -1.0], [2.0, 0.25]]), torch.tensor([[1.0, 2.0], [-3.0, 0.5]])
# Heads of equal and of different sizes, and one without parameters of its own.
SIZES = {"equal": (2, 2, 2), "different": (1, 3, 2), "one without": (2, 0, 3)}


def problem(sizes):
    """Small integers and halves; one parameter is of all heads."""
    heads = {f"h{i}": torch.full((2, n), 0.5 + i) for i, n in enumerate(sizes)} | {"z": torch.tensor(0.5)}

    def top(own, features, x):
        alone = [(features @ own[f"h{i}"]).square().sum() for i in range(len(sizes))]
        return [loss + (features.sum() + own["z"]) * (i + 1) for i, loss in enumerate(alone)]

    return fj.multitask(lambda shared, x: x @ shared["w"], top), {"shared": {"w": TRUNK}, "heads": heads}


def sum_by_hand(sizes):
    """The sum of the losses, differentiated by torch in float64."""
    losses, params = problem(sizes)
    heads = {name: h.double().requires_grad_() for name, h in params["heads"].items()}
    total = sum(losses.heads(heads, ROWS.double() @ TRUNK.double(), ROWS))
    return dict(zip(heads, torch.autograd.grad(total, list(heads.values())), strict=True))


def rows_by_hand(sizes):
    losses, params = problem(sizes)
    return torch.func.jacrev(lambda w: torch.stack(losses(params | {"shared": {"w": w}}, ROWS)))(TRUNK)


EACH = [2.0**3, 2.0**20, 2.0**-5]


@pytest.mark.parametrize("scale", [None, 2.0**9, EACH])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_scales_leave_the_gradient_of_the_heads_as_it_is_and_each_loss_has_its_row(sizes, scale):
    losses, params = problem(sizes)
    torch.compiler.reset()
    find = fj.jacobian_fn(losses, scale=None if scale is None else torch.tensor(scale))
    traced = torch.compile(find, fullgraph=True, backend="aot_eager")
    for take in (find, traced) if sizes == SIZES["one without"] and scale != EACH else (find,):
        found, _, *finite = take(params, ROWS)
        assert all(flags.all() for flags in finite)
        for name, expected in sum_by_hand(sizes).items():
            assert torch.equal(found.heads[name].double(), expected)  # small integers and halves: exact
        assert torch.equal(found.shared["w"], rows_by_hand(sizes))


@pytest.mark.parametrize("mode", ["loop", "vmap", "compiled"])
@pytest.mark.parametrize("scale", [2.0**9, [2.0**3, 2.0**20]], ids=["one", "each"])
def test_heads_may_have_no_parameters(mode, scale):
    losses = fj.multitask(lambda shared, x: x @ shared, lambda _, z, x: [z.sum(), (z[0] * torch.arange(2)).sum()])
    torch.compiler.reset()
    rows = fj.jacobian_fn(losses, scale=torch.tensor(scale), mode="auto" if mode == "compiled" else mode)
    if mode == "compiled":
        rows = torch.compile(rows, fullgraph=True, backend="aot_eager")
    params = {"shared": TRUNK, "heads": {}}
    found, _, finite = rows(params, ROWS)
    direction, _ = fj.weighted_fn(losses)(params, ROWS)[1](torch.tensor([2.0, -1.0]))
    assert finite.all()
    assert found.heads == direction["heads"] == {}
    # The columns of x summed; and the first example, in the second column alone.
    assert found.shared.tolist() == [[[-2, -2], [2.5, 2.5]], [[0, 1], [0, 2]]]
    assert direction["shared"].tolist() == [[-4, -5], [5, 3]]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("overflows", [0, 2])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_an_overflow_in_one_head_leaves_the_others_as_they_are(sizes, overflows, mode):
    losses, params = problem(sizes)
    scale = torch.full((3,), 2.0**10)
    scale[overflows] = 2.0**127
    found, _, finite = fj.jacobian_fn(losses, mode=mode, scale=scale)(params, ROWS)
    expected = sum_by_hand(sizes)
    expected[f"h{overflows}"].zero_()
    expected["z"] -= overflows + 1
    assert finite.tolist() == [i != overflows for i in range(3)]
    for name, own in expected.items():
        assert torch.equal(found.heads[name].double(), own)
    assert torch.equal(found.shared["w"][finite], rows_by_hand(sizes)[finite])


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_derivatives_go_through_what_was_unscaled(sizes):
    losses, params = problem(sizes)
    scale = torch.tensor(EACH)

    def length(w, heads):
        jacobian, _, _ = fj.jacobian_fn(losses, scale=scale)({"shared": {"w": w}, "heads": heads}, ROWS)
        return sum(h.square().sum() for h in jacobian.heads.values())

    def length_by_hand(w, heads):
        total = lambda heads: sum(losses.heads(heads, ROWS.to(w.dtype) @ w, ROWS))
        return sum(h.square().sum() for h in torch.func.grad(total)(heads).values())

    w = TRUNK.clone().requires_grad_()
    (found,) = torch.autograd.grad(length(w, params["heads"]), w)
    double = {name: h.double() for name, h in params["heads"].items()}
    expected = torch.func.grad(length_by_hand)(TRUNK.double(), double)
    bound = 8 * eps(torch.float32) * expected.abs()
    check_within(found, expected, bound)
    check_within(torch.func.grad(length)(TRUNK, params["heads"]), expected, bound)


SGD = fj.sgd(1.0)


def step_of(sizes, scale, view):
    """A step along rows of one entry each, of these sizes in float64, by weights that are known."""
    weights = torch.ones(len(sizes), dtype=torch.float64)
    rule = fj.stateless(view, lambda _: weights)
    params = torch.zeros(len(sizes), dtype=torch.float64)
    state = fj.TrainState(params, (), SGD.init(params), (), scale)
    losses = lambda params: params * torch.tensor(sizes, dtype=torch.float64)
    return fj.step(state, losses=losses, aggregator=rule, optimizer=SGD, engine="jacobian")


@pytest.mark.parametrize("size", [1e150, 1e305])
@pytest.mark.parametrize("view", [fj.views.gramian, fj.views.norms])
@pytest.mark.parametrize("shape", [(), (2,)])
def test_only_rows_in_float64_that_overflow_skip_the_step_and_not_their_squares(view, shape, size):
    """The square of the smaller one is 1e300, and scaled above 1.8e308, which says nothing of the row."""
    moves = size < 1e300
    after, info = step_of([size, 3.0], fj.scale_state(2.0**16, shape=shape), view)
    assert torch.equal(info.finite, torch.tensor([moves, True] if shape else moves))
    assert info.moved == moves
    assert torch.equal(after.params, -torch.tensor([size, 3.0], dtype=torch.float64) * moves)
    assert torch.equal(after.scale.scale, torch.where(info.finite, 2.0**16, 2.0**15))
