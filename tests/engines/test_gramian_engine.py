"""The Gramian engine against rows of plain autograd: every model, kind of losses, price, scale and transform."""

import pytest
import torch
from bounds import check_products, check_same, check_within, eps, sum_bound
from gramian_by_hand import WEIGHTS, Largest, agree, expectation, found, model_of, priced, weights_for, wide
from hypothesis import example, given
from hypothesis import strategies as st
from jacobian_by_hand import KINDS, case_of, leaves, rows_of
from torch.nn import functional as F  # noqa: N812
from zoo import ASKS, BATCH, Case, Model, numbers, plain, with_hook

from functional_jd import SlowPathWarning, gramian_fn, multitask, per_example, squared_norms_fn, weighted_fn

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")


@given(
    dims=st.integers(1, 3),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 3),
    padding=st.one_of(st.integers(0, 2), st.sampled_from(["same", "valid"])),
    dilation=st.integers(1, 2),
    groups=st.sampled_from([1, 2]),
    transposed=st.booleans(),
    extra=st.integers(0, 1),
    kind=st.sampled_from(sorted(KINDS)),
    lean=st.booleans(),
)
@example(
    dims=2, kernel=2, stride=1, padding="same", dilation=1, groups=1, transposed=False, extra=0, kind="plain", lean=True
)
# Which makes a copy, and says so; more on the right than on the left is what is to be shown.
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")
def test_convolutions_of_every_make(dims, kernel, stride, padding, dilation, groups, transposed, extra, kind, lean):
    each = lambda n, least: n if isinstance(n, str) else tuple(max(n - d, least) for d in range(dims))
    stride, dilation = each(1 if padding == "same" else stride, 1), each(dilation, 1)
    how = {"stride": stride, "padding": each(padding, 0), "dilation": dilation, "groups": groups}
    if transposed:
        extras = tuple(min(extra, max(pair) - 1) for pair in zip(stride, dilation, strict=True))
        how |= {"padding": 0 if isinstance(padding, str) else how["padding"], "output_padding": extras}
    f = getattr(F, f"conv_transpose{dims}d" if transposed else f"conv{dims}d")
    shape = (2, 3, *[kernel] * dims) if transposed else (4, 2 // groups, *[kernel] * dims)
    channels = 3 * groups if transposed else 4

    def predict(params, x):
        y = torch.tanh(f(x, params["w"], params["b"], **how))
        y = y.flatten(1)
        return torch.stack([y.mean(1), (y**2).mean(1), y[:, 0]], 1)

    model = Model(
        {"w": numbers(*shape), "b": numbers(channels, seed=1)}, predict, numbers(BATCH, 2, *[6] * dims, seed=2)
    )
    case = KINDS[kind](model)
    with pytest.MonkeyPatch.context() as patch:
        priced(patch, lean)
        agree(found(case), expectation(case))


def counted(params, x):
    return F.embedding(torch.tensor([[0], [1], [1], [1]]), params["w"], scale_grad_by_freq=True)[: len(x), 0] * x


@pytest.mark.filterwarnings("error::functional_jd.SlowPathWarning")
def test_single_entries_of_a_leaf_are_no_reason_to_form_the_rows():
    w, x = numbers(3), numbers(4, seed=1)
    gramian, _, pullback = gramian_fn(per_example(lambda w, x: w[1] * x + w[2]))(w, x)
    rows = torch.stack([torch.zeros_like(x), x, torch.ones_like(x)], 1)
    check_products(gramian, rows, rows)
    check_within(pullback(WEIGHTS)[0], WEIGHTS @ rows, sum_bound(WEIGHTS[:, None] * rows))


def test_frequencies_and_renormed_tables_are_left_to_autograd():
    case = plain(model_of(counted))
    agree(found(case), expectation(case))


def test_a_source_changed_in_place_is_an_error_as_in_autograd():
    def predict(params, x):
        x = x * 1
        y = F.linear(x, params["w"])
        x.zero_()
        return y

    case = plain(model_of(predict))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found(case)


@pytest.mark.parametrize("take", [gramian_fn, squared_norms_fn])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_known_layers_are_never_formed(kind, take):
    case, m = wide(kind)
    with Largest() as largest:
        _, _, pullback = take(case.losses)(case.params, *case.args)
        pullback(torch.ones(m, dtype=torch.float64))
    assert largest.numel < m * 64 * 64


def test_rows_are_formed_where_inner_products_of_factors_would_cost_more():
    params = {"w": numbers(2, 2)}
    case = Case(params, lambda p, x: torch.tanh(x @ p["w"]).sum((0, 1)), (numbers(5, 40, 2),))
    with Largest() as largest:
        agree(found(case, WEIGHTS[:2]), expectation(case, WEIGHTS[:2]))
    assert largest.numel < 200 * 200


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["mlp", "tied", "conv2d", "lstm"])
def test_a_row_that_overflowed_is_a_row_and_column_that_are_not_finite(name, kind, monkeypatch):
    case = case_of(name, kind)
    m = len(weights_for(case))
    expected, _ = expectation(case)
    scale = torch.ones(m)
    scale[1] = torch.inf
    others = [i for i in range(m) if i != 1]
    for lean in (True, False):
        priced(monkeypatch, lean)
        squares, _, pullback = squared_norms_fn(case.losses, scale=scale)(case.params, *case.args)
        assert not squares[1].isfinite()
        check_same(squares[others], expected.diagonal()[others])
        assert pullback(torch.ones(m))[1].tolist() == [i != 1 for i in range(m)]
        gramian, _, pullback = gramian_fn(case.losses, scale=scale)(case.params, *case.args)
        assert not gramian[1].isfinite().any()
        assert not gramian[:, 1].isfinite().any()
        check_same(gramian[others][:, others], expected[others][:, others])
        shared, finite = pullback(torch.ones(m))
        assert not all(x.isfinite().all() for x in leaves(shared["shared"] if kind == "tasks" else shared))
        assert finite.tolist() == [i != 1 for i in range(m)]


