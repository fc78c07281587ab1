"""Ranks that do different things with shards: all of them are told so, and go on."""

import itertools
from functools import partial

import pytest
import torch
import torch.distributed as dist
from bounds import eps
from modes import Called
from shard_models import EXAMPLES, close, mesh, mine, mlp, placed, rank, ranks, whole
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._pytree import tree_map

import functional_jd as fj
from functional_jd import distributed


def equal_leaves(names="abcd"):
    draw = torch.Generator().manual_seed(0)
    params = {name: torch.randn(6, 6, generator=draw) for name in "abc"} | {"d": torch.randn(3, 6, generator=draw)}
    own = {name: distribute_tensor(params[name], mesh(), [Shard(0)]) for name in names}
    return own, mine(torch.randn(EXAMPLES, 6, generator=draw))


def all_of(x):
    """The whole batch, of which this is a rank's part."""
    held = [None] * ranks()
    dist.all_gather_object(held, x)
    return torch.cat(held)


def used(*names):
    """Losses that use these leaves, in this order."""

    def losses(p, x):
        for name in names:
            x = torch.tanh(x @ p[name].mT)
        return x.square().mean(0)[:3]

    return losses


def check_ranks_that_use_leaves_differently_are_told_so_when_training_starts():
    own, x = equal_leaves()
    last = rank() == ranks() - 1
    with pytest.raises(ValueError, match=r"^weights_fn: expected the same leaves, used .*gathers '[ab]', number 1\. "):
        fj.weights_fn(distributed.sharded(used(*("ab" if last else "ba")), mesh()), fj.upgrad())(own, x)
    unreached = lambda p, x: used("a", "b")(p, x) + (p["c"].detach() if last else p["c"]).sum()
    cases = [
        (used("a", "b") if last else used("b", "a"), r"gathers '[ab]', number 1\. "),
        (used("a", "b") if last else used("a", "c"), r"gathers '[bc]', number 2\. "),
        (used("a", "d") if last else used("a", "b"), r"gathers '[bd]', number 2\. "),
        (used("a", "b") if last else used("a"), r"on this rank: (value float32 \[3\]|gathers 'b', number 2)\. "),
        (unreached, r"on this rank: uses all leaves but ('c', )?'d'\. "),
        (lambda p, x: {"one" if last else "two": used("a")(p, x)}, r"on this rank: (one|two) float32 \[3\]\. "),
        (lambda p, x: used("a")(p, x)[: 2 if last else 3], r"value float32 \[[23]\]\. "),
    ]
    for rule, mode, (losses, words) in itertools.product((fj.upgrad(), fj.mean()), (True, False), cases):
        how = {"losses": distributed.sharded(losses, mesh(), mode), "aggregator": rule, "optimizer": fj.sgd(0.1)}
        if not mode and "gathers" in words:  # each leaf is gathered once, in the order of the parameters
            continue
        with pytest.raises(ValueError, match=f"^train_state: expected the same leaves, used in .*{words}Let all"):
            fj.train_state(own, x, **how)


def check_a_warm_step_that_mixes_leaves_is_refused_on_all_ranks():
    own, x = equal_leaves("ab")
    orders = [("a", "b"), ("b", "a")]
    how = {"aggregator": fj.upgrad(), "optimizer": fj.sgd(0.1)}
    state = fj.train_state(own, x, losses=distributed.sharded(used("a", "b"), mesh()), **how)
    for alike in orders:  # all ranks in another order than at the start: right
        fj.step(state, x, losses=distributed.sharded(used(*alike), mesh()), **how)
    mixed = used(*orders[rank() == 0])
    with pytest.raises(ValueError, match=r"step: expected the same leaves, used in the same order.*this rank: [ab], "):
        fj.step(state, x, losses=distributed.sharded(mixed, mesh()), **how)


