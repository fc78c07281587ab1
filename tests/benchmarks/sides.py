"""The sides of a diagnosis: each computes one aggregated direction of a model; plain training, less than that."""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
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


RULE = jd.stateless(jd.views.gramian, lean)
PEER_RULE = GramianWeightedAggregator(Lean())
# A step whose "parameters" are the direction: what `engine="auto"` takes, and the step around it, but no optimizer.
_MAX_NORM = 0.1
_NO_OPTIMIZER = jd.Optimizer(lambda params: (), lambda direction, state, params: (direction, state))


def by_jacobian(losses: Any, params: Any, *batch: Tensor) -> Any:
    """The direction from the rows."""
    jacobian, _ = jd.jacobian_fn(losses)(params, *batch)
    return jd.aggregate(RULE, jacobian).direction


def by_gramian(losses: Any, params: Any, *batch: Tensor) -> Any:
    """The direction from the rows' inner products."""
    gramian, _, pullback = jd.gramian_fn(losses)(params, *batch)
    weights, _ = RULE.update(gramian, RULE.init(gramian))
    return pullback(weights)[0]


def of_tasks(make: Callable[[], Tasks]) -> dict[str, Side]:
    """Everybody, for several tasks on a trunk."""
    model = make()
    in_grad = lambda _: flat(model.tree(gradients))
    sides = {
        "fb": Side(partial(plain, model.modules, lambda: sum(model.forward()[0]))),
        "JD": Side(partial(_peer_of_tasks, model), in_grad),
    }
    return sides | ours(model)


def of_examples(make: Callable[[], Examples], rows: bool = True) -> dict[str, Side]:
    """Everybody, for one objective per example; `rows`: the peer's engine that holds all of them, too."""
    in_grad = lambda model: lambda _: flat(model.tree(gradients))
    model, hooked = make(), make()  # hooks stay, and the others must not pay for them
    engine = Engine(hooked.model, batch_dim=0)
    sides = {
        "fb": Side(partial(plain, model.modules, model.mean)),
        "Engine": Side(partial(_peer_by_gramian, hooked, engine), in_grad(hooked)),
    }
    if rows:
        sides["JD"] = Side(partial(_peer_by_rows, model), in_grad(model))
    return sides | ours(model)


def ours(model: Tasks | Examples) -> dict[str, Side]:
    """The engines called by hand, and the step that chooses one."""
    losses, params, batch = model.losses(), model.tree(values), model.batch
    how: dict[str, Any] = {"losses": losses, "aggregator": RULE, "optimizer": _NO_OPTIMIZER}
    start = jd.train_state(params, *batch, **how)
    return {
        "jacobian": Side(lambda: by_jacobian(losses, params, *batch), flat),
        "gramian": Side(lambda: by_gramian(losses, params, *batch), flat),
        "auto": Side(lambda: jd.step(start, *batch, **how)[0].params, flat),
    }


def of_private(make: Callable[[], Examples]) -> dict[str, Side]:
    """The sum of gradients that are clipped one by one, and their norms: ours beside Opacus and `vmap(grad)`."""
    peer: dict[str, Side] = {}
    if find_spec("opacus"):
        from ghost import ghost_clipped

        peer = {"Opacus": ghost_clipped(make(), _MAX_NORM)}
    model = make()
    losses, params, batch = model.losses(), model.tree(values), model.batch
    how: dict[str, Any] = {"losses": losses, "aggregator": jd.clipped(_MAX_NORM), "optimizer": _NO_OPTIMIZER}
    start = jd.train_state(params, *batch, **how)
    return peer | {
        "fb": Side(partial(plain, model.modules, model.mean)),
        "vmap(grad)": Side(lambda: _clipped_rows(losses.loss, params, *batch), flat),
        "norms": Side(lambda: jd.squared_norms_fn(losses)(params, *batch)),
        "ours": Side(lambda: jd.step(start, *batch, **how)[0].params, flat),
    }


def _clipped_rows(loss: Callable[..., Tensor], params: dict[str, Tensor], *batch: Tensor) -> dict[str, Tensor]:
    rows = torch.vmap(torch.func.grad(loss), in_dims=(None, *[0] * len(batch)))(params, *batch)
    norms = torch.stack([row.flatten(1).norm(dim=1) for row in rows.values()]).norm(dim=0)
    weights = (_MAX_NORM / norms).clamp(max=1)
    return {name: torch.tensordot(weights, row, 1) for name, row in rows.items()}


def plain(modules: Any, loss: Callable[[], Any]) -> None:
    """One ordinary forward and backward pass."""
    for module in modules:
        module.zero_grad()
    loss().backward()


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
