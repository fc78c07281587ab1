"""Gramians and directions from rows of plain autograd: the expectation that the Gramian engine is compared with."""

import pytest
import torch
from bounds import check_same
from jacobian_by_hand import KINDS, leaves, rows_of
from torch import nn
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode
from zoo import BATCH, Case, Cube, Model, numbers

from functional_jd import autocast, gramian_fn, multitask, per_example
from functional_jd.engines.gramian import products
from functional_jd.engines.kinds import kind as from_rows
from functional_jd.objectives import Multitask

F = nn.functional


WEIGHTS = torch.tensor([0.5, -2.0, 0.25, 3.0], dtype=torch.float64)


both_prices = pytest.mark.parametrize("lean", [True, False], ids=["factors", "rows"])


def priced(patch, lean, block=None):
    """At this price of factors, and with rows so many numbers at a time."""
    for name in ("factors_are_cheaper", "position_norms_are_cheaper", "crossed_factors_are_cheaper"):
        patch.setattr(products, name, lambda *_: lean)
    if block is not None:
        patch.setattr(products, "block_size", lambda _: block)


def multiplied_out(part, shape, m):
    """The rows of a part `[m, *p]`, and those of its absolute terms, in float64."""
    if not isinstance(part, products.Factors):
        return part.double(), part.double().abs()
    left = F.one_hot(part.left, shape[0])[:, :, None] if part.left.ndim == 2 else part.left
    sides = [side.double().expand(m, *side.shape[1:]) for side in (left, part.right)]
    rows, terms = (torch.einsum("mpgo,mpgi->mgoi", *pair) for pair in (sides, [side.abs() for side in sides]))
    return rows.reshape(m, *shape), terms.reshape(m, *shape)


def rows_of_parts(parts, shape, m, which=0):
    """The sum of the rows of parts `[m, n]`, or with 1 that of their absolute terms."""
    rows = [multiplied_out(part, shape, m)[which] for part in parts]
    return sum(rows, start=torch.zeros(m, *shape, dtype=torch.float64)).reshape(m, shape.numel())


def weights_for(case):
    return WEIGHTS[:3] if isinstance(case.losses, Multitask) else WEIGHTS


def expectation(case, weights=None):
    """The Gramian, and the direction leaf by leaf: the heads' without weights (they sort before the trunk)."""
    weights = weights_for(case) if weights is None else weights
    n_heads = len(leaves(case.params["heads"])) if isinstance(case.losses, Multitask) else 0
    rows = [r.double().reshape(len(weights), -1) for r in rows_of(case.losses, case.params, *case.args)]
    gramian = sum(r @ r.mT for r in rows[n_heads:])
    return gramian, [r.sum(0) if i < n_heads else weights @ r for i, r in enumerate(rows)]


def found(case, weights=None, **how):
    torch.manual_seed(0)
    gramian, _, pullback = gramian_fn(case.losses, **how)(case.params, *case.args)
    direction, finite = pullback(weights_for(case) if weights is None else weights)
    assert finite.tolist() == all_true(how.get("scale"))
    direction = leaves(direction)
    assert [(x.shape, x.dtype) for x in direction] == [(x.shape, x.dtype) for x in leaves(case.params)]
    assert gramian.dtype == torch.float64
    return gramian, [x.double().reshape(-1) for x in direction]


def all_true(scale):
    """A flag for each scale, or one where none is given."""
    return torch.ones(getattr(scale, "scale", torch.ones(()) if scale is None else scale).shape).bool().tolist()


def agree(result, expected, dtype=torch.float64, roundings=2**8):
    """Entries to the size of the largest: single ones may cancel to nothing."""
    (gramian, direction), (true_gramian, true_direction) = result, expected
    check_same(gramian, true_gramian.to(gramian.dtype), dtype, roundings)
    check_same(torch.cat(direction), torch.cat(true_direction), dtype, roundings)


def single(case):
    """The same in float32."""
    narrow = lambda x: x.float() if x.is_floating_point() else x
    params, args = _pytree.tree_map(narrow, (case.params, case.args))
    return case._replace(params=params, args=args)


def refuse_all_rows(patch):
    patch.setattr(from_rows, "products_and_pullback", lambda *_, **__: pytest.fail("formed all rows"))


def is_tapped(monkeypatch, case):
    """Whether the engine does not fall back to rows of everything."""
    with monkeypatch.context() as patch:
        refuse_all_rows(patch)
        found(case)


def check_autocast(model, kind, dtype, tolerance, monkeypatch):
    """The Gramian under autocast and a scale is that of full precision, at both prices; the case is handed back."""

    low = autocast(model.predict, dtype)
    case = single(KINDS[kind](model._replace(predict=lambda params, x: low(params, x).float())))
    expected = expectation(KINDS[kind](model))
    is_tapped(monkeypatch, case)
    for lean in (True, False):
        priced(monkeypatch, lean)
        result = found(case, scale=torch.tensor(256.0))
        for x, y in ((result[0], expected[0]), (torch.cat(result[1]), torch.cat(expected[1]))):
            assert (x - y).norm() < tolerance * y.norm()
    return case


