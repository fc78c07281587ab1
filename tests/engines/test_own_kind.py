"""The kind and the engine of the guide, as a stranger would write them."""

import re
from pathlib import Path

import pytest
import torch

import functional_jd as jd
from functional_jd.core.declared import Declared
from functional_jd.objectives import Multitask

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "own_kind.md"


@pytest.fixture(scope="module")
def guide():
    found = {"torch": torch}
    for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL):
        exec(compile(code, PAGE.name, "exec"), found)
    return found


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


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
        torch.testing.assert_close(one.params[name], other.params[name], rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(info.weights, expected.weights, rtol=1e-9, atol=1e-12)
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


def test_a_strangers_engine_with_all_directions_sees_the_whole_gramian(guide):
    basis = torch.eye(15, dtype=torch.float64)
    directions = {"w": basis[:, :12].reshape(15, 4, 3), "b": basis[:, 12:]}
    engine = guide["sketched_engine"](directions)
    same(trained(losses, jd.upgrad(), engine=engine), trained(losses, jd.upgrad(), engine="jacobian"))
    with pytest.raises(ValueError, match=r"serves rules that need the Gramian, found one that needs no gradients"):
        trained(losses, jd.mean(), engine=engine)


def test_a_subclass_is_of_the_kind_of_its_base():
    class Trunk(Multitask):
        pass

    shared = {"shared": {"w": PARAMS["w"]}, "heads": {"a": numbers(3), "b": numbers(3, seed=1)}}
    parts = (
        lambda p, x: (x @ p["w"]).tanh(),
        lambda heads, h, x: {name: (h @ own - 1).square().mean() for name, own in heads.items()},
    )
    for kind in (Trunk(*parts), jd.multitask(*parts)):
        assert jd.jacobian_fn(kind)(shared, X)[0].heads["a"].shape == (3,)


def test_a_declared_structure_without_a_kind_is_differentiated_as_a_function():
    class Alone(Declared):
        def __call__(self, params):
            return params["b"] ** 2

    rows, _ = jd.jacobian_fn(Alone())(PARAMS)
    torch.testing.assert_close(rows["b"], torch.diag(2 * PARAMS["b"]))
