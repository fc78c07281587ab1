"""Clipping by norm, row by row: torch's own, the sensitivity, the automatic formula, and steps without rows."""

import math

import pytest
import torch
from bounds import check_stable, check_within, eps
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call

import functional_jd as fj
from functional_jd.testing.strategies import jacobians

LIKE = {"w": torch.zeros(2, 2), "b": torch.zeros(3)}
BOUNDS = st.integers(1, 40).map(lambda k: k / 4)
J = torch.tensor([[3.0, 4.0, 0.0], [0.3, 0.0, 0.4], [-6.0, 0.0, 8.0], [0.0, 0.0, 0.0]], dtype=torch.float64)


def flat(rows):
    return torch.cat([leaf.flatten(1) for leaf in rows.values()], 1)


@given(jacobians((1, 5), like=LIKE), BOUNDS)
def test_equal_to_torch_s_clipping_of_every_gradient_alone(rows, bound):
    total = {name: torch.zeros_like(leaf) for name, leaf in LIKE.items()}
    for i in range(len(rows["b"])):
        parameters = [nn.Parameter(torch.zeros_like(leaf, dtype=torch.float64)) for leaf in LIKE.values()]
        for parameter, leaf in zip(parameters, rows.values(), strict=True):
            parameter.grad = leaf[i].clone()
        norm = flat(rows)[i].norm()
        # torch adds 1e-6 to the norm.
        nn.utils.clip_grad_norm_(parameters, float(bound * (norm + 1e-6) / norm) if norm > bound else float("inf"))
        total = {name: total[name] + p.grad for name, p in zip(total, parameters, strict=True)}
    found = fj.aggregate(fj.clipped(bound), rows)
    terms = torch.minimum(flat(rows).norm(dim=1), torch.tensor(bound)).sum()
    for name in LIKE:
        check_within(found.direction[name], total[name], 64 * eps() * terms)


def test_rows_that_are_short_enough_keep_their_bits_and_zeros_count():
    weights = fj.aggregate(fj.clipped(1.0), J).weights
    assert weights.tolist() == [0.2, 1.0, 0.1, 1.0]
    assert torch.equal(fj.aggregate(fj.clipped(16.0), J).direction, fj.aggregate(fj.total(), J).direction)


def network():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 1)).double()
        x, y = torch.randn(5, 7, 6, dtype=torch.float64), torch.randn(5, 7, 1, dtype=torch.float64)
    params = {name: p.detach() for name, p in net.named_parameters()}
    return params, fj.per_example(lambda p, x, y: (functional_call(net, p, (x,)) - y).square().mean()), (x, y)


@pytest.mark.parametrize("engine", ["jacobian", "gramian", "auto"])
@pytest.mark.parametrize("shape", [(), (5,)])
def test_a_step_is_that_of_vmap_of_grad(engine, shape):
    """The loop that people write: gradients of examples by vmap, clipped, added up."""
    params, losses, batch = network()
    gradients_of = torch.vmap(torch.func.grad(losses.loss), (None, 0, 0))
    bound = float(flat(gradients_of(params, *batch)).norm(dim=1).median())

    def by_hand(params, *batch):
        gradients = gradients_of(params, *batch)
        factors = (bound / flat(gradients).norm(dim=1)).clamp(max=1.0)
        steps = {name: torch.einsum("m,m...->...", factors, rows) for name, rows in gradients.items()}
        return factors, {name: p - 0.5 * steps[name] for name, p in params.items()}

    how = {"losses": losses, "aggregator": fj.clipped(bound), "optimizer": fj.sgd(0.5), "engine": engine}
    state = fj.train_state(params, *batch, scale=fj.scale_state(shape=shape), **how)
    after, info = fj.step(state, *batch, **how)
    check_stable((info.weights, after.params), by_hand, params, *batch)
    assert info.gramian == ()


@given(jacobians(), st.integers(1, 40).map(lambda k: k / 16))
def test_equal_to_the_formula_by_hand(rows, gamma):
    weights = fj.aggregate(fj.auto_clipped(gamma), rows).weights
    for weight, row in zip(weights.tolist(), rows.tolist(), strict=True):
        assert math.isclose(weight, 1 / (math.hypot(*row) + gamma), rel_tol=64 * eps())
    doubled = fj.aggregate(fj.auto_clipped(gamma, max_norm=torch.tensor(2.0)), rows).weights
    assert torch.equal(doubled, 2 * weights)
