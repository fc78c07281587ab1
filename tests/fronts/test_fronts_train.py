"""Trainings for many preferences as one, beside trainings one by one."""

import sys

import pytest
import torch
from bounds import check_same, check_within, eps
from solutions import quadratics
from torch import nn
from torch.utils._pytree import tree_leaves

import functional_jd as jd
from functional_jd import fronts
from functional_jd.fronts import Front, hypervolume_gradient, knee, lattice, moo_svgd, pmtl, tch_set, train

RULES = {
    "tchebycheff": jd.tchebycheff,
    "stch": lambda u: jd.stch(0.1, u),
    "epo": jd.epo,
    "pbi": lambda u: jd.pbi(5.0, u),
    "upgrad": lambda u: jd.upgrad(preference=u),
    "constant": jd.constant,
}
START = torch.tensor([0.3, -0.2, 0.5])


def two_tasks():
    generator = torch.Generator().manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2))
    params = {name: torch.randn(p.shape, generator=generator) * 0.3 for name, p in net.named_parameters()}
    apply = jd.functional(net)

    def losses(params, buffers, x, y):
        output, buffers = apply(params, buffers, x)
        return {"a": (output[:, 0] - y).square().mean(), "b": (output[:, 1] + y).abs().mean()}, buffers

    batches = [(torch.randn(8, 4, generator=generator), torch.randn(8, generator=generator)) for _ in range(3)]
    return params, {name: b.clone() for name, b in net.named_buffers()}, losses, batches


def one_by_one(start, batches, rule, preferences, *, scale=None, buffers=(), **method):
    states = []
    for preference in preferences:
        how = {**method, "aggregator": rule(preference)}
        state = jd.train_state(start, *batches[0], scale=scale, buffers=buffers, **how)
        for batch in batches:
            state, _ = jd.step(state, *batch, **how)
        states.append(state)
    return states


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("chunk_size", [None, 2])
def test_every_solution_is_the_training_of_its_preference(name, chunk_size):
    method = {"losses": quadratics, "optimizer": jd.adamw(0.05)}
    preferences = lattice(2, 4)[1:-1]
    expected = one_by_one(START, [()] * 5, RULES[name], preferences, **method)
    front = train(START, [()] * 5, rule=RULES[name], preferences=preferences, chunk_size=chunk_size, **method)
    assert isinstance(front, Front)
    for k, state in enumerate(expected):
        check_same(front[k], state, torch.float32)
        check_same(front.losses[k], quadratics(state.params).double(), torch.float32)


@pytest.mark.parametrize("name", ["tchebycheff", "upgrad"])
def test_every_solution_has_its_own_scale_buffers_and_moments(name):
    params, buffers, losses, batches = two_tasks()
    half = jd.autocast(losses, torch.float16)
    # A first scale that overflows: every solution skips its first step, and halves.
    scale = jd.scale_state(2.0**24, shape=(2,))
    method = {"losses": half, "optimizer": jd.adamw(0.02), "scale": scale, "buffers": buffers}
    preferences = torch.tensor([[0.2, 0.8], [0.5, 0.5]])
    expected = one_by_one(params, batches, RULES[name], preferences, **method)
    front = train(params, batches, rule=RULES[name], preferences=preferences, **method)
    assert expected[0].buffers["1.num_batches_tracked"] < 3
    for k, state in enumerate(expected):
        for x, y in zip(tree_leaves(front[k]), tree_leaves(state), strict=True):
            check_within(x, y, 16 * eps(torch.float16) * y.double().abs() + 8 * eps(torch.float16))
        assert torch.equal(front[k].scale.scale, state.scale.scale)


def test_two_calls_on_halves_of_the_batches_are_one():
    params, buffers, losses, batches = two_tasks()
    method = {"losses": losses, "optimizer": jd.adamw(0.02), "rule": RULES["stch"]}
    whole = train(params, iter(batches), buffers=buffers, preferences=lattice(2, 2), **method)
    half = train(params, batches[:1], buffers=buffers, preferences=lattice(2, 2), **method)
    found = train(half, batches[1:], **method)
    torch.testing.assert_close(tuple(found), tuple(whole), rtol=0, atol=0)


def test_a_solution_is_a_state_like_any_other():
    how = {"losses": quadratics, "optimizer": jd.adamw(0.05)}
    front = train(START, [()] * 2, rule=jd.tchebycheff, preferences=lattice(2, 2), **how)
    state, info = jd.step(front[1], aggregator=jd.upgrad(), **how)
    assert info.moved
    assert state.params.shape == START.shape
    assert jd.to_checkpoint(front[-1])


def test_it_tells_its_steps():
    seen = []
    how = {"losses": quadratics, "optimizer": jd.sgd(0.05), "rule": jd.tchebycheff, "preferences": lattice(2, 4)}
    train(START, [()] * 3, on_step=lambda info, state: seen.append((info.losses.shape, state.params.shape)), **how)
    assert seen == [((5, 2), (5, 3))] * 3


@pytest.mark.inductor
def test_it_compiles():
    how = {"losses": quadratics, "optimizer": jd.adamw(0.05), "rule": jd.tchebycheff, "preferences": lattice(2, 4)}
    expected = train(START, [()] * 4, **how)
    check_same(train(START, [()] * 4, compile=True, **how), expected, torch.float32)


PREFERENCES = lattice(2, 4)[1:-1]
POPULATIONS = {"moo_svgd": moo_svgd(), "hypervolume_gradient": hypervolume_gradient([20.0, 20.0]), "tch_set": tch_set()}


