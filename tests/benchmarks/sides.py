"""The contestants: each computes one aggregated direction of a model; plain training and the limit, less than that."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from models import Examples, Tasks, flat, gradients, values
from races import Side
from torch import Tensor
from torchjd.aggregation import GramianWeightedAggregator, Weighting
from torchjd.autogram import Engine
from torchjd.autojac import backward, jac_to_grad, mtl_backward

import functional_jd as jd


def lean(G: Tensor) -> Tensor:
    """Weights that cost nothing and look at the whole Gramian: less for those with whom the others agree."""
    return torch.softmax(-G.sum(1) / G.trace(), dim=0)


class Lean(Weighting[Tensor]):
    """The same for the peer."""

    def forward(self, stat: Tensor, /) -> Tensor:
        """Weigh."""
        return lean(stat)


RULE = jd.stateless(jd.gramian, lean)
PEER_RULE = GramianWeightedAggregator(Lean())
# A step whose "parameters" are the direction: what `engine="auto"` takes, and the step around it, but no optimizer.
_NO_OPTIMIZER = jd.Optimizer(lambda params: (), lambda direction, state, params: (direction, state))


def by_jacobian(losses: Any, params: Any, *batch: Tensor) -> Any:
    """The direction from the rows."""
    jacobian, _ = jd.jacobian_fn(losses)(params, *batch)
    return jd.aggregate(RULE, jacobian).direction


def by_gramian(losses: Any, params: Any, *batch: Tensor) -> Any:
    """The direction from the rows' inner products."""
    gramian, _, pullback = jd.gramian_fn(losses)(params, *batch)
    weights, _ = RULE.update(gramian, RULE.init(gramian))
    return pullback(weights)


def of_tasks(model: Tasks) -> dict[str, Side]:
    """Everybody, for several tasks on a trunk."""
    modules = (model.trunk, model.heads)
    in_grad = lambda _: flat(dict(zip(("shared", "heads"), gradients(modules), strict=True)))
    sides = {
        "fb": Side(partial(plain, modules, lambda: sum(model.forward()[0]))),
        "limit": Side(partial(_limit, model)),
        "JD": Side(partial(_peer_of_tasks, model), in_grad),
    }
    return sides | ours(model.losses(), model.params, model.x, model.y)


def of_examples(model: Examples, rows: bool = True) -> dict[str, Side]:
    """Everybody, for one objective per example; `rows`: the peer's engine that holds all of them, too."""
    in_grad = lambda module: lambda _: flat(*gradients([module]))
    hooked = model._replace(model=deepcopy(model.model))  # hooks stay, and the others must not pay for them
    engine = Engine(hooked.model, batch_dim=0)
    sides = {
        "fb": Side(partial(plain, [model.model], lambda: model.forward().mean())),
        "Engine": Side(partial(_peer_by_gramian, hooked, engine), in_grad(hooked.model)),
    }
    if rows:
        sides["JD"] = Side(partial(_peer_by_rows, model), in_grad(model.model))
    return sides | ours(model.losses(), values(model.model), model.x, model.y)


def ours(losses: Any, params: Any, *batch: Tensor) -> dict[str, Side]:
    """The engines called by hand, and the step that chooses one."""
    how: dict[str, Any] = {"losses": losses, "aggregator": RULE, "optimizer": _NO_OPTIMIZER}
    start = jd.train_state(params, *batch, **how)
    return {
        "jacobian": Side(lambda: by_jacobian(losses, params, *batch), flat),
        "gramian": Side(lambda: by_gramian(losses, params, *batch), flat),
        "auto": Side(lambda: jd.step(start, *batch, **how)[0].params, flat),
    }


def plain(modules: Any, loss: Callable[[], Any]) -> None:
    """One ordinary forward and backward pass."""
    for module in modules:
        module.zero_grad()
    loss().backward()


def _limit(model: Tasks) -> None:
    """What nobody who forms rows can beat: one forward pass, and one backward pass of the trunk per task."""
    losses, h = model.forward()
    weights = list(model.trunk.parameters())
    for gradient in [torch.autograd.grad(loss, h, retain_graph=True)[0] for loss in losses]:
        torch.autograd.grad(h, weights, gradient, retain_graph=True)


def _peer_of_tasks(model: Tasks) -> None:
    model.trunk.zero_grad()
    model.heads.zero_grad()
    losses, h = model.forward()
    mtl_backward(losses, features=h)
    jac_to_grad(model.trunk.parameters(), PEER_RULE)


def _peer_by_rows(model: Examples) -> None:
    model.model.zero_grad()
    backward(model.forward())
    jac_to_grad(model.model.parameters(), PEER_RULE)


def _peer_by_gramian(model: Examples, engine: Engine) -> None:
    model.model.zero_grad()
    losses = model.forward()
    weights = lean(engine.compute_gramian(losses))
    losses.backward(weights)
