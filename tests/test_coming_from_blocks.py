"""The blocks of the page for those who come from another library, beside torch's own optimizers and gradients."""

import copy
from pathlib import Path

import pytest
import torch
from bounds import check_same
from pages import typed

import functional_jd as jd

PAGE = Path(__file__).parents[1] / "docs" / "coming_from.md"


@pytest.fixture(scope="module")
def session():
    """What the reader has who typed all blocks."""
    return typed(PAGE)


def test_a_scheduler_that_ran_ahead_gives_the_steps_of_one_beside_its_optimizer(session):
    p = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = torch.optim.AdamW([p], lr=1e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=100, cycle_momentum=False)
    ours, memory = p.detach().clone(), session["scheduled"].init(p.detach())
    for taken in range(102):
        direction = torch.sin(taken + torch.arange(3.0, dtype=torch.float64))
        ours, memory = session["scheduled"].update(direction, memory, ours)
        if taken < 100:
            p.grad = direction
            optimizer.step()
            scheduler.step()
            torch.testing.assert_close(ours, p.detach())
    assert memory.steps == 102, "behind the last rate, it stays"


def test_moments_that_moved_go_on_as_torch_would(session):
    net, state = copy.deepcopy(session["net"]), session["state"]
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    optimizer.load_state_dict(copy.deepcopy(session["optimizer"].state_dict()))
    fresh = state._replace(optimizer=session["goes_on"]["optimizer"].init(state.params))
    for part, _, cost in session["batches"][2:]:
        values = session["costs"](dict(net.named_parameters()), part, cost)
        rows = [torch.autograd.grad(value, [*net.parameters()], retain_graph=True) for value in values]
        found = jd.aggregate(jd.upgrad(), [torch.stack(column) for column in zip(*rows, strict=True)])
        for p, direction in zip(net.parameters(), found.direction, strict=True):
            p.grad = direction
        optimizer.step()
        state, _ = jd.step(state, part, cost, **session["goes_on"])
        fresh, _ = jd.step(fresh, part, cost, **session["goes_on"])
    expected = {name: p.detach() for name, p in net.named_parameters()}
    check_same(state.params, expected)
    assert any((fresh.params[name] - p).abs().max() > 1e-4 for name, p in expected.items())


def test_weights_of_examples_give_what_backward_would(session):
    net = copy.deepcopy(session["net"])
    net.zero_grad()
    values = (net(session["x"]) - session["price"]).square().squeeze(1)
    torch.testing.assert_close(session["errors"], values.detach())
    rows = [
        torch.cat([g.flatten() for g in torch.autograd.grad(y, [*net.parameters()], retain_graph=True)]) for y in values
    ]
    torch.testing.assert_close(session["gramian"].float(), torch.stack(rows) @ torch.stack(rows).T)
    values.backward(session["weights"].to(values.dtype))
    torch.testing.assert_close(session["direction"], {name: p.grad for name, p in net.named_parameters()})
    assert session["finite"].all()
