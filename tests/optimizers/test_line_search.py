"""Line searches against brute force over the rates, in steps and by hand, under transforms, and their mistakes."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from bounds import eps
from torch.utils._pytree import tree_map

import functional_jd as fj
from functional_jd import line_search

RATES = [4.0, 1.0, 0.3, 0.1, 1e-2, 1e-3, 1e-4, 0.0]
START = {"x": torch.tensor([-1.2, 1.0], dtype=torch.float64)}


def rosenbrock(params):
    """As residuals: `f = |r|^2 / 2`."""
    x, y = params["x"].unbind()
    return torch.stack([10 * (y - x * x), 1 - x]) * 2**0.5


def half_squares(values):
    return values.square().sum() / 2


def method(rates=RATES, rule=None, inner=None, losses=rosenbrock, **how):
    optimizer = line_search(inner or fj.sgd(1.0), rates, **how)
    return {"losses": losses, "aggregator": rule or fj.natural_gradient(1e-6), "optimizer": optimizer}


@pytest.mark.filterwarnings("ignore:train_state. natural_gradient expects residuals")  # Adam is one more optimizer
@pytest.mark.parametrize(
    "inner", [fj.sgd(1.0), fj.sgd(0.5, momentum=0.9), fj.adamw(0.3)], ids=["sgd", "momentum", "adamw"]
)
def test_every_step_is_the_best_of_a_loop_over_the_rates(inner):
    how = method(inner=inner)
    state = fj.train_state(START, **how)
    params, memory = START, inner.init(START)
    for _ in range(8):
        state, _ = fj.step(state, **how)
        direction = fj.aggregate(how["aggregator"], *fj.jacobian_fn(rosenbrock)(params)[:1], losses=rosenbrock(params))
        proposed, memory = inner.update(direction.direction, memory, params)
        tried = [{"x": params["x"] + rate * (proposed["x"] - params["x"])} for rate in RATES]
        best = min(range(len(RATES)), key=lambda i: half_squares(rosenbrock(tried[i])))
        assert state.optimizer.rate == RATES[best]
        size = max(p["x"].abs().max() for p in (params, proposed)) * max(RATES)
        torch.testing.assert_close(state.params["x"], tried[best]["x"], rtol=0, atol=float(8 * eps() * size))
        params = state.params
        torch.testing.assert_close(state.optimizer.inner, memory)


@pytest.mark.parametrize(("rates", "to", "best"), [([4.0, 0.25, 0.125], 1.25, 0.25), ([4.0, 2.0], 1, 0)])
def test_what_is_not_finite_is_never_best_and_where_nothing_is_finite_nothing_moves(rates, to, best):
    walls = lambda p: torch.where(p.abs() > 1.5, torch.nan, -p)
    optimizer, x = line_search(fj.sgd(1.0), rates, merit=torch.sum), torch.ones(())
    moved, state = optimizer.search(walls, torch.tensor(-1.0), optimizer.init(x), x)
    assert (moved, state.rate) == (to, best)
    moved, state = optimizer.search(lambda p: p, torch.tensor(-torch.inf), optimizer.init(x), x)
    assert (moved, state.rate) == (1, 0)


@pytest.mark.filterwarnings("ignore:train_state. .* residuals")  # any rule will do
@pytest.mark.parametrize("transform", ["compile", "vmap"])
def test_steps_under_transforms(transform):
    points = torch.linspace(-1, 1, 5, dtype=torch.float64)
    losses = lambda p, b, x: (torch.exp(p["a"] * x) + p["b"] * x - 2 + b["count"] * 0.1 * x, {"count": b["count"] + 1})
    params = {"a": torch.tensor(0.3, dtype=torch.float64), "b": torch.tensor(2.0, dtype=torch.float64)}
    how = method(rule=fj.mean(), losses=fj.per_example(losses))
    state = fj.train_state(params, points, buffers={"count": torch.tensor(1.0)}, **how)
    expected, info = fj.step(state, points, **how)
    assert info.moved
    assert expected.buffers["count"] == 2
    if transform == "compile":
        torch.compiler.reset()
        found, _ = torch.compile(partial(fj.step, **how), backend="eager", fullgraph=True)(state, points)
    else:
        two = tree_map(lambda x: torch.stack([x, x]), state)
        found, _ = torch.vmap(partial(fj.step, **how), in_dims=(0, None))(two, points)
        found = tree_map(lambda x: x[1], found)
    assert found.optimizer.rate == expected.optimizer.rate
    torch.testing.assert_close(found.params, expected.params)


def test_derivatives_are_those_of_the_step_with_the_chosen_rate():
    rates = torch.tensor([1.0, 0.25], dtype=torch.float64)
    x, direction = torch.tensor([3.0, -2.0], dtype=torch.float64), torch.tensor([4.0, -3.0], dtype=torch.float64)

    def moved(x, direction, rates):
        optimizer = line_search(fj.sgd(1.0), rates, merit=lambda y: y.square().sum())
        return optimizer.search(lambda p: p, direction, optimizer.init(x), x)[0]

    torch.testing.assert_close(moved(x, direction, rates), x - direction)
    expected = (torch.eye(2), -torch.eye(2), torch.stack([-direction, torch.zeros(2)]).mT)
    for derivative in (torch.func.jacrev, torch.func.jacfwd):
        slopes = derivative(moved, argnums=(0, 1, 2))(x, direction, rates)
        torch.testing.assert_close(slopes, tuple(e.double() for e in expected))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_parameters_keep_their_dtype_and_rates_are_not_rounded_to_it(dtype):
    x = torch.tensor([1.0, -0.5], dtype=dtype)
    optimizer = line_search(fj.sgd(1.0), [0.3], merit=torch.sum)
    found, _ = optimizer.search(lambda p: p.float(), 16 * x, optimizer.init(x), x)
    assert found.dtype == dtype
    assert torch.equal(found, (x.double() - 0.3 * 16 * x.double()).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_squares_of_losses_in_half_precision_neither_overflow_nor_are_rounded(dtype):
    """Of three losses of 400 and less, which float16 cannot square, and of 256 and less, alike in bfloat16."""
    for x, direction in ((torch.tensor([400.0, 300.0, 300.0]), 100.0), (torch.tensor([16.0, 1.0, 1.0]), 0.5)):
        optimizer = line_search(fj.sgd(1.0), torch.tensor([0.25, 1.0, 0.5]))
        ahead = torch.tensor([0.0, 0.0, direction])
        moved, state = optimizer.search(lambda p: p.to(dtype), ahead, optimizer.init(x), x)
        assert (state.rate.dtype, state.rate) == (torch.float64, 1.0)  # whatever the rates are
        assert torch.equal(moved, x - ahead)
    optimizer = line_search(fj.sgd(1.0), [4.0, 1.0, 0.5])
    assert optimizer.search(lambda p: 1e-25 * p, x, optimizer.init(x), x)[1].rate == 1  # nor do they underflow


def test_losses_that_vmap_refuses_are_compared_one_by_one_and_leave_no_trace():
    count = torch.zeros(())

    def losses(params):
        count.add_(1)
        noise = torch.rand(2)
        return rosenbrock(params) + 0 * noise + 0 * params["x"].sum().item()

    optimizer = line_search(fj.sgd(1.0), [1.0, 0.0])
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with pytest.warns(fj.SlowPathWarning, match="line_search: evaluates the losses at one rate after the other"):
        optimizer.search(losses, {"x": torch.zeros(2, dtype=torch.float64)}, optimizer.init(START), START)
    assert count == 0
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("way", ["vmap", "one by one", "compile"])
def test_all_rates_see_the_same_noise(way):
    """With noise of its own for each rate, the noise would choose: it is a hundred times the change."""

    def losses(x):
        if way == "one by one":
            x.sum().item()
        return x + 100 * torch.randn(2)

    x, optimizer = torch.zeros(2), line_search(fj.sgd(1.0, momentum=0.9), [0.0, 0.5, 1.0, 0.25], merit=torch.sum)
    search = lambda ahead, state, x: optimizer.search(losses, ahead, state, x)
    if way == "compile":
        torch.compiler.reset()
        search = torch.compile(search, backend="eager", fullgraph=True)
    warned = pytest.warns(fj.SlowPathWarning) if way == "one by one" else nullcontext()
    with warned:
        for seed in range(6):
            torch.manual_seed(seed)
            moved, state = search(torch.ones(2), optimizer.init(x), x)
            assert torch.equal(moved, x - 1)
    # The optimizer inside goes on from its own state: its momentum is that of the second step of torch's.
    assert torch.equal(optimizer.search(losses, torch.ones(2), state, x)[0], x - 1.9)


def test_mistakes_are_named_with_their_cure():
    one, search = fj.sgd(1.0), line_search(fj.sgd(1.0), [1.0])
    for rates, found in (([1.0, -1.0], "-1"), ([torch.inf], "inf"), (["1"], "'1'")):
        words = f"line_search: rates must be .*found {found}.*Pass for instance rates="
        with pytest.raises((TypeError, ValueError), match=words):
            line_search(one, rates)
    for merit, found in ((lambda x: x, r"torch.float64 \[2\]"), (lambda x: (x > 0).sum(), r"torch.int64 \[\]")):
        how = method(merit=merit)
        with pytest.raises(ValueError, match=f"line_search: merit must be .*one real number, found {found}"):
            fj.step(fj.train_state(START, **how), **how)
    with pytest.raises(ValueError, match=r"line_search: expected the losses.*with this optimizer outermost"):
        search.update(START, search.init(START), START)
    noise = fj.random.key(0), 1.0, 1.0, 1
    for around, found in (
        (lambda: line_search(search, [1.0]), "line_search: .* compares losses"),
        (lambda: fj.noised(search, *noise), "noised: .* compares losses"),
        (lambda: fj.by_label({"all": search}, lambda name, leaf: "all"), "by_label: .*'all'.* compares losses"),
        (lambda: line_search(fj.noised(one, *noise), [1.0]), "line_search: .* adds noise"),
    ):
        with pytest.raises(ValueError, match=found):
            around()
    replicas = fj.engines.jacobian_engine()._replace(replicate=lambda tree: tree)
    with pytest.raises(ValueError, match=r"must not compare losses.*replicas have different batches"):
        fj.step(fj.train_state(START, **method()), engine=replicas, **method())
