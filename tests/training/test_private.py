"""Private training: every step is that of DP-SGD by hand, with the same noise; batches without examples too."""

from functools import partial

import pytest
import torch
from bounds import check_stable, check_within, eps
from torch import nn
from torch.func import functional_call
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, TensorDataset

import functional_jd as fj
from functional_jd.random import key, normal, split

NET = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)).double()
PARAMS = {
    name: torch.randn(p.shape, generator=torch.Generator().manual_seed(i), dtype=torch.float64)
    for i, (name, p) in enumerate(NET.named_parameters())
}
SETTINGS = {"max_norm": 0.3, "noise_multiplier": 1.7, "batch_size": 6.0}


def loss(params, x, y):
    return (functional_call(NET, params, (x,)) - y).square().sum()


def batch(m, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(m, n, generator=draw, dtype=torch.float64) for n in (5, 2)]


def method(clipping="flat", loss=loss, optimizer=None, **settings):
    optimizer = optimizer or fj.sgd(0.5)
    return fj.private(loss, optimizer=optimizer, key=key(3), clipping=clipping, **(SETTINGS | settings))


def by_hand(params, x, y, at, clipping="flat"):
    """Algorithm 1 of Abadi et al., one example after the other, with the key of the step."""
    total = {name: torch.zeros_like(p) for name, p in params.items()}
    for one, target in zip(x, y, strict=True):
        gradient = torch.func.grad(loss)(params, one, target)
        norm = torch.cat([g.flatten() for g in gradient.values()]).norm()
        factor = 0.3 / (norm + 0.01) if clipping == "automatic" else 1 / max(1.0, norm / 0.3)
        total = {name: total[name] + factor * g for name, g in gradient.items()}
    now, later = split(at)
    keys = dict(zip(sorted(params), split(now, len(params)), strict=True))
    noisy = {name: g + 1.7 * 0.3 * normal(keys[name], g.shape, dtype=g.dtype) for name, g in total.items()}
    return {name: p - 0.5 * noisy[name] / 6.0 for name, p in params.items()}, later


@pytest.mark.parametrize("clipping", ["flat", "automatic"])
@pytest.mark.parametrize("engine", ["auto", "jacobian", "gramian"])
def test_steps_on_poisson_batches_are_dp_sgd_by_hand(clipping, engine):
    how = method(clipping)
    state = fj.train_state(PARAMS, *batch(3), **how)
    params, at = PARAMS, key(3)
    for number, m in enumerate((4, 0, 1, 0, 7)):
        given = batch(m, number)
        state, info = fj.step(state, *given, engine=engine, **how)
        params, at = by_hand(params, *given, at, clipping)
        assert info.moved
        assert info.losses.shape == (max(m, 1),)
        for name, p in params.items():
            # At most twenty operations on every entry, per example and step.
            check_within(state.params[name], p, 1e3 * eps() * (1 + p.abs()))
    assert torch.equal(state.optimizer.key, at)


@pytest.mark.parametrize("scale", [None, (), "rows"], ids=str)
@pytest.mark.parametrize("engine", ["auto", "jacobian", "gramian"])
def test_a_batch_without_examples_is_a_step_of_pure_noise(scale, engine):
    how = method()
    scale = None if scale is None else fj.scale_state(shape=(1,) if scale == "rows" else ())
    state = fj.train_state(PARAMS, *batch(1), scale=scale, **how)
    after, info = fj.step(state, *batch(0), engine=engine, **how)
    expected, _ = by_hand(PARAMS, *batch(0), key(3))
    assert info.moved
    assert info.losses.tolist() == [0.0]
    for name, p in expected.items():
        assert not torch.equal(after.params[name], PARAMS[name])
        check_within(after.params[name], p, 8 * eps() * (1 + p.abs()))


def test_without_examples_buffers_stay_and_keys_go_on():
    def drawn(params, own, x, y):
        return loss(params, x * (1 + normal(own["key"], x.shape)), y), own | {"mean": own["mean"] + x}

    how = method(loss=drawn)
    with pytest.warns(UserWarning, match="move the buffer 'mean'"):
        state = fj.train_state(PARAMS, *batch(2), buffers={"key": key(1), "mean": torch.ones(5).double()}, **how)
    nobody, somebody = (fj.step(state, *batch(m), **how)[0].buffers for m in (0, 2))
    assert nobody["mean"].tolist() == [1.0] * 5
    check_within(somebody["mean"], 1 + batch(2)[0].mean(0), 8 * eps())
    assert not any(torch.equal(after["key"], key(1)) for after in (nobody, somebody))
    for whole in (False, True):  # the key is all, or stands beside a buffer that stays

        def drawing(params, own, x, y, whole=whole):
            at = own if whole else own["dropout_key"]
            later = split(at)[1]
            value = loss(params, x * (1 + normal(at, x.shape)), y)
            return value, later if whole else own | {"dropout_key": later, "table": own["table"].clone()}

        own = key(1) if whole else {"dropout_key": key(1), "table": torch.tensor([1.0, torch.nan])}
        fj.train_state(PARAMS, *batch(2), buffers=own, **method(loss=drawing))  # no warning: warnings are errors


