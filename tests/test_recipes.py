"""The recipes of `torch.amp` as values, each beside the stateful original, step by step.

The cases are those of PyTorch's own tests of gradient scaling: four batches, the third of which overflows.
"""

import copy
from functools import partial

import pytest
import torch
from bounds import check_same, check_within, eps
from torch import nn
from torch.func import functional_call
from torch.nn.functional import l1_loss, mse_loss
from torch.utils._pytree import tree_map

import functional_jd as fj
from functional_jd.optimizers.clipping import clip_by_norm, global_norm

LIMIT = 0.2  # a norm that every direction of these cases exceeds


def clamped(direction, limit):
    return tree_map(lambda d: d.clamp(-limit, limit), direction)


def net(seed):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def batches(spoiled=2, count=4, half=False):
    """Of one batch, the losses are finite and the scaled gradients overflow."""
    generator = torch.Generator().manual_seed(1)
    data = [(torch.randn(8, 8, generator=generator), torch.randn(8, 8, generator=generator)) for _ in range(count)]
    if spoiled is not None:
        data[spoiled][0][0, 0] = 4e4 if half else 7e19
    return data


def both(output, y):
    return {"distance": l1_loss(output, y), "error": mse_loss(output, y)}


SHAPE = net(0)  # of which only the form counts: `functional_call` brings the parameters


def losses(params, x, y):
    return both(functional_call(SHAPE, params, (x,)), y)


class Original:
    """The stateful way: a model with `.grad`, `torch.optim` and `GradScaler`."""

    def __init__(self, cls=torch.optim.SGD, seed=0, half=False, **hyper):
        self.net, self.half = net(seed), half
        self.optimizer = cls(self.net.parameters(), **({"lr": 1.0} | hyper))
        self.scaler = torch.amp.GradScaler("cpu", init_scale=128.0, growth_interval=1)

    def losses(self, x, y):
        with torch.autocast("cpu", torch.float16, enabled=self.half):
            return both(self.net(x), y)

    def step(self, x, y, between=lambda: None):
        self.optimizer.zero_grad()
        self.scaler.scale(sum(self.losses(x, y).values()) / 2).backward()
        between()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def agrees(self, params, scale, half=False, roundings=64):
        own = {name: p.detach() for name, p in self.net.named_parameters()}
        check_same(params, own, torch.float16 if half else None, 1 if half else roundings)
        assert scale.scale == self.scaler.get_scale()
        assert scale.growth_tracker == self.scaler._get_growth_tracker()


def fresh_scale(**settings):
    return fj.scale_state(128.0, growth_interval=1, **settings)


def fresh_params(seed=0):
    return {name: p.detach().clone() for name, p in net(seed).named_parameters()}


def clipped(optimizer, clip):
    """An optimizer that clips the direction first."""
    return fj.Optimizer(optimizer.init, lambda direction, *rest: optimizer.update(clip(direction), *rest))


# Typical training

