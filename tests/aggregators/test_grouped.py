"""Grouped: every group is aggregated as if it were alone."""

from collections import OrderedDict, defaultdict
from functools import partial

import hypothesis
import pytest
import sequences
import torch
from bounds import check_within, eps, gramian_bound, product_bound
from hypothesis import given
from sequences import integer_jacobians
from zoo import Passed

import functional_jd as jd
from functional_jd import random
from functional_jd.aggregation.views import full_jacobian, gramian, losses, no_gradients, with_losses
from functional_jd.core.heads import MultitaskJacobian
from functional_jd.core.tree import tree_leaves, tree_map
from functional_jd.testing import batched, compiled, differentiable, jacobians, laws_of, non_finite

rows = integer_jacobians((3, 3), (5, 5))
number = partial(sequences.number, columns=5)


def tree(J):
    """Groups of several shapes: a nested one, a bare matrix, a bare scalar."""
    return {"trunk": {"w": J[:, :4].reshape(3, 2, 2), "b": J[:, 4]}, "middle": J[:, 1:4], "last": J[:, 0]}


def drawn():
    """Weights drawn from a key that the state carries on."""

    def update(seen, key):
        drawn, carried = random.split(key)
        return random.uniform(drawn, (len(seen),), dtype=torch.float64), carried

    return jd.Aggregator(gramian, lambda seen: random.key(7), update)


def entrywise():
    return jd.stateless(full_jacobian, lambda J: tree_map(torch.sign, J))


def rules():
    return {"trunk": jd.upgrad(), "middle": jd.excess_mtl(0.1), "last": drawn()}


@given(rows, rows)
def test_every_group_is_aggregated_as_if_alone_call_after_call(one, two):
    together, state = jd.grouped(rules()), None
    alone = dict.fromkeys(rules())
    for J in (tree(one), tree(two)):
        direction, weights, state = jd.aggregate(together, J, state)
        assert {key: own.shape for key, own in weights.items()} == dict.fromkeys(J, (3,))
        torch.testing.assert_close(jd.aggregation.combine(J, weights), direction)
        for key, rule in rules().items():
            expected = jd.aggregate(rule, J[key], alone[key])
            alone[key] = expected.state
            for mine, theirs in zip(tree_leaves(direction[key]), tree_leaves(expected.direction), strict=True):
                check_within(mine, theirs, 64 * eps() * sum(leaf.abs().sum() for leaf in tree_leaves(J[key])))
            for mine, theirs in zip(tree_leaves(state[key]), tree_leaves(expected.state), strict=True):
                assert torch.equal(mine, theirs)


def test_the_order_of_the_keys_does_not_matter():
    J = tree(number(2))
    backwards = jd.aggregate(jd.grouped(dict(reversed(rules().items()))), dict(reversed(J.items())))
    forwards = jd.aggregate(jd.grouped(rules()), J)
    assert all(map(torch.equal, tree_leaves(backwards.direction), tree_leaves(forwards.direction)))


def test_second_batches_and_losses_reach_the_rules_that_look_at_them():
    J, K = {"a": number(0), "b": number(1)}, {"a": number(2), "b": number(3)}
    values = torch.tensor([1.0, 2.0, 3.0])
    together = jd.grouped({"a": jd.modo(0.01), "b": jd.stateless(losses, lambda seen: seen)})
    direction = jd.aggregate(together, J, None, K, losses=values).direction
    torch.testing.assert_close(direction["a"], jd.aggregate(jd.modo(0.01), J["a"], None, K["a"]).direction)
    torch.testing.assert_close(direction["b"], values.double() @ J["b"])
    with pytest.raises(ValueError, match="independent batches"):
        jd.aggregate(together, J, losses=values)


def test_the_groups_of_a_multitask_jacobian_are_those_of_the_trunk():
    J, heads = tree(number(0)), {"out": torch.ones(2)}
    direction = jd.aggregate(jd.grouped(rules()), MultitaskJacobian(J, heads)).direction
    expected = jd.aggregate(jd.grouped(rules()), J).direction
    assert all(map(torch.equal, tree_leaves(direction["shared"]), tree_leaves(expected)))
    assert direction["heads"] is heads


