"""Replicas that have come to differ, and replicas with unequal parts of a batch."""

import itertools
from functools import partial

import pytest
import torch
from bounds import check_within, eps
from replica_problems import EACH, all_same, begin, begun, close, mine, plain, problem, step, trained
from torch.distributed import get_rank as rank
from torch.distributed import get_world_size as replicas
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

import functional_jd as fj
from functional_jd import distributed
from functional_jd.torch_compat.graphs import written


def check_a_drifted_replica_is_named_on_all():
    _, batch, how, state = begun(optimizer=fj.adamw(1e-2))
    state, _ = step(state, *batch, **how)
    distributed.check_replicas(state)
    distributed.check_replicas({"none": torch.zeros(0), "nan": torch.tensor(torch.nan), "flag": torch.tensor(True)})
    last = replicas() - 1
    for value, other in ((1.0, 1 + torch.finfo(torch.float64).eps), (0.0, -0.0)):  # one bit
        heads = state.params["heads"]
        heads = heads | {"two": torch.where(torch.tensor(rank() == last), other, torch.full((3, 1), value).double())}
        drifted = state._replace(params=state.params | {"heads": heads})
        with pytest.raises(RuntimeError, match=rf"^check_replicas: .* in params.heads.two \(ranks {last}\)\. Go on fr"):
            distributed.check_replicas(drifted)
    with pytest.raises(ValueError, match="check_replicas: expected a tree with the same names"):
        distributed.check_replicas(torch.ones(1 + rank()))
    with pytest.raises(ValueError, match="check_replicas: expected a call outside of transforms"):
        torch.vmap(lambda x: distributed.check_replicas(x))(torch.ones(2))


def check_what_the_first_replica_gives_has_tangents_and_no_gradients():
    params, batch = problem()
    how = {"losses": plain, "aggregator": fj.mean(), "optimizer": fj.sgd(0.1)}

    def ended(begin, step, batch, rate):
        state = begin(tree_map(lambda p: p * rate, params), *batch, **how)
        return sum((leaf**2).sum() for leaf in tree_leaves(step(state, *batch, **how)[0].params))

    after, expected = partial(ended, begin, step, mine(batch)), partial(ended, fj.train_state, fj.step, batch)
    one = torch.ones((), dtype=torch.float64)
    close(*(torch.func.jvp(f, (one,), (one,))[1] for f in (after, expected)))
    for call in (after, lambda rate: distributed.replicate(rate)):
        with pytest.raises(RuntimeError, match="expected no derivative in reverse mode by values of all ranks"):
            torch.func.grad(call)(one)


def check_more_rows_on_one_replica_are_refused_on_all():
    for rule in (fj.upgrad(), fj.mean()):
        _, batch, how, state = begun(EACH, rule)
        unequal = tree_map(lambda leaf: leaf[rank() == 0 :], batch)  # the first has one example less
        with pytest.raises(ValueError, match=r"step: expected losses with the same .* on this rank: value float64"):
            step(state, *unequal, **how)


def check_other_losses_in_a_later_step_are_refused_on_all():
    """Tasks that each batch has or has not. What is sent for losses has one size, whatever their number."""
    start = ("all", "cost"), 2, torch.float64
    held = list(start)

    def losses(p, *batch):
        names, m, dtype = held
        found = torch.stack([*plain(p, *batch).values()]).repeat(600).to(dtype)[:m]
        return dict(zip(names, found, strict=True)) if m == len(names) else found

    others = [(("all", "time"), 2), (("all", "cost", "time"), 3), ((), 1), ((), 1001), ((), 1200)]
    others = [(*each, torch.float64) for each in others] + [(("all", "cost"), 2, torch.float32)]
    for rule in (fj.upgrad(), fj.mean()):
        held[:] = start
        params, batch, how, state = begun(losses, rule)
        for one, other in [*itertools.product(others, [start]), (others[3], others[4])]:
            held[:] = one if rank() else other
            with pytest.raises(ValueError, match="step: expected losses with the same names, shapes and dtypes on all"):
                step(state, *batch, **how)
        held[:] = others[0] if rank() else start
        found = fj.weights_fn(losses, rule, group=torch.distributed.group.WORLD)
        with pytest.raises(ValueError, match="weights_fn: expected losses with the same names"):
            found(params, *batch, state=state.aggregator)
        for alike in others[:2]:
            held[:] = alike
            assert step(state, *batch, **how)[1].moved, "others than at the start, but the same everywhere"


def check_another_rule_in_a_later_step_is_refused_on_all():
    rules = (fj.upgrad(), fj.mean()), (fj.cagrad(0.4), fj.cagrad(0.5)), (fj.mean(), fj.total())
    for (one, other), losses in itertools.product(rules, (plain, EACH)):
        _, batch, how, state = begun(losses, one)
        with pytest.raises(ValueError, match=r"^step: expected the same rule on all ranks, found different ones"):
            step(state, *batch, **how | {"aggregator": other if rank() else one})
        assert step(state, *batch, **how)[1].moved


def check_the_digest_of_names_leaves_no_trace_in_a_graph():
    for losses, rule in ((plain, fj.mean()), (plain, fj.upgrad()), (EACH, fj.clipped(1.0))):
        _, batch, how, state = begun(losses, rule)
        inputs, structure = tree_flatten((state, *batch))
        take = lambda *leaves: tree_leaves(step(*tree_unflatten(leaves, structure), **how))  # noqa: B023
        close(written(take, inputs)(*inputs), take(*inputs))