OPTIMIZERS = {
    "sgd": (fj.sgd(1.0), torch.optim.SGD, {}),
    "momentum": (fj.sgd(0.5, 0.9, nesterov=True), torch.optim.SGD, {"lr": 0.5, "momentum": 0.9, "nesterov": True}),
    "adamw": (fj.adamw(0.01), torch.optim.AdamW, {"lr": 0.01}),
    "fused adamw": (fj.adamw(0.01), torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "adam": (fj.from_torch(torch.optim.Adam, lr=0.01), torch.optim.Adam, {"lr": 0.01}),
}


@pytest.mark.parametrize("engine", ["auto", "jacobian"])
@pytest.mark.parametrize("half", [False, True], ids=["single", "half"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_typical_training(name, half, engine):
    optimizer, cls, hyper = OPTIMIZERS[name]
    original = Original(cls, half=half, **hyper)
    how = {"losses": fj.autocast(losses) if half else losses, "aggregator": fj.mean(), "optimizer": optimizer}
    state = fj.train_state(fresh_params(), *batches()[0], scale=fresh_scale(), **how)
    scales = []
    for i, batch in enumerate(batches(half=half)):
        original.step(*batch)
        state, info = fj.step(state, *batch, engine=engine, **how)
        # Adam divides by the gradient's own size: where that is next to zero, so is the agreement.
        original.agrees(state.params, state.scale, half)
        assert info.finite == (i != 2)
        scales.append(state.scale.scale.item())
    assert scales == [256.0, 512.0, 256.0, 512.0]  # 128 grown three times, backed off once


@pytest.mark.parametrize("how", ["norm", "largest", "value"])
def test_clipping_of_unscaled_directions(how):
    clip, in_place = {
        "norm": (lambda d: clip_by_norm(d, LIMIT), lambda p: nn.utils.clip_grad_norm_(p, LIMIT)),
        "largest": (
            lambda d: clip_by_norm(d, LIMIT / 20, torch.inf),
            lambda p: nn.utils.clip_grad_norm_(p, LIMIT / 20, norm_type=torch.inf),
        ),
        "value": (partial(clamped, limit=LIMIT / 20), lambda p: nn.utils.clip_grad_value_(p, LIMIT / 20)),
    }[how]
    original, unclipped = Original(), Original()
    method = {"losses": losses, "aggregator": fj.mean(), "optimizer": clipped(fj.sgd(1.0), clip)}
    state = fj.train_state(fresh_params(), *batches()[0], scale=fresh_scale(), **method)

    def unscale_and_clip():
        original.scaler.unscale_(original.optimizer)
        in_place(original.net.parameters())

    for batch in batches():
        original.step(*batch, between=unscale_and_clip)
        unclipped.step(*batch)
        state, _ = fj.step(state, *batch, **method)
        original.agrees(state.params, state.scale, roundings=2**8)  # torch adds 1e-6 to the norm
    with pytest.raises(AssertionError):
        unclipped.agrees(state.params, state.scale)


@pytest.mark.parametrize("spoiled", [None, 2])
def test_accumulation_over_micro_batches(spoiled):
    original, optimizer = Original(), fj.sgd(1.0)
    params, scale, moments = fresh_params(), fresh_scale(), optimizer.init(fresh_params())
    data = batches(spoiled, count=8)
    for pair in zip(data[::2], data[1::2], strict=True):
        original.optimizer.zero_grad()
        for batch in pair:
            original.scaler.scale(sum(original.losses(*batch).values()) / 2 / len(pair)).backward()
        original.scaler.step(original.optimizer)
        original.scaler.update()

        found = fj.accumulate(losses, pair, params=params, aggregator=fj.mean(), scale=scale)
        new = optimizer.update(found.direction, moments, params)
        (params, moments), scale = fj.precision.select(found.moved, new, (params, moments)), found.scale
        original.agrees(params, scale)
    assert scale.scale == (128.0 * 2**4 if spoiled is None else 128.0 * 2**2)  # once per effective batch


@pytest.mark.parametrize("engine", ["auto", "jacobian"])
@pytest.mark.parametrize("half", [False, True], ids=["single", "half"])
def test_gradient_penalty(half, engine):
    original = Original(half=half, lr=0.1)
    mixed = fj.autocast(losses) if half else losses

    def with_penalty(params, factor, x, y):
        jacobian, values, finite = fj.jacobian_fn(mixed, scale=factor)(params, x, y)
        slope = global_norm(fj.aggregate(fj.total(), jacobian).direction)
        return {**values, "slope": torch.where(finite, slope, torch.inf)}

    how = {"losses": with_penalty, "aggregator": fj.total(), "optimizer": fj.sgd(0.1)}
    state = fj.train_state(fresh_params(), torch.tensor(128.0), *batches()[0], scale=fresh_scale(), **how)
    for i, batch in enumerate(batches()):
        original.optimizer.zero_grad()
        value = sum(original.losses(*batch).values())
        leaves = list(original.net.parameters())
        slopes = torch.autograd.grad(original.scaler.scale(value), leaves, create_graph=True)
        penalty = sum((g / original.scaler.get_scale()).pow(2).sum() for g in slopes).sqrt()
        original.scaler.scale(value + penalty).backward()
        original.scaler.step(original.optimizer)
        original.scaler.update()

        before = state.params
        state, info = fj.step(state, state.scale.scale, *batch, engine=engine, **how)
        inner = info.losses["slope"].isfinite()  # where it is not, a lower scale would have mended the loss itself
        state = state._replace(scale=fj.precision.select(inner, state.scale, fj.update_scale(state.scale, inner)))
        original.agrees(state.params, state.scale, half)
        assert info.finite == (i != 2)
        if i != 2:
            check_within(info.losses["slope"], penalty.detach(), 5 * eps(torch.float16) * penalty.detach())
            assert not torch.equal(state.params["0.weight"], before["0.weight"])


def test_one_scale_per_objective_is_one_scaler_per_loss():
    big = 1e38  # a number of single precision, but not times a scale
    factors = torch.tensor([[1.0, 1.0], [1.0, big], [1.0, 1.0], [big, 1.0], [big, big], [1.0, 1.0]])
    original = Original()
    scalers = [torch.amp.GradScaler("cpu", init_scale=128.0, growth_interval=2) for _ in range(2)]

    def weighted(params, factor, x, y):
        return torch.stack([*losses(params, x, y).values()]) * factor

    how = {"losses": weighted, "aggregator": fj.total(), "optimizer": fj.sgd(1.0)}
    scale = fj.scale_state(128.0, growth_interval=2, shape=(2,))
    state = fj.train_state(fresh_params(), factors[0], *batches()[0], scale=scale, **how)
    for factor, batch in zip(factors, batches(None, 6), strict=True):
        rows, flags = [], []
        for i, scaler in enumerate(scalers):
            twin = copy.deepcopy(original.net)
            optimizer = torch.optim.SGD(twin.parameters(), lr=1.0)
            scaler.scale([*both(twin(batch[0]), batch[1]).values()][i] * factor[i]).backward()
            scaler.unscale_(optimizer)
            flags.append(not any(scaler._found_inf_per_device(optimizer).values()))
            scaler.update()
            rows.append([p.grad for p in twin.parameters()])
        if all(flags):
            for p, *gradients in zip(original.net.parameters(), *rows, strict=True):
                p.grad = sum(gradients)
            original.optimizer.step()

        # `total` would take one weighted backward pass, which has one flag.
        state, info = fj.step(state, factor, *batch, engine="jacobian", **how)
        assert info.finite.tolist() == flags
        assert state.scale.scale.tolist() == [scaler.get_scale() for scaler in scalers]
        assert state.scale.growth_tracker.tolist() == [scaler._get_growth_tracker() for scaler in scalers]
        for name, p in original.net.named_parameters():
            check_same(state.params[name], p.detach(), roundings=64)


@pytest.mark.parametrize("engine", ["auto", "jacobian"])
def test_a_schedule_does_not_advance_on_a_skipped_step(engine):
    original = Original(momentum=0.9)
    rate = lambda k: 0.5 ** (k // 2) / (k + 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(original.optimizer, rate)
    how = {"losses": losses, "aggregator": fj.mean(), "optimizer": fj.sgd(rate, momentum=0.9)}
    state = fj.train_state(fresh_params(), *batches()[0], scale=fresh_scale(), **how)
    for batch in (*batches(), *batches(1)):
        before = original.scaler.get_scale()
        original.step(*batch)
        if original.scaler.get_scale() >= before:
            schedule.step()
        state, _ = fj.step(state, *batch, engine=engine, **how)
        original.agrees(state.params, state.scale)
        assert state.optimizer.steps == schedule.last_epoch
    assert schedule.last_epoch == 6  # of 8


def test_what_breaks_after_unscale_is_not_hidden():
    def broken(direction):
        return tree_map(lambda d: d * torch.nan, direction)

    how = {"losses": losses, "aggregator": fj.mean(), "optimizer": clipped(fj.adamw(0.1), broken)}
    state = fj.train_state(fresh_params(), *batches(None)[0], scale=fresh_scale(), **how)
    state, info = fj.step(state, *batches(None)[0], **how)
    assert info.finite
    assert all(p.isnan().all() for p in state.params.values())
