"""The table of views says what rules receive, and what a step forms for it."""

import re

import pytest
import torch
from bounds import check_same

import functional_jd as jd
from functional_jd import views

TABLE = {
    name: (received, formed)
    for name, received, formed in re.findall(r"^- `(\w+)`: (.*?); (.*)\.$", views.__doc__, flags=re.MULTILINE)
}
SINGLE = {name for name in views.__all__ if isinstance(getattr(views, name), views.View) and "_and_" not in name}
X = torch.linspace(-1, 1, 12).reshape(4, 3)
PARAMS = {"w": torch.linspace(-2, 1, 3 * 8).reshape(3, 8), "b": torch.linspace(0, 1, 8)}
M = 4


def losses(params, x):
    return (x @ params["w"] + params["b"]).sin().square().mean(1)


def recording(view):
    """A rule with this view, and the list of what it has received."""
    found = []

    def weigh(seen):
        found.append(seen)
        return torch.full((M,), 1 / M, dtype=torch.float64)

    return jd.stateless(view, weigh), found


def stepped(view, params=PARAMS, **how):
    """What a rule with this view receives in a step, and the engine that the step takes."""
    rule, found = recording(view)
    x = X.to(params["w"].dtype)
    method = {"losses": jd.per_example(lambda p, x: losses(p, x[None])[0]), "aggregator": rule}
    state = jd.train_state(params, x, **method, optimizer=jd.sgd(0.1), **how)
    jd.step(state, x, **method, optimizer=jd.sgd(0.1))
    return found[-1], jd.chosen_engine(state, x, **method).engine


def expected(name):
    """By hand, in float64."""
    rows, values = jd.jacobian_fn(losses)(PARAMS, X)
    flat = torch.cat([leaf.double().flatten(1) for leaf in rows.values()], dim=1)
    gramian = flat @ flat.mT
    return {
        "no_gradients": torch.zeros(M).double(),
        "losses": values.double(),
        "norms": gramian.diagonal().sqrt(),
        "gramian": gramian,
        "full_jacobian": rows,
        "cross_gramian": gramian,
    }[name]


def test_the_table_has_all_views():
    assert TABLE.keys() == SINGLE


@pytest.mark.parametrize("name", TABLE)
def test_a_rule_receives_what_the_table_says(name):
    rule, found = recording(getattr(views, name))
    rows, values = jd.jacobian_fn(losses)(PARAMS, X)
    jd.aggregate(rule, rows, None, rows, losses=values)
    if name != "cross_gramian":
        found += [stepped(getattr(views, name))[0], stepped(getattr(views, name), scale=jd.scale_state())[0]]
    text, wanted = TABLE[name][0], expected(name)
    for seen in found:
        check_same(seen, wanted, torch.float32)
        if name != "full_jacobian":
            assert f"float64 `[{', '.join('m' * seen.ndim)}]`" in text
            assert (seen.dtype, seen.shape) == (torch.float64, (M,) * seen.ndim)


@pytest.mark.parametrize("name", ["norms", "gramian", "full_jacobian"])
def test_a_view_with_losses_gives_a_pair(name):
    pair = getattr(views, f"{name.removeprefix('full_')}_and_losses")
    (seen, values), engine = stepped(pair)
    alone = stepped(getattr(views, name))
    torch.testing.assert_close(seen, alone[0])
    check_same(values, expected("losses"), torch.float32)
    assert engine == alone[1]


@pytest.mark.parametrize("name", [name for name in TABLE if name != "cross_gramian"])
def test_a_step_forms_what_the_table_says(name):
    engines = {"no rows, one backward pass": "weighted", "all rows": "jacobian"}
    for width, cheap in (8, "jacobian"), (40000, "gramian"):  # the cheaper engine of either size
        params = {"w": torch.ones(3, width), "b": torch.ones(width)}
        assert stepped(getattr(views, name), params)[1] == engines.get(TABLE[name][1], cheap)


def test_a_step_refuses_a_view_of_two_batches():
    with pytest.raises(ValueError, match="by hand: aggregate"):
        stepped(views.cross_gramian)


def test_rows_in_half_precision_are_so_in_aggregate_and_float32_in_a_step():
    params = {name: x.bfloat16() for name, x in PARAMS.items()}
    rule, found = recording(views.full_jacobian)
    jd.aggregate(rule, jd.jacobian_fn(losses)(params, X.bfloat16())[0])
    assert {x.dtype for x in found[0].values()} == {torch.bfloat16}
    assert {x.dtype for x in stepped(views.full_jacobian, params)[0].values()} == {torch.float32}


@pytest.mark.parametrize(("products", "shape"), [("norms", (M,)), ("gramian", (M, M))])
def test_what_a_function_of_the_observation_sees_is_not_the_same_by_hand_and_in_a_step(products, shape):
    rule, found = recording(views.View(lambda seen: (seen.products, seen.rows), products))
    jd.aggregate(rule, jd.jacobian_fn(losses)(PARAMS, X)[0])
    assert found[0][0] is None
    (seen, rows), _ = stepped(views.View(lambda seen: (seen.products, seen.rows), products))
    assert rows is None
    squares = expected("norms").square() if products == "norms" else expected("gramian")
    assert (seen.dtype, seen.shape) == (torch.float64, shape)
    check_same(seen, squares, torch.float32)