def check_other_losses_in_a_later_step_are_refused_on_all_ranks():
    """What is sent for them has one size: messages of others would end the processes."""
    (own, x), last = equal_leaves("ab"), rank() == ranks() - 1
    start = ["all"], 3, torch.float32
    held = list(start)

    def losses(p, x):
        names, m, dtype = held
        found = used("a", "b")(p, x).to(dtype).repeat(500)[:m]
        return dict.fromkeys(names, found)

    sizes = [(4, 3), (2, 3), (1, 1200), (1200, 1001), (1000, 1001), (0, 3)]
    cases = [[(["all"] if m else [], m, torch.float32) for m in pair] for pair in sizes]
    cases += [[(["all"], 3, torch.float64), start], [(["time"], 3, torch.float32), start]]
    for rule, reshard in ((fj.upgrad(), True), (fj.upgrad(), False), (fj.mean(), True), (fj.geometric_mean(), True)):
        how = {"losses": distributed.sharded(losses, mesh(), reshard), "aggregator": rule, "optimizer": fj.sgd(0.1)}
        held[:] = start
        state = fj.train_state(own, x, **how)
        for one, other in cases:
            held[:] = one if last else other
            words = r"step: expected the same leaves, .*, and the same losses on all ranks, found .*on this rank: a, b"
            with pytest.raises(ValueError, match=words):
                fj.step(state, x, **how)
        for alike in ((["all"], 2, torch.float32), (["time"], 3, torch.float32)):  # others than at the start
            held[:] = alike
            assert fj.step(state, x, **how)[1].moved


def check_another_rule_in_a_later_step_is_refused_on_all_ranks():
    (own, x), last = equal_leaves("ab"), rank() == ranks() - 1
    preferences = [torch.tensor([1.0, 2.0, number]) for number in (3.0, 4.0)]
    rules = [(fj.upgrad, fj.mean), (fj.upgrad, fj.mgda), (fj.mean, fj.total)]
    rules.append((partial(fj.cagrad, 0.4), partial(fj.cagrad, 0.5)))
    rules += [tuple(partial(rule, weights) for weights in preferences) for rule in (fj.upgrad, fj.constant)]
    for one, other in rules:
        how = {"losses": distributed.sharded(used("a", "b"), mesh()), "optimizer": fj.sgd(0.1)}
        state = fj.train_state(own, x, aggregator=one(), **how)
        assert fj.step(state, x, aggregator=one(), **how)[1].moved, "the same, built anew"
        rule = other() if last else one()
        with pytest.raises(ValueError, match=r"^step: expected the same rule on all ranks, found .* this rank: \['Ag"):
            fj.step(state, x, aggregator=rule, **how)
        with pytest.raises(ValueError, match=r"^weights_fn: expected the same rule on all ranks"):
            fj.weights_fn(how["losses"], rule)(own, x, state=state.aggregator)
    key = fj.random.key(int(last))  # what is drawn with is in the state
    state = fj.train_state(own, x, aggregator=fj.random_weights(fj.random.key(0)), **how)
    assert fj.step(state, x, aggregator=fj.random_weights(key), **how)[1].moved


def check_many_losses_take_a_second_message():
    own, x = tree_map(torch.Tensor.double, equal_leaves("ab"))
    params, batch = whole(own), all_of(x)
    for m in (999, 1000, 1001, 1500):
        factors = torch.arange(1, m + 1)
        losses = lambda p, x: used("a", "b")(p, x).repeat(500)[:m] * factors  # noqa: B023
        found = fj.jacobian_fn(distributed.sharded(losses, mesh()))(own, x)
        expected = fj.jacobian_fn(losses)(params, batch)
        close(found, expected, 2**8 * m * eps())  # of terms that are at most m times those of the first loss


