"""Public reports on several losses, their weights and accumulation: see README.md."""

import pytest
import torch
from bounds import check_stable
from torch.nn import functional

import functional_jd as jd

DOUBLE = torch.float64


def method(losses, optimizer=None, rule=None):
    return {"losses": losses, "aggregator": rule or jd.upgrad(), "optimizer": optimizer or jd.sgd(0.1)}


def test_three_rows_that_pcgrad_conflicts_with_and_upgrad_does_not():
    torch.manual_seed(0)
    least = {"pcgrad": 0.0, "upgrad": 0.0}
    for J in torch.randn(100, 3, 3, dtype=DOUBLE):
        for name, rule in (("pcgrad", jd.pcgrad(jd.random.key(0))), ("upgrad", jd.upgrad())):
            gains = J @ jd.aggregate(rule, J).direction / J.norm(dim=1)
            least[name] = min(least[name], float(gains.min()))
    assert least["pcgrad"] < -0.1
    assert least["upgrad"] > -(2.0**-40)


@pytest.mark.parametrize("name", ["upgrad", "config", "pcgrad", "nash_mtl", "gradnorm", "uw"])
def test_each_batch_has_labels_of_one_task(name):
    rules = {"pcgrad": lambda: jd.pcgrad(jd.random.key(0)), "gradnorm": lambda: jd.gradnorm(1.5, 0.05)}
    torch.manual_seed(0)
    x, y, p = torch.randn(9, 4), torch.randn(9), torch.randn(4, 3)

    def losses(p, x, y, task):
        known = {name: task == k for k, name in enumerate("abc")}
        error = ((x @ p) - y[:, None]).square()
        return {
            n: torch.where(m, error[:, k], 0).sum() / m.sum().clamp(min=1) for k, (n, m) in enumerate(known.items())
        }

    how = method(losses, rule=rules.get(name, getattr(jd, name))())
    state = jd.train_state(p, x, y, torch.arange(9) % 3, **how)
    for k in range(6):
        before = state.params
        state, info = jd.step(state, x, y, torch.full((9,), k % 3), **how)
        assert info.moved
        moved = (state.params != before).any(0)
        assert moved.tolist() == [k % 3 == j for j in range(3)]


def test_reported_losses_are_those_before_weights_in_the_order_of_names():
    losses = lambda p: {"pde": {"y": p[0] ** 2, "x": p[1] ** 2}, "bc": p[2] ** 2}
    how = method(losses, rule=jd.constant([1.0, 10.0, 100.0]))
    _, info = jd.step(jd.train_state(torch.tensor([1.0, 2.0, 3.0]), **how), **how)
    assert jd.objective_names(info.losses) == ["bc", "pde.x", "pde.y"]
    assert info.weights.tolist() == [1, 10, 100]
    assert [info.losses["bc"].item(), info.losses["pde"]["x"].item(), info.losses["pde"]["y"].item()] == [9, 4, 1]
    with pytest.raises(TypeError, match="order of objective_names"):
        jd.constant({"bc": 1.0, "pde": 10.0})


def test_parts_with_different_numbers_of_tokens_add_up_to_the_whole_batch():
    torch.manual_seed(0)
    W, x, y = torch.randn(5, 7, dtype=DOUBLE), torch.randn(6, 9, 5, dtype=DOUBLE), torch.randint(7, (6, 9))
    mask = (torch.rand(6, 9) < torch.tensor([0.9, 0.1, 0.5, 0.2, 0.95, 0.3])[:, None]).double()

    def losses(W, x, y, mask, count):
        scores = x @ W
        entropy = functional.cross_entropy(scores.flatten(0, 1), y.flatten(), reduction="none").view(mask.shape)
        sizes = scores.logsumexp(-1).square()
        return {"entropy": (entropy * mask).sum() / count, "size": (sizes * mask).sum() / count}

    whole, _ = jd.jacobian_fn(losses)(W, x, y, mask, mask.sum())
    parts = zip(x.split(2), y.split(2), mask.split(2), strict=True)
    added = sum(jd.jacobian_fn(losses)(W, *part, mask.sum())[0] for part in parts)
    check_stable(jd.aggregate(jd.upgrad(), added).direction, lambda J: jd.aggregate(jd.upgrad(), J).direction, whole)
