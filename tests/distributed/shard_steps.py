"""Steps on shards: those of whole parameters and of the whole batch."""

import itertools
import warnings
from functools import partial

import torch
from shard_models import EXAMPLES, MESHES, MODELS, close, mesh, mine, mlp, placed, rank, same, same_everywhere
from shard_training import (
    OPTIMIZERS,
    RULES,
    STEPS,
    by_part,
    keeps_placements,
    most_pairs,
    none_is_whole,
    some_cases,
    trained,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._pytree import tree_leaves

import functional_jd as fj
from functional_jd import distributed


def check_float32_steps_equal_those_of_whole_parameters():
    optimizers = itertools.cycle(OPTIMIZERS.items())
    for model, rule in most_pairs(MODELS, RULES):
        params, losses, batch = model()
        name, optimizer = next(optimizers)
        how = {"losses": losses, "aggregator": rule(), "optimizer": optimizer()}
        expected, expected_infos = trained(params, batch, how)
        own = placed(params)
        how["losses"] = distributed.sharded(losses, mesh())
        state, infos = trained(own, mine(batch), how)
        assert keeps_placements(state, own)
        assert same_everywhere((state, infos))
        # Directions of size .1 are rounded by 1e-8: a thousandth of the eps of adamw, so of its rate at small entries.
        close(state.params, expected.params, 1e-6 if name == "sgd" else 1e-5)
        close(state[1:], expected[1:], 1e-5)  # of a velocity, a tenth moves the parameters
        close([info.losses for info in infos], [info.losses for info in expected_infos], 1e-6)
        assert all(info.moved for info in infos)


def check_bfloat16_steps_equal_those_of_the_mean_over_the_ranks():
    for (params, losses, batch), rule in some_cases(MODELS, RULES):
        low = fj.autocast(losses, torch.bfloat16)
        how = {"losses": by_part(low), "aggregator": rule, "optimizer": fj.sgd(0.1)}
        expected, _ = trained(params, batch, how)
        how["losses"] = fj.autocast(distributed.sharded(losses, mesh()), torch.bfloat16)  # keeps what is declared
        state, infos = trained(placed(params), mine(batch), how)
        assert same_everywhere((state, infos))
        # The parts' gradients are added in another order, in float32, and rounded to bfloat16 on their way.
        close(state, expected, 2 * STEPS * 0.1 * torch.finfo(torch.bfloat16).eps)


def check_an_overflow_on_one_rank_backs_off_its_own_scale_only():
    """In float16, with a scale per objective, of which the last rank's first loss overflows in the second step."""
    for (params, losses, batch), rule in some_cases(MODELS, RULES, first=1):

        def marked(p, factor, *batch, losses=losses):
            values = torch.cat([leaf.reshape(-1).float() for leaf in tree_leaves(losses(p, *batch))])
            return values * torch.stack([factor.amax(), factor.new_ones(()), factor.new_ones(())])

        half, one = fj.autocast(marked, torch.float16), torch.ones(EXAMPLES)
        large = one.clone()
        large[-1] = 2.0**30  # on the last rank
        how = {"losses": by_part(half), "aggregator": rule, "optimizer": fj.sgd(0.1)}
        own = how | {"losses": distributed.sharded(half, mesh())}
        scale = fj.scale_state(2.0**12, shape=(3,))
        expected = fj.train_state(params, one, *batch, scale=scale, **how)
        state = fj.train_state(placed(params), mine(one), *mine(batch), scale=scale, **own)
        for k in range(STEPS):
            factor, before = large if k == 1 else one, state
            expected, _ = fj.step(expected, factor, *batch, **how)
            state, info = fj.step(state, mine(factor), *mine(batch), **own)
            assert info.finite.tolist() == [k != 1, True, True]
            assert same(state[:4], before[:4]) == (k == 1), "a skipped step changes nothing but the scale"
            assert same_everywhere((state, info))
        assert state.scale.scale.tolist() == [2.0**11, 2.0**12, 2.0**12]
        assert keeps_placements(state, before.params)
        close(state, expected, 2 * STEPS * 0.1 * torch.finfo(torch.float16).eps)


def check_no_rank_holds_a_whole_leaf_after_a_step():
    draw = torch.Generator().manual_seed(0)
    params = {"w": torch.randn(37, 53, generator=draw), "v": torch.randn(4, 37, generator=draw)}
    losses = lambda p, x: (torch.tanh(x @ p["w"].mT) @ p["v"].mT).square().mean(0)
    batch = torch.randn(EXAMPLES, 53, generator=draw)
    how = {"aggregator": fj.upgrad(), "optimizer": fj.adamw(1e-2, eps=1e-5)}
    expected, _ = trained(params, (batch,), how | {"losses": losses}, n=2)
    for mode in ("loop", "vmap"):
        for reshard in (False, True):
            own = {"losses": distributed.sharded(losses, mesh(), reshard), "engine": fj.jacobian_engine(mode)}
            state, infos = trained(placed(params), (mine(batch),), how | own, n=2)
            assert none_is_whole((params, expected))
            close(state, expected, 1e-6)
            assert all(info.moved for info in infos)


def check_multitask_losses_are_gathered_part_by_part():
    draw = torch.Generator().manual_seed(0)
    normal = partial(torch.randn, generator=draw)
    params = {"shared": {"w": normal(5, 7), "b": normal(7)}, "heads": {"one": normal(7), "two": normal(7, 2)}}
    features = lambda p, x: torch.tanh(x @ p["w"] + p["b"])
    heads = lambda p, h, x: {"one": (h @ p["one"]).square().mean(), "two": (h @ p["two"]).square().mean()}
    losses, x = fj.multitask(features, heads), normal(EXAMPLES, 5)
    for rule in (fj.upgrad(), fj.mean()):
        how = {"losses": losses, "aggregator": rule, "optimizer": fj.sgd(0.1)}
        expected, _ = trained(params, (x,), how)
        own = placed(params)
        state, infos = trained(own, (mine(x),), how | {"losses": distributed.sharded(losses, mesh())})
        assert state.params["shared"]["w"].placements == own["shared"]["w"].placements
        assert same_everywhere((state, infos))
        close(state, expected, 1e-6)


def check_buffers_are_averaged_and_others_are_the_first_ranks():
    params, losses, batch = mlp()

    def counting(p, buffers, *batch):
        values = losses(p, *batch)
        mean = {"mean": batch[0].mean(0), "count": buffers["count"] + 1 + rank()}
        return values, mean, batch[1]

    how = {"losses": distributed.sharded(counting, mesh()), "aggregator": fj.upgrad(), "optimizer": fj.sgd(0.1)}
    buffers = {"mean": torch.zeros(5), "count": torch.tensor(0)}
    state = fj.train_state(placed(params), *mine(batch), buffers=buffers, has_aux=True, **how)
    state, info = fj.step(state, *mine(batch), has_aux=True, **how)
    close(state.buffers["mean"], batch[0].mean(0), 4 * torch.finfo(torch.float32).eps)
    assert state.buffers["count"] == 1
    assert torch.equal(info.aux, mine(batch)[1]), "aux is the rank's own"
    assert same_everywhere(state)


def check_losses_that_compute_with_dtensors_themselves():
    """Tensor parallelism: the batch is whole on every rank, and each multiplies with its own columns and rows."""
    params, _, batch = mlp()
    whole_losses = lambda p, x, y: ((torch.tanh(x @ p["w"].mT + p["b"]) @ p["v"].mT - y) ** 2).mean(0)

    def parallel(p, x, y):
        x = DTensor.from_local(x, mesh(), [Replicate()], run_check=False)
        y = DTensor.from_local(y, mesh(), [Replicate()], run_check=False)
        h = torch.tanh(x @ p["w"].mT + p["b"])  # its columns lie on the ranks
        return (((h @ p["v"].mT).redistribute(placements=[Replicate()]) - y) ** 2).mean(0)

    layouts = {"w": Shard(0), "b": Shard(0), "v": Shard(1), "gain": Replicate()}
    own = {name: distribute_tensor(params[name], mesh(), [layouts[name]]) for name in params}
    for rule in (fj.upgrad(), fj.mean()):
        how = {"aggregator": rule, "optimizer": fj.adamw(1e-2, eps=1e-5)}
        expected, _ = trained(params, batch, how | {"losses": whole_losses})
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", fj.SlowPathWarning)
            state, infos = trained(own, batch, how | {"losses": parallel})
        slow = [w for w in told if issubclass(w.category, fj.SlowPathWarning)]
        assert bool(slow) == (rule.view is fj.gramian), "one backward pass takes no slow path"
        assert same_everywhere((state, infos))
        assert {k: leaf.placements[0] for k, leaf in state.params.items()} == layouts
        close(state, expected, 1e-6)


def check_a_mesh_of_two_dimensions():
    draw = torch.Generator().manual_seed(0)
    params = {"w": torch.randn(7, 5, generator=draw), "v": torch.randn(5, 3, generator=draw), "b": torch.ones(3)}
    losses = lambda p, x: (torch.tanh(x @ p["w"]) @ p["v"] + p["b"]).square().mean(0)
    x = torch.randn(EXAMPLES, 7, generator=draw)
    square = MESHES["square"]
    layouts = {"w": [Shard(0), Shard(0)], "v": [Replicate(), Shard(1)], "b": [Shard(0), Replicate()]}
    own = {name: distribute_tensor(params[name], square, layouts[name]) for name in params}
    for rule in (fj.upgrad(), fj.graddrop(fj.random.key(1))):
        how = {"losses": losses, "aggregator": rule, "optimizer": fj.sgd(0.1)}
        expected, _ = trained(params, (x,), how)
        state, infos = trained(own, (mine(x),), how | {"losses": distributed.sharded(losses, square)})
        assert {k: list(leaf.placements) for k, leaf in state.params.items()} == layouts
        assert same_everywhere((state, infos))
        close(state, expected, 1e-6)