def check_unequal_batches_count_by_their_examples():
    params, batch = problem()
    parts = [3] * (replicas() - 1) + [len(batch[0]) - 3 * (replicas() - 1)]
    unequal = tree_map(lambda leaf: leaf.split(parts)[rank()], batch)
    weighted = lambda count: lambda p, *batch: distributed.weighted_by_examples(plain(p, *batch), count(batch[0]))
    for rule, count in ((fj.upgrad(), len), (fj.mean(), lambda x: torch.ones_like(x[:, 0]).sum())):
        how = {"losses": plain, "aggregator": rule, "optimizer": fj.sgd(1e-2)}
        expected, expected_infos = trained(fj.train_state, fj.step, how, None, params, batch)
        how["losses"] = weighted(count)
        state, infos = trained(begin, step, how, None, params, unequal)
        assert all_same((state, infos))
        # Sums over the batch in another order: a weighted mean of means.
        roundings = len(batch[0]) * 8
        close(state.params, expected.params, roundings)
        close([info.losses for info in infos], [info.losses for info in expected_infos], roundings)


def check_counts_of_narrow_dtypes_are_added_up_in_wide_ones():
    one, last = torch.tensor(2.0), rank() == replicas() - 1
    counts = {torch.float16: 40_000, torch.bfloat16: 1000, torch.uint8: 200, torch.int16: 30_000, torch.bool: 1}
    for dtype, count in counts.items():
        found = distributed.weighted_by_examples(one, torch.tensor(count, dtype=dtype))
        close(found, one, 4)
    own = torch.tensor(1000.0 if last else 3.0, dtype=torch.bfloat16)
    total = 3 * (replicas() - 1) + 1000
    close(distributed.weighted_by_examples(one, own), one * replicas() * own.float() / total, 4)


def check_weights_of_batches_compose_with_transforms():
    own, total = 1 + rank(), replicas() * (replicas() + 1) / 2
    f = partial(distributed.weighted_by_examples, examples=own)
    factor = torch.tensor(own * replicas() / total, dtype=torch.float64)
    x = torch.arange(1.0, 4.0, dtype=torch.float64)
    close(f(x), factor * x, 4)
    close(torch.vmap(f)(x), factor * x, 4)
    close(torch.func.grad(lambda x: f(x).square().sum())(x), 2 * factor**2 * x, 4)
    close(torch.func.jvp(f, (x,), (x,))[1], factor * x, 4)
    close(torch.compile(f, fullgraph=True, backend="eager")(x), factor * x, 4)
    counts = torch.arange(2) + own  # under vmap, as many on each rank as the ranks say
    weights = counts * replicas() / (total + torch.arange(2) * replicas())
    found = torch.vmap(lambda n: distributed.weighted_by_examples(x, n))(counts)
    check_within(found, weights.double()[:, None] * x, 4 * eps(torch.float32) * weights[:, None] * x)
    alike = distributed.weighted_by_examples({"a": x, "b": x.bfloat16()}, 5)
    close(alike, {"a": x, "b": x.float()}, 0)  # on equally many, the same values, in at least float32
    for wrong in (1.5, True, torch.ones(2)):
        with pytest.raises(TypeError, match="weighted_by_examples: examples must be an int or a tensor"):
            distributed.weighted_by_examples(x, wrong)


def dropped(p, buffers, x, y, z):
    """Losses of what is left of the inputs, and the mask."""
    now, following = fj.random.split(buffers["key"])
    mask = fj.random.uniform(now, x.shape) < 0.5
    return plain(p, mask * x, y, z), {"key": following}, mask


def check_keyed_losses_draw_what_one_process_would_and_each_replica_its_own():
    params, batch = problem()
    buffers, n = {"key": fj.random.key(7)}, len(batch[0]) // replicas()

    def one(p, buffers, x, y, z):
        losses, _, mask = dropped(p, buffers, x[None], y[None], z[None])
        return sum(losses.values()), buffers, mask

    for rule in (fj.upgrad(), fj.mean()):  # rows, and one backward pass
        how = {"losses": fj.per_example(one), "aggregator": rule, "optimizer": fj.sgd(1e-2), "has_aux": True}
        state = begin(params, *mine(batch), buffers=buffers, **how)
        expected = fj.train_state(params, *batch, buffers=buffers, **how)
        for _ in range(2):
            state, info = step(state, *mine(batch), **how)
            expected, wanted = fj.step(expected, *batch, **how)
            assert torch.equal(info.aux, wanted.aux[rank() * n : rank() * n + n])
            assert all_same(state)
            close(state, expected)
    how |= {"losses": dropped}
    state, key = begin(params, *mine(batch), buffers=buffers, **how), buffers["key"]
    for _ in range(2):
        state, info = step(state, *mine(batch), **how)
        own = fj.random.fold_in(key, rank()) if rank() else key
        assert torch.equal(info.aux, dropped(params, {"key": own}, *mine(batch))[2])
        assert all_same(state)
        assert not all_same(info.aux)
        key = fj.random.split(key)[1]
        assert torch.equal(state.buffers["key"], key)