STARTS = {"mean": [1.0] * 5, "count": 1, "pair": [1, 2], "on": True}
MOVES = {
    "mean": lambda old, x: 0.9 * old + 0.1 * x.float(),
    "count": lambda old, x: old + 1,
    "pair": lambda old, x: old + 1,  # no key, though it looks like one
    "on": lambda old, x: ~old,
}


@pytest.mark.parametrize("name", MOVES)
@pytest.mark.parametrize("noise", ["private", "noised", "without"])
def test_buffers_that_move_without_noise_are_told(name, noise):
    move = lambda params, own, x, y: (loss(params, x, y), own | {name: MOVES[name](own[name], x)})
    how = method(loss=move)
    how |= {"private": {}, "noised": {"losses": fj.per_example(move)}, "without": {"optimizer": fj.sgd(0.5)}}[noise]
    buffers = {name: torch.tensor(start) for name, start in STARTS.items()} | {"key": key(1)}
    begin = lambda: fj.train_state(PARAMS, *batch(2), buffers=buffers, **how)
    if noise == "without":
        begin()  # no warning: warnings are errors
        return
    with pytest.warns(UserWarning, match=f"train_state: the losses of noised training move the buffer '{name}', which"):
        begin()


@pytest.mark.parametrize("transform", ["vmap", "compile"])
@pytest.mark.parametrize("m", [0, 3])
def test_steps_under_transforms(transform, m):
    how = method()
    state = fj.train_state(PARAMS, *batch(3), **how)
    take, given = partial(fj.step, **how), batch(m)
    expected = lambda *given: take(state, *given)[0].params
    if transform == "compile":
        torch.compiler.reset()
        found = torch.compile(take, backend="aot_eager", fullgraph=True)(state, *given)[0].params
    else:
        two = tree_map(lambda x: torch.stack([x, x]), state)
        found = tree_map(lambda x: x[1], torch.vmap(take, (0, None, None))(two, *given)[0].params)
    check_stable(found, expected, *given)