def test_one_scale_or_none_has_one_flag_for_all_rows():
    large = lambda p: p * torch.tensor([1.0, 1e30])
    for scale, expected in ((None, True), (torch.tensor(2.0), True), (torch.tensor(1e30), False)):
        gramian, _, pullback = gramian_fn(large, scale=scale)(torch.ones(2))
        finite = pullback(torch.ones(2))[1]
        assert finite.shape == ()
        assert finite == expected == gramian.isfinite().all()
    overflowed = gramian_fn(lambda p: p * torch.tensor([1.0, torch.inf]))(torch.ones(2))[2]
    assert not overflowed(torch.ones(2))[1]


def test_heads_that_are_not_finite_spoil_all_rows():
    losses = multitask(lambda p, x: p * x, lambda h, z, x: [h.sqrt() + z.sum(), z.mean()])
    case = Case({"shared": numbers(3), "heads": torch.zeros((), dtype=torch.float64)}, losses, (numbers(3, seed=1),))
    for scale in (None, torch.tensor(8.0)):
        gramian, _, pullback = gramian_fn(losses, scale=scale)(case.params, *case.args)
        assert not gramian.isfinite().any()
        assert not pullback(torch.ones(2))[1]
        assert not squared_norms_fn(losses, scale=scale)(case.params, *case.args)[0].isfinite().any()
    # With a scale of its own, each row of the heads is looked at by itself.
    pullback = gramian_fn(losses, scale=torch.full((2,), 8.0))(case.params, *case.args)[2]
    assert pullback(torch.ones(2))[1].tolist() == [False, True]


@pytest.mark.parametrize(("argnums", "order"), [(1, [1]), (-1, [1]), ((0, 1), [0, 1]), ((1, 0), [1, 0])])
def test_any_arguments_can_be_differentiated(argnums, order):
    given = (numbers(3, 3), numbers(4, 3, seed=1))
    losses = lambda w, x: torch.tanh(F.linear(x, w)).mean(1)
    swapped = lambda chosen: losses(*[chosen[order.index(i)] if i in order else given[i] for i in range(2)])
    gramian, _, pullback = gramian_fn(losses, argnums=argnums)(*given)
    mine, _ = pullback(WEIGHTS)
    assert isinstance(mine, tuple) == isinstance(argnums, tuple)
    agree((gramian, [x.reshape(-1) for x in leaves(mine)]), expectation(Case([given[i] for i in order], swapped, ())))


@pytest.mark.parametrize("kind", ["plain", "per_example", "multitask"])
@pytest.mark.parametrize("known", [True, False], ids=["tapped", "rows"])
def test_what_was_unscaled_is_at_least_float32(kind, known):
    # The direction is 2^-26 times small integers: below the range of float16, which the scaled rows do not leave.
    params, x = {"w": numbers(3, 3, dtype=torch.float16)}, numbers(2, 3, seed=1, dtype=torch.float16)
    forward = lambda w, x: (x @ w.mT if known else torch.einsum("oi,...i->...o", w, x)).float()
    tiny = 2.0**-26
    losses = {
        "plain": lambda p, x: tiny * forward(p["w"], x).sum(-1),
        "per_example": per_example(lambda p, x: tiny * forward(p["w"], x).sum()),
        "multitask": multitask(lambda p, x: forward(p["w"], x), lambda p, h, x: [tiny * row.sum() for row in h]),
    }[kind]
    given = {"shared": params, "heads": {}} if kind == "multitask" else params
    gramian, _, pullback = gramian_fn(losses, scale=torch.tensor(2.0**26))(given, x)
    direction = leaves(pullback(torch.ones(2, dtype=torch.float64))[0])[0]
    assert direction.dtype == torch.float32
    total = tiny * x.double().sum(0).expand(3, 3)
    check_within(direction, total, eps(torch.float16) * total.abs())
    square = 3 * tiny**2 * (x.double() @ x.double().mT)
    check_within(gramian, square, eps(torch.float16) * square.abs())