def check_other_starts_of_shards_are_refused_on_all_ranks():
    params, losses, batch = mlp()
    own, last = placed(params), rank() == ranks() - 1
    key = fj.random.key(int(last))
    how = {"losses": distributed.sharded(losses, mesh()), "aggregator": fj.upgrad(), "optimizer": fj.sgd(0.1)}
    buffered = distributed.sharded(lambda p, b, *batch: (losses(p, *batch), b), mesh())
    rules = fj.upgrad() if last else fj.mgda(), fj.constant([1.0, 1.0, 2.0 if last else 1.0]), fj.random_weights(key)
    other = [
        *(("rule", {"aggregator": rule}) for rule in (*rules, fj.cagrad(0.5 if last else 0.4))),
        ("optimizer", {"optimizer": fj.sgd(0.1 if last else 0.2)}),
        ("scale", {"scale": fj.scale_state(2.0**10 if last else 2.0**11)}),
        ("scale", {"scale": fj.scale_state(shape=(3,) if last else ())}),
        ("buffers", {"losses": buffered, "buffers": {"key": key}}),
        ("buffers", {"losses": buffered, "buffers": {"mean": torch.full((2,), float(last))}}),
    ]
    for name, changed in other:
        with pytest.raises(ValueError, match=f"^train_state: expected the same {name} on all ranks, found different"):
            fj.train_state(own, *mine(batch), **how | changed)
    plain = own | {"gain": torch.tensor(1.0 + last)}
    with pytest.raises(ValueError, match=r"train_state: expected the same parameters on all ranks.*gain float32 \[\]"):
        fj.train_state(plain, *mine(batch), **how)
    close(fj.train_state(own, *mine(batch), **how).params, params, 0)


def check_weights_of_other_rules_and_keys_are_refused_on_all_ranks():
    params, losses, batch = mlp()
    own, last, losses = placed(params), rank() == ranks() - 1, distributed.sharded(losses, mesh())
    key = fj.random.key(int(last))
    refused = "expected the same {} on all ranks, found different"
    for rule in (fj.random_weights(key), fj.pcgrad(key), fj.upgrad() if last else fj.mgda()):
        with pytest.raises(ValueError, match=f"^weights_fn: {refused.format('rule')}"):
            fj.weights_fn(losses, rule)(own, *mine(batch))
    plain = own | {"gain": torch.tensor(1.0 + last)}
    with pytest.raises(ValueError, match=f"^weights_fn: {refused.format('parameters')}"):
        fj.weights_fn(losses, fj.upgrad())(plain, *mine(batch))
    # A user's own rule is known by its name only: what it draws with is seen in its state.
    mean = fj.mean()
    rule = mean._replace(init=lambda seen: {"key": key}, update=lambda seen, state: (mean.update(seen, ())[0], state))
    with pytest.raises(ValueError, match=f"^weights_fn: {refused.format('keys')}"):
        fj.weights_fn(losses, rule)(own, *mine(batch))
    scale, how = fj.scale_state(2.0 ** int(last)), {"params": own, "aggregator": fj.upgrad()}
    for more, what in (({"scale": scale}, "scale"), ({"aggregator": rule}, "keys"), ({"params": plain}, "parameters")):
        with pytest.raises(ValueError, match=f"^accumulate: {refused.format(what)}"):
            fj.accumulate(losses, [mine(batch)], **how | more)
    with pytest.raises(ValueError, match=f"^weights_fn: {refused.format('scale')}"):
        fj.weights_fn(losses, fj.upgrad())(own, *mine(batch), scale=scale)
    with pytest.raises(ValueError, match=f"^train_state: {refused.format('keys')}"):
        fj.train_state(own, *mine(batch), losses=losses, aggregator=rule, optimizer=fj.sgd(0.1))


def check_digests_add_no_collective_to_a_warm_step():
    """Two layers and two losses: gathers there and back, a scatter a row and a leaf; losses, Gramian and flags."""
    own, x = equal_leaves("ab")
    named = lambda p, x: dict(zip(("one", "two"), used("a", "b")(p, x)[:2], strict=True))
    how = {"losses": distributed.sharded(named, mesh()), "optimizer": fj.adamw(0.1)}
    kinds = "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"
    for rule, expected in ((fj.upgrad(), (4, 4, 3)), (fj.mean(), (3, 2, 2))):
        state = fj.train_state(own, x, aggregator=rule, **how)
        state, _ = fj.step(state, x, aggregator=rule, **how)
        with Called() as called:
            fj.step(state, x, aggregator=rule, **how)
        assert tuple(called.names[kind] for kind in kinds) == expected
        assert {name for name in called.names if hasattr(torch.ops._c10d_functional, name)} == {*kinds, "wait_tensor"}
