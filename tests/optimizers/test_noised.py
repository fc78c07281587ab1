"""Noise as an optimizer: its size and its distribution, its key, skipped steps, and Opacus's formula."""

import pytest
import torch
from bounds import check_within, eps
from optimizers.steps import run
from scipy.stats import kstest
from torch.utils._pytree import tree_map
from two_tasks import same

import functional_jd as fj
from functional_jd import noised
from functional_jd.optimizers.noised import NoisedState
from functional_jd.random import key

PARAMS = {"w": torch.zeros(100, 100, dtype=torch.float64), "b": torch.zeros(50, dtype=torch.float64)}
ZEROS = tree_map(torch.zeros_like, PARAMS)
# An optimizer that hands over what it receives.
SEEN = fj.Optimizer(lambda params: (), lambda direction, state, params: (direction, state))


def received(direction=ZEROS, seed=0, multiplier=1.5, max_norm=2.0, batch_size=64.0, params=PARAMS):
    optimizer = noised(SEEN, key(seed), multiplier, max_norm, batch_size)
    return optimizer.update(direction, optimizer.init(params), params)


def test_the_noise_has_the_promised_size_and_is_normal_and_independent():
    noise, _ = received()
    std = 1.5 * 2.0 / 64.0
    sample = torch.cat([x.flatten() for x in noise.values()]) / std
    n = len(sample)
    # Five standard deviations of a mean and of a variance.
    assert sample.mean().abs() < 5 / n**0.5
    assert (sample.var() - 1).abs() < 5 * (2 / n) ** 0.5
    assert kstest(sample.numpy(), "norm").pvalue > 1e-4
    assert (noise["w"][0, :50] * noise["b"]).mean().abs() < 5 * std**2 / 50**0.5
    assert not torch.equal(noise["w"][0, :50], noise["b"])


def test_the_mean_is_opacus_s():
    """Of opacus.optimizers.DPOptimizer: the sum plus noise of std `multiplier max_grad_norm`, by the expected size."""
    direction = tree_map(lambda x: torch.ones_like(x) * 3, PARAMS)
    noise, _ = received()
    found, _ = received(direction)
    for name in PARAMS:
        check_within(found[name], 3 / 64.0 + noise[name], 4 * eps() * (3 / 64.0 + noise[name].abs()))


def test_without_noise_it_is_the_optimizer_inside_on_the_mean():
    direction = tree_map(lambda x: torch.linspace(-1, 1, x.numel()).reshape(x.shape), PARAMS)
    mean = tree_map(lambda x: x / 8, direction)  # a division by 8 is exact
    found, state = run(noised(fj.adamw(0.1), key(0), 0.0, 1.0, 8), PARAMS, [direction] * 3)
    assert same((found, state.inner), run(fj.adamw(0.1), PARAMS, [mean] * 3))


def test_every_step_has_its_noise_and_the_key_says_which():
    optimizer = noised(SEEN, key(0), 1.0, 1.0, 1)
    first, state = optimizer.update(ZEROS, optimizer.init(PARAMS), PARAMS)
    second, later = optimizer.update(ZEROS, state, PARAMS)
    again, _ = optimizer.update(ZEROS, state, PARAMS)
    other, _ = received(seed=1)
    assert not torch.equal(first["w"], second["w"])
    assert not torch.equal(first["w"], other["w"])
    assert torch.equal(second["w"], again["w"])
    assert not torch.equal(state.key, later.key)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_parameters_keep_their_dtype_and_the_noise_has_at_least_32_bits(dtype):
    params = {"w": torch.zeros(3, dtype=dtype)}
    seen, _ = received(params, params=params)
    assert seen["w"].dtype == torch.promote_types(dtype, torch.float32)
    wide = {"w": params["w"].to(seen["w"].dtype)}
    assert torch.equal(seen["w"].float(), received(wide, params=params)[0]["w"].float())
    assert received(params, params=params, batch_size=torch.tensor(1e5))[0]["w"].all()
    mixed = {"a": torch.zeros(2).double(), **params}
    assert received(mixed, params=mixed)[0]["w"].dtype == seen["w"].dtype
    optimizer = noised(fj.sgd(0.1), key(0), 1.0, 1.0, 1)
    moved, _ = optimizer.update(params, optimizer.init(params), params)
    assert moved["w"].dtype == dtype


def test_a_skipped_step_keeps_the_key_and_a_checkpoint_goes_on_with_the_same_noise():
    losses = fj.per_example(lambda p, x, y: (torch.tanh(x @ p["w"]) - y).square().sum())
    numbers = torch.Generator().manual_seed(0)
    x, y = (torch.randn(6, n, generator=numbers, dtype=torch.float64) for n in (4, 3))
    optimizer = noised(fj.adamw(0.5), key(3), 0.5, 1.0, 6)
    how = {"losses": losses, "aggregator": fj.clipped(1.0), "optimizer": optimizer}
    state = fj.train_state({"w": torch.zeros(4, 3, dtype=torch.float64)}, x, y, scale=fj.scale_state(), **how)
    skipped, info = fj.step(state, x * torch.inf, y, **how)
    assert not info.moved
    assert torch.equal(skipped.optimizer.key, state.optimizer.key)
    assert torch.equal(skipped.params["w"], state.params["w"])
    taken, info = fj.step(skipped, x, y, **how)
    expected, _ = fj.step(state, x, y, **how)
    assert info.moved
    assert isinstance(taken.optimizer, NoisedState)
    assert not torch.equal(taken.optimizer.key, state.optimizer.key)
    # The scale is another power of two, of which no bit stays.
    assert torch.equal(taken.params["w"], expected.params["w"])
    back = fj.from_checkpoint(fj.to_checkpoint(taken), like=taken)
    ours, theirs = (fj.step(each, x, y, **how)[0] for each in (taken, back))
    assert torch.equal(ours.params["w"], theirs.params["w"])


