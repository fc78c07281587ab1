"""A family beside an ordinary loop of `torch.autograd.grad` in float64.

Bounds are measured: how far the ordinary loop ends from itself when its parameters are moved by some roundings.
"""

from collections.abc import Callable, Iterable
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from families import KEY, Family
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import functional_jd as fj

# What is added up in another order: some hundred roundings where all is float64, fewer where some parts are float32.
_ROUNDINGS = {
    torch.float64: 2.0**10 * torch.finfo(torch.float64).eps,
    torch.float32: 2.0**4 * torch.finfo(torch.float32).eps,
}
WEIGHTS = torch.tensor([0.3, 2.0, 1.1], dtype=torch.float64)
RATE, STEPS = 0.1, 3


class RefusedError(Exception):
    """torch does not do this for the model, with or without us."""


class Found(NamedTuple):
    """What was compared.

    Attributes:
        name: the name of the number.
        error: how far it is from the ordinary loop's.
        bound: how far it may be.
    """

    name: str
    error: float
    bound: float


class Reference:
    """A family at a point: the rows of an ordinary loop, and how well they are determined."""

    def __init__(self, family: Family):
        self.family, self.x = family, family.inputs
        self.rounding = _ROUNDINGS[family.inside]
        module = family.module()
        self.params = {name: p.detach() for name, p in trained(module)}
        self.buffers = dict(module.named_buffers())
        self.losses = pure(family.losses, module)

    @cached_property
    def moved(self) -> list[tuple[Tensor, Tensor, Any]]:
        return [self.plain(seed) for seed in (None, 1, 2)]

    def moved_module(self, seed: int | None) -> Any:
        return moved(self.family.module(), seed, self.rounding)

    def spread(self, points: list[Tensor]) -> Tensor:
        """How far the first may be from the truth: how far the others are from it, and its own roundings."""
        own = self.rounding * points[0].norm(dim=-1)
        return torch.stack([own, *[(x - points[0]).norm(dim=-1) for x in points[1:]]]).max(0).values

    def plain(self, seed: int | None) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Rows `[m, n]`, losses `[m]` and buffers of an ordinary loop, from parameters that are moved."""
        module = self.moved_module(seed)
        rows, values = self.evaluated(module)
        return rows, values, {name: b.clone() for name, b in module.named_buffers()}

    def evaluated(self, module: nn.Module) -> tuple[Tensor, Tensor]:
        """Rows and losses of a module, each by a backward pass of its own."""
        values = self.family.losses(module, KEY, self.x)
        rows = matrix([gradients(values[name], module) for name in sorted(values)])
        return rows, torch.stack([values[name].detach().double() for name in sorted(values)])

    @property
    def rows(self) -> Tensor:
        return self.moved[0][0]

    @cached_property
    def row_bounds(self) -> Tensor:
        return self.spread([rows for rows, _, _ in self.moved])

    def check_rows(self, mode: str) -> list[Found]:
        found, (values, buffers) = fj.jacobian_fn(self.losses, has_aux=True, mode=mode)(*self.given)
        return [*rows_apart(mode, flat(found), self.rows, self.row_bounds), *self.others(mode, values, buffers)]

    @property
    def given(self) -> tuple[Any, ...]:
        return self.params, self.buffers, KEY, self.x

    def others(self, name: str, values: Any, buffers: Any) -> list[Found]:
        return [
            self.apart(f"{name} losses", by_name(values), [x for _, x, _ in self.moved]),
            self.apart(f"{name} buffers", by_name(buffers), [by_name(x) for _, _, x in self.moved]),
        ]

    def apart(self, name: str, mine: Tensor, points: list[Tensor]) -> Found:
        """A vector beside the first of those from parameters that are moved."""
        return Found(name, float((mine - points[0]).norm()), float(self.spread(points)))

    def check_gramian(self, differentiable: bool = False) -> list[Found]:
        gramian, aux, pullback = fj.gramian_fn(self.losses, has_aux=True)(*self.points(differentiable))
        return self.products("", gramian, aux, pullback(WEIGHTS)[0])

    def products(self, name: str, gramian: Tensor, aux: Any, direction: Any) -> list[Found]:
        return [
            gramian_apart(f"{name}gramian", gramian, self.rows, self.row_bounds),
            sum_apart(f"{name}pullback", direction, self.rows, self.row_bounds),
            *self.others(f"{name}gramian", *aux),
        ]

    def points(self, differentiable: bool) -> tuple[Any, ...]:
        """What the losses take; with parameters that require grad, what comes out can be differentiated again."""
        params, *rest = self.given
        return {name: p.clone().requires_grad_(differentiable) for name, p in params.items()}, *rest

    def check_compiled_gramian(self) -> list[Found]:
        def run(*args: Any) -> Any:
            gramian, aux, pullback = fj.gramian_fn(self.losses, has_aux=True)(*args)
            return gramian, aux, pullback(WEIGHTS)[0]

        torch._dynamo.reset()
        take = torch.compile(run, backend="aot_eager", fullgraph=True)
        found = take(*self.given)
        with torch._dynamo.config.patch(error_on_recompile=True):
            take(*self.given[:2], fj.random.split(KEY, 2)[1], self.x.flip(0))
        return self.products("compiled ", *found)

    def check_weighted(self) -> list[Found]:
        (values, buffers), pullback = fj.weighted_fn(self.losses, has_aux=True)(*self.given)
        direction, finite = pullback(WEIGHTS)
        assert bool(finite.all())
        apart = sum_apart("weighted", direction, self.rows, self.row_bounds)
        return [apart, *self.others("weighted", values, buffers)]

    @cached_property
    def by_example(self) -> tuple[Any, Tensor, Tensor]:
        """One loss for each example, as the model is evaluated, with the rows of an ordinary loop and their bounds."""
        apply = functional(self.family.module().eval())

        def loss(params: Any, x: Tensor) -> Tensor:
            return self.family.loss(lambda *args, **kwargs: apply(params, self.buffers, *args, **kwargs)[0], x)

        plain = []
        for seed in (None, 1, 2):
            module = self.moved_module(seed).eval()
            plain.append(matrix([gradients(self.family.loss(module, x), module) for x in self.x]))
        return fj.per_example(loss), plain[0], self.spread(plain)

    def check_example_rows(self, mode: str) -> list[Found]:
        losses, rows, bounds = self.by_example
        jacobian, _ = fj.jacobian_fn(losses, mode=mode)(self.params, self.x)
        return rows_apart(f"examples {mode}", flat(jacobian), rows, bounds)

    def check_example_sums(self, differentiable: bool = False) -> list[Found]:
        losses, rows, bounds = self.by_example
        gramian, _, pullback = fj.gramian_fn(losses)(self.points(differentiable)[0], self.x)
        _, weigh = fj.weighted_fn(losses)(self.params, self.x)
        return [
            gramian_apart("examples gramian", gramian, rows, bounds),
            sum_apart("examples pullback", pullback(WEIGHTS)[0], rows, bounds),
            sum_apart("examples weighted", weigh(WEIGHTS)[0], rows, bounds),
        ]

    def way(self, rule: fj.Aggregator, seed: int | None) -> tuple[Tensor, Tensor, Tensor]:
        """How far `STEPS` steps of an ordinary loop come, in one vector; their last losses, and the buffers then."""
        module = self.moved_module(seed)
        params = [p for _, p in trained(module)]
        before = joined(params)
        optimizer = torch.optim.SGD(params, lr=RATE, momentum=0.9)
        for _ in range(STEPS):
            kept = [p.detach().clone() for p in params]
            rows, values = self.evaluated(module)
            pieces = fj.aggregate(rule, rows).direction.split([real(p).numel() for p in params])
            for p, own, piece in zip(params, kept, pieces, strict=True):
                p.data.copy_(own)  # a model that shortens its parameters in place does not so in ours
                p.grad = piece.view_as(p)
            optimizer.step()
        return joined(params) - before, values, by_name(dict(module.named_buffers()))

    def check_steps(self, compiled: bool = False) -> list[Found]:
        """Some steps beside the ordinary loop: by UPGrad; compiled, where UPGrad takes long, by the mean."""
        rule, engine = (fj.mean(), "jacobian") if compiled else (fj.upgrad(), "auto")
        method = {"losses": self.losses, "aggregator": rule, "optimizer": fj.sgd(RATE, momentum=0.9)}
        state = fj.train_state(self.params, KEY, self.x, buffers=self.buffers, engine=engine, **method)
        take = partial(fj.step, engine=engine, **method)
        if compiled:
            torch._dynamo.reset()
            take = torch.compile(take, backend="aot_eager", fullgraph=True)
        for _ in range(STEPS):
            state, info = take(state, KEY, self.x)
            assert bool(info.moved)
        if compiled:  # another batch, and what the steps returned, are the same program
            with torch._dynamo.config.patch(error_on_recompile=True):
                take(state, fj.random.split(KEY, 2)[1], self.x.flip(0))
        ways, values, buffers = zip(*(self.way(rule, seed) for seed in (None, 1, 2)), strict=True)
        start = by_name(self.params)
        went = by_name(state.params) - start
        # The difference of parameters before and after is off by roundings of these.
        bound = float(self.spread(ways)) + STEPS * torch.finfo(torch.float64).eps * float(start.norm())
        name = "compiled steps" if compiled else "steps"
        return [
            Found(name, float((went - ways[0]).norm()), bound),
            self.apart(f"{name} losses", by_name(info.losses), values),
            self.apart(f"{name} buffers", by_name(state.buffers), buffers),
        ]

    def check_multitask(self) -> list[Found]:
        """Two heads on what the model gives: the trunk by UPGrad, each head by its own loss."""
        module = self.family.module()
        size = self.family.output(module, KEY, self.x).shape[1:].numel()
        draw = torch.Generator().manual_seed(3)
        own = {name: torch.randn(size, 2, generator=draw, dtype=torch.float64) / size**0.5 for name in "ab"}
        features = pure(self.family.output, module)

        def heads(own: Any, h: Tensor, buffers: Any, key: Tensor, x: Tensor) -> Any:
            return {name: (h.flatten(1).to(own[name].dtype) @ own[name]).square().mean() for name in own}, buffers

        ends = []
        for seed in (None, 1, 2):
            module, given = self.moved_module(seed), {n: p.clone().requires_grad_() for n, p in own.items()}
            values, _ = heads(given, self.family.output(module, KEY, self.x), (), KEY, self.x)
            rows = matrix([gradients(values[name], module) for name in "ab"])
            head = [torch.autograd.grad(values[name], given[name], retain_graph=True)[0].flatten() for name in "ab"]
            ends.append(torch.cat([fj.aggregate(fj.upgrad(), rows).direction, *head]))
        method = {"losses": fj.multitask(features, heads), "aggregator": fj.upgrad(), "optimizer": fj.sgd(1.0)}
        found = []
        for engine in ("jacobian", "gramian"):
            params = {"shared": self.params, "heads": own}
            state = fj.train_state(params, KEY, self.x, buffers=self.buffers, **method)
            state, _ = fj.step(state, KEY, self.x, engine=engine, **method)
            went = [self.params[name] - state.params["shared"][name] for name in sorted(self.params)]
            went += [own[name] - state.params["heads"][name] for name in "ab"]
            mine = torch.cat([x.double().flatten() for x in went])
            # The difference of parameters before and after is off by a rounding of these.
            size = torch.cat([x.double().flatten() for x in tree_leaves((self.params, own))]).norm()
            bound = float(self.spread(ends)) + torch.finfo(torch.float64).eps * float(size)
            found.append(Found(f"multitask {engine}", float((mine - ends[0]).norm()), bound))
        return found

    def check_autocast(self, dtype: torch.dtype = torch.bfloat16) -> list[Found]:
        """Rows in half precision are no further from those in float64 than native autocast's are."""
        module = self.family.module().float()
        x = self.x.float() if self.x.is_floating_point() else self.x
        try:
            with torch.autocast("cpu", dtype):
                values = self.family.losses(module, KEY, x)
            native = matrix([gradients(values[name].float(), module) for name in sorted(values)])
        except RuntimeError as error:
            raise RefusedError(f"native autocast: {error}") from error
        bounds = 4 * (native - self.rows).norm(dim=1) + torch.finfo(dtype).eps * self.rows.norm(dim=1)
        params = {name: p.detach() for name, p in trained(module)}
        buffers = dict(self.family.module().float().named_buffers())
        losses, found = fj.autocast(pure(self.family.losses, module), dtype), []
        scale = torch.tensor(256.0)
        for mode in ("loop", "vmap"):
            rows, _, _ = fj.jacobian_fn(losses, has_aux=True, mode=mode, scale=scale)(params, buffers, KEY, x)
            found += rows_apart(f"bfloat16 {mode}", flat(rows), self.rows, bounds)
        gramian, _, pullback = fj.gramian_fn(losses, has_aux=True)(params, buffers, KEY, x)
        return [
            *found,
            gramian_apart("bfloat16 gramian", gramian, self.rows, bounds),
            sum_apart("bfloat16 pullback", pullback(WEIGHTS)[0], self.rows, bounds),
        ]