def test_what_is_not_finite_stays_in_its_group():
    J = tree(number(0))
    J["middle"] = J["middle"] * torch.tensor([[1.0], [torch.nan], [1.0]])
    direction = jd.aggregate(jd.grouped({"trunk": jd.upgrad(), "middle": jd.upgrad(), "last": jd.mean()}), J).direction
    assert direction["middle"].isnan().all()
    assert all(leaf.isfinite().all() for leaf in tree_leaves([direction["trunk"], direction["last"]]))


MISTAKES = [
    (lambda J: jd.aggregate(jd.grouped({"a": jd.mean()}), J), r".* top-level keys .*, \['a', 'b'\], found \['a'\]"),
    (
        lambda J: jd.aggregate(jd.grouped(dict.fromkeys("abc", jd.mean())), J),
        r".* \['a', 'b'\], found \['a', 'b', 'c'\]",
    ),
    (lambda J: jd.aggregate(jd.grouped({"a": jd.mean()}), [J["a"]]), "parameters must be a dict by groups, found list"),
    (lambda J: jd.grouped({"a": jd.mean}), r"rules\['a'\] must be a rule, found"),
    (lambda J: jd.grouped({"a": jd.mean()}, rows={"b": [1]}), "rows must have keys"),
    *(
        (lambda J, own=own: jd.grouped({"a": jd.mean()}, rows={"a": own}), "rows must have keys")
        for own in ([1, 1], [], [-1])
    ),
]


@pytest.mark.parametrize(("make", "message"), MISTAKES)
def test_groups_and_rules_that_do_not_fit_are_named(make, message):
    with pytest.raises((TypeError, ValueError), match=f"grouped: {message}"):
        make({"a": number(0), "b": number(1)})


@pytest.mark.parametrize("other", [jd.mean, partial(jd.clipped, 0.1), jd.upgrad], ids=["mean", "clipped", "upgrad"])
def test_groups_inside_a_group_take_a_step_as_their_rows_are_aggregated(other):
    params = {"a": {"u": torch.tensor([1.0, -2.0]), "v": torch.tensor([0.5])}, "b": torch.tensor([3.0, 1.0])}

    def values(params):
        u, v, b = params["a"]["u"], params["a"]["v"], params["b"]
        return torch.stack([u.square().sum() + (v * b).sum(), (u * b).sum() + v.pow(3).sum()])

    rule = jd.grouped({"a": jd.grouped({"u": jd.mean(), "v": jd.total()}), "b": other()})
    method = {"losses": values, "aggregator": rule, "optimizer": jd.sgd(1.0)}
    moved, _ = jd.step(jd.train_state(params, **method), **method)
    direction = jd.aggregate(rule, jd.jacobian_fn(values)(params)[0]).direction
    expected = tree_map(torch.sub, params, direction)
    torch.testing.assert_close(moved.params, expected)


def test_a_rule_of_callables_without_a_hash_is_a_rule():
    class Halves:
        __hash__ = None

        def __call__(self, received, state):
            return torch.full_like(received, 0.5), state

    rule = jd.Aggregator(no_gradients, lambda _: (), Halves())
    J = {"a": number(0), "b": number(1)}
    direction = jd.aggregate(jd.grouped({"a": rule, "b": rule}), J).direction
    torch.testing.assert_close(direction, {name: 0.5 * leaf.sum(0) for name, leaf in J.items()})


def two_groups(n=4):
    params = {"a": {"w": number(0)[0, :2]}, "b": {"v": torch.linspace(-1, 1, n).double()}}
    x = torch.linspace(0.5, 2, 3).double()
    seen = []

    def losses_of(params, x):
        inner = Passed.apply(params["a"]["w"].sum() * x, seen)
        return (inner.sin() + params["b"]["v"].square().mean() * x).exp() / x.sum()

    return params, x, losses_of, seen


