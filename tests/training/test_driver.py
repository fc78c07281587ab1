"""The way from an observation to a direction: which losses are finite, and what a pullback receives with a scale."""

import pytest
import torch

import functional_jd as fj
from functional_jd.training.driver import _finite_values

INF, NAN = torch.inf, torch.nan


def test_losses_are_finite_one_by_one_in_every_structure():
    values = [1.0, INF, -INF, NAN, -3e38, 0.0]
    as_dict = {f"{index}": torch.tensor(x) for index, x in enumerate(values)}
    parted = [torch.tensor(values[:2]), torch.tensor(values[2]), torch.tensor([values[3:]])]
    for losses in (torch.tensor(values), as_dict, parted):
        assert _finite_values(losses, torch.ones(6)).tolist() == [True, False, False, False, True, True]
        assert _finite_values(losses, torch.ones(())).item() is False
    # Of two replicas, one scale for the losses of both: all of them must be finite.
    assert _finite_values(torch.tensor(values), torch.ones(3)).tolist() == [False, False, False]
    assert _finite_values(torch.tensor([1.0, INF, 2.0, 3.0]), torch.ones(2)).tolist() == [True, False]
    assert _finite_values(torch.tensor([1.0, 4.0, 2.0, 3.0]), torch.ones(())).item() is True


J = torch.tensor([[3.0, 4.0], [1.0, -10.0]])  # in conflict, so that weights tell the size of the rows
ENGINES = ["jacobian", "gramian"]


def losses(params, x):
    return J @ params["w"] * x


def test_a_rule_starts_from_rows_without_their_scale():
    """`db_mtl` and `gradnorm` keep what they see first."""
    how = {"losses": lambda p, x: losses(p, x) + 1, "aggregator": fj.gradnorm(), "optimizer": fj.sgd(1.0)}
    scaled = fj.scale_state(shape=(2,))._replace(scale=torch.tensor([2.0**20, 2.0**-3]))
    begun = [fj.train_state({"w": torch.zeros(2)}, torch.ones(2), scale=s, **how) for s in (None, scaled)]
    torch.testing.assert_close(begun[0].aggregator, begun[1].aggregator)
    how["aggregator"] = fj.held(fj.upgrad())[0]
    for engine in ENGINES:
        begun = fj.train_state({"w": torch.zeros(2)}, torch.ones(2), scale=scaled, engine=engine, **how)
        torch.testing.assert_close(begun.aggregator.weights, fj.aggregate(fj.upgrad(), J).weights)


@pytest.mark.parametrize("engine", [*ENGINES, "weighted"])
@pytest.mark.parametrize("make", [lambda x: x, lambda x: {"x": x}], ids=["tensor", "dict"])
@pytest.mark.parametrize("later", [False, True])
@pytest.mark.filterwarnings("ignore::functional_jd.SlowPathWarning")
def test_a_batch_that_losses_differentiate_by_is_a_constant_afterwards(engine, make, later):
    """Forces are derivatives by places in the batch. Else every state would keep the graphs of all steps before it."""

    def losses(params, batch):
        x = batch if isinstance(batch, torch.Tensor) else batch["x"]
        if later:
            x.requires_grad = True
        energy = ((x if later else x.requires_grad_()) @ params["w"]).tanh().sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return {"energy": energy.square(), "force": (force - 1).square().mean()}

    rule = fj.mean() if engine == "weighted" else fj.upgrad()
    how = {"losses": losses, "aggregator": rule, "optimizer": fj.adamw(0.1), "engine": engine}
    x = torch.tensor([[1.0, 2.0], [0.5, -1.0]])
    state = fj.train_state({"w": torch.ones(2, 2)}, make(x), **how)
    assert not x.requires_grad
    for _ in range(2):
        state, info = fj.step(state, make(x), **how)
        assert not any(y.requires_grad for y in (x, state.params["w"], info.weights))


def test_a_batch_that_requires_grad_still_does():
    x = torch.tensor(1.0, requires_grad=True)
    how = {"losses": losses, "aggregator": fj.mean(), "optimizer": fj.sgd(0.1)}
    state, _ = fj.step(fj.train_state({"w": torch.ones(2)}, x, **how), x, **how)
    assert x.requires_grad
    assert state.params["w"].requires_grad
