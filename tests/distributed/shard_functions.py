"""Each function of a step on `DTensor`s, against itself on whole tensors."""

from functools import partial

import pytest
import torch
from shard_models import all_same, close, mesh, mine, mlp, placed, ranks
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import functional_jd as fj
from functional_jd import distributed
from functional_jd.core.sharding import over_mesh
from functional_jd.distributed.gathering import gathered


def check_the_functions_of_a_step_by_hand():
    """Each on DTensors, against itself on whole tensors, with a mixed tree: sharded, replicated and plain leaves."""
    draw = torch.Generator().manual_seed(0)
    shapes = {"a": (3, 5, 4), "b": (3, 4, 5), "c": (3, 2), "d": (3,)}
    rows = {name: torch.randn(s, generator=draw) for name, s in shapes.items()}
    layouts = {"a": Shard(1), "b": Shard(2), "c": Replicate()}

    def spread(tree, less=0):
        own = {name: Shard(p.dim - less) if p.is_shard() else p for name, p in layouts.items()}
        return tree | {name: distribute_tensor(tree[name], mesh(), [p]) for name, p in own.items()}

    J = spread(rows)
    eps = torch.finfo(torch.float32).eps
    close(fj.views.gramian(J), fj.views.gramian(rows), 16 * eps)
    close(fj.views.norms(J), fj.views.norms(rows))
    by_entry = (fj.trimmed_mean(1), fj.graddrop(fj.random.key(1)))
    for rule in (fj.upgrad(), fj.mean(), fj.clipped(2.0), fj.natural_gradient(0.1), *by_entry):
        found, expected = (fj.aggregate(rule, tree, losses=torch.tensor([1.0, -2.0, 3.0])) for tree in (J, rows))
        close(found.direction, expected.direction, 16 * eps)
        close(found.weights, expected.weights, 2**10 * torch.finfo(torch.float64).eps)
        assert {k: found.direction[k].placements[0] for k in "ab"} == {"a": Shard(0), "b": Shard(1)}
    with pytest.raises(ValueError, match="this rule needs whole rows, found rows that are sharded"):
        fj.aggregate(fj.excess_mtl(), J)
    losses = distributed.sharded(lambda p: torch.stack([p["a"].sum(), p["a"].square().sum()]), mesh())
    how = {"losses": losses, "optimizer": fj.sgd(0.1)}
    sharded = {"a": distribute_tensor(torch.ones(4, 3), mesh(), [Shard(0)])}
    with pytest.raises(ValueError, match=r"^train_state: this rule needs whole rows, found rows that are sharded"):
        fj.train_state(sharded, aggregator=fj.excess_mtl(), **how)
    state = fj.train_state(sharded, aggregator=fj.upgrad(), **how)
    with pytest.raises(ValueError, match=r"^step: this rule needs whole rows, found rows that are sharded"):
        fj.step(state, aggregator=fj.excess_mtl(), **how)
    scale = torch.tensor([2.0, 4.0, 8.0])
    scaled = fj.precision.scale(scale, J)
    close(scaled, fj.precision.scale(scale, rows), 0)
    back, finite = fj.unscale(scale, scaled)
    close(back, rows, 0)
    assert finite.all()
    assert back["a"].placements == J["a"].placements
    bad = {k: leaf.clone() for k, leaf in rows.items()}
    bad["a"][1, 0, 0] = torch.inf  # on the first rank only
    back, finite = fj.unscale(scale, spread(bad))
    assert finite.tolist() == [True, False, True]
    close(back, fj.unscale(scale, bad)[0], 0)

    direction = {k: leaf[0] for k, leaf in rows.items()}
    d = spread(direction, less=1)
    params = {k: leaf[1] for k, leaf in rows.items()}
    p = spread(params, less=1)
    for power in (1.0, 2.0, 3.0, torch.inf):
        close(fj.optimizers.global_norm(d, power), fj.optimizers.global_norm(direction, power), 16 * eps)
        assert all_same(fj.optimizers.global_norm(d, power))
        for bound in (0.1, torch.tensor(0.5)):
            clipped = (fj.optimizers.clip_by_norm(tree, bound, power) for tree in (d, direction))
            close(*clipped, 16 * eps)
    for taken in (True, False):
        chosen = fj.precision.select(torch.tensor(taken), d, p)
        close(chosen, direction if taken else params, 0)
        assert chosen["a"].placements == d["a"].placements
    for optimizer in (
        *(fj.sgd(0.1, momentum=0.9, nesterov=True, weight_decay=0.1), fj.sgd(lambda k: 0.1 / (k + 1)), fj.adamw(1e-2)),
        *(fj.from_torch(cls, lr=1e-2) for cls in (torch.optim.AdamW, torch.optim.RMSprop)),
        fj.noised(fj.sgd(0.1), fj.random.key(2), 1.0, 0.5, 4.0),
        fj.by_label({"x": fj.sgd(0.1), "y": fj.adamw(0.1)}, lambda name, _: "x" if name == "a" else "y"),
    ):
        found, expected = (p, optimizer.init(p)), (params, optimizer.init(params))
        for _ in range(2):
            found, expected = optimizer.update(d, found[1], found[0]), optimizer.update(direction, *expected[::-1])
        close(found[0], expected[0], 4 * eps)
        assert {k: found[0][k].placements[0] for k in "ab"} == {"a": Shard(0), "b": Shard(1)}
    with pytest.raises(ValueError, match=r"from_torch: cls must be a class that updates every entry.*Adafactor"):
        fj.from_torch(torch.optim.Adafactor).init(p)
    other = d | {"a": distribute_tensor(direction["a"], mesh(), [Replicate()])}
    with pytest.raises(ValueError, match=r"sgd: expected a direction that is sharded as the parameters are.*'a'"):
        fj.sgd(0.1).update(other, fj.sgd(0.1).init(p), p)
    with pytest.raises(TypeError, match=r"select: .*placed"):
        fj.precision.select(torch.tensor(True), other, p)
    weights = torch.tensor([0.5, 0.25, 0.25])
    for own, whole in ((None, None), (weights, weights), (d, direction)):
        close(fj.diagnostics.diagnose(J, own), fj.diagnostics.diagnose(rows, whole))
    kept = fj.to_checkpoint(p)
    assert kept["a"].placements == p["a"].placements
    close(fj.from_checkpoint(kept, like=d), params, 0)