@pytest.mark.parametrize(
    ("rules", "engine", "passes", "words"),
    [
        ({"a": jd.mean(), "b": jd.mean()}, "weighted", 1, "the rule needs no gradients: one backward pass"),
        ({"a": jd.mean(), "b": jd.total()}, "weighted", 2, "2 backward passes"),
        ({"a": jd.upgrad(), "b": jd.mean()}, "jacobian", 3, "parameters are few"),
        ({"a": jd.mean(), "b": entrywise()}, "jacobian", 3, "the rows themselves"),
    ],
)
def test_groups_cost_what_their_rules_cost_together(rules, engine, passes, words):
    params, x, losses_of, seen = two_groups()
    how = {"losses": losses_of, "aggregator": jd.grouped(rules), "optimizer": jd.sgd(0.1)}
    state = jd.train_state(params, x, **how)
    choice = jd.chosen_engine(state, x, losses=losses_of, aggregator=how["aggregator"])
    assert (choice.engine, words in choice.reason) == (engine, True), choice
    seen.clear()
    new, _ = jd.step(state, x, **how)
    assert len(seen) == passes
    rows, _ = jd.jacobian_fn(losses_of)(params, x)
    for key, rule in rules.items():
        expected = jd.aggregate(rule, rows[key]).direction
        moved = tree_map(lambda p, d: p - 0.1 * d, params[key], expected)
        for found, wanted in zip(tree_leaves(new.params[key]), tree_leaves(moved), strict=True):
            check_within(found, wanted, 64 * eps() * (1 + wanted.abs().max()))


def test_groups_of_many_parameters_have_inner_products_by_group():
    params, x, losses_of, _ = two_groups(n=1 << 18)
    rule = jd.grouped({"a": jd.upgrad(), "b": jd.clipped(0.1)})
    how = {"losses": losses_of, "aggregator": rule, "optimizer": jd.sgd(0.1)}
    state = jd.train_state(params, x, **how)
    assert jd.chosen_engine(state, x, losses=losses_of, aggregator=rule).engine == "gramian"
    by_products, info = jd.step(state, x, **how)
    by_rows, other = jd.step(state, x, engine="jacobian", **how)
    rows, _ = jd.jacobian_fn(losses_of)(params, x)
    sizes = {"a": rows["a"]["w"], "b": rows["b"]["v"]}
    for key, J in sizes.items():
        check_within(info.weights[key], other.weights[key], gramian_bound(J, other.weights[key].abs().max()))
    for found, wanted in zip(tree_leaves(by_products.params), tree_leaves(by_rows.params), strict=True):
        check_within(found, wanted, 64 * eps() * (1 + wanted.abs().max()))


@pytest.mark.parametrize("view", [gramian.map(lambda G: 2 * G), with_losses(gramian).map(lambda pair: 2 * pair[0])])
def test_a_view_that_is_made_of_the_gramian_gets_its_engine(view):
    params, x, losses_of, _ = two_groups(n=1 << 18)
    rule = jd.stateless(view, lambda G: torch.softmax(-G.diagonal().sqrt(), 0))
    state = jd.train_state(params, x, losses=losses_of, aggregator=rule, optimizer=jd.sgd(0.1))
    assert jd.chosen_engine(state, x, losses=losses_of, aggregator=rule).engine == "gramian"
    rows, values = jd.jacobian_fn(losses_of)(params, x)
    G = gramian(rows)
    _, info = jd.step(state, x, losses=losses_of, aggregator=rule, optimizer=jd.sgd(0.1))
    # An exponent is off by the roundings of a sum of squares, of which the root has half.
    rounding = rows["b"]["v"].shape[1] * eps() * (2 * G).diagonal().sqrt().max()
    check_within(info.weights, torch.softmax(-(2 * G).diagonal().sqrt(), 0), rounding)
    check_within(jd.aggregate(rule, rows, losses=values).weights, info.weights, rounding)
    flat = torch.cat([leaf.flatten(1) for leaf in tree_leaves(rows)], 1)
    check_within(info.gramian, G, product_bound(flat, flat.mT))


ROWS = {"all": torch.randn(3, 4, dtype=torch.float64), "some": torch.randn(3, 5, dtype=torch.float64)}
ROWS["some"][0] = 0
PARTS = {"trunk": ROWS["all"], "last": torch.randn(3, 5, dtype=torch.float64)}


