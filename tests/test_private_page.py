"""What the guide to private training says, and shows in its blocks, is so."""

from pathlib import Path

import pytest
import torch
from bounds import check_same, check_within, eps
from pages import blocks, typed
from scipy.stats import kstest
from torch.nn import functional

import functional_jd as fj
from functional_jd.random import key, normal, split

PAGE = Path(__file__).parents[1] / "docs" / "guides" / "private.md"


@pytest.fixture(scope="module")
def guide():
    """What the reader of the guide has."""
    return typed(PAGE)


HOW = {"noise_multiplier": 1.1, "batch_size": 16.0, "key": key(0)}
PARAMS = {"w": torch.linspace(-1, 1, 20)[:, None]}


@pytest.mark.parametrize("clipping", ["flat", "automatic"])
@pytest.mark.parametrize("spoiled", [None, torch.inf, 1e30], ids=["finite", "infinite", "overflow"])
@pytest.mark.parametrize("every", [1, 3, 100], ids=["all", "a third", "nobody"])
def test_the_parts_of_a_batch_in_the_guide_make_the_step_of_the_whole_batch(guide, every, spoiled, clipping):
    x, price = guide["x"], guide["price"].clone()
    drawn = torch.arange(1, 33) % every == 0
    if spoiled is not None:
        price[2] = spoiled
    private = fj.private(guide["loss"], max_norm=1.0, optimizer=fj.adamw(0.1), **HOW, clipping=clipping)
    training = fj.train_state(guide["linear"], x, guide["price"], **private)
    found = guide | {"price": price, "drawn": drawn, "private": private, "training": training}
    exec(next(code for code in blocks(PAGE) if "in_parts" in code), found)
    expected, info = fj.step(training, x[drawn], price[drawn], **private)
    assert bool(info.moved) == (spoiled is None or every == 100)
    assert torch.equal(found["in_parts"].optimizer.key, expected.optimizer.key)
    check_same(found["in_parts"].params, expected.params, roundings=64)


def test_padded_batches_of_the_guide_are_one_graph_and_take_the_steps_of_those_that_were_drawn(guide):
    assert len(guide["take"].graphs) == 1
    x, kind, params = guide["x"], guide["kind"], {"w": torch.full((20, 5), 0.1)}
    scored = lambda params, x, kind: functional.cross_entropy(x @ params["w"], kind)
    how = {"max_norm": 1.0, "optimizer": fj.sgd(0.1)} | HOW
    drawn = fj.private(scored, **how)
    weighted = fj.private(lambda params, x, kind, w: w * scored(params, x, kind), **how)
    state, take = fj.train_state(params, x, kind, **drawn), fj.compiled(fj.step, backend="eager")
    for n in (17, 15, 0, 1):
        after, info = take(state, *guide["padded"](x[:n], kind[:n]), **weighted)
        expected, _ = fj.step(state, x[:n], kind[:n], **drawn)
        assert info.moved
        check_same(after.params, expected.params, roundings=4)
    assert len(take.graphs) == 1
    with pytest.raises(RuntimeError, match="negative dimension"):
        guide["padded"](x, kind)
    after, _ = fj.step(state, x, kind, torch.ones(len(x)), **weighted)
    expected, _ = fj.step(state, x, kind, **drawn)
    check_same(after.params, expected.params, roundings=4)


def test_norms_as_the_guide_finds_them_are_those_of_the_gradients(guide):
    x, price = guide["x"], guide["price"]
    rows = 2 * x * (x @ PARAMS["w"] - price)
    max_norm = float(rows.norm(dim=1).median())
    private = fj.private(guide["loss"], max_norm=max_norm, optimizer=fj.sgd(0.1), **HOW)
    _, info = fj.step(fj.train_state(PARAMS, x, price, **private), x, price, **private)
    is_clipped = info.weights < 1
    assert abs(is_clipped.float().mean() - 0.5) < 0.04  # the median itself is one of 32
    torch.testing.assert_close((max_norm / info.weights)[is_clipped].float(), rows.norm(dim=1)[is_clipped])
    norms = fj.squared_norms_fn(private["losses"])(PARAMS, x, price)[0].sqrt()
    torch.testing.assert_close(norms.float(), rows.norm(dim=1))


def test_the_module_in_the_guide_is_given_one_example_at_a_time(guide):
    model, x, kind = guide["model"], guide["x"], guide["kind"]
    assert guide["net_info"].moved
    params = {name: p.detach() for name, p in model.named_parameters()}
    values = torch.vmap(guide["of_module"], (None, 0, 0))(params, x, kind)
    torch.testing.assert_close(values, functional.cross_entropy(model(x), kind, reduction="none"))


def test_noise_of_ones_own_in_the_guide_is_normal_and_added_to_the_clipped_sum(guide):
    drawn = guide["secure_normal"]((40, 100)).flatten()
    assert not torch.equal(drawn, guide["secure_normal"]((40, 100)).flatten())
    assert drawn.mean().abs() < 6 / 4000**0.5
    assert (drawn.var() - 1).abs() < 6 * (2 / 4000) ** 0.5
    assert kstest(drawn.numpy(), "norm").pvalue > 1e-6
    noise = (guide["noisy"]["w"] * 16 - guide["total"]["w"]) / 1.1
    assert 0.2 < noise.std() < 3  # of 20 numbers


