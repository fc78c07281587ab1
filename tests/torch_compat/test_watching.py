"""What is changed in place: seen, and put back. Mostly no mode sees the ops of the losses."""

import pytest
import torch
from torch import nn
from torch.overrides import has_torch_function
from two_tasks import two_tasks

import functional_jd as jd
from functional_jd.torch_compat.watching import StateJournal, Watch

CHANGES = {
    "method": lambda b, x: b.add_(x),
    "operator": lambda b, x: b.__iadd__(x),
    "item": lambda b, x: b.__setitem__(0, 7.0),
    "out": lambda b, x: torch.add(b, x, out=b),
    "out_of_two": lambda b, x: torch.frexp(x, out=(b, torch.empty(3, dtype=torch.int32))),
    "copy": lambda b, x: b.copy_(x),
    "batch_norm": lambda b, x: nn.functional.batch_norm(
        x.expand(4, 3) * torch.arange(4)[:, None], b, b.clone(), training=True
    ),
    "batch_norm_of_torch": lambda b, x: torch.batch_norm(
        x.expand(4, 3) * torch.arange(4)[:, None], None, None, b, b.clone(), True, 0.1, 1e-5, False
    ),
    "embedding": lambda b, x: nn.functional.embedding(
        torch.tensor([0]), b[:, None].expand(3, 1).contiguous(), max_norm=1e-3
    ),
    "dropout": lambda b, x: nn.functional.dropout(b, 0.5, training=True, inplace=True),
    "init": lambda b, x: nn.init.ones_(b),
    "data": lambda b, x: setattr(b, "data", b.data + x),
    "through data": lambda b, x: b.data.mul_(2),
    "data, and then the new": lambda b, x: (setattr(b, "data", x), b.add_(1)),
    "several": lambda b, x: torch._foreach_mul_([b, x], 2.0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_changed_in_place_is_put_back(name):
    buffer, x = torch.tensor([1.0, 2.0, 3.0]), torch.ones(3)
    journal = StateJournal()
    with Watch(journal):
        CHANGES[name](buffer, x)
    if name != "embedding":  # changes a copy
        assert not torch.equal(buffer, torch.tensor([1.0, 2.0, 3.0]))
    journal.undo()
    assert torch.equal(buffer, torch.tensor([1.0, 2.0, 3.0]))


LEFT_ALONE = {
    "embedding": lambda w, x: nn.functional.embedding(x, w),
    "embedding_bag": lambda w, x: nn.functional.embedding_bag(x[None], w),
    "batch_norm": lambda w, x: nn.functional.batch_norm(torch.ones(2, 2), w[0], w[1]),
    "batch_norm by name": lambda w, x: nn.functional.batch_norm(torch.ones(2, 2), w[0], w[1], training=False),
    "instance_norm": lambda w, x: nn.functional.instance_norm(torch.ones(1, 2, 3), w[0], w[1], use_input_stats=False),
    "requires_grad": lambda w, x: w.requires_grad_(),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_what_an_op_does_not_change_is_not_written_to(name):
    w, journal = torch.ones(3, 2), StateJournal()
    version = w._version
    with Watch(journal):
        LEFT_ALONE[name](w, torch.tensor([0, 2]))
    journal.undo()
    assert w._version == version, "a graph that has kept the tensor would refuse its backward pass"


@pytest.mark.parametrize("lookup", [nn.functional.embedding, nn.functional.embedding_bag])
@pytest.mark.parametrize("largest", [0.5, 0.0])
def test_rows_that_a_lookup_shortens_are_put_back(lookup, largest):
    w, journal = torch.ones(3, 2), StateJournal()
    with Watch(journal):
        lookup(torch.tensor([[0, 2]]), w, max_norm=largest)
    assert not torch.equal(w, torch.ones(3, 2))
    journal.undo()
    assert torch.equal(w, torch.ones(3, 2))


def test_a_generator_of_ones_own_is_put_back():
    journal, own = StateJournal(), torch.Generator().manual_seed(0)
    with Watch(journal):
        first = torch.rand(2, generator=own)
    journal.undo(again=True)
    assert torch.equal(torch.rand(2, generator=own), first)
    journal.undo()
    assert torch.equal(torch.rand(2, generator=own), first)


def test_what_the_graph_made_is_not_copied():
    journal, w = StateJournal(), torch.ones(3, requires_grad=True)
    with Watch(journal):
        torch.relu_(w * 2).add_(1)
    assert not journal.before


@pytest.mark.parametrize("rule", [jd.mean, jd.upgrad])
@pytest.mark.parametrize("kind", ["plain", "multitask"])
def test_no_mode_sees_the_ops_of_an_eager_step(kind, rule):
    seen, (params, features, top, batch) = [], two_tasks()
    noting = lambda f: lambda *args: seen.append(has_torch_function(batch)) or f(*args)
    whole = noting(lambda p, *batch: top(p["heads"], features(p["shared"], *batch), *batch))
    losses = whole if kind == "plain" else jd.multitask(noting(features), noting(top))
    method = {"losses": losses, "aggregator": rule(), "optimizer": jd.sgd(0.1)}
    state = jd.train_state(params, *batch, **method)
    for engine in ("auto", "jacobian", *(["weighted"] if rule is jd.mean else [])):
        seen.clear()
        state, info = jd.step(state, *batch, engine=engine, **method)
        assert info.moved
        assert seen
        assert set(seen) == {False}


def test_select_scatter_in_a_vmap_inside_the_losses_raises_at_the_start():
    losses = lambda p, c: torch.vmap(lambda c: torch.select_scatter(c * p["x"], c * p["y"], 1, -2).sum())(c)
    params = {"x": torch.ones(3, 3), "y": torch.ones(3)}
    with pytest.raises(RuntimeError, match=r"derivatives of select_scatter under torch.vmap. Take torch.slice_scatter"):
        jd.train_state(params, torch.ones(2), losses=losses, aggregator=jd.mean(), optimizer=jd.sgd(0.1))


@pytest.mark.filterwarnings("ignore::functional_jd.SlowPathWarning")
@pytest.mark.parametrize("rule", [jd.mean(), jd.upgrad()], ids=["mean", "upgrad"])
@pytest.mark.parametrize("engine", ["auto", "jacobian", "gramian"])
@pytest.mark.parametrize("fast", [True, False], ids=["vmap", "falls back"])
def test_all_examples_of_a_batch_are_put_back(engine, rule, fast):
    """What vmap shows of a batch is one example. A fallback from the inner products finds the batch as it was."""
    if rule.view.products == "none" and (engine == "gramian" or not fast):
        pytest.skip("needs no products, or changes what autograd keeps")

    def of_others(params, x):
        y = (2 * x * params).square().sum()
        return y if fast else y + y.detach().clone().item() * 0

    def in_place(params, x):
        return of_others(params, x.mul_(3))

    def stepped(loss, x):
        how = {"losses": jd.per_example(loss), "aggregator": rule, "optimizer": jd.sgd(0.1), "engine": engine}
        state = jd.train_state(torch.ones(2), x, **how)
        torch.testing.assert_close(x, start)
        return jd.step(state, x, **how)

    start = torch.arange(1.0, 7.0).view(3, 2)
    changed = start.clone()
    found, expected = stepped(in_place, changed), stepped(lambda params, x: of_others(params, x * 3), start)
    torch.testing.assert_close(changed, 3 * start)
    torch.testing.assert_close((found[0].params, found[1].losses), (expected[0].params, expected[1].losses))
