"""Public reports on functional calls, vmap, random numbers, checkpoints and gradients of examples: see README.md."""

import warnings
from contextlib import nullcontext

import pytest
import torch
from bounds import check_stable, check_within, eps
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import functional_jd as jd

DOUBLE = torch.float64


def values_of(module):
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def taken(losses, params, *batch, rule=None, **start):
    """The direction of one step: by how much gradient descent with rate one moves each parameter."""
    how = {"losses": losses, "aggregator": rule or jd.total(), "optimizer": jd.sgd(1.0)}
    state, info = jd.step(jd.train_state(params, *batch, **how, **start), *batch, **how)
    assert info.moved
    return {name: params[name].detach() - state.params[name] for name in params}


def rows_of_loop(module, loss, examples):
    """The gradients of all examples by a loop of plain torch, `{name: [m, *p]}`; zeros where a loss does not reach."""
    names, tensors = zip(*module.named_parameters(), strict=True)
    rows = [torch.autograd.grad(loss(x), tensors, allow_unused=True) for x in examples]
    columns = zip(*rows, strict=True)
    given = [[torch.zeros_like(p) if g is None else g for g in c] for p, c in zip(tensors, columns, strict=True)]
    return {name: torch.stack(column) for name, column in zip(names, given, strict=True)}


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(7, 3), nn.Linear(3, 7, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, ids):
        return self.out(torch.tanh(self.embed(ids)))


class Twice(nn.Module):
    """A layer and a norm that are used twice, and a layer that is not used."""

    def __init__(self):
        super().__init__()
        self.used, self.unused, self.norm = nn.Linear(4, 4), nn.Linear(4, 2), nn.LayerNorm(4)

    def forward(self, x):
        return self.norm(self.used(torch.tanh(self.norm(self.used(x)))))


class Recomputed(nn.Module):
    def __init__(self, use=True):
        super().__init__()
        self.first, self.last, self.use = nn.Linear(3, 8), nn.Linear(8, 2), use

    def forward(self, x):
        f = lambda x: torch.tanh(self.first(x))
        return self.last(checkpoint(f, x, use_reentrant=False) if self.use else f(x))


def test_a_tied_weight_has_one_name_and_the_gradient_of_both_uses():
    torch.manual_seed(0)
    net, ids = Tied().double(), torch.tensor([1, 4, 4])
    apply = jd.functional(net)
    found = taken(lambda p, ids: apply(p, {}, ids)[0].square().mean(0), values_of(net), ids)
    assert list(found) == ["embed.weight"]
    expected = torch.autograd.grad(net(ids).square().mean(0).sum(), net.embed.weight)[0]
    check_within(found["embed.weight"], expected, 64 * eps() * expected.abs().max())
    both = {"embed.weight": net.embed.weight.detach(), "out.weight": net.embed.weight.detach() + 1}
    with pytest.raises(ValueError, match=r"out\.weight"):
        taken(lambda p, ids: apply(p, {}, ids)[0].square().mean(0), both, ids)


@pytest.mark.parametrize("rule", [jd.upgrad(), jd.clipped(0.1)], ids=["upgrad", "clipped"])
@pytest.mark.parametrize(
    ("make", "examples"),
    [(Tied, torch.tensor([[1, 4], [2, 2], [0, 6]])), (Twice, torch.linspace(-1, 2, 12, dtype=DOUBLE).view(3, 4).cos())],
    ids=["tied", "twice"],
)
def test_gradients_of_examples_of_shared_layers(make, examples, rule):
    torch.manual_seed(0)
    net = make().double()
    apply = jd.functional(net)
    losses = jd.per_example(lambda p, x: apply(p, {}, x)[0].pow(3).sum())
    how = {"losses": losses, "aggregator": rule, "optimizer": jd.sgd(1.0)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "train_state: no loss reaches")
        state, _ = jd.step(jd.train_state(values_of(net), examples, **how), examples, **how)
    rows = rows_of_loop(net, lambda x: net(x).pow(3).sum(), examples)
    found = {name: p.detach() - state.params[name] for name, p in net.named_parameters()}
    check_stable(found, lambda rows: jd.aggregate(rule, rows).direction, rows)


def test_the_same_key_draws_the_same_mask_in_every_call_and_in_a_hessian():
    f, p = jd.random.keyed(lambda p: (functional.dropout(p, 0.5) ** 2).sum()), torch.ones(6)
    key = jd.random.key(3)
    assert f(key, p) == f(key, p)
    H = torch.func.hessian(lambda p: f(key, p))(p)
    mask = jd.random.keyed(lambda p: functional.dropout(p, 0.5))(key, p)
    assert torch.equal(H, torch.diag(2 * mask.square()))
    many = torch.vmap(torch.func.hessian(lambda p: f(key, p)), randomness="different")(p.expand(2, 6))
    assert torch.equal(many, H.expand(2, 6, 6))


@pytest.mark.parametrize("examples", [True, False])
def test_checkpoints_and_offloaded_activations_in_losses(examples):
    torch.manual_seed(0)
    net, x = Recomputed().double(), torch.randn(6, 3, dtype=DOUBLE)
    plain = Recomputed(use=False).double()
    plain.load_state_dict(net.state_dict())
    rule = jd.clipped(0.1) if examples else jd.upgrad()

    def losses_of(module, around=nullcontext):
        apply = jd.functional(module)

        def loss(p, x):
            with around():
                return apply(p, {}, x)[0].square()

        return jd.per_example(lambda p, x: loss(p, x).sum()) if examples else lambda p, x: loss(p, x).mean(0)

    expected = taken(losses_of(plain), values_of(net), x, rule=rule)
    for losses in (losses_of(net), losses_of(plain, torch.autograd.graph.save_on_cpu)):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", jd.SlowPathWarning)
            found = taken(losses, values_of(net), x, rule=rule)
        reasons = "saved tensor hooks", "_NoopSaveInputs"  # the latter of checkpoints in torch 2.11
        assert examples == any(reason in str(w.message) for w in told for reason in reasons)
        for name in expected:
            check_within(found[name], expected[name], 256 * eps() * (1 + expected[name].abs().max()))