def moved(module: Any, seed: int | None, by: float) -> Any:
    """The module, with its parameters moved by some roundings."""
    if seed is None:
        return module
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            signs = 2 * torch.randint(2, p.shape, generator=draw) - 1
            p *= 1 + by * signs.double()
    return module


def trained(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The parameters that are trained, in the order of their names."""
    return sorted((name, p) for name, p in module.named_parameters() if p.requires_grad)


def functional(module: nn.Module) -> Callable[..., Any]:
    """As `fj.functional`, for the parameters that are trained."""
    apply, frozen = fj.functional(module), {n: p.detach() for n, p in module.named_parameters() if not p.requires_grad}
    return lambda params, *args, **kwargs: apply(frozen | params, *args, **kwargs)


def pure(f: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
    """Of `f(call, key, x)`, which calls the module: `(params, buffers, key, x) -> (what f returns, buffers)`."""
    apply = functional(module)

    def with_buffers(params: Any, buffers: Any, key: Tensor, x: Tensor) -> Any:
        after: dict[str, Tensor] = {}

        def call(*args: Any, **kwargs: Any) -> Any:
            output, new = apply(params, buffers, *args, **kwargs)
            after.update(new)
            return output

        return f(call, key, x), after

    return with_buffers


def gradients(value: Tensor, module: nn.Module) -> list[Tensor]:
    params = [p for _, p in trained(module)]
    found = torch.autograd.grad(value, params, retain_graph=True, materialize_grads=True)
    return [x.to_dense() if x.is_sparse else x for x in found]


def joined(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([real(x.detach()).flatten() for x in tensors] or [torch.zeros(1)])


def by_name(tree: dict[str, Tensor]) -> Tensor:
    return joined(tree[name] for name in sorted(tree))


def real(x: Tensor) -> Tensor:
    return torch.view_as_real(x).double() if x.is_complex() else x.double()


def matrix(rows: list[list[Tensor]]) -> Tensor:
    """One row of numbers for each list of gradients."""
    return torch.stack([torch.cat([real(x).flatten() for x in row]) for row in rows])


def flat(tree: dict[str, Tensor]) -> Tensor:
    """Rows `[m, n]` of a dict of rows, by name."""
    return torch.cat([real(tree[name]).reshape(len(tree[name]), -1) for name in sorted(tree)], 1)


def rows_apart(name: str, found: Tensor, rows: Tensor, bounds: Tensor) -> list[Found]:
    errors = (found - rows).norm(dim=1)
    return [Found(f"{name} row {k}", float(errors[k]), float(bounds[k])) for k in range(len(rows))]


def gramian_apart(name: str, found: Tensor, rows: Tensor, bounds: Tensor) -> Found:
    """The entry that is furthest off, in units of its bound `|a| db + |b| da + da db`."""
    norms = rows.norm(dim=1)
    allowed = norms[:, None] * bounds + bounds[:, None] * norms + bounds[:, None] * bounds
    errors = (found - rows @ rows.T).abs()
    worst = int((errors / allowed).nan_to_num(nan=torch.inf, posinf=torch.inf).where(allowed > 0, errors).argmax())
    return Found(name, float(errors.flatten()[worst]), float(allowed.flatten()[worst]))


def sum_apart(name: str, direction: Any, rows: Tensor, bounds: Tensor) -> Found:
    mine = flat({n: d[None] for n, d in direction.items()})[0]
    return Found(name, float((mine - WEIGHTS @ rows).norm()), float(WEIGHTS @ bounds))