def agrees(case, *how):
    values = case.losses(case.params, *case.args)
    weights = numbers(len(values))
    agree(found(case, weights), expectation(case, weights), *how)


IN_PLACE = {  # a linear layer of a batch of sequences gives a view, and so does a convolution of one image
    "linear": lambda p, x: F.linear(x, p["w"], p["b"]).relu_().square().mean((1, 2)),
    "conv": lambda p, x: torch.stack([F.relu(F.conv1d(e, p["w"][:, :, None], p["b"]), inplace=True).sum() for e in x]),
}


@pytest.mark.parametrize("f", IN_PLACE.values(), ids=IN_PLACE)
def test_what_a_layer_gives_may_be_changed_in_place(f):
    params, x = {"w": numbers(3, 3), "b": numbers(3, seed=1)}, numbers(4, 3, 3, seed=2)
    for losses in (f, per_example(lambda p, x: f(p, x[None]).sum())):
        agrees(Case(params, losses, (x,)))


CHANGES = {  # of a copy, or of a view of it
    "view": (torch.t, lambda used: used[0].mul_(2)),
    "relu": (lambda copy: copy, lambda used: F.relu(used, inplace=True)),
    "foreach": (lambda copy: copy, lambda used: torch._foreach_mul_([used], 2.0)),
}


@pytest.mark.parametrize(("view", "change"), CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("attached", [False, True])
def test_a_copy_of_a_weight_may_be_changed_in_place(view, change, attached):
    def losses(p, x):
        used = view(p["w"].double())
        change(used)
        return F.linear(x, used).sin().sum(0)

    params = {"w": numbers(3, 3, dtype=torch.float32).requires_grad_(attached)}
    agrees(Case(params, losses, (numbers(4, 3, seed=1),)), torch.float32, 64)


def test_a_leaf_whose_numbers_share_memory_is_not_taken_for_its_transpose():
    params = {"w": torch.tensor(0.5, dtype=torch.float64).expand(3, 3)}
    agrees(Case(params, lambda p, x: F.linear(x, p["w"].T).sin().sum(0), (numbers(4, 3),)))


def test_an_infinite_loss_stays_alone_where_somebody_differentiates_the_gramian():
    p = numbers(3).requires_grad_()
    losses = lambda p: [p.sin().sum(), p.exp().sum() * torch.inf, p.tanh().sum()]
    assert gramian_fn(losses)(p)[0].diagonal().isfinite().tolist() == [True, False, True]


def close_to_rows(gramians, pullback, rows):
    rows = torch.cat([leaf.flatten(1) for leaf in rows], 1)
    for gramian in gramians:
        torch.testing.assert_close(gramian, rows @ rows.mT)
    direction, _ = pullback(torch.ones(len(rows), dtype=torch.float64))
    torch.testing.assert_close(torch.cat([leaf.flatten() for leaf in leaves(direction)]), rows.sum(0))


@pytest.mark.parametrize(
    ("take", "words"), [(gramian_fn, "forms all rows"), (weighted_fn, "one example after the other")]
)
@pytest.mark.parametrize("ask", ASKS)
def test_hooks_of_a_loss_that_asks_for_the_graph_act_on_every_example(ask, take, words):
    params, x = {"w": numbers(3, 4), "v": numbers(4, seed=1)}, numbers(BATCH, 3, seed=2)
    losses = per_example(with_hook(ASKS[ask]))
    with pytest.warns(SlowPathWarning, match=words):
        *gramian, _, pullback = take(losses)(params, x)
    close_to_rows(gramian, pullback, rows_of(losses, params, x))


class KeepsAGraph(torch.autograd.Function):
    """As reversible and implicit layers do."""

    @staticmethod
    def forward(ctx, x, w, recording):
        with recording():
            own = x.detach().requires_grad_()
            y = torch.tanh(F.linear(own, w))
        ctx.graph = (y, own, w)
        return y.detach()

    @staticmethod
    def backward(ctx, g):
        y, *inputs = ctx.graph
        return *torch.autograd.grad(y, inputs, g, retain_graph=True, allow_unused=True), None


@pytest.mark.parametrize("recording", [torch.enable_grad, lambda: torch.inference_mode(False)])
@pytest.mark.parametrize("differentiable", [False, True])
def test_a_graph_inside_a_custom_function_reaches_the_parameters(differentiable, recording):
    params, x = {"w": numbers(4, 3), "v": numbers(2, 4, seed=2)}, numbers(5, 3, seed=1).requires_grad_(differentiable)
    losses = lambda p, x: F.linear(KeepsAGraph.apply(x, p["w"], recording), p["v"]).square().sum(1)
    gramian, _, pullback = gramian_fn(losses)(params, x)
    close_to_rows([gramian], pullback, rows_of(losses, params, x))
