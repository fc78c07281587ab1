"""Rows through ops whose batched derivatives torch gets wrong."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from zoo import numbers as draw

import functional_jd as fj
from functional_jd.torch_compat.repaired_ops import cdist

EPS = torch.finfo(torch.float64).eps
WAYS = ("use_mm_for_euclid_dist_if_necessary", "donot_use_mm_for_euclid_dist", "use_mm_for_euclid_dist")
# A term of a gradient is a weight times a power of `|x - y| / d`, which is not above 1: so many roundings at most.
ROUNDINGS = 32
M = 5


def problem():
    """Five losses of distances between points, with their rows by a loop and the bounds of these."""
    params, weights = {"x": draw(4, 3), "y": draw(3, 3, seed=1)}, draw(M, 4, 3, seed=2)
    losses = lambda params: (weights * torch.cdist(params["x"], params["y"])).flatten(1).sum(1)
    leaves = {name: x.clone().requires_grad_() for name, x in params.items()}
    rows = [torch.autograd.grad(value, list(leaves.values()), retain_graph=True) for value in losses(leaves)]
    by_leaf = dict(zip(leaves, map(torch.stack, zip(*rows, strict=True)), strict=True))
    bound = ROUNDINGS * EPS * weights.abs().flatten(1).sum(1)
    return params, losses, by_leaf, bound


def check(jacobian, rows, bound):
    for name, row in rows.items():
        assert ((jacobian[name] - row).abs().flatten(1).amax(1) <= bound).all(), name


def test_compiles_whole():
    params, losses, rows, bound = problem()
    check(torch.compile(fj.jacobian_fn(losses), backend="aot_eager", fullgraph=True)(params)[0], rows, bound)


def test_composes_with_transforms():
    params, losses, rows, bound = problem()
    many = {name: torch.stack([x, x]) for name, x in params.items()}
    for row in zip(*torch.vmap(fj.jacobian_fn(losses))(many)[0].values(), strict=True):
        check(dict(zip(rows, row, strict=True)), rows, bound)
    check(torch.func.jacrev(fj.autocast(losses, torch.bfloat16))(params), rows, bound)


def test_examples_share_a_penalty_on_distances():
    """The points are the same for all examples: gradients alone are batched."""
    params, _, _, _ = problem()
    losses = fj.per_example(lambda params, c: (c * torch.cdist(params["x"], params["y"])).square().sum())
    scales = draw(M, seed=3)
    gradient = torch.func.grad(lambda params: torch.cdist(params["x"], params["y"]).square().sum())(params)
    squares = sum(float(g.abs().sum()) for g in gradient.values())
    jacobian, _ = fj.jacobian_fn(losses)(params, scales)
    expected = {name: scales.square().reshape(M, 1, 1) * g for name, g in gradient.items()}
    check(jacobian, expected, ROUNDINGS * EPS * scales.square() * squares)


@given(p=st.floats(1, 8), rows=st.integers(0, 30), columns=st.integers(0, 3), way=st.sampled_from(WAYS))
def test_distances_are_torchs(p, rows, columns, way):
    x, y = draw(5, 2, 1, rows, columns), draw(3, 4, columns, seed=1)
    found = torch.vmap(lambda x: cdist(x, y, p, way))(x)
    torch.testing.assert_close(found, torch.stack([torch.cdist(one, y, p, way) for one in x]))


def test_points_that_coincide_have_zero_rows():
    x = draw(3, 2)
    losses = fj.per_example(lambda x, c: c * torch.cdist(x, x.detach()).diagonal().sum())
    assert not fj.jacobian_fn(losses)(x, torch.ones(2))[0].any()


ENGINES, NORMS = (fj.jacobian_fn, fj.gramian_fn, fj.weighted_fn), (1.0, 1.5, 2.0, 3.0, float("inf"))
ROWS = ("masked_select", "index_copy", "roll", "cdist, in a vmap", *(f"cdist, {p}" for p in NORMS))
# Torch pairs these with the wrong examples: there are as many as systems.
SYSTEMS, ONE, F = draw(M, 3, 3) + 4 * torch.eye(3), torch.tensor([1]), nn.functional
WRONG = {
    "solve": lambda w, x: torch.linalg.solve(SYSTEMS, torch.outer(x, w)),
    "solve_ex": lambda w, x: torch.linalg.solve_ex(SYSTEMS, torch.outer(x, w))[0],
    "solve a vector": lambda w, x: torch.linalg.solve(SYSTEMS[:3] + torch.diag(x), w)[:, 0],
    "lu_solve": lambda w, x: torch.linalg.lu_solve(*torch.linalg.lu_factor(SYSTEMS[0] + torch.diag(x)), w * SYSTEMS),
    "lstsq": lambda w, x: torch.linalg.lstsq(SYSTEMS[:3], torch.outer(x, w))[0],
    "as_strided_": lambda w, x: (torch.outer(x, w)[:2, :2] * 1).as_strided_((2, 2), (1, 2)),
    "index_copy": lambda w, x: torch.index_copy(x, 0, ONE, w.sum()),
    "index_fill": lambda w, x: torch.index_fill(w, 0, ONE, (w * x).sum()),
    "roll": lambda w, x: torch.roll((w * x).sum(), 1),
    "select_scatter": lambda w, x: torch.select_scatter(torch.outer(x, w), x * w, 1, -2),
    "conv2d": lambda w, x: F.conv2d(SYSTEMS[None, :3], SYSTEMS[:2, :, None, :2], w[:2] * x[:2], (2,)),
}


@pytest.mark.filterwarnings("ignore")  # torch warns of some: as an error, this would hide them
@pytest.mark.parametrize("op", WRONG)
def test_examples_that_torch_takes_for_others_go_one_by_one(op):
    w, x, found = draw(3, seed=3), draw(M if op != "solve a vector" else 3, 3, seed=4), WRONG[op]
    weights = draw(found(w, x[0]).numel(), seed=5).view_as(found(w, x[0]))
    loss = lambda w, x: (weights * found(w, x).square()).sum()
    rows = torch.stack([torch.autograd.functional.jacobian(lambda w, one=one: loss(w, one), w) for one in x])
    (J, values), (G, *_), (_, pull) = (find(fj.per_example(loss))(w, x) for find in ENGINES)
    expected = rows, rows @ rows.T, x[:, 0] @ rows, torch.stack([loss(w, one) for one in x])
    torch.testing.assert_close((J, G, pull(x[:, 0])[0], values), expected)


@pytest.mark.parametrize("op", ROWS)
def test_rows_that_torch_takes_for_others_go_one_by_one(op):
    x, mask = draw(M, 3), draw(M, 3, seed=1) > 0
    found = {
        "masked_select": lambda w: torch.masked_select(w, mask),
        "index_copy": lambda w: WRONG["index_copy"](w, x[0]),
    }
    found["roll"] = lambda w: torch.stack([torch.roll(w.prod(), 1), w.sum()])
    found["cdist, in a vmap"] = lambda w: torch.vmap(lambda c: torch.cdist(c * x * w, x).sum())(x[:, 0])
    found |= {f"cdist, {p}": partial(lambda p, w: torch.cdist(x * w, x, p).flatten(), p) for p in NORMS}
    weights = draw(M, found[op](w := draw(3, seed=2)).numel(), seed=3)
    losses = lambda w: weights @ found[op](w).square()
    with pytest.warns(fj.SlowPathWarning, match=rf"the derivative of torch.{op.partition(',')[0]} is wrong under"):
        rows, (gramian, _, pullback) = fj.jacobian_fn(losses)(w)[0], fj.gramian_fn(losses)(w)
    with pytest.raises(RuntimeError, match=r"is wrong under torch\.vmap\. [A-Z]"):
        fj.jacobian_fn(losses, mode="vmap")(w)
    torch.testing.assert_close(rows, torch.autograd.functional.jacobian(losses, w))
    torch.testing.assert_close((gramian, pullback(x[:, 0])[0]), (rows @ rows.T, x[:, 0] @ rows))


@pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyOptions"), reason="torch has it from 2.13 on")
def test_examples_of_cross_entropy_in_chunks_go_one_by_one():
    """Beside the form without chunks, whose logits are as large as the sums of the absolute terms below."""
    params, x = {"w": draw(4, 3)}, draw(M, 3, seed=1)

    def loss(options, params, x):
        return nn.functional.linear_cross_entropy(x, params["w"], torch.tensor(2), options=options)

    chunked, whole = (fj.per_example(partial(loss, options)) for options in (nn.LinearCrossEntropyOptions(), None))
    with pytest.warns(fj.SlowPathWarning, match="options=None"):
        gramian, _, pullback = fj.gramian_fn(chunked)(params, x)
    rows = fj.jacobian_fn(whole)(params, x)[0]["w"].flatten(1)
    terms = x.abs().sum(1) * (1 + x.abs().sum(1) * params["w"].abs().sum())
    bound = ROUNDINGS * EPS * terms
    reach = rows.abs().sum(1)
    assert ((gramian - rows @ rows.T).abs() <= bound[:, None] * reach + reach[:, None] * bound).all()
    assert ((pullback(torch.ones(M))[0]["w"].flatten() - rows.sum(0)).abs() <= bound.sum()).all()


def test_replicas_of_examples_pass_prelu():
    x, params = draw(3, 2, 5), {"a": draw(3, 2, seed=1), "w": draw(3, 5, seed=2)}
    losses = fj.per_example(
        lambda p, x: nn.functional.prelu((p["a"][:, None] * x)[None], p["w"][:2].abs()).square().sum()
    )
    found = torch.vmap(lambda p: fj.jacobian_fn(losses)(p, x)[0]["a"])(params)
    alone = [
        fj.jacobian_fn(losses)(dict(zip(params, p, strict=True)), x)[0]["a"] for p in zip(*params.values(), strict=True)
    ]
    torch.testing.assert_close(found, torch.stack(alone))


FORMS = {
    "layer_norm": lambda h, g: torch.layer_norm(h, (4,), g, None),
    "batch_norm": lambda h, g: torch.batch_norm(h, g, None, None, None, True, 0.1, 1e-5, False),
    "instance_norm": lambda h, g: torch.instance_norm(h[None], g[:3], None, None, None, True, 0.1, 1e-5, False)[0],
}


@pytest.mark.parametrize("form", FORMS)
def test_rows_through_the_norms_of_torch_have_the_derivatives_of_those_of_functional(form):
    x, params = draw(3, 4), {"w": draw(4, 4, seed=1), "g": draw(4, seed=2)}
    plain = {"layer_norm": lambda h, g: nn.functional.layer_norm(h, (4,), g)}
    plain |= {"batch_norm": lambda h, g: nn.functional.batch_norm(h, None, None, g, training=True)}
    plain |= {"instance_norm": lambda h, g: nn.functional.instance_norm(h[None], weight=g[:3])[0]}

    def size(norm, params):
        losses = lambda p: norm(x @ p["w"], p["g"]).tanh().sum(0)
        return sum(row.square().sum() for row in fj.jacobian_fn(losses)(params)[0].values())

    torch.testing.assert_close(*(torch.func.grad(partial(size, f[form]))(params) for f in (FORMS, plain)))


def test_one_hot_of_examples_takes_no_slow_road():
    x, y, params = draw(6, 3), torch.tensor([0, 3, 1, 1, 2, 0]), {"w": draw(3, 4, seed=1)}
    log_softmax = lambda params, x: torch.log_softmax(x @ params["w"], -1)
    by_hand = fj.per_example(lambda params, x, y: -(nn.functional.one_hot(y, 4) * log_softmax(params, x)).sum(-1))
    plain = fj.per_example(lambda params, x, y: nn.functional.cross_entropy(x @ params["w"], y))
    found, expected = (fj.jacobian_fn(losses)(params, x, y)[0]["w"] for losses in (by_hand, plain))
    assert (found - expected).abs().max() <= 8 * EPS * x.abs().max()
    torch.testing.assert_close(*(fj.gramian_fn(losses)(params, x, y)[0] for losses in (by_hand, plain)))
    swept = torch.vmap(lambda y: fj.jacobian_fn(by_hand)(params, x, y)[0]["w"])(torch.stack([y, y.flip(0)]))
    torch.testing.assert_close(swept[0], expected)
    outside = fj.per_example(lambda params, x, y: -(nn.functional.one_hot(y, 3).sum() * log_softmax(params, x)).sum(-1))
    with pytest.raises(RuntimeError, match="smaller than num_classes"):
        fj.jacobian_fn(outside)(params, x, y)
    counted = fj.per_example(lambda params, x, y: -(nn.functional.one_hot(y).sum() * log_softmax(params, x)).sum(-1))
    with pytest.warns(fj.SlowPathWarning, match="test_repaired_ops.py"):
        fj.jacobian_fn(counted)(params, x, y)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("padding", [2, -2, None])
def test_examples_look_up_rows_with_padding_of_their_own(shared, padding):
    params, scales, indices = {"w": draw(4, 3)}, draw(M, seed=1), torch.tensor([2, 0, 2, 1, 2, 3]).expand(M, -1)
    weights = draw(6, 3, seed=2)

    def loss(params, c, i):
        table = params["w"] if shared else c * params["w"]
        found = nn.functional.embedding(i, table, padding)
        return (found * weights).sum() + c * torch.embedding(table, i, 2).sum()

    rows = torch.stack(
        [torch.func.grad(loss)(params, c, i)["w"].flatten() for c, i in zip(scales, indices, strict=True)]
    )
    losses, bound = fj.per_example(loss), ROUNDINGS * EPS * (1 + scales.abs().max()) * (weights.abs().sum() + 6)
    for engine in (fj.gramian_fn, fj.weighted_fn, torch.compile(fj.weighted_fn, backend="aot_eager")):
        pulled = engine(losses)(params, scales, indices)[-1](torch.ones(M))[0]["w"]
        assert ((pulled.flatten() - rows.sum(0)).abs() <= M * bound).all()
    assert ((fj.jacobian_fn(losses)(params, scales, indices)[0]["w"].flatten(1) - rows).abs() <= bound).all()
    one = lambda w: fj.jacobian_fn(lambda w: nn.functional.embedding(indices[0], w, padding).sum().square())(w)[0][0]
    slope = 2 * params["w"][indices[0]].sum() * torch.bincount(indices[0], minlength=4)[:, None].expand(4, 3)
    kept = torch.arange(4) != (5 if padding is None else padding % 4)  # only derivatives in reverse have a padding
    torch.testing.assert_close(torch.func.jvp(one, (draw(4, 3, seed=3),), (params["w"],))[1], slope * kept[:, None])
    wrong = fj.per_example(lambda w, c, i: nn.functional.embedding(i, c * w, 9).sum())
    with pytest.raises(AssertionError, match="Padding_idx must be within"):
        fj.jacobian_fn(wrong)(params["w"], scales, indices)
