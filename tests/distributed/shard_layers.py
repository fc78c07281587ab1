"""Layers with sharded parameters: checkpoints, own functions and transforms that take them, and frozen bases."""

import itertools
import re

import pytest
import torch
from shard_models import EXAMPLES, close, mesh, mine, placed, trained
from torch.autograd import Function
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import functional_jd as fj
from functional_jd import distributed
from functional_jd.distributed.gathering import gathered


def check_checkpoints_take_parameters_as_arguments():
    draw = torch.Generator().manual_seed(0)
    params = {name: torch.randn(6, 6, generator=draw) for name in "ab"} | {"c": torch.randn(6, generator=draw)}
    x = torch.randn(EXAMPLES, 6, generator=draw)

    def layer(w, x, *, shift):
        return torch.tanh(x @ w.mT + shift)

    def losses(p, x):
        for name in "ab":
            x = checkpoint(layer, p[name], x, use_reentrant=False, shift=p["c"])
        return x.square().mean(0)[:3]

    for rule in (fj.upgrad(), fj.mean()):
        how = {"aggregator": rule, "optimizer": fj.sgd(0.1)}
        expected, _ = trained(params, (x,), how | {"losses": losses}, n=2)
        for reshard in (True, False):
            own = distributed.sharded(losses, mesh(), reshard)
            state, _ = trained(placed(params), (mine(x),), how | {"losses": own}, n=2)
            close(state, expected)


def check_a_frozen_base_that_is_sharded_is_gathered_where_it_is_an_argument():
    """Adapters of low rank beside a base that is not trained, as FSDP shards both."""
    draw = torch.Generator().manual_seed(0)
    base = {"layers": [torch.randn(6, 6, generator=draw) for _ in range(2)], "scale": torch.tensor(0.5)}
    params = {name: torch.randn(2, 6, generator=draw) for name in "ab"}
    x = torch.randn(EXAMPLES, 6, generator=draw)

    def losses(p, base, x):
        for w in base["layers"]:
            x = torch.tanh(x @ (w + base["scale"] * p["a"].mT @ p["b"]).mT)
        return x.square().mean(0)[:3]

    of_head = lambda v, h, base: ((h @ base["layers"][1])[:, :2] @ v).square().mean()
    heads = lambda own, h, base, x: {name: of_head(own[name], h, base) for name in "ab"}
    tasks = fj.multitask(lambda shared, base, x: torch.tanh(x @ base["layers"][0] @ shared.mT), heads)
    own = {name: torch.randn(2, generator=draw) for name in "ab"}
    split = {"shared": torch.randn(6, 6, generator=draw), "heads": own}
    sharded_base = {"layers": list(placed(dict(enumerate(base["layers"]))).values()), "scale": base["scale"]}
    for (f, start), rule in itertools.product(((losses, params), (tasks, split)), (fj.upgrad(), fj.mean())):
        how = {"aggregator": rule, "optimizer": fj.sgd(0.1)}
        expected, _ = trained(start, (base, x), how | {"losses": f}, n=2)
        for reshard in (True, False):
            own = distributed.sharded(f, mesh(), reshard)
            state, _ = trained(placed(start), (sharded_base, mine(x)), how | {"losses": own}, n=2)
            close(state, expected)
    captured = distributed.sharded(lambda p, x: losses(p, sharded_base, x), mesh())
    with pytest.raises(ValueError, match=r"train_state: expected sharded.* take every DTensor as an argument"):
        fj.train_state(placed(params), mine(x), losses=captured, **how)
    for group, state in itertools.product((None, False), (None, ())):
        with pytest.raises(ValueError, match=r"^weights_fn: expected sharded.* take every DTensor as an argument"):
            fj.weights_fn(captured, fj.upgrad(), group=group)(placed(params), mine(x), state=state)