@pytest.mark.parametrize("rule", [jd.mgda(), jd.cagrad(0.4), jd.upgrad(), jd.nash_mtl(), jd.trimmed_mean(0), jd.moco()])
def test_rows_of_some_losses_are_those_that_the_rule_of_the_group_receives(rule):
    both = jd.grouped({"all": rule, "some": rule}, rows={"some": [1, 2]})
    values = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    expected = jd.aggregate(rule, ROWS["some"][1:], losses=values[1:]).direction
    assert expected.norm() > 0
    direction = lambda J: jd.aggregate(both, J, losses=values).direction["some"]
    torch.testing.assert_close(direction(ROWS), expected)
    whole = jd.aggregate(rule, ROWS["all"], losses=values).direction
    torch.testing.assert_close(jd.aggregate(both, ROWS, losses=values).direction["all"], whole)
    slope = torch.func.grad(lambda J: direction(J).sum())(ROWS)
    assert not slope["some"][0].any()


def in_part(p, head=1.0):
    """Three losses, of which "some" does not reach the first."""
    both = (p["all"] + head * p["some"]).exp().sum()
    return torch.stack([p["all"].square().sum(), both, (p["some"] - 3).square().sum()])


def slope_of(params, losses, rule, places, key="some"):
    J, values = jd.jacobian_fn(losses)(params)
    return jd.aggregate(rule, J[key][places], losses=values[places]).direction


TWO_ONES = {"all": torch.ones(2), "some": torch.ones(2)}
BACKWARDS = OrderedDict(reversed(TWO_ONES.items()))


def by_groups(rule=None, losses=in_part):
    rule = rule or jd.grouped(dict.fromkeys(TWO_ONES, jd.mgda()))
    return {"losses": losses, "optimizer": jd.sgd(0.01), "aggregator": rule}


def check_moved(state, expected):
    # A step of 0.01 keeps the digits of the parameters, not its own.
    rounding = 8 * eps(torch.float32) / 0.01
    moved = (1 - state.params["some"]) / 0.01
    check_within(moved, expected, rounding + 64 * eps(torch.float32) * expected.abs().max())


@pytest.mark.parametrize("rule", [jd.mgda(), jd.cagrad(0.4), jd.upgrad(), jd.gradnorm()])
@pytest.mark.parametrize("engine", ["auto", "gramian", "jacobian"])
@pytest.mark.parametrize("params", [TWO_ONES, BACKWARDS, defaultdict(None, BACKWARDS)])
def test_losses_that_do_not_reach_a_group_have_no_row_there(rule, engine, params):
    rules = {"all": jd.total(), "some": rule}
    how = by_groups(jd.grouped(rules)) | {"engine": engine}
    if rule.view.losses:  # it remembers all objectives
        with pytest.warns(UserWarning, match=r"'some'.*rows=\{'some': \[1, 2\]\}"):
            jd.train_state(params, **how)
        how["aggregator"] = jd.grouped(rules, rows={"some": [1, 2]})
    state, info = jd.step(jd.train_state(params, **how), **how)
    check_moved(state, slope_of(TWO_ONES, in_part, rule, [1, 2]))
    assert info.weights["some"][0] == 0


def test_rows_that_exist_count_in_aggregate_too_and_give_the_derivatives_of_named_rows():
    params = tree_map(torch.Tensor.double, TWO_ONES)
    for rule in (jd.mgda(), jd.cagrad(0.4), jd.imtl_g()):
        found, named = (jd.grouped({"all": jd.mgda(), "some": rule}, rows) for rows in (None, {"some": [1, 2]}))
        state = jd.train_state(params, **by_groups(found)).aggregator
        J, _ = jd.jacobian_fn(in_part)(params)
        how = lambda J, state=state, found=found: jd.aggregate(found, J, state).direction["some"]
        by_name = lambda J, named=named: jd.aggregate(named, J).direction["some"]
        check_within(how(J), by_name(J), 64 * eps() * J["some"].abs().sum())
        slopes = [torch.func.grad(lambda J, f=f: f(J).sum())(J)["some"] for f in (how, by_name)]
        check_within(*slopes, 2**8 * eps() * (1 + slopes[1].abs().max()))


def test_a_rule_around_groups_starts_from_the_rows_that_exist():
    how = by_groups(jd.cr_mogm(jd.grouped({"all": jd.total(), "some": jd.mgda()})))
    state, _ = jd.step(jd.train_state(TWO_ONES, **how), **how)
    check_moved(state, slope_of(TWO_ONES, in_part, jd.mgda(), [1, 2]))