def _cut(p, x, w):
    first, rest = p[w].split([1, 2])
    return F.pad(F.linear(x, rest, p["b"][1:]), (1, 0)) - x @ first.T * p["b"]


def _attended(p, x, w):
    x, heads = x.transpose(0, 1), {"q_proj_weight": p["u"], "k_proj_weight": p[w], "v_proj_weight": p["v"]}
    fixed = (3, 3, None, p[w].flatten(), None, None, False, 0.0, p["u"], p["b"])
    return F.multi_head_attention_forward(x, x, x, *fixed, use_separate_proj_weight=True, **heads)[0].transpose(0, 1)


STEPS = {
    "linear": lambda p, x, w: F.linear(x, p[w]),
    "biased": lambda p, x, w: F.linear(x, p[w], p["b"]),
    "right": lambda p, x, w: x @ p[w],
    "transposed": lambda p, x, w: torch.matmul(x, p[w].mT),
    "twice_transposed": lambda p, x, w: F.linear(x, p[w].T.t()),
    "left": lambda p, x, w: (p[w] @ x.mT).mT,
    "looked_up": lambda p, x, w: x + F.embedding(torch.tensor([1, 2]), p[w], padding_idx=-1),  # by all examples alike
    "convolved": lambda p, x, w: F.conv1d(x.mT, p[w][:, :, None], p["b"]).mT,
    "normed": lambda p, x, w: F.layer_norm(x, (3,), p[w][0], p["b"], 0.1) + F.rms_norm(x, (3,), p[w][:, 1], 0.1),
    "cut": _cut,
    "attended": _attended,
    "hidden": lambda p, x, w: x * Cube.apply(p[w]).mean(),  # no mode sees the weight in a custom function
}


def network(steps, kind, seed):
    """A small network of these steps, each with one of two weights that all share."""

    def predict(params, x):
        x = F.embedding(x, params["u"])
        for name, weight in steps:
            x = torch.tanh(STEPS[name](params, x, weight)) + x
        return F.linear(x, params["v"]).mean(1)

    params = {"u": numbers(3, 3, seed=seed), "v": numbers(3, 3, seed=seed + 1), "b": numbers(3, seed=seed + 2)}
    tokens = torch.randint(3, (BATCH, 2), generator=torch.Generator().manual_seed(seed))
    return KINDS[kind](Model(params, predict, tokens))


def model_of(predict, params=None, inputs=None):
    weights = {"w": numbers(3, 3), "v": numbers(3, 3, seed=1)} if params is None else params
    return Model(weights, predict, numbers(BATCH, 3, seed=2) if inputs is None else inputs)


def tangent(params, x):
    return torch.func.jvp(lambda x: torch.tanh(F.linear(x, params["w"])), (x,), (torch.ones_like(x),))[1]


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any op makes, views aside."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in _pytree.tree_leaves(result):
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.untyped_storage().nbytes() // x.element_size())
        return result


def wide(kind):
    """Weights 64 x 64, one of them used twice, at 8 examples or 3 tasks: rows would be larger than all else."""
    params = {name: numbers(64, 64, seed=i) / 8 for i, name in enumerate("euv")} | {"b": numbers(64, seed=3)}

    def predict(params, x):
        x = F.embedding(x, params["e"])
        return (torch.tanh(F.linear(torch.tanh(F.linear(x, params["u"], params["b"])), params["u"])) @ params["v"])[
            :, :3
        ]

    examples = torch.arange(8)
    if kind == "by_example":
        return Case(params, per_example(lambda p, x: predict(p, x[None]).square().mean()), (examples,)), 8
    if kind == "tasks":
        heads = multitask(predict, lambda p, z, x: list((z * p).mean(0)))
        return Case({"shared": params, "heads": numbers(3)}, heads, (examples,)), 3
    return Case(params, lambda p, x: predict(p, x).mean(0), (examples,)), 3


def penalty(params, x):
    """A derivative within the losses, differentiated again."""
    inner = x.detach().requires_grad_()
    y = torch.tanh(F.linear(inner, params["w"]))
    (slope,) = torch.autograd.grad(y.sum(), inner, create_graph=True)
    return y + slope


def functional_penalty(params, x):
    return torch.func.grad(lambda x: torch.tanh(F.linear(x, params["w"])).sum())(x)


def mapped(params, x):
    return torch.vmap(lambda row: torch.tanh(F.linear(row, params["w"])))(x)


def half_frozen(params, x):
    with torch.no_grad():
        x = torch.tanh(F.linear(x, params["w"]))
    return F.linear(x, params["w"]) @ params["v"].detach()


def overwritten(params, x):
    y = F.linear(x, params["w"])
    y.mul_(2)
    y[:, 0] = 1
    return F.linear(torch.tanh(y), params["v"])


def both_sides(params, x):
    return F.linear(params["w"], params["w"])[0] * x + F.linear(x, params["v"][0])[:, None]


STRANGE = {f.__name__: f for f in (penalty, functional_penalty, tangent, mapped, half_frozen, overwritten, both_sides)}