BY_EXAMPLE = fj.per_example(lambda p, x: (x @ p["a"]["w"] - p["b"]["w"].sum()).square())
# What protects nobody: losses, rule, and what the error says.
PROTECTS_NOBODY = {
    "no bound": (BY_EXAMPLE, fj.mean(), "the rule must bound every row.*found none"),
    "a batch": (lambda p, x: BY_EXAMPLE(p, x).mean(), fj.clipped(0.1), "the losses must be made by per_example"),
    "tasks": (lambda p, x: {"a": BY_EXAMPLE(p, x).mean()}, fj.clipped(0.1), "the losses must be made by per_example"),
    "too little noise": (BY_EXAMPLE, fj.clipped(1.0), "the rule must bound rows by 0.1, .* found 1"),
    "another tensor": (BY_EXAMPLE, fj.clipped(torch.tensor(1.0)), "the rule must bound rows by 0.1, .* found 1"),
    "automatic": (BY_EXAMPLE, fj.auto_clipped(), "the rule must bound rows by 0.1, .* found 1"),
    "a group": (BY_EXAMPLE, fj.grouped({"a": fj.clipped(0.1), "b": fj.mean()}), "the rule must bound every row"),
    "groups": (BY_EXAMPLE, fj.grouped({k: fj.clipped(0.1) for k in "ab"}), "the rule .* by 0.1,.* found 0.141421"),
    "changed": (BY_EXAMPLE, fj.cr_mogm(fj.clipped(0.1)), "the rule must bound every row"),
}
OTHER_SET = fj.per_example({name: lambda p, x: (x @ p["a"]["w"] - p["b"]["w"].sum()).square() for name in "xy"})
SPLIT = {"a": {"w": torch.ones(3)}, "b": {"w": torch.ones(2)}}


@pytest.mark.parametrize(("losses", "rule", "words"), PROTECTS_NOBODY.values(), ids=PROTECTS_NOBODY)
@pytest.mark.parametrize("engine", ["auto", "jacobian"])
def test_noise_that_protects_nobody_is_refused(losses, rule, words, engine):
    how = {"losses": losses, "aggregator": rule, "optimizer": noised(fj.sgd(0.1), key(0), 1.0, 0.1, 4)}
    with pytest.raises(ValueError, match=rf"train_state: with noised, {words}.*Take private\("):
        fj.train_state(SPLIT, torch.ones(4, 3), engine=engine, **how)


def test_several_sets_in_which_somebody_may_have_two_rows_are_refused():
    x = torch.ones(4, 3)
    rule, optimizer = fj.clipped(0.1), noised(fj.sgd(0.1), key(0), 1.0, 0.1, 4)

    def clipped(examples):
        jacobian, _ = fj.jacobian_fn(OTHER_SET)(SPLIT, {"x": examples, "y": examples})
        direction = fj.aggregate(rule, jacobian).direction
        return torch.cat([direction["a"]["w"], direction["b"]["w"]])

    assert (clipped(x) - clipped(x[1:])).norm() > 0.19, "one example moves the sum by twice the norm of the noise"
    with pytest.raises(ValueError, match=r"train_state: with noised, .* one set of examples, found several"):
        fj.train_state(SPLIT, {"x": x, "y": x}, losses=OTHER_SET, aggregator=rule, optimizer=optimizer)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_step_with_another_rule_than_the_one_that_was_checked_is_refused(compiled):
    x, take = torch.ones(4, 3), torch.compile(fj.step, backend="eager") if compiled else fj.step
    how = {"max_norm": 1.0, "noise_multiplier": 1.0, "batch_size": 4, "optimizer": fj.sgd(0.1), "key": key(0)}
    private = fj.private(lambda p, x: (x @ p["w"] - 1).square(), **how)
    state = fj.train_state({"w": torch.zeros(3)}, x, **private)
    take(state, x, **private)
    for rule, words in ((fj.mean(), "bound every row"), (fj.clipped(10.0), "rows by 1, .* found 10")):
        with pytest.raises(ValueError, match=f"{'functional_jd' if compiled else 'step'}: with noised, .*{words}"):
            take(state, x, **(private | {"aggregator": rule}))


def test_noise_for_a_group_alone_is_refused():
    with pytest.raises(ValueError, match=r"by_label: the optimizer 'x' must not .* found one that adds noise"):
        fj.by_label({"x": noised(fj.sgd(0.1), key(0), 1.0, 1.0, 4), "y": fj.sgd(0.1)}, lambda name, _: name)


def test_noise_for_the_bound_of_the_rule_starts():
    groups = fj.grouped({"a": fj.clipped(0.3), "b": fj.clipped(torch.tensor(0.4))})
    flat, automatic, tensors = fj.clipped(0.5), fj.auto_clipped(max_norm=0.5), fj.clipped(torch.tensor(0.1))
    for rule, norm in ((flat, 0.5), (automatic, 0.5), (tensors, 0.1), (groups, 0.5)):
        how = {"losses": BY_EXAMPLE, "aggregator": rule, "optimizer": noised(fj.sgd(0.1), key(0), 1.0, norm, 4)}
        fj.train_state(SPLIT, torch.ones(4, 3), **how)
