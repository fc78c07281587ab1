"""BatchNorm of a single example is refused wherever examples are evaluated; a batch inside an example is taken."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call

import functional_jd as fj

LAYERS = {
    "1d": (lambda: nn.BatchNorm1d(4), (4,)),
    "2d": (lambda: nn.BatchNorm2d(2), (2, 3, 3)),
    "without_statistics_in_eval": (lambda: nn.BatchNorm2d(2, track_running_stats=False).eval(), (2, 3, 3)),
}


def problem(layer, shape):
    """The loss of one example through a layer, its parameters and examples."""
    params = {name: p.detach() for name, p in layer.named_parameters()}
    loss = lambda p, x: functional_call(layer, p, (x[None],)).square().sum()
    return fj.per_example(loss), params, torch.randn(5, *shape, generator=torch.Generator().manual_seed(0))


def start(losses, params, x):
    fj.train_state(params, x, losses=losses, aggregator=fj.upgrad(), optimizer=fj.sgd(0.1))


WAYS = {
    "jacobian_fn": lambda losses, *args: fj.jacobian_fn(losses)(*args),
    "jacobian_fn loop": lambda losses, *args: fj.jacobian_fn(losses, mode="loop")(*args),
    "gramian_fn": lambda losses, *args: fj.gramian_fn(losses)(*args),
    "train_state": start,
    "per_example": lambda losses, *args: losses(*args),
    "weighted_fn": lambda losses, *args: fj.weighted_fn(losses)(*args),
}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("way", WAYS)
def test_statistics_of_one_example_are_refused_with_the_cure(way, layer):
    make, shape = LAYERS[layer]
    with pytest.raises(ValueError, match=rf"^{way.split()[0]}: .*a batch of one, which has no statistics.*eval mode"):
        WAYS[way](*problem(make(), shape))


@pytest.mark.parametrize("fn", [fj.jacobian_fn, fj.gramian_fn, fj.weighted_fn])
def test_they_are_refused_under_transforms_and_compilers(fn):
    make, shape = LAYERS["without_statistics_in_eval"]
    losses, params, x = problem(make(), shape)
    run = lambda p: fn(losses)(p, x)[0]
    with pytest.raises(ValueError, match="a batch of one, which has no statistics"):
        torch.func.vjp(run, params)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="a batch of one, which has no statistics"):
        torch.compile(run, backend="eager", fullgraph=True)(params)


@pytest.mark.parametrize(
    "norm",
    [
        lambda x, w: torch.batch_norm(x, w, None, None, None, True, 0.1, 1e-5, False),
        lambda x, w: torch.native_batch_norm(x, w, None, None, None, True, 0.1, 1e-5)[0],
        lambda x, w: nn.functional.batch_norm(input=x, running_mean=None, running_var=None, weight=w, training=True),
    ],
)
def test_every_form_of_the_op_is_known(norm):
    losses = fj.per_example(lambda w, x: norm(x[None], w).square().sum())
    with pytest.raises(ValueError, match="a batch of one, which has no statistics"):
        fj.jacobian_fn(losses)(torch.ones(2), torch.randn(4, 2, 3))


def test_eval_mode_and_group_norm_are_the_cures():
    for layer, shape in ((nn.BatchNorm2d(2).eval(), (2, 3, 3)), (nn.GroupNorm(2, 2), (2, 3, 3))):
        losses, params, x = problem(layer, shape)
        for fn in (fj.jacobian_fn, fj.gramian_fn, fj.weighted_fn):
            fn(losses)(params, x)
        assert losses(params, x).shape == (5,)


def test_standardized_weights_are_no_batch_of_examples():
    """As networks without normalization layers have them: statistics of each filter, from `batch_norm`."""
    draw = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(3, 2, 2, generator=draw).double(), torch.randn(4, 2, 5, generator=draw).double())

    def loss(w, x):
        flat = w.reshape(1, 3, 4)
        standard = nn.functional.batch_norm(flat, None, None, training=True, momentum=0.0).reshape(w.shape)
        return nn.functional.conv1d(x[None], standard).square().sum()

    def by_hand(w, x):
        flat = w.flatten(1)
        flat = (flat - flat.mean(1, keepdim=True)) / (flat.var(1, correction=0, keepdim=True) + 1e-5).sqrt()
        return nn.functional.conv1d(x[None], flat.reshape(w.shape)).square().sum()

    rows = torch.stack([torch.func.grad(by_hand)(weight, one) for one in x])
    torch.testing.assert_close(fj.jacobian_fn(fj.per_example(loss))(weight, x)[0], rows)
    gramian, _, pullback = fj.gramian_fn(fj.per_example(loss))(weight, x)
    torch.testing.assert_close(gramian, rows.flatten(1) @ rows.flatten(1).T)
    weights = torch.tensor([0.5, 2.0, -1.0, 0.0], dtype=torch.float64)
    for pull in (pullback, fj.weighted_fn(fj.per_example(loss))(weight, x)[1]):
        torch.testing.assert_close(pull(weights)[0], torch.tensordot(weights, rows, 1))


@given(st.integers(2, 4), st.integers(1, 3), st.sampled_from([fj.jacobian_fn, fj.gramian_fn]))
def test_a_batch_inside_an_example_has_statistics(size, channels, fn):
    draw = torch.Generator().manual_seed(size)
    x, w = torch.randn(3, size, channels, generator=draw).double(), torch.ones(channels, dtype=torch.float64)
    loss = lambda w, x: torch.tanh(nn.functional.batch_norm(x, None, None, w, training=True) * x).sum()
    # By its definition: the biased variance, and eps = 1e-5.
    normalized = (x - x.mean(1, keepdim=True)) / (x.var(1, correction=0, keepdim=True) + 1e-5).sqrt()
    rows = ((1 - torch.tanh(normalized * x) ** 2) * normalized * x).sum(1)
    expected = rows if fn is fj.jacobian_fn else rows @ rows.mT
    # Sums of at most 12 terms, of which none exceeds 10, of differences that lose a digit or two.
    torch.testing.assert_close(fn(fj.per_example(loss))(w, x)[0], expected, rtol=0, atol=1e6 * torch.finfo(w.dtype).eps)


def test_a_layer_of_momentum_zero_is_refused_too():
    net = nn.Sequential(nn.Conv1d(2, 3, 2), nn.BatchNorm1d(3, momentum=0.0))
    apply = fj.functional(net)
    losses = fj.per_example(lambda p, x: apply(p, dict(net.named_buffers()), x[None])[0].square().sum())
    with pytest.raises(ValueError, match=r"found batch_norm of a batch of one"):
        fj.jacobian_fn(losses)(dict(net.named_parameters()), torch.ones(4, 2, 5))