def check_gathered_leaves_have_the_bits_and_the_memory_of_whole_ones():
    """Every rank has the same batch, so that the means are exact: any other order of sums would show."""
    draw = torch.Generator().manual_seed(0)
    params = {"w": torch.randn(37, 53, generator=draw), "k": torch.randn(6, 5, 3, 3, generator=draw)}
    x, image = torch.randn(11, 53, generator=draw), torch.randn(2, 5, 8, 8, generator=draw)

    def losses(p, x, image):
        by_view = p["k"].view(6, -1).square().sum(1)[:3]
        outputs = torch.nn.functional.conv2d(image, p["k"]).mean((0, 2, 3))
        return torch.cat([(x @ p["w"].mT).square().mean(0)[:30], by_view, outputs, p["w"].view(-1).softmax(0)[:2]])

    expected = losses(params, x, image)
    for dim, reshard in itertools.product((0, 1, -1), (True, False)):
        own = {name: distribute_tensor(p, mesh(), [Shard(dim % p.ndim)]) for name, p in params.items()}
        assert torch.equal(distributed.sharded(losses, mesh(), reshard)(own, x, image), expected)
        _, found = fj.jacobian_fn(distributed.sharded(losses, mesh(), reshard))(own, x, image)
        assert torch.equal(found, expected)
        for name, leaf in own.items():
            whole = gathered(leaf.to_local(), leaf, mesh())
            assert whole.is_contiguous()
            assert torch.equal(whole, params[name])


class Rounded(Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx, w):
        return (4 * w).round() / 4

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent


class Product(Function):
    """`x w`, with a backward pass of its own."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, cotangent):
        x, w = ctx.saved_tensors
        return cotangent @ w.mT, x.mT @ cotangent


def spread(p, x):
    """Views whose sizes and strides do not say all: complex ones, and those with a sign or a conjugate to come."""
    w = torch.view_as_complex(p["w"].reshape(3, 3, 2))
    h = (x[:, :3] + 0j) @ w @ w.mH
    return (h * w.conj().imag.sum(0) * w.imag[1]).real.square().mean(0)


def check_functions_and_views_of_a_parameter_give_its_rows():
    draw = torch.Generator().manual_seed(0)
    params = {"w": torch.randn(3, 6, generator=draw).double(), "b": torch.randn(6, generator=draw).double()}
    x = torch.randn(EXAMPLES, 3, generator=draw).double()
    for losses in (
        lambda p, x: (x @ Rounded.apply(p["w"]) + p["b"]).square().mean(0)[:3],
        lambda p, x: (Product.apply(x, p["w"]) * p["b"]).square().mean(0)[:3],
        lambda p, x: (Product.apply(x, p["w"]) @ Rounded.apply(p["w"]).mT).square().mean(0) + p["w"].square().mean(1),
        spread,
    ):
        for mode in ("loop", "vmap"):
            expected, values = fj.jacobian_fn(losses, mode="loop")(params, x)
            for reshard in (True, False):
                own = distributed.sharded(losses, mesh(), reshard)
                found, means = fj.jacobian_fn(own, mode=mode)(placed(params, [Shard(0)]), mine(x))
                close((found, means), (expected, values))


def check_what_no_function_gathers_is_refused_in_one_sentence():
    draw = torch.Generator().manual_seed(0)
    params = {"w": torch.randn(3, 6, generator=draw), "b": torch.randn(6, generator=draw)}
    x = torch.randn(EXAMPLES, 3, generator=draw)

    def penalty(p, x):
        value = (x @ p["w"] + p["b"]).square().mean()
        (slope,) = torch.autograd.grad(value, [p["w"]], create_graph=True, allow_unused=True, materialize_grads=True)
        return torch.stack([value, slope[0, 0]])

    slopes = torch.func.grad(lambda w, x: (x @ w).tanh().mean())
    for losses, words in (
        (lambda p, x: torch.vmap(lambda w: (x @ w).square().mean(), in_dims=1)(p["w"]) + p["b"], "torch.vmap"),
        (penalty, "a derivative by a parameter"),
        (lambda p, x: slopes(p["w"], x).sum(1) + p["b"][:3], "a transform of torch.func"),
    ):
        how = {"aggregator": fj.upgrad(), "optimizer": fj.sgd(0.1)}
        with pytest.raises(ValueError, match=rf"sharded: .*{re.escape(words)}.*reshard=False"):
            fj.train_state(placed(params), mine(x), losses=distributed.sharded(losses, mesh()), **how)
        kept = distributed.sharded(losses, mesh(), reshard=False)
        state = fj.train_state(placed(params), mine(x), losses=kept, **how)
        after, info = fj.step(state, mine(x), losses=kept, **how)
        assert info.moved
        assert not torch.equal(after.params["w"].full_tensor(), params["w"])