@pytest.mark.parametrize("engine", ["jacobian", "gramian"])
def test_in_bfloat16_no_example_moves_parameters_by_more_than_the_bound_and_noise_is_in_float32(engine):
    params, (x, y) = {name: p.float() for name, p in PARAMS.items()}, (z.float() for z in batch(6))
    how = method(optimizer=fj.sgd(6.0))
    how["losses"] = fj.autocast(how["losses"], dtype=torch.bfloat16)
    state = fj.train_state(params, x, y, **how)
    after = lambda kept: fj.step(state, x[kept], y[kept], engine=engine, **how)[0].params
    everybody = torch.arange(6)
    rest = (after(everybody[everybody != i]) for i in everybody)
    moved = [sum(float((after(everybody)[n] - p).double().square().sum()) for n, p in r.items()) ** 0.5 for r in rest]
    assert max(moved) <= 0.3 * (1 + 1e-5)  # sums in float32
    assert min(moved) > 0.1
    nobody, (now, _) = after(everybody[:0]), split(key(3))
    for at, name in zip(split(now, len(params)), sorted(params), strict=True):
        assert nobody[name].dtype == torch.float32
        noise = 1.7 * 0.3 * normal(at, params[name].shape)
        check_within(nobody[name], params[name] - noise, 4 * eps(torch.float32) * (params[name].abs() + noise.abs()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("engine", [fj.gramian_fn, fj.squared_norms_fn])
@pytest.mark.parametrize(
    "loss", [lambda p, x: (p["w"] * x).sum(), lambda p, x: nn.functional.linear(x[None], p["w"][None]).sum()]
)
def test_sums_of_many_rows_by_parameters_in_half_precision_are_in_float32(dtype, engine, loss):
    """In half precision, one row more than 3000 changes an entry by 2 at least, or by nothing."""
    ones = lambda *shape: torch.ones(*shape, dtype=dtype)
    pullbacks = [engine(fj.per_example(loss))({"w": ones(4)}, ones(n, 4))[-1] for n in (3000, 3001)]
    one, two = (pull(torch.ones(3000 + n))[0]["w"] for n, pull in enumerate(pullbacks))
    assert torch.equal(two - one, torch.ones(4))


def test_mistakes_are_named():
    for wrong, kind, words in (
        ({"noise_multiplier": -1.0}, ValueError, "private: noise_multiplier must be finite and not negative, found -1"),
        ({"max_norm": 0.0}, ValueError, "max_norm must be positive"),
        ({"batch_size": 0.0}, ValueError, "batch_size must be positive and finite, found 0"),
        ({"clipping": "flt"}, ValueError, "private: clipping must be .*flat, automatic, found 'flt'"),
        ({"clipping": "layers"}, ValueError, r"found 'layers'. .* By layers: .* grouped\({key: clipped\(max_norm / k"),
    ):
        with pytest.raises(kind, match=words):
            method(**wrong)
    with pytest.raises(ValueError, match="train_state: the first batch must have an example, found none"):
        fj.train_state(PARAMS, *batch(0), **method())
    tasks = fj.multitask(lambda p, x: x, lambda p, z, x: z)
    with pytest.raises(TypeError, match="private: loss must be the loss of one example"):
        method(loss=tasks)
    for optimizer, words in (
        (fj.line_search(fj.sgd(1.0), [1.0]), "compares losses"),
        (fj.noised(fj.sgd(1.0), key(0), 1.0, 1.0, 4), "adds noise"),
    ):
        with pytest.raises(ValueError, match=f"private: optimizer must not .* found one that {words}"):
            method(optimizer=optimizer)
    with pytest.warns(
        UserWarning, match=r"private: noise_multiplier 0 adds no noise, so that nothing .* protected\. A"
    ):
        method(noise_multiplier=0)
    method(noise_multiplier=torch.tensor(0.0))  # one of several, under vmap
    how = method() | {"losses": fj.per_example(loss)}  # which is not private
    state = fj.train_state(PARAMS, *batch(3), **how)
    with pytest.raises(ValueError, match=r"per_example: all batched arguments must .* at least one, found \[0\]"):
        fj.step(state, *batch(0), **how)


def test_a_loader_returns_empty_batches_from_a_sampler_and_not_from_a_batch_sampler():
    data, drawn = TensorDataset(*batch(4)), [[1, 3], [], [0]]
    loader = DataLoader(data, sampler=drawn, batch_size=None)
    assert [[*map(len, given)] for given in loader] == [[2, 2], [0, 0], [1, 1]]
    assert torch.equal(next(iter(loader))[0], data.tensors[0][[1, 3]])
    with pytest.raises(IndexError):
        [*DataLoader(data, batch_sampler=drawn)]
    how = method()
    after = fj.fit(partial(fj.step, **how), fj.train_state(PARAMS, *batch(1), **how), loader)
    assert torch.equal(after.optimizer.key, split(split(split(key(3))[1])[1])[1])  # three steps


def test_by_label_goes_inside_and_other_dimensions_of_examples_and_autocast_around():
    halves = fj.by_label({"weight": fj.sgd(0.5), "bias": fj.sgd(0.5)}, lambda name, _: name.split(".")[-1])
    given, ways = batch(4), (method(optimizer=halves), method())
    found, expected = (fj.step(fj.train_state(PARAMS, *given, **how), *given, **how)[0].params for how in ways)
    for name, p in expected.items():
        check_within(found[name], p, 8 * eps() * (1 + p.abs()))
    how = method(loss=fj.per_example(loss, in_dims=1))
    how["losses"] = fj.autocast(how["losses"], dtype=torch.bfloat16)
    x, y = (z.mT.contiguous() for z in batch(3))
    state = fj.train_state(PARAMS, x, y, **how)
    assert fj.step(state, x, y, **how)[1].losses.shape == (3,)
    assert fj.step(state, x[:, :0], y[:, :0], **how)[1].losses.tolist() == [0.0]


def test_a_grid_over_bounds_protects_where_rule_and_noise_have_one():
    x, y = batch(3)
    x[2] *= 1e4
    start = {name: torch.zeros_like(p) for name, p in PARAMS.items()}

    def trained(make, n, c):
        how = make(c)
        return fj.step(fj.train_state(start, x[:n], y[:n], **how), x[:n], y[:n], **how)[0].params

    def moved(make):
        grid = torch.tensor([1.0, 50.0], dtype=torch.float64)
        after, without = (torch.vmap(partial(trained, make, n))(grid) for n in (3, 2))
        return sum((after[name] - without[name]).flatten(1).square().sum(1) for name in start).sqrt() / grid

    together = lambda c: method(max_norm=c, batch_size=1.0) | {"aggregator": fj.clipped(c)}
    apart = lambda c: together(c) | {"optimizer": fj.noised(fj.sgd(0.5), key(3), 1.7, 1.0, 1.0)}
    assert (moved(together) <= 0.5 + 1e-9).all()
    assert (moved(apart)[1] * 50 > 1).all()  # as noised says: not seen under vmap
    with pytest.raises(ValueError, match=r"rows by 1, the norm of the noise, found 50"):
        trained(apart, 3, torch.tensor(50.0))
