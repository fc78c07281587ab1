"""Which engine is taken, by shapes alone."""

import pytest
import torch

import functional_jd as jd
from functional_jd.engines import PLAIN
from functional_jd.engines.choose import choose_engine

TINY = [(32, 16), (32,), (16, 32), (16,)]
MLP = [(200, 96), (200,), (160, 200), (160,)]
WIDE = [(256, 128), (256,), (256, 256), (256,)]
LARGE = [(2048, 1024), (2048,), (2048, 2048), (2048,), (2048, 2048), (2048,), (512, 2048), (512,)]
CONV = [(16, 3, 3, 3), *[(16,)] * 3, (32, 16, 3, 3), *[(32,)] * 3]
LAYER = [(192, 64), (192,), (64, 64), (64,), (128, 64), (128,), (64, 128), *[(64,)] * 5]


def chosen(params, *batch, losses, rule=None):
    state = jd.TrainState(params, (), (), (), jd.precision.no_scale())
    return jd.chosen_engine(state, *batch, losses=losses, aggregator=rule or jd.upgrad()).engine


@pytest.mark.parametrize(
    ("shapes", "batch", "tasks", "engine"),
    [
        (TINY, (16, 16), 2, "jacobian"),
        *[(MLP, (64, 96), m, "jacobian") for m in (2, 8, 32)],
        (WIDE, (128, 128), 8, "jacobian"),
        *[(LARGE, (128, 1024), m, "gramian") for m in (2, 8)],
        *[([(512, 512)] * 2, (64, 512), m, "gramian") for m in (2, 8, 32)],
        *[([(256, 256)] * 2, (16, 256), m, "gramian") for m in (2, 8)],
        *[([(512, 512)] * 2, (256, 512), m, "jacobian") for m in (2, 8)],
        *[(CONV, (16, 3, 32, 32), m, "jacobian") for m in (2, 8)],
        *[(LAYER * 2, (16, 16, 64), m, "jacobian") for m in (2, 8, 32)],
    ],
)
def test_tasks_take_the_engine_that_was_measured_to_be_faster(shapes, batch, tasks, engine):
    losses = jd.multitask(lambda shared, x, y: x, lambda heads, h, x, y: [])
    heads = {f"{i}.{name}": torch.empty(1) for i in range(tasks) for name in ("weight", "bias")}
    params = {"shared": {str(i): torch.empty(shape) for i, shape in enumerate(shapes)}, "heads": heads}
    assert chosen(params, torch.empty(batch), torch.empty(tasks, batch[0], 1), losses=losses) == engine


@pytest.mark.parametrize(
    ("shapes", "example", "m", "engine"),
    [
        ([(16, 16)] * 2, (16,), 64, "jacobian"),
        (MLP, (96,), 64, "gramian"),
        (MLP, (96,), 4, "gramian"),
        (CONV, (3, 32, 32), 64, "jacobian"),
        (LAYER * 2, (16, 64), 4, "jacobian"),
        (LAYER * 2, (16, 64), 16, "gramian"),
        (LAYER * 2, (16, 64), 64, "gramian"),
    ],
)
def test_examples_take_the_engine_that_was_measured_to_be_faster(shapes, example, m, engine):
    losses = jd.per_example(lambda params, x, y: y)
    params = [torch.empty(shape) for shape in (*shapes, (10, shapes[-1][0]), (10,))]
    assert chosen(params, torch.empty(m, *example), torch.empty(m, dtype=torch.int64), losses=losses) == engine


@pytest.mark.parametrize(("shapes", "batch", "engine"), [(TINY, (16, 16), "jacobian"), (LARGE, (64, 1024), "gramian")])
@pytest.mark.parametrize("rule", [jd.epo([0.5, 0.5]), jd.natural_gradient(1e-6)])
def test_a_rule_that_needs_the_losses_too_takes_the_engine_of_its_shapes(rule, shapes, batch, engine):
    params = [torch.empty(shape) for shape in shapes]
    assert chosen(params, torch.empty(batch), losses=lambda params, x: x[0], rule=rule) == engine


@pytest.mark.parametrize(
    ("rule", "shapes", "reason"),
    [
        (jd.mean(), LARGE, "the rule needs no gradients: one backward pass"),
        (jd.trimmed_mean(1), LARGE, "the rule needs the rows themselves"),
        (jd.upgrad(), TINY, "few beside the batch (examples times the length of a sequence): forming all gradients"),
        (jd.upgrad(), [(512, 512)] * 2, "layer by layer costs less than forming all gradients"),
    ],
)
def test_reasons_name_what_costs_less(rule, shapes, reason):
    leaves = [torch.empty(shape, device="meta") for shape in shapes]
    assert reason in choose_engine(rule.view, 2, leaves, (torch.empty(16, 1),), PLAIN).reason


def test_tokens_are_positions_and_a_function_without_a_batch_has_one():
    leaves, losses = {"table": torch.empty(1000, 300)}, lambda params, *tokens: params["table"][0]
    few, many = (torch.zeros(5, n, dtype=torch.int64) for n in (10, 11))
    found = [chosen(leaves, *batch, losses=losses) for batch in ((), (few,), (many,))]
    assert found == ["gramian", "gramian", "jacobian"]


def test_low_precision_takes_rows():
    params = [torch.empty(shape, dtype=torch.bfloat16) for shape in LARGE]
    assert chosen(params, torch.empty(64, 1024), losses=lambda params, x: x[0]) == "jacobian"


def test_rows_that_take_much_memory_are_not_formed():
    leaf = torch.empty(1 << 20, device="meta")
    names = lambda positions: [
        choose_engine(jd.upgrad().view, m, [leaf], (torch.empty(positions, 1),), PLAIN).engine for m in (7, 8)
    ]
    assert names(200) == ["jacobian", "gramian"]
    assert names(1 << 20) == ["jacobian", "jacobian"], "gradients of layers at all positions take more"


def test_a_nested_batch_has_positions():
    x = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)
    losses = lambda p, x: [sum((y @ p).square().sum() for y in x.unbind()), p.sum()]
    found = jd.weights_fn(losses, jd.upgrad())(torch.ones(3), x).weights
    expected = jd.aggregate(jd.upgrad(), torch.tensor([[36.0] * 3, [1.0] * 3])).weights
    torch.testing.assert_close(found, expected.to(found.dtype))
