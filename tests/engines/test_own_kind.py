"""The kind and the engine of the page on contributing, as a stranger would write them."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from bounds import check_same, check_within
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._pytree import tree_leaves
from zoo import numbers

import functional_jd as jd
from functional_jd.engines import PLAIN, Declared, Kind
from functional_jd.objectives import Multitask

PAGE = Path(__file__).parent / "OWN_KIND.md"


@pytest.fixture(scope="module")
def guide():
    found = {"torch": torch}
    for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL):
        exec(compile(code, PAGE.name, "exec"), found)
    return found


PARAMS = {"w": numbers(4, 3), "b": numbers(3, seed=1)}
X, Y = numbers(5, 4, seed=2), numbers(5, 3, seed=3)
NOISES = tuple({"w": numbers(4, 3, seed=s) / 9, "b": numbers(3, seed=s + 1) / 9} for s in (4, 6, 8))


def losses(params, x, y):
    return ((x @ params["w"] + params["b"]).tanh() - y).square().mean(0)


def averaged(params, x, y):
    moved = [{name: params[name] + noise[name] for name in params} for noise in NOISES]
    return torch.stack([losses(p, x, y) for p in moved]).mean(0)


def trained(f, rule, steps=3, **how):
    method = {"losses": f, "aggregator": rule, "optimizer": jd.sgd(0.1)}
    state = jd.train_state(PARAMS, X, Y, **method, **how)
    for _ in range(steps):
        state, info = jd.step(state, X, Y, **method, engine=how.get("engine", "auto"))
    return state, info


def same(mine, theirs):
    (one, info), (other, expected) = mine, theirs
    for name in PARAMS:
        check_same(one.params[name], other.params[name])
    check_same(info.weights, expected.weights)
    torch.testing.assert_close(info.losses, expected.losses)


@pytest.mark.parametrize("scale", [None, (), (3,)])
@pytest.mark.parametrize("engine", ["auto", "jacobian", "gramian"])
def test_a_strangers_kind_trains_like_the_plain_function_of_the_same_losses(guide, engine, scale):
    scaled = {} if scale is None else {"scale": jd.scale_state(2.0**8, shape=scale)}
    mine = trained(guide["Smoothed"](losses, NOISES), jd.upgrad(), engine=engine, **scaled)
    same(mine, trained(averaged, jd.upgrad(), engine="jacobian", **scaled))


@pytest.mark.parametrize("rule", [jd.mean, jd.total, lambda: jd.stch(0.5)])
def test_without_a_weighted_pass_of_its_own_a_kind_serves_rules_without_gradients(guide, rule):
    same(trained(guide["Smoothed"](losses, NOISES), rule()), trained(averaged, rule()))


STEP = 2.0**-13
"""Of differences, which are off by its square times a third derivative."""


def by_differences(found, expected, times=1):
    for x, y in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        check_within(x, y, times * STEP**2 * (y.abs().max() + 1))


BASIS = torch.eye(15, dtype=torch.float64)
DIRECTIONS = {"w": BASIS[:, :12].reshape(15, 4, 3), "b": BASIS[:, 12:]}


@pytest.mark.parametrize("scale", [None, (), (3,)])
@pytest.mark.parametrize(("rule", "engine"), [(jd.mean, "auto"), (jd.upgrad, "jacobian"), (jd.upgrad, "gramian")])
def test_a_kind_with_rows_of_its_own_need_not_look_at_the_scale(guide, rule, engine, scale):
    scaled = {} if scale is None else {"scale": jd.scale_state(shape=scale)}
    blind = guide["Measured"](lambda *args: losses(*args).detach(), DIRECTIONS, h=STEP)
    names = jd.objective_names(losses(PARAMS, X, Y))
    (found, info), (expected, theirs) = (
        trained(blind, rule(), engine=engine, constant=names, **scaled),
        trained(losses, rule(), engine=engine, **scaled),
    )
    assert info.moved.all()
    for name in PARAMS:
        by_differences(found.params[name], expected.params[name])
    by_differences(info.weights, theirs.weights, 8)


def test_a_kind_with_rows_of_its_own_serves_functions_without_aux_and_derivatives_of_the_rows(guide):
    measured = guide["Measured"](losses, DIRECTIONS, h=STEP)
    by_differences(*(jd.jacobian_fn(f)(PARAMS, X, Y) for f in (measured, losses)))
    trace = lambda f: torch.func.grad(lambda p: jd.gramian_fn(f)(p, X, Y)[0].trace())(PARAMS)
    by_differences(trace(measured), trace(losses), 8)


def tasks():
    """A trunk with heads, as `multitask` takes them, and the two functions."""
    params = {"shared": PARAMS, "heads": {"a": numbers(3), "b": numbers(3, seed=1)}}
    trunk = lambda p, x, y: (x @ p["w"] + p["b"]).tanh()
    heads = lambda own, h, x, y: {name: (h @ w - y[:, i]).square().mean() for i, (name, w) in enumerate(own.items())}
    return params, trunk, heads


def objectives(guide):
    """Losses of each kind, by name, with their parameters."""
    params, trunk, heads = tasks()
    return {
        "plain": (losses, PARAMS),
        "per_example": (jd.per_example(lambda p, x, y: losses(p, x[None], y[None]).sum()), PARAMS),
        "multitask": (jd.multitask(trunk, heads), params),
        "stranger": (guide["Smoothed"](losses, NOISES), PARAMS),
    }


@pytest.mark.parametrize("scale", [None, ()])
@pytest.mark.parametrize("kind", ["plain", "per_example", "multitask", "stranger"])
def test_a_strangers_engine_with_all_directions_sees_the_whole_gramian_of_every_kind(guide, kind, scale):
    f, params = objectives(guide)[kind]
    directions = DIRECTIONS
    if kind == "multitask":
        directions = {"shared": directions, "heads": {name: torch.zeros(15, 3).double() for name in "ab"}}
    scaled = {} if scale is None else {"scale": jd.scale_state(2.0**8, shape=scale)}
    method = {"losses": f, "aggregator": jd.upgrad(), "optimizer": jd.sgd(0.1)}
    found = []
    for engine in (guide["sketched_engine"](directions), "jacobian"):
        state = jd.train_state(params, X, Y, **method, engine=engine, **scaled)
        state, info = jd.step(state, X, Y, **method, engine=engine)
        assert info.moved
        found.append((state.params, info.weights))
    check_same(*found)
    if kind == "multitask":  # the heads' gradient is that of the plain sum
        own = lambda heads: sum(f({"shared": PARAMS, "heads": heads}, X, Y).values())
        for name, gradient in torch.func.grad(own)(params["heads"]).items():
            torch.testing.assert_close(found[0][0]["heads"][name], params["heads"][name] - 0.1 * gradient)
    with pytest.raises(ValueError, match=r"serves rules that need the Gramian, found a rule that needs no gradients"):
        jd.train_state(params, X, Y, **method | {"aggregator": jd.mean()}, engine=guide["sketched_engine"](directions))


def test_without_a_scale_rows_that_are_not_finite_are_not_hidden(guide):
    f = guide["Smoothed"](lambda p: p["w"].sqrt().sum(0), ({"w": torch.zeros(2, 2)},))
    params = {"w": torch.tensor([[0.0, 1.0], [1.0, 1.0]])}
    method = {"losses": f, "aggregator": jd.mean(), "optimizer": jd.sgd(0.1)}
    info = jd.step(jd.train_state(params, **method), **method)[1]
    assert not info.moved
    assert not jd.weighted_fn(f)(params)[1](torch.ones(2))[1]


@pytest.fixture
def sharded(tmp_path):
    """Parameters on a mesh of one rank."""
    dist.init_process_group("gloo", init_method=(tmp_path / "store").as_uri(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    yield {name: distribute_tensor(x, mesh, [Shard(0)]) for name, x in PARAMS.items()}, mesh
    dist.destroy_process_group()


def test_a_kind_without_a_sharded_form_is_refused_and_one_with_it_is_its_own(guide, sharded):
    params, mesh = sharded
    alone = guide["Smoothed"](losses, ({name: torch.zeros_like(x) for name, x in PARAMS.items()},))
    over_mesh = jd.distributed.sharded(alone, mesh)
    refused = r"expected losses whose rows are equal objectives .* found those of Smoothed\. Pass a plain function"
    method = {"losses": over_mesh, "aggregator": jd.upgrad(), "optimizer": jd.sgd(0.1)}
    with pytest.raises(ValueError, match=f"train_state: {refused}"):
        jd.train_state(params, X, Y, **method)
    for f in (jd.jacobian_fn(over_mesh), jd.weighted_fn(over_mesh), jd.jacobian_fn(alone)):
        with pytest.raises(ValueError, match=refused):
            f(params, X, Y)
    with pytest.raises(ValueError, match=r"jacobian_fn: argnums must be 0, .* of losses with a structure, found 1"):
        jd.jacobian_fn(jd.distributed.sharded(alone, mesh), argnums=1)(PARAMS, params["w"], Y)

    def doubled_rows(losses, args, options):
        rows, values, aux = PLAIN.jacobian(losses, args, options)
        return {name: 2 * row for name, row in rows.items()}, values, aux

    class Doubled:
        kind = Kind(doubled_rows, over_shards=lambda losses, chosen, enter: enter(losses, chosen))

        def __call__(self, params, x, y):
            return losses(params, x, y)

    rows = torch.func.jacrev(losses)(PARAMS, X, Y)
    found, _ = jd.jacobian_fn(jd.distributed.sharded(Doubled(), mesh))(params, X, Y)
    for name, leaf in found.items():
        torch.testing.assert_close(leaf.full_tensor(), 2 * rows[name])
    direction, finite = jd.weighted_fn(jd.distributed.sharded(Doubled(), mesh))(params, X, Y)[1](X[0, :3])
    torch.testing.assert_close(direction["b"].full_tensor(), 2 * torch.einsum("i,ij->j", X[0, :3], rows["b"]))
    assert finite


def test_a_subclass_is_of_the_kind_of_its_base():
    class Trunk(Multitask):
        pass

    params, *parts = tasks()
    for kind in (Trunk(*parts), jd.multitask(*parts)):
        assert jd.jacobian_fn(kind)(params, X, Y)[0].heads["a"].shape == (3,)


def test_a_declared_structure_without_a_kind_is_differentiated_as_a_function():
    class Alone(Declared):
        def __call__(self, params):
            return params["b"] ** 2

    rows, _ = jd.jacobian_fn(Alone())(PARAMS)
    torch.testing.assert_close(rows["b"], torch.diag(2 * PARAMS["b"]))