def test_persons_in_the_guide_are_clipped_as_one(guide):
    x, price, mask = guide["people"]
    how = fj.private(guide["of_person"], **guide["of_people"])
    state = fj.train_state(PARAMS, x, price, mask, **how)
    nobody, _ = fj.step(state, x[:0], price[:0], mask[:0], **how)  # the same noise
    after, _ = fj.step(state, x, price, mask, **how)
    total = torch.zeros_like(PARAMS["w"])
    for person, counts in enumerate(mask.bool()):
        if counts.any():
            own, asked = x[person][counts], price[person][counts]
            gradient = 2 * own.mT @ (own @ PARAMS["w"] - asked) / counts.sum()
            total += gradient / gradient.norm().clamp(min=1)
    rounding = 8 * eps(torch.float32) * nobody.params["w"].abs().max()
    check_within(nobody.params["w"] - after.params["w"], 0.1 * total / 4, rounding)


def rows_by_hand(keys, x, price):
    """Of both losses of the guide: the sum of the gradients of the examples, clipped, with noise, by the batch size."""
    residual = lambda w, i: x[i] @ w - price[i]
    rows = []
    for of_one, at in zip((lambda r: r.square().sum(), lambda r: r.abs().sum()), keys, strict=True):
        total = torch.zeros_like(PARAMS["w"])
        for i in range(len(x)):
            w = PARAMS["w"].clone().requires_grad_()
            (gradient,) = torch.autograd.grad(of_one(residual(w, i)), w)
            total += gradient / max(1.0, float(gradient.norm()) * 2**0.5)
        (now,) = split(split(at)[0], 1)  # one leaf
        rows.append((total + 1.1 * normal(now, total.shape)) / 16)
    return torch.stack(rows)


@pytest.mark.parametrize("every", [1, 3, 100], ids=["all", "a third", "nobody"])
def test_private_conflicts_of_the_guide_are_clipped_sums_with_noise_and_upgrad_of_them(guide, every):
    drawn = torch.arange(1, 33) % every == 0
    x, price = guide["x"][drawn], guide["price"][drawn]
    noise = {name: part["optimizer"].init(PARAMS) for name, part in guide["parts"].items()}
    moments = guide["descent"].init(PARAMS)
    rows, later, finite = guide["noisy_rows"](PARAMS, noise, x, price)
    expected = rows_by_hand(split(key(3), 2), x, price)
    assert finite
    check_same(rows["w"], expected, roundings=64)
    after, _, carried = guide["private_step"]((PARAMS, moments, noise), x, price)
    direction = fj.aggregate(fj.upgrad(), {"w": expected}).direction
    check_same(after["w"], PARAMS["w"] - 0.1 * direction["w"])
    for name, at in zip(noise, split(key(3), 2), strict=True):
        assert torch.equal(later[name].key, split(at)[1])
        assert torch.equal(carried[name].key, later[name].key)
    spoiled = guide["private_step"]((PARAMS, moments, noise), guide["x"], torch.full((32, 1), torch.nan))
    assert torch.equal(spoiled[0]["w"], PARAMS["w"])
    assert all(torch.equal(spoiled[2][name].key, noise[name].key) for name in noise)


def test_no_example_moves_the_rows_of_private_conflicts_together_by_more_than_the_bound(guide):
    x, price = guide["x"], guide["price"].clone()
    price[3] = 1e3  # its gradients are long
    noise = {name: part["optimizer"].init(PARAMS) for name, part in guide["parts"].items()}
    rows = lambda kept: guide["noisy_rows"](PARAMS, noise, x[kept], price[kept])[0]["w"].double() * 16
    everybody = torch.arange(32)
    moved = torch.stack([(rows(everybody) - rows(everybody[everybody != i])).norm() for i in everybody])
    assert moved.max() <= 1 + 1e-4  # sums of 32 in float32
    assert moved[3] >= 1 - 1e-4  # the bound is attained


def graphs_by_size(f, sizes):
    """How many graphs there are after each size."""
    torch.compiler.reset()
    graphs, counts = [], []
    kept = lambda graph, _: graphs.append(graph) or graph.forward
    compiled = torch.compile(f, dynamic=True, fullgraph=True, backend=kept)
    for n in sizes:
        compiled(n)
        counts.append(len(graphs))
    return counts


def examples_of(scored):
    """Steps on so many examples."""
    params, x, kind = {"w": torch.full((20, 5), 0.1)}, torch.ones(32, 20), torch.arange(32) % 5
    of_one = lambda params, x, kind: scored(x @ params["w"], kind)
    how = fj.private(of_one, optimizer=fj.sgd(0.1), key=key(0), max_norm=0.3, noise_multiplier=1.7, batch_size=6.0)
    state = fj.train_state(params, x, kind, **how)
    return lambda batch: fj.step(state, *batch, **how), lambda n: (x[:n], kind[:n])


def test_as_the_guide_says_a_loss_with_an_index_is_a_graph_for_each_size():
    f, of_size = examples_of(functional.cross_entropy)
    assert graphs_by_size(f, map(of_size, (17, 15))) == [1, 2]


def test_as_the_guide_says_a_loss_without_an_index_is_one_graph_and_one_more_for_0_and_1():
    scored = lambda scores, kind: -(scores.log_softmax(-1) * (torch.arange(len(scores)) == kind)).sum()
    f, of_size = examples_of(scored)
    assert graphs_by_size(f, map(of_size, (17, 15, 9, 1, 0, 20))) == [1, 1, 1, 2, 3, 3]
    scores = torch.linspace(-1, 2, 5)
    torch.testing.assert_close(scored(scores, torch.tensor(3)), functional.cross_entropy(scores, torch.tensor(3)))
