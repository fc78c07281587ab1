"""Trainings for many preferences as one, beside trainings one by one."""

import sys

import pytest
import torch
from bounds import check_same, check_within, eps
from solutions import quadratics
from torch import nn
from torch.utils._pytree import tree_leaves

import functional_jd as jd
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
    torch.testing.assert_close(found, whole, rtol=0, atol=0)


def test_solutions_of_two_quadratics_reach_the_closed_form():
    # On the front w = t everywhere, with losses 3 (t - 1)^2 and 3 (t + 1)^2; there u_1 L_1 = u_2 L_2.
    preferences = lattice(2, 8)[1:-1]
    front = torch.zeros(3)
    for rate in (0.1, 0.03, 0.01, 0.003, 0.001, 0.0003):  # the largest loss changes from step to step
        how = {"losses": quadratics, "optimizer": jd.sgd(rate), "rule": jd.tchebycheff}
        front = train(front, [()] * 40, preferences=preferences, **how)
    ratio = (preferences[:, 0] / preferences[:, 1]).sqrt()
    t = (ratio - 1) / (ratio + 1)
    expected = torch.stack([3 * (t - 1).square(), 3 * (t + 1).square()], 1)
    torch.testing.assert_close(front.losses, expected, rtol=0, atol=1e-2)
    assert knee(front.losses) == 3


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
    torch.testing.assert_close(found, train(start, [()] * 5, **how), rtol=0, atol=0)


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


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"rule": jd.upgrad()}, TypeError, "train: rule must be a function"),
        ({"rule": lambda u: u}, TypeError, "train_state: aggregator must be"),
        ({"preferences": [[1.0, 2.0]]}, TypeError, r"preferences must be a floating-point tensor \[K, m\]"),
        ({"preferences": None}, TypeError, r"preferences must be a floating-point tensor \[K, m\]"),
        (
            {"preferences": torch.ones(2)},
            ValueError,
            r"preferences must be \[K, m\], one in a row, found torch.float32 \[2\]",
        ),
        ({"preferences": torch.ones(0, 2)}, ValueError, "preferences must be 1, one for each solution, found 0"),
        ({"preferences": torch.ones(2, 3)}, ValueError, "tchebycheff: weights must be one per row, found 3 and 2 rows"),
        ({"batches": []}, ValueError, "train: batches must have an item, found none"),
        ({"chunk_size": 0}, ValueError, "train: chunk_size must be an integer of at least 1"),
        (
            {"compile": "fast"},
            ValueError,
            "compile must be False, True, 'eager', 'inductor' or 'cudagraphs', found 'fast'",
        ),
        (
            {"compile": 1},
            ValueError,
            "train: compile must be False, True, 'eager', 'inductor' or 'cudagraphs', found 1",
        ),
    ],
)
def test_what_does_not_fit_is_refused(change, kind, message):
    how = {"losses": quadratics, "optimizer": jd.sgd(0.1), "rule": jd.tchebycheff, "preferences": lattice(2, 2)}
    arguments = {"batches": [()], **how, **change}
    with pytest.raises(kind, match=message):
        train(START, **arguments)


def test_a_front_goes_on_with_as_many_preferences():
    how = {"losses": quadratics, "optimizer": jd.sgd(0.1), "rule": jd.tchebycheff}
    front = train(START, [()], preferences=lattice(2, 2), **how)
    with pytest.raises(ValueError, match="preferences must be 3, one for each solution, found 4"):
        train(front, [()], preferences=lattice(2, 3), **how)