def check_gathering_composes_with_transforms():
    """The gradient of what all ranks compute alike, with respect to a shard: the sum over the ranks, scattered."""
    draw = torch.Generator().manual_seed(0)
    full = torch.randn(5, 3, generator=draw, dtype=torch.float64)
    cotangents = torch.randn(2, 5, 3, generator=draw, dtype=torch.float64)
    for placement in (Shard(0), Shard(1), Replicate()):
        like = distribute_tensor(full, mesh(), [placement])
        shard = like.to_local()
        f = partial(gathered, like=like, mesh=mesh())
        assert torch.equal(f(shard), full)
        summed = [distribute_tensor(c * ranks(), mesh(), [placement]).to_local() for c in cotangents]
        _, pull = torch.func.vjp(f, shard)
        torch.testing.assert_close(torch.stack([pull(c)[0] for c in cotangents]), torch.stack(summed))
        torch.testing.assert_close(torch.vmap(pull)(cotangents)[0], torch.stack(summed))
        _, tangent = torch.func.jvp(f, (shard,), (2 * shard,))
        assert torch.equal(tangent, 2 * full)
        point = shard.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(f(point), point, cotangents[0])
        torch.testing.assert_close(gradient, summed[0])
        assert torch.equal(torch.vmap(f)(torch.stack([shard, -shard])), torch.stack([full, -full]))
    with pytest.raises(RuntimeError, match="no derivative by the largest entry of all ranks"):
        torch.func.jvp(lambda x: over_mesh("most", x, mesh()), (full,), (full,))


def check_large_rows_are_scattered_one_by_one():
    """Rows of more than 2^20 elements, whichever dimension is theirs."""
    numbers = torch.arange(1025.0 * 1024) % 251
    for placement in (Shard(0), Shard(1)):
        like = distribute_tensor(numbers.reshape(1025, 1024), mesh(), [placement])
        _, pull = torch.func.vjp(partial(gathered, like=like, mesh=mesh()), like.to_local())
        cotangents = torch.stack([like.full_tensor(), -like.full_tensor()])
        expected = ranks() * torch.stack([like.to_local(), -like.to_local()])
        assert torch.equal(torch.vmap(pull)(cotangents)[0], expected)
        assert torch.equal(torch.vmap(pull, in_dims=2, out_dims=2)(cotangents.movedim(0, 2))[0].movedim(2, 0), expected)


def check_partial_leaves_and_other_meshes_are_refused_in_one_sentence():
    params, losses, batch = mlp()
    own, over = placed(params), distributed.sharded(losses, mesh())
    partial_leaf = own | {"w": DTensor.from_local(params["w"], mesh(), [Partial()])}
    for f in (fj.jacobian_fn(over), fj.weighted_fn(losses), fj.gramian_fn(losses)):
        with pytest.raises(ValueError, match=r"_fn: expected DTensors with the placements Shard and Replicate, .*'w'"):
            f(partial_leaf, *mine(batch))
    how = {"losses": over, "aggregator": fj.upgrad(), "optimizer": fj.sgd(0.1)}
    searching = how | {"optimizer": fj.line_search(fj.sgd(1.0), [0.1, 0.2])}
    state = fj.train_state(own, *mine(batch), **searching)
    replicated = how | {"losses": losses, "engine": distributed.replicated()}
    examples, mapped = distributed.sharded(fj.per_example(losses), mesh()), fj.jacobian_fn(losses, mode="vmap")
    for call, kind, words in (
        (partial(fj.train_state, partial_leaf, **how), ValueError, "train_state: .* DTensors with the placements"),
        (partial(fj.jacobian_fn(examples), own), ValueError, r"jacobian_fn: .*found per_example losses"),
        (partial(fj.step, state, **searching), ValueError, r"step: .* not compare losses .*parameters are sharded"),
        (partial(mapped, own), ValueError, r"jacobian_fn: mode must be .* for sharded parameters"),
        (partial(fj.train_state, own, **replicated), ValueError, "tensors must be whole on every replica"),
        (lambda *_: distributed.sharded(losses, "cpu"), TypeError, "sharded: mesh must be a DeviceMesh, found str"),
        (lambda *_: distributed.sharded({}, mesh()), TypeError, "sharded: losses must be a function, found dict"),
    ):
        with pytest.raises(kind, match=words):
            call(*mine(batch))
