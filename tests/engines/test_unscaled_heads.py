"""The gradients of heads under loss scales: equal to unscaled ones, and an overflow is told apart by its row."""

import pytest
import torch
from bounds import check_within, eps

import functional_jd as jd

TRUNK, X = torch.tensor([[0.5, -1.0], [2.0, 0.25]]), torch.tensor([[1.0, 2.0], [-3.0, 0.5]])
# Heads of equal and of different sizes, and one without parameters of its own.
SIZES = {"equal": (2, 2, 2), "different": (1, 3, 2), "one without": (2, 0, 3)}


def problem(sizes):
    heads = {f"h{i}": torch.full((2, n), 0.5 + i) for i, n in enumerate(sizes)}

    def top(own, features, x):
        return [(features @ own[f"h{i}"]).square().sum() + features.sum() * (i + 1) for i in range(len(sizes))]

    return jd.multitask(lambda shared, x: x @ shared["w"], top), {"shared": {"w": TRUNK}, "heads": heads}


def by_hand(sizes):
    """The sum of the losses, differentiated by torch in float64."""
    losses, params = problem(sizes)
    heads = {name: h.double().requires_grad_() for name, h in params["heads"].items()}
    total = sum(losses.heads(heads, X.double() @ TRUNK.double(), X))
    return dict(zip(heads, torch.autograd.grad(total, list(heads.values())), strict=True))


@pytest.mark.parametrize("shape", [(), (3,)])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_scales_leave_the_gradient_of_the_heads_as_it_is(sizes, shape):
    losses, params = problem(sizes)
    scale = jd.scale_state(shape=shape)
    scale = scale._replace(scale=2.0 ** torch.tensor([3.0, 20.0, -5.0]) if shape else torch.tensor(2.0**9))
    found, _, finite = jd.jacobian_fn(losses, scale=scale)(params, X)
    assert finite.all()
    for name, expected in by_hand(sizes).items():
        assert torch.equal(found.heads[name].double(), expected)  # small integers and halves: exact


@pytest.mark.parametrize("scale", [None, torch.tensor(2.0**9)], ids=["none", "one"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_compiled_heads_have_the_same_gradient_and_each_loss_its_row(sizes, scale):
    losses, params = problem(sizes)
    torch.compiler.reset()
    found = torch.compile(jd.jacobian_fn(losses, scale=scale), fullgraph=True, backend="aot_eager")(params, X)
    for name, expected in by_hand(sizes).items():
        assert torch.equal(found[0].heads[name].double(), expected)
    for i in range(len(sizes)):
        row = torch.func.grad(lambda w, i=i: losses({"shared": {"w": w}, "heads": params["heads"]}, X)[i])(TRUNK)
        assert torch.equal(found[0].shared["w"][i], row)


@pytest.mark.parametrize("mode", ["loop", "vmap", "compiled"])
@pytest.mark.parametrize("scale", [2.0**9, [2.0**3, 2.0**20]], ids=["one", "each"])
def test_heads_may_have_no_parameters(mode, scale):
    losses = jd.multitask(lambda shared, x: x @ shared, lambda _, z, x: [z.sum(), (z[0] * torch.arange(2)).sum()])
    mode, compiled = ("auto", True) if mode == "compiled" else (mode, False)
    torch.compiler.reset()
    rows = jd.jacobian_fn(losses, scale=torch.tensor(scale), mode=mode)
    if compiled:
        rows = torch.compile(rows, fullgraph=True, backend="aot_eager")
    found, _, finite = rows({"shared": TRUNK, "heads": {}}, X)
    assert finite.all()
    assert found.heads == {}
    # The columns of x summed; and the first example, in the second column alone.
    assert found.shared.tolist() == [[[-2, -2], [2.5, 2.5]], [[0, 1], [0, 2]]]
    direction, _ = jd.weighted_fn(losses)({"shared": TRUNK, "heads": {}}, X)[1](torch.tensor([2.0, -1.0]))
    assert direction["heads"] == {}
    assert direction["shared"].tolist() == [[-4, -5], [5, 3]]


@pytest.mark.parametrize("overflows", [0, 2])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_an_overflow_in_one_head_leaves_the_others_as_they_are(sizes, overflows):
    losses, params = problem(sizes)
    scale = torch.full((3,), 2.0**10)
    scale[overflows] = 2.0**127
    found, _, finite = jd.jacobian_fn(losses, scale=scale)(params, X)
    assert finite.tolist() == [i != overflows for i in range(3)]
    for i, (name, expected) in enumerate(by_hand(sizes).items()):
        assert torch.equal(found.heads[name].double(), expected if i != overflows else torch.zeros_like(expected))


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_derivatives_go_through_what_was_unscaled(sizes):
    losses, params = problem(sizes)
    scale = 2.0 ** torch.tensor([3.0, 20.0, -5.0])

    def length(w, heads):
        jacobian, _, _ = jd.jacobian_fn(losses, scale=scale)({"shared": {"w": w}, "heads": heads}, X)
        return sum(h.square().sum() for h in jacobian.heads.values())

    def length_by_hand(w, heads):
        total = lambda heads: sum(losses.heads(heads, X.to(w.dtype) @ w, X))
        return sum(h.square().sum() for h in torch.func.grad(total)(heads).values())

    w = TRUNK.clone().requires_grad_()
    (found,) = torch.autograd.grad(length(w, params["heads"]), w)
    double = {name: h.double() for name, h in params["heads"].items()}
    expected = torch.func.grad(length_by_hand)(TRUNK.double(), double)
    bound = 8 * eps(torch.float32) * expected.abs()
    check_within(found, expected, bound)
    check_within(torch.func.grad(length)(TRUNK, params["heads"]), expected, bound)
