"""Losses that declare their structure: called as plain functions, and what they say about mistakes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from zoo import numbers

import functional_jd as fj
from functional_jd.objectives import multitask, per_example


def loss(w, x, y):
    return {"error": (x @ w - y).pow(2), "size": w.norm() * x.sum()}


@given(st.integers(1, 5), st.integers(0, 1), st.sampled_from([0, -1, None]))
def test_per_example_is_a_loop_over_the_examples(count, x_dim, y_dim):
    w, x = numbers(3), numbers(count, 3, seed=1)
    y = numbers(seed=2) if y_dim is None else numbers(count, seed=2)
    batched = x if x_dim == 0 else x.mT
    values = per_example(loss, in_dims=(x_dim, y_dim))(w, batched, y)
    expected = [loss(w, x[i], y if y_dim is None else y[i]) for i in range(count)]
    for key in ("error", "size"):
        torch.testing.assert_close(values[key], torch.stack([e[key] for e in expected]))
    assert per_example(loss, in_dims=(x_dim, y_dim)).count((batched, y)) == count


def test_examples_may_be_trees():
    losses = per_example(lambda w, example: (w * example["x"]).sum() + example["y"][0])
    values = losses(numbers(3), {"x": torch.ones(4, 3), "y": [torch.arange(4.0)]})
    torch.testing.assert_close(values, numbers(3).sum() + torch.arange(4.0).double())


def test_per_example_falls_back_to_the_loop_where_vmap_cannot():
    def branching(w, x):
        return w if x.item() > 0 else -w

    for outer in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=outer):
            values = per_example(branching, in_dims=-1)(torch.tensor(2.0).half(), torch.tensor([[1.0, -1.0, 3.0]]))
        assert (values.tolist(), values.dtype) == ([2, -2, 2], torch.float16)


def test_random_layers_draw_anew_for_every_example():
    torch.manual_seed(0)
    losses = per_example(lambda w, x: (w * torch.rand(())).sum())
    for f in (losses, torch.compile(losses, backend="eager", fullgraph=True)):
        assert f(torch.ones(2), torch.zeros(50)).unique().numel() > 40


def test_per_example_composes_with_transforms():
    losses = per_example(lambda w, x: torch.sin(x @ w))
    w, x = numbers(3), numbers(4, 3, seed=1)
    torch.testing.assert_close(torch.func.jacrev(losses)(w, x), torch.cos(x @ w)[:, None] * x)
    torch.testing.assert_close(torch.func.jvp(lambda w: losses(w, x), (w,), (w,))[1], torch.cos(x @ w) * (x @ w))
    ws = numbers(2, 3, seed=2)
    torch.testing.assert_close(torch.vmap(losses, (0, None))(ws, x), torch.sin(ws @ x.mT))
    compiled = torch.compile(losses, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(w, x), torch.sin(x @ w))
    torch.compiler.reset()


@given(st.permutations(["b", "a", "c"]))
def test_multitask_is_the_composition(keys):
    losses = multitask(lambda shared, x: x @ shared, lambda heads, f, x: {k: (f * heads[k]).sum() for k in keys})
    shared, heads, x = numbers(3), {k: numbers(seed=i) for i, k in enumerate("abc")}, numbers(4, 3, seed=9)
    values = losses({"shared": shared, "heads": heads}, x)
    assert list(values) == keys
    for key in keys:
        torch.testing.assert_close(values[key], sum(row @ shared for row in x) * heads[key])


W, X = torch.ones(3), torch.ones(2, 3)
MISTAKES = {
    "loss": (lambda: per_example(W), TypeError, "per_example: loss must be a function, found Tensor.*itself"),
    "features": (lambda: multitask(None, max), TypeError, "multitask: features must be a function, found NoneType"),
    "heads": (lambda: multitask(max, {}), TypeError, "multitask: heads must be a function, found dict"),
    "dims": (lambda: per_example(loss, (0, 0, 0))(W, X, W), ValueError, "names 3 arguments, found 2.*Give one"),
    "nothing": (lambda: per_example(loss)(W), ValueError, r"at least one argument.*found none.*\(params, \*batch\)"),
    "all shared": (lambda: per_example(loss, None)(W, X, W), ValueError, "at least one argument.*found none"),
    "counts": (lambda: per_example(loss)(W, X, W), ValueError, r"same number of examples.*found \[2, 3\].*None"),
    "empty": (lambda: per_example(loss).count((X[:0], W[:0])), ValueError, r"at least one, found \[0\]"),
    "float": (lambda: per_example(loss).count((X, 1.0)), ValueError, "along dimension 0, found float.*None in in_dims"),
    "no dimension": (lambda: per_example(loss).count((X, W[0])), ValueError, r"dimension 0, found shape \[\].*None"),
    "too few": (lambda: per_example(loss, (0, 1)).count((X, W)), ValueError, r"dimension 1, found shape \[3\]"),
    "keys": (
        lambda: multitask(max, max)({"shared": W, "head": W}),
        ValueError,
        r"multitask: params must be a dict.*found \['head', 'shared'\].*Put the trunk's parameters",
    ),
    "no dict": (lambda: multitask(max, max)(W), ValueError, "'shared' and 'heads', found Tensor"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_named_with_their_cure(mistake):
    make, kind, message = MISTAKES[mistake]
    with pytest.raises(kind, match=message):
        make()


def test_autocast_keeps_the_structure():
    wrap = fj.autocast
    trunk, top = (lambda p, x: x @ p["w"]), (lambda p, h, x: [(h @ p["v"]).square().mean(), 3 * h.mean()])
    params = {"shared": {"w": torch.full((3, 2), 0.3)}, "heads": {"v": torch.tensor([0.7, -0.2])}}
    x = torch.linspace(-1, 1, 12).reshape(4, 3)
    found, _ = fj.jacobian_fn(wrap(fj.multitask(trunk, top)))(params, x)
    expected, _ = fj.jacobian_fn(fj.multitask(wrap(trunk), wrap(top)))(params, x)
    assert isinstance(found, fj.aggregation.MultitaskJacobian)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert not torch.equal(found.shared["w"], fj.jacobian_fn(fj.multitask(trunk, top))(params, x)[0].shared["w"])
    loss = lambda w, x, y: (x @ w - y).square()
    examples = wrap(fj.per_example(loss, in_dims=(0, None)))
    assert (type(examples), examples.in_dims) == (fj.objectives.PerExample, (0, None))
    w, y = torch.tensor([0.3, -0.7, 0.1]), torch.tensor(0.5)
    alone = torch.stack([torch.func.grad(wrap(loss))(w, one, y) for one in x])
    torch.testing.assert_close(fj.jacobian_fn(examples)(w, x, y)[0], alone)
