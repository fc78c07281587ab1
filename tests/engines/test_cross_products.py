"""Inner products of rows on two batches against rows of plain autograd: models, sizes, prices, transforms."""

import pytest
import torch
from bounds import check_products, check_stable
from gramian_by_hand import F, Largest, priced, wide
from jacobian_by_hand import KINDS, case_of, leaves, rows_of
from zoo import MODELS, Case, numbers

from functional_jd import SlowPathWarning, cross_gramian_fn, per_example, scale_state
from functional_jd.objectives import Multitask

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")


def flat_rows(case, args, m=None):
    """The rows `[m, n]` of the parameters that have rows."""
    heads = len(leaves(case.params["heads"])) if isinstance(case.losses, Multitask) else 0
    return torch.cat([r.double().flatten(1) for r in rows_of(case.losses, case.params, *args)[heads:]], 1)[:m]


def other_batch(case):
    """The same examples in another order, with other targets."""
    x, *rest = case.args
    return (x.flip(0), *(0.5 * y.roll(1, 0) if y.is_floating_point() else y for y in rest))


NAMES = ["mlp", "tied", "reused", "conv2d", "conv_transpose", "layer_norm", "embedding", "encoder", "lstm"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_equals_the_inner_products_of_the_rows_at_either_price(name, kind, monkeypatch):
    case = case_of(name, kind)
    other = other_batch(case)
    rows, others = flat_rows(case, case.args), flat_rows(case, other)
    scales = [torch.tensor(64.0), scale_state(8.0)] if name == "mlp" else []
    for lean, scale in ((True, None), (False, None), *((True, scale) for scale in scales)):
        priced(monkeypatch, lean)
        f = cross_gramian_fn(case.losses, scale=scale)
        products = f(case.params, case.args, other)
        assert products.dtype == torch.float64
        check_products(products, rows, others)
        check_products(f(case.params, other, case.args), others, rows)
        if kind == "by_example":
            check_products(f(case.params, case.args, tuple(x[:3] for x in other)), rows, others[:3])


def test_rows_of_known_layers_are_never_formed():
    case, m = wide("by_example")
    with Largest() as largest:
        products = cross_gramian_fn(case.losses)(case.params, case.args, (torch.arange(5),))
    assert products.shape == (m, 5)
    assert largest.numel < 5 * 64 * 64
    losses = per_example(lambda p, x: F.linear(x, p["w"]).sum() + p["b"].sum())  # of sequences without positions
    empty = cross_gramian_fn(losses)({"w": numbers(2, 3), "b": numbers(2)}, (numbers(4, 0, 3),), (numbers(5, 0, 3),))
    assert torch.equal(empty, torch.full((4, 5), 2.0))


def test_a_row_that_overflowed_is_a_row_that_is_not_finite():
    case = case_of("mlp", "by_example")
    x, y = case.args
    bad = x.index_fill(0, torch.tensor([1]), torch.inf)
    products = cross_gramian_fn(case.losses)(case.params, (bad, y), case.args)
    assert products.isfinite().all(1).tolist() == [True, False, True, True]


def test_what_vmap_refuses_is_taken_row_by_row():
    case = case_of(next(name for name in MODELS if not MODELS[name]().examples and MODELS[name]().single), "by_example")
    rows = flat_rows(case, case.args)
    check_products(cross_gramian_fn(case.losses)(case.params, case.args, case.args), rows, rows)


def test_a_derivative_inside_the_losses_says_what_it_costs():
    def loss(p, x):
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(torch.tanh(F.linear(x, p["w"])).sum(), x, create_graph=True)
        return slope.square().sum()

    params, x = {"w": numbers(2, 3)}, numbers(4, 3, seed=1)
    with pytest.warns(SlowPathWarning, match=r"cross_gramian_fn.*forms all rows"):
        products = cross_gramian_fn(per_example(loss))(params, (x,), (x[:2],))
    rows = flat_rows(Case(params, per_example(loss), (x,)), (x,))
    check_products(products, rows, rows[:2])


def test_mistakes_are_named():
    with pytest.raises(TypeError, match="cross_gramian_fn: losses must be a function, found int"):
        cross_gramian_fn(3)
    with pytest.raises(TypeError, match=r"cross_gramian_fn: each batch must be a tuple .*found torch.float64"):
        cross_gramian_fn(lambda p, x: p * x)(numbers(2), numbers(2), numbers(2))
    with pytest.raises(ValueError, match=r"cross_gramian_fn: scale must be of shape \[\], found .* \[2\]"):
        cross_gramian_fn(lambda p: p, scale=torch.ones(2))


def test_compiles_to_one_graph():
    case = case_of("mlp", "by_example")
    other, f = other_batch(case), cross_gramian_fn(case.losses)
    torch.compiler.reset()
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    check_stable(compiled(case.params, case.args, other), f, case.params, case.args, other)
