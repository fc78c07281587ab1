"""Solutions that know one another: one step of all, beside weights and steps by hand."""

import pytest
import torch
from sequences import random_rows
from solutions import check_composes, quadratics
from torch import nn
from torch.func import jacrev, stack_module_state

import functional_jd as jd
from functional_jd import views
from functional_jd.fronts import Population, hypervolume_gradient, lattice, moo_svgd, tch_set, train
from functional_jd.fronts.population import member

POPULATIONS = {
    "losses": Population(views.losses, lambda losses: losses - losses.amin(0) + 0.1),
    "gramian": Population(views.gramian, lambda gramians: gramians.sum(-1) / gramians.amax()),
    "gramian and losses": Population(
        views.gramian_and_losses, lambda seen: seen[1] / seen[0].diagonal(dim1=-2, dim2=-1).sum(0).sqrt()
    ),
    "jacobian": Population(views.full_jacobian, lambda J: J.sum(0).square().sum(-1) + J.square().sum(-1)),
    "hypervolume_gradient": hypervolume_gradient([20.0, 20.0]),
    "moo_svgd": moo_svgd(0.1, 5.0),
    "tch_set": tch_set(0.3),
}


def seen_by(population, J, L):
    G = J @ J.mT
    return {"losses": L, "gramian": G, "gramian_and_losses": (G, L), "full_jacobian": J}[population.view.__name__]


@pytest.mark.parametrize("engine", ["auto", "jacobian"])
@pytest.mark.parametrize("name", POPULATIONS)
def test_a_step_follows_the_weights_of_all(name, engine):
    population, w = POPULATIONS[name], random_rows(4, 3)
    front = train(w, [()] * 3, losses=quadratics, rule=population, optimizer=jd.sgd(0.05), engine=engine)
    for _ in range(3):
        J, L = torch.vmap(jacrev(quadratics))(w), torch.vmap(quadratics)(w)
        weights = population.weigh(seen_by(population, J, L))
        w = w - 0.05 * torch.einsum("ki,kip->kp", weights, J)
    torch.testing.assert_close(front.states.params, w)
    torch.testing.assert_close(front.losses, torch.vmap(quadratics)(w))
    assert front.preferences.shape == (4, 0)


def test_losses_are_evaluated_once_a_step():
    calls = []
    method = {"rule": POPULATIONS["losses"], "optimizer": jd.sgd(0.05)}
    method["losses"] = lambda w: calls.append(w) or quadratics(w)
    front = train(random_rows(4, 3), [()], **method)
    before = len(calls)
    train(front, [()] * 5, **method)
    assert len(calls) - before == 5 + 1  # and once for the losses of the front


def test_models_with_buffers_and_scales_in_float16():
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2)) for _ in range(3)]
    params, buffers = stack_module_state(nets)
    apply, x, y = jd.functional(nets[0]), torch.randn(8, 4), torch.randn(8)

    def losses(params, buffers, x, y):
        output, buffers = apply(params, buffers, x)
        return torch.stack([(output[:, 0] - y).square().mean(), (output[:, 1] + y).abs().mean()]), buffers

    method = {"rule": hypervolume_gradient([5.0, 5.0]), "optimizer": jd.adamw(0.02)}
    method |= {"buffers": {name: b[0] for name, b in buffers.items()}, "scale": jd.scale_state(2.0**24, shape=(2,))}
    front = train(params, [(x, y)] * 30, losses=jd.autocast(losses, torch.float16), **method)
    assert (front.states.scale.scale < 2.0**24).all()
    assert front.states.scale.scale.shape == (3, 2)
    assert (front.states.buffers["1.num_batches_tracked"] > 0).all()
    assert (front.losses < 1.0).any(1).all()
    assert all(p.requires_grad for p in params.values())
    assert not any(p.requires_grad for p in front.states.params.values())


def test_a_front_of_preferences_goes_on_as_a_population():
    front = train(random_rows(4, 3)[0], [()] * 3, losses=quadratics, rule=jd.tchebycheff, optimizer=jd.sgd(0.05),
                  preferences=lattice(2, 4)[1:-1])  # fmt: skip
    method = {"losses": quadratics, "rule": POPULATIONS["losses"], "optimizer": jd.sgd(0.05)}
    found = train(front, [()], **method)
    expected = train(front.states.params, [()], **method)
    assert torch.equal(found.states.params, expected.states.params)
    assert torch.equal(found.preferences, front.preferences)


@pytest.mark.parametrize("name", POPULATIONS)
def test_under_transforms(name):
    def stepped(w):
        return torch.vmap(one)(w, torch.arange(len(w)))

    def one(w, index):
        return jd.aggregate(member(POPULATIONS[name], index), jacrev(quadratics)(w), losses=quadratics(w)).direction

    seeds = torch.stack([random_rows(4, 3, seed=seed) for seed in range(3)])
    check_composes(stepped, seeds)
    assert torch.autograd.gradcheck(stepped, seeds[0].clone().requires_grad_(), check_forward_ad=True)