@pytest.mark.parametrize("name", [*RULES, "pmtl", *POPULATIONS])
def test_operators_without_python_take_the_same_steps(name):
    rule = (RULES | POPULATIONS | {"pmtl": pmtl(PREFERENCES, 2)})[name]
    start = START + torch.arange(3.0)[:, None] if name in POPULATIONS else START
    how = {"losses": quadratics, "rule": rule, "optimizer": jd.adamw(0.05)}
    how |= {} if name in POPULATIONS else {"preferences": PREFERENCES}
    found = train(start, [()] * 5, compile="eager", **how)
    torch.testing.assert_close(tuple(found), tuple(train(start, [()] * 5, **how)), rtol=0, atol=0)


@pytest.mark.parametrize("together", [False, True])
def test_all_steps_are_one_graph(together, monkeypatch):
    graphs = []

    def counted(graph, _):
        graphs.append(graph)
        return graph

    def counting(f, backend):
        assert backend == "inductor"
        return jd.compiled(f, backend=counted)

    monkeypatch.setattr(sys.modules["functional_jd.fronts.train"], "compiled", counting)
    rule = hypervolume_gradient([20.0, 20.0]) if together else jd.tchebycheff
    given = {} if together else {"preferences": lattice(2, 4)}
    start = START + torch.arange(5.0)[:, None] if together else START
    train(start, [()] * 3, losses=quadratics, rule=rule, optimizer=jd.adamw(0.05), compile=True, **given)
    assert len(graphs) == 1


def together(weigh):
    return {"start": torch.ones(4, 3), "rule": fronts.Population(jd.views.losses, weigh), "preferences": None}


TOGETHER = together(lambda losses: losses)
APART = {"a": torch.ones(2, 3), "b": torch.ones(3)}
# Garbage of other kinds is in `tests/fuzz`.
REFUSED = [
    ({"rule": jd.upgrad()}, TypeError, "train: rule must be a function"),
    ({"rule": lambda u: u}, TypeError, "train_state: aggregator must be"),
    ({"engine": "none"}, ValueError, "engine must be"),
    ({"start": START * torch.nan, "batches": [()] * 5, "patience": 3}, jd.TrainingStalled, "the last 3 steps"),
    ({"preferences": torch.ones(0, 2)}, ValueError, "preferences must be 1, one for each solution, found 0"),
    ({"preferences": torch.ones(2, 3)}, ValueError, "tchebycheff: weights must be one per row, found 3 and 2 rows"),
    ({**TOGETHER, "chunk_size": 2}, ValueError, "chunk_size must be None for a population, found 2"),
    ({**TOGETHER, "preferences": torch.ones(4, 2)}, ValueError, "preferences must be None for a population"),
    ({**TOGETHER, "start": APART}, ValueError, r"stacked .* leaves \[K, ...\], found shapes"),
    ({**TOGETHER, "start": torch.tensor(1.0)}, ValueError, r"found shapes \[\[\]\]"),
    ({**TOGETHER, "start": torch.ones(0, 3)}, ValueError, r"found shapes \[\[0, 3\]\]"),
    ({**TOGETHER, "start": torch.ones(2, 3, dtype=torch.int64)}, TypeError, "train: "),
    (together(lambda losses: losses[0]), ValueError, r"weights of the population must be \[K, m\] with K = 4, found"),
    (together(lambda _: 1.0), ValueError, "found 1.0. Return one weight for each loss"),
]


@pytest.mark.parametrize(("change", "kind", "message"), REFUSED)
def test_what_does_not_fit_is_refused(change, kind, message):
    how = {"losses": quadratics, "optimizer": jd.sgd(0.1), "rule": jd.tchebycheff, "preferences": lattice(2, 2)}
    with pytest.raises(kind, match=message):
        train(**{"start": START, "batches": [()], **how, **change})


def test_numbers_that_do_not_fit_are_refused_by_name():
    how = {"losses": quadratics, "optimizer": jd.sgd(0.1), "rule": jd.tchebycheff}
    front = train(START, [()], preferences=lattice(2, 2), **how)
    for call, message in (
        (lambda: train(front, [()], preferences=lattice(2, 3), **how), "preferences must be 3, .* found 4"),
        (lambda: fronts.hypervolume(torch.ones(3, 5), torch.ones(5)), "at most 4 losses, .*found 5.*moocore"),
        (lambda: hypervolume_gradient([1.0] * 5).weigh(torch.ones(2, 5)), "losses must be at most 4, .*found 5"),
        (lambda: hypervolume_gradient([1.0] * 3).weigh(torch.ones(2, 2)), "reference must be one per row, found 3 and"),
        (lambda: tch_set(weights=[-1.0]), "tch_set: weights must be finite and non-neg"),
        (lambda: lattice(40, 40), r"lattice: divisions must be such that there are at most 2\^20 preferences"),
        (lambda: knee(torch.ones(0, 2)), "knee: points must be at least one, found none"),
        (lambda: pmtl(torch.eye(2))(torch.zeros(2)), "pmtl: preference must be"),
        (
            lambda: jd.aggregate(pmtl(torch.eye(3))(torch.ones(2)), torch.eye(2), losses=torch.ones(2)),
            r"pmtl: preferences must be \[K, 2\], one column per loss, found torch.float64 \[3, 3\]",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_no_graph_grows_through_parameters_that_losses_only_close_over():
    backbone, x = nn.Linear(3, 4), torch.randn(5, 3)
    how = {"losses": lambda p, x: (backbone(x) @ p).square().mean(0), "optimizer": jd.adamw(0.1)}
    front = train(torch.ones(4, 2), [(x,)] * 3, rule=RULES["upgrad"], preferences=lattice(2, 3), **how)
    assert not any(x.requires_grad for x in tree_leaves(front))
