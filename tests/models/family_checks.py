"""A family beside an ordinary loop of `torch.autograd.grad` in float64.

Bounds are measured: how far the ordinary loop ends from itself when its parameters are moved by some roundings.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from bounds import check_within
from families import KEY, Family
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import functional_jd as fj

# What is added up in another order: some hundred roundings where all is float64, fewer where some parts are float32.
_ROUNDINGS = {dtype: n * torch.finfo(dtype).eps for dtype, n in ((torch.float64, 2.0**10), (torch.float32, 2.0**4))}
WEIGHTS = torch.tensor([0.3, 2.0, 1.1], dtype=torch.float64)
RATE, STEPS = 0.1, 3


class RefusedError(Exception):
    """torch does not do this for the model, with or without us."""


class Rows(NamedTuple):
    """Rows `[m, n]` of an ordinary loop, and how far each may be off, `[m]`."""

    rows: Tensor
    bounds: Tensor

    def check_rows(self, found: dict[str, Tensor]) -> None:
        check_distance(flat(found), self.rows, self.bounds)

    def check_gramian(self, found: Tensor) -> None:
        """Entries are off by `|a| db + |b| da + da db` at most."""
        rows, bounds, norms = *self, self.rows.norm(dim=1)
        check_within(found, rows @ rows.T, norms[:, None] * bounds + bounds[:, None] * (norms + bounds))

    def check_sum(self, direction: dict[str, Tensor]) -> None:
        check_distance(by_name(direction), WEIGHTS @ self.rows, WEIGHTS @ self.bounds)


class Reference:
    """A family at a point: the rows of an ordinary loop, and how well they are determined."""

    def __init__(self, family: Family):
        self.family, self.x = family, family.inputs
        self.rounding = _ROUNDINGS[family.inside]
        module = family.module()
        self.params = {name: p.detach() for name, p in trained(module)}
        self.buffers = dict(module.named_buffers())
        self.losses = pure(family.losses, module)

    @property
    def given(self) -> tuple[Any, ...]:
        return self.params, self.buffers, KEY, self.x

    @cached_property
    def moved(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Rows, losses and buffers of an ordinary loop, from parameters that are moved by roundings, or not."""
        modules = [self.moved_module(seed) for seed in (None, 1, 2)]
        return [(*self.evaluated(module), by_name(dict(module.named_buffers()))) for module in modules]

    def moved_module(self, seed: int | None) -> Any:
        return moved(self.family.module(), seed, self.rounding)

    def spread(self, points: Sequence[Tensor]) -> Tensor:
        """How far the first may be from the truth: how far the others are from it, and its own roundings."""
        own = self.rounding * points[0].norm(dim=-1)
        return torch.stack([own, *[(x - points[0]).norm(dim=-1) for x in points[1:]]]).max(0).values

    def evaluated(self, module: nn.Module) -> tuple[Tensor, Tensor]:
        """Rows and losses of a module, each by a backward pass of its own."""
        values = self.family.losses(module, KEY, self.x)
        rows = matrix([gradients(values[name], module) for name in sorted(values)])
        return rows, torch.stack([values[name].detach().double() for name in sorted(values)])

    @cached_property
    def rows(self) -> Rows:
        rows = [rows for rows, _, _ in self.moved]
        return Rows(rows[0], self.spread(rows))

    def check_rows(self, mode: str) -> None:
        found, aux = fj.jacobian_fn(self.losses, has_aux=True, mode=mode)(*self.given)
        self.rows.check_rows(found)
        self.check_others(*aux)

    def check_others(self, values: Any, buffers: Any) -> None:
        self.check_near(by_name(values), [x for _, x, _ in self.moved])
        self.check_near(by_name(buffers), [x for _, _, x in self.moved])

    def check_near(self, mine: Tensor, points: Sequence[Tensor]) -> None:
        """A vector beside the first of those from parameters that are moved."""
        check_distance(mine, points[0], self.spread(points))

    def check_gramian(self, differentiable: bool = False) -> None:
        gramian, aux, pullback = fj.gramian_fn(self.losses, has_aux=True)(*self.points(differentiable))
        self.check_products(gramian, aux, pullback(WEIGHTS)[0])

    def check_products(self, gramian: Tensor, aux: Any, direction: Any) -> None:
        self.rows.check_gramian(gramian)
        self.rows.check_sum(direction)
        self.check_others(*aux)

    def points(self, differentiable: bool) -> tuple[Any, ...]:
        """What the losses take; with parameters that require grad, what comes out can be differentiated again."""
        params, *rest = self.given
        return {name: p.clone().requires_grad_(differentiable) for name, p in params.items()}, *rest

    def check_compiled_gramian(self) -> None:
        def run(*args: Any) -> Any:
            gramian, aux, pullback = fj.gramian_fn(self.losses, has_aux=True)(*args)
            return gramian, aux, pullback(WEIGHTS)[0]

        torch._dynamo.reset()
        take = torch.compile(run, backend="aot_eager", fullgraph=True)
        found = take(*self.given)
        with torch._dynamo.config.patch(error_on_recompile=True):
            take(*self.given[:2], fj.random.split(KEY, 2)[1], self.x.flip(0))
        self.check_products(*found)

    def check_weighted(self) -> None:
        aux, pullback = fj.weighted_fn(self.losses, has_aux=True)(*self.given)
        direction, finite = pullback(WEIGHTS)
        assert bool(finite.all())
        self.rows.check_sum(direction)
        self.check_others(*aux)

    @cached_property
    def by_example(self) -> tuple[Any, Rows]:
        """One loss for each example, as the model is evaluated, with the rows of an ordinary loop."""
        apply = functional(self.family.module().eval())

        def loss(params: Any, x: Tensor) -> Tensor:
            return self.family.loss(lambda *args, **kwargs: apply(params, self.buffers, *args, **kwargs)[0], x)

        plain = []
        for seed in (None, 1, 2):
            module = self.moved_module(seed).eval()
            plain.append(matrix([gradients(self.family.loss(module, x), module) for x in self.x]))
        return fj.per_example(loss), Rows(plain[0], self.spread(plain))

    def check_example_rows(self, mode: str) -> None:
        losses, rows = self.by_example
        rows.check_rows(fj.jacobian_fn(losses, mode=mode)(self.params, self.x)[0])

    def check_example_sums(self, differentiable: bool = False) -> None:
        losses, rows = self.by_example
        gramian, _, pullback = fj.gramian_fn(losses)(self.points(differentiable)[0], self.x)
        _, weigh = fj.weighted_fn(losses)(self.params, self.x)
        rows.check_gramian(gramian)
        rows.check_sum(pullback(WEIGHTS)[0])
        rows.check_sum(weigh(WEIGHTS)[0])

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

    def check_steps(self, compiled: bool = False) -> None:
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
        bound = self.spread(ways) + STEPS * torch.finfo(torch.float64).eps * start.norm()
        check_distance(went, ways[0], bound)
        self.check_near(by_name(info.losses), values)
        self.check_near(by_name(state.buffers), buffers)

    def check_multitask(self) -> None:
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
        for engine in ("jacobian", "gramian"):
            params = {"shared": self.params, "heads": own}
            state = fj.train_state(params, KEY, self.x, buffers=self.buffers, **method)
            state, _ = fj.step(state, KEY, self.x, engine=engine, **method)
            went = [self.params[name] - state.params["shared"][name] for name in sorted(self.params)]
            went += [own[name] - state.params["heads"][name] for name in "ab"]
            # The difference of parameters before and after is off by a rounding of these.
            bound = self.spread(ends) + torch.finfo(torch.float64).eps * joined(tree_leaves(params)).norm()
            check_distance(joined(went), ends[0], bound)

    def check_autocast(self, dtype: torch.dtype = torch.bfloat16) -> None:
        """Rows in half precision are no further from those in float64 than native autocast's are."""
        module = self.family.module().float()
        x = self.x.float() if self.x.is_floating_point() else self.x
        try:
            with torch.autocast("cpu", dtype):
                values = self.family.losses(module, KEY, x)
            native = matrix([gradients(values[name].float(), module) for name in sorted(values)])
        except RuntimeError as error:
            raise RefusedError(f"native autocast: {error}") from error
        exact = self.rows.rows
        half = Rows(exact, 4 * (native - exact).norm(dim=1) + torch.finfo(dtype).eps * exact.norm(dim=1))
        params = {name: p.detach() for name, p in trained(module)}
        given = params, dict(self.family.module().float().named_buffers()), KEY, x
        losses = fj.autocast(pure(self.family.losses, module), dtype)
        for mode in ("loop", "vmap"):
            rows, *_ = fj.jacobian_fn(losses, has_aux=True, mode=mode, scale=torch.tensor(256.0))(*given)
            half.check_rows(rows)
        gramian, _, pullback = fj.gramian_fn(losses, has_aux=True)(*given)
        half.check_gramian(gramian)
        half.check_sum(pullback(WEIGHTS)[0])


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


def check_distance(found: Tensor, expected: Tensor, bound: Tensor | float) -> None:
    """Vectors, or the rows of matrices, are no further apart than this."""
    check_within((found - expected).norm(dim=-1), torch.zeros(()), bound)


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