def test_a_loss_that_reaches_a_group_later_counts_from_then_on():
    reached = []
    later = lambda p: in_part(p) + torch.stack([(p["some"] * 2).sum()] + [p["all"].new_zeros(())] * 2)
    losses = lambda p: later(p) if reached else in_part(p)
    how = by_groups(losses=losses)
    state = jd.train_state(TWO_ONES, **how)
    assert state.aggregator["some"] == {(1, 2): ()}
    reached.append(True)
    check_moved(jd.step(state, **how)[0], slope_of(TWO_ONES, losses, jd.mgda(), [0, 1, 2]))


def test_a_head_that_starts_at_zero_and_a_task_without_labels_reach_their_group():
    # Zeros of this step only: no warning, and the row counts as soon as there is one.
    state = jd.train_state(TWO_ONES, **by_groups(losses=lambda p: in_part(p, 0.0)))
    assert state.aggregator["some"] == {(1, 2): ()}
    below = lambda p: torch.stack([(p["all"] * p["some"].sum() - c).square().sum() for c in (1, -2, 3)])
    jd.train_state({"all": torch.ones(2), "some": torch.zeros(2)}, **by_groups(losses=below))  # zeros of all

    def without_labels(p):
        both = (p["all"] + p["some"]).exp().sum()
        return {"a": torch.zeros(()), "b": both, "c": (p["some"] - 3).square().sum()}

    with pytest.warns(UserWarning, match=r"'some', found zeros of all but the losses \[1, 2\]"):
        state = jd.train_state(TWO_ONES, constant=["a"], **by_groups(losses=without_labels))
    assert state.aggregator == {"all": {(0, 1): ()}, "some": ()}


def test_places_of_a_group_survive_compiling_vmap_and_a_checkpoint(tmp_path):
    take = partial(jd.step, **by_groups())
    state = jd.train_state(TWO_ONES, **by_groups())
    expected, _ = take(state)
    many = torch.vmap(lambda x: take(state._replace(params={**TWO_ONES, "some": x}))[0].params["some"])
    torch.testing.assert_close(many(torch.ones(2, 2)), expected.params["some"].expand(2, 2))
    found, _ = jd.compiled(take, backend="eager")(state)
    assert torch.equal(found.params["some"], expected.params["some"])
    assert found.aggregator == state.aggregator == {"all": {(0, 1): ()}, "some": {(1, 2): ()}}
    torch.save((expected, jd.to_checkpoint(expected)), tmp_path / "x")
    whole, named = torch.load(tmp_path / "x", weights_only=True)
    for loaded in (whole, jd.from_checkpoint(named, like=state)):
        assert loaded.aggregator == state.aggregator
        assert torch.equal(loaded.params["some"], expected.params["some"])


@pytest.mark.parametrize("rule", [jd.gradnorm(), jd.upgrad(), jd.nash_mtl()])
def test_from_part_weights_of_a_part_count_for_all(rule):
    whole, alone, memory, own = jd.aggregation.from_part(rule, ["last"]), rule, None, None
    values = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    for _ in range(3):
        found = jd.aggregate(whole, PARTS, memory, losses=values)
        other = jd.aggregate(alone, {"last": PARTS["last"]}, own, losses=values)
        memory, own = found.state, other.state
        torch.testing.assert_close(found.weights, other.weights)
        torch.testing.assert_close(found.direction["trunk"], found.weights @ PARTS["trunk"])


OF_SOME = jd.grouped({"all": jd.mgda(), "some": jd.cagrad(0.4)}, rows={"some": [1, 2]})


@pytest.mark.parametrize("rule", [jd.aggregation.from_part(jd.upgrad(), ["some"]), OF_SOME])
def test_rules_of_parts_obey_the_laws(rule):
    few = hypothesis.settings(max_examples=10, derandomize=True, database=None, deadline=None)
    cases = jacobians(3, like={"all": torch.zeros(4), "some": torch.zeros(5)}, wide=False)
    found = laws_of(rule, batched, compiled, differentiable, non_finite, jacobians=cases, settings=few)
    assert all(value is True for value in found.values()), found


def test_from_part_names_that_are_no_parameters_are_refused():
    with pytest.raises(ValueError, match="from_part: names must be keys of the parameters"):
        jd.aggregate(jd.aggregation.from_part(jd.upgrad(), ["lost"]), PARTS)
