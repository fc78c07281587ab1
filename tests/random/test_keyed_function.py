"""Functions that draw, as functions of a key: the bits, torch's semantics, transforms, checkpoints, the engines."""

import gc
import inspect
import re
from functools import partial
from types import FunctionType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from sequences import compiled
from torch import nn
from torch.utils._pytree import tree_leaves as leaves
from torch.utils.checkpoint import checkpoint

from functional_jd import gramian_fn, jacobian_fn, per_example, random, weighted_fn
from functional_jd.random import keyed, keyed_function

attend, drop = nn.functional.scaled_dot_product_attention, nn.functional.dropout
KEY = random.key(1)
x = torch.arange(1.0, 49.0).reshape(6, 8)
images = x.reshape(1, 2, 6, 4)
double = torch.float64


def frozen(module):
    return module.requires_grad_(False)


with torch.random.fork_rng():
    torch.manual_seed(0)
    attention = frozen(nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True))
    encoder = frozen(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True))
    lstm = frozen(nn.LSTM(8, 5, 3, dropout=0.5, bidirectional=True, batch_first=True))
    gru = frozen(nn.GRU(8, 5, 2, dropout=0.5))

# What draws; of the first, everything holds under every transform.
DRAWS = {
    "dropout": lambda: nn.functional.dropout(x, 0.5),
    "Dropout": lambda: nn.Dropout(0.3)(x.half()),
    "Dropout2d": lambda: nn.Dropout2d(0.3)(images),
    "AlphaDropout": lambda: nn.AlphaDropout(0.3)(x),
    "FeatureAlphaDropout": lambda: nn.FeatureAlphaDropout(0.3)(images),
    "sdpa": lambda: attend(x[None], x[None], x[None], dropout_p=0.5, is_causal=True),
    "attention": lambda: attention(x[None], x[None], x[None]),
    "encoder": lambda: encoder(x[None]),
    "rand": lambda: torch.rand(3, 4),
    "randn": lambda: torch.randn((3,), dtype=torch.bfloat16),
    "rand_like": lambda: torch.rand_like(x) + torch.randn_like(x),
    "randperm": lambda: torch.randperm(7),
    "normal": lambda: torch.normal(x, x) + torch.normal(0.0, 1.0, (6, 8)) + torch.normal(x, 2.0) + torch.normal(1.0, x),
    "bernoulli": lambda: torch.bernoulli(x / 48) + (x / 48).bernoulli() + torch.bernoulli(x, 0.5),
    "multinomial": lambda: torch.multinomial(x, 3),
    "with replacement": lambda: torch.multinomial(x, 30, replacement=True),
    "in place": lambda: [torch.empty(5).uniform_(-1, 2), torch.empty_like(x).normal_(), torch.empty(5).bernoulli_(0.3)],
    "distributions": lambda: [
        torch.distributions.Normal(0.0, 1.0).sample((3,)),
        torch.distributions.Laplace(torch.zeros(2), torch.ones(2)).sample(),
        torch.distributions.Categorical(torch.ones(3)).sample((4,)),
        torch.distributions.Bernoulli(torch.ones(3) * 0.5).sample(),
        torch.distributions.Gumbel(torch.zeros(2), torch.ones(2)).rsample(),
    ],
    "many": lambda: sum(torch.rand(2) for _ in range(keyed_function._AHEAD + 3)),
}
every_draw = pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)


def same_bits(left, right):
    pairs = list(zip(leaves(left), leaves(right), strict=True))
    return all(a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b) for a, b in pairs)


def close(left, right):
    """Equal draws, behind which sums may be taken in another order."""
    for a, b in zip(leaves(left), leaves(right), strict=True):
        torch.testing.assert_close(a, b)


@every_draw
def test_the_same_key_gives_the_same_bits_and_leaves_the_generator_alone(draw):
    state = torch.get_rng_state()
    first = keyed(draw)(KEY)
    torch.rand(3)
    moved = torch.get_rng_state()
    assert same_bits(keyed(draw)(KEY), first)
    assert any(not same_bits(keyed(draw)(random.key(seed)), first) for seed in range(2, 6))
    assert torch.equal(torch.get_rng_state(), moved)
    torch.set_rng_state(state)


def test_every_call_draws_with_the_next_key_of_one_split():
    keys = random.split(KEY, 50)

    def f():
        return [torch.rand(3), torch.randn(2, dtype=double), torch.randperm(4), *[torch.rand(2) for _ in range(40)]]

    uniform, normal, permutation, *rest = keyed(f)(KEY)
    assert torch.equal(uniform, random.uniform(keys[0], (3,)))
    assert torch.equal(normal, random.normal(keys[1], (2,), dtype=double))
    assert torch.equal(permutation, random.permutation(keys[2], 4))
    assert all(torch.equal(y, random.uniform(key, (2,))) for y, key in zip(rest, keys[3:], strict=False))


def test_functions_inside_may_be_keyed_themselves():
    inner = random.key(7)
    outer = keyed(lambda: (torch.rand(2), keyed(torch.rand)(inner, 3), torch.rand(2)))(KEY)
    assert torch.equal(outer[1], keyed(torch.rand)(inner, 3))
    assert same_bits(outer[::2], keyed(lambda: (torch.rand(2), torch.rand(2)))(KEY))


# torch's semantics


@given(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]), st.booleans(), st.booleans(), st.integers(0, 2**32))
def test_dropout_takes_the_values_that_torchs_takes(p, training, inplace, seed):
    for name in ("dropout", "dropout1d", "alpha_dropout", "feature_alpha_dropout"):
        for dtype in (torch.float32, double, torch.float16, torch.bfloat16):
            ones = torch.ones(5, 60, dtype=dtype)
            theirs, own = ones.clone(), ones.clone()
            with torch.random.fork_rng():
                expected = getattr(nn.functional, name)(theirs, p, training, inplace)
            y = keyed(getattr(nn.functional, name))(random.key(seed), own, p, training, inplace)
            assert (y is own) == (expected is theirs)
            assert (y.dtype, y.shape, y.stride()) == (expected.dtype, expected.shape, expected.stride())
            # Any of the values that torch's own formula may give: of what is kept, and of what is dropped.
            assert set(y.unique().tolist()) <= set(_values(name, p, training, dtype))
            assert torch.equal(own, y if inplace else ones)


def _values(name, p, training, dtype):
    with torch.random.fork_rng():
        return getattr(nn.functional, name)(torch.ones(20, 20, 2, dtype=dtype), p, training).unique().tolist()


def test_feature_dropout_drops_whole_channels():
    y = keyed(nn.functional.dropout2d)(KEY, torch.ones(20, 30, 4, 5), 0.4)
    assert torch.equal(y, y[:, :, :1, :1].expand_as(y))
    assert 0 < (y == 0).double().mean() < 1


def test_factories_take_the_arguments_of_torchs():
    for f, args, kwargs in [
        (torch.rand, (2, 3), {"dtype": double}),
        (torch.rand, ((2, 3),), {"requires_grad": True}),
        (torch.randn, (), {"size": (2,), "dtype": torch.float16}),
        (torch.rand, (2,), {"device": "meta"}),
        (torch.randperm, (5,), {"dtype": torch.int32}),
        (torch.rand_like, (torch.ones(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),), {}),
        (torch.randn_like, (x,), {"dtype": double}),
    ]:
        y = keyed(f)(KEY, *args, **kwargs)
        with torch.random.fork_rng():
            expected = f(*args, **kwargs)
        found = (y.shape, y.dtype, y.device, y.stride(), y.requires_grad)
        assert found == (expected.shape, expected.dtype, expected.device, expected.stride(), expected.requires_grad)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: nn.functional.dropout(x, 1.5),
        lambda: torch.dropout(x, -0.5, True),
        lambda: torch.empty(3).normal_(0, -1),
        lambda: torch.empty(3, dtype=torch.int64).normal_(),
        lambda: torch.empty(3).uniform_(2, 1),
        lambda: torch.empty(3).uniform_(-3e38, 3e38),
        lambda: torch.bernoulli(x, 2.0),
        lambda: torch.bernoulli(x, -0.1),
        lambda: torch.empty(2).bernoulli_(-0.1),
        lambda: torch.multinomial(torch.ones(3), 4),
        lambda: torch.multinomial(torch.ones(3), 0),
        lambda: torch.normal(0.0, -1.0, (3,)),
    ],
)
def test_wrong_arguments_are_errors_as_in_torch(wrong):
    with pytest.raises((RuntimeError, ValueError)) as expected:
        wrong()
    with pytest.raises(expected.type) as found:
        keyed(wrong)(KEY)
    said, torchs = (str(error.value).split(", but")[0].replace("_ ", " ") for error in (found, expected))
    assert said == torchs


def test_recurrent_layers_are_torchs_where_nothing_is_dropped_and_raise_elsewhere():
    packed = nn.utils.rnn.pack_padded_sequence(torch.ones(4, 3, 8), torch.tensor([4, 2, 1]))
    for module in (lstm, gru, nn.RNN(8, 3, 2, dropout=0.5)):
        name = "rnn_tanh" if type(module) is nn.RNN else type(module).__name__.lower()
        for data in (torch.ones(4, 3, 8), packed):
            with pytest.raises(RuntimeError, match=f"^keyed: .*found {name}, which reads torch's generator"):
                keyed(module)(KEY, data)
            close(keyed(module.eval())(KEY, data), module(data))
            module.train()
    one = nn.LSTM(8, 5)
    close(keyed(one)(KEY, x), one(x))


def test_attention_without_drops_is_torchs_and_with_drops_scales_what_is_kept():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 3, 5, 4, dtype=double)
    mask = torch.rand(5, 5) < 0.7
    mask.fill_diagonal_(True)
    for options in ({}, {"is_causal": True}, {"attn_mask": mask}, {"scale": 0.3}):
        near = keyed(attend)(KEY, q, k, v, dropout_p=1e-30, **options)
        close(near, attend(q, k, v, **options))
    wide = torch.randn(2, 6, 5, 4, dtype=double)
    close(keyed(attend)(KEY, wide, k, v, dropout_p=1e-30, enable_gqa=True), attend(wide, k, v, enable_gqa=True))
    nothing = torch.zeros(5, 5, dtype=torch.bool)
    close(keyed(attend)(KEY, q, k, v, nothing, 0.5), attend(q, k, v, nothing))
    # Values that are the unit vectors show the weights themselves.
    p, units = 0.25, torch.eye(5, dtype=double).expand(2, 3, 5, 5)
    whole = attend(q, k, units)
    dropped = keyed(attend)(KEY, q, k, units, dropout_p=p)
    close(dropped, torch.where(dropped == 0, 0.0, whole / (1 - p)))
    assert 0 < (dropped == 0).double().mean() < 1
    assert (keyed(attend)(KEY, q, k, v, dropout_p=1.0) == 0).all()


@pytest.mark.parametrize("outside", [True, False])
@pytest.mark.parametrize("name", ["attention", "sdpa", "Dropout"])
def test_under_autocast_the_dtypes_are_those_without_a_key(name, outside):
    from functional_jd import autocast

    with torch.random.fork_rng():
        expected = autocast(DRAWS[name], torch.bfloat16)()
    found = (autocast(keyed(DRAWS[name]), torch.bfloat16) if outside else keyed(autocast(DRAWS[name], torch.bfloat16)))(
        KEY
    )
    assert [y.dtype for y in leaves(found)] == [y.dtype for y in leaves(expected)]


# Distributions. One in a thousand seeds would fail each; the seed is fixed.

N = 20_000
CONTINUOUS = {
    "uniform_": (lambda: torch.empty(N).uniform_(-1, 3), stats.uniform(-1, 4)),
    "normal_": (lambda: torch.empty(N).normal_(2, 3), stats.norm(2, 3)),
    "normal": (lambda: torch.normal(torch.ones(N), 2.0), stats.norm(1, 2)),
    "gumbel": (lambda: torch.distributions.Gumbel(torch.zeros(N), torch.ones(N)).sample(), stats.gumbel_r()),
    "laplace": (lambda: torch.distributions.Laplace(torch.zeros(N), torch.ones(N)).sample(), stats.laplace()),
}
weights = torch.tensor([1.0, 0.0, 2.0, 5.0])
DISCRETE = {
    "dropout": (lambda: nn.functional.dropout(torch.ones(N), 0.3) != 0, [0.3, 0.7]),
    "bernoulli": (lambda: torch.bernoulli(torch.full((N,), 0.2)), [0.8, 0.2]),
    "bernoulli_": (lambda: torch.empty(N).bernoulli_(0.9), [0.1, 0.9]),
    "multinomial": (lambda: torch.multinomial(weights, N, replacement=True), weights / 8),
    "first of multinomial": (lambda: torch.multinomial(weights.expand(N, 4), 2)[:, 0], weights / 8),
    "randperm": (lambda: torch.stack([torch.randperm(4)[0] for _ in range(1000)]), [1 / 4] * 4),
}


@pytest.mark.parametrize(("draw", "law"), CONTINUOUS.values(), ids=CONTINUOUS)
def test_numbers_follow_scipys_distribution(draw, law):
    assert stats.kstest(keyed(draw)(KEY).double().numpy(), law.cdf).pvalue > 1e-3


@pytest.mark.parametrize(("draw", "law"), DISCRETE.values(), ids=DISCRETE)
def test_choices_have_their_probabilities(draw, law):
    found = keyed(draw)(KEY).long()
    law = torch.as_tensor(law, dtype=double)
    counts = torch.bincount(found, minlength=len(law)).double()
    assert len(counts) == len(law)
    assert (counts[law == 0] == 0).all()
    assert stats.chisquare(counts[law > 0].numpy(), (law[law > 0] * len(found)).numpy()).pvalue > 1e-3


# For some functions torch loops over the elements, and says so.
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@every_draw
def test_a_key_draws_the_same_bits_under_transforms(draw):
    keys, alone = random.split(KEY, 4), leaves(keyed(draw)(KEY))
    loop = [leaves(keyed(draw)(key)) for key in keys]
    close(torch.vmap(keyed(draw))(keys), [torch.stack(column) for column in zip(*loop, strict=True)])
    of_one_key = torch.vmap(lambda _: keyed(draw)(KEY), out_dims=0)(torch.ones(3))
    close(of_one_key, [y.expand(3, *y.shape) for y in alone])
    close(compiled(keyed(draw))(KEY), alone)


def test_compile_and_vmap_together_draw_the_same_bits():
    f, keys = torch.vmap(keyed(DRAWS["encoder"])), random.split(KEY, 3)
    close(compiled(f)(keys), f(keys))


def test_derivatives_are_those_of_the_draw():
    f = keyed(lambda w: (w * nn.functional.dropout(w, 0.5)).sum() + (w * torch.randn(8)).sum())
    w = torch.linspace(1, 2, 8)
    keys = random.split(KEY, 2)
    noise = random.normal(keys[1], (8,))
    mask = 2.0 * (random.uniform(keys[0], (8,)) < 0.5)
    expected = 2 * w * mask + noise
    torch.testing.assert_close(torch.func.grad(f, 1)(KEY, w), expected)
    torch.testing.assert_close(compiled(torch.func.grad(f, 1))(KEY, w), expected)
    tangent = torch.ones(8)
    torch.testing.assert_close(torch.func.jvp(lambda w: f(KEY, w), (w,), (tangent,))[1], expected.sum())
    per_key = torch.vmap(torch.func.grad(f, 1), (0, None))(random.split(KEY, 3), w)
    torch.testing.assert_close(per_key[1], torch.func.grad(f, 1)(random.split(KEY, 3)[1], w))


def test_a_vmap_inside_does_what_its_randomness_says():
    rows = torch.ones(5, 4)

    def f(randomness):
        return torch.vmap(nn.functional.dropout, randomness=randomness)(rows)

    same = keyed(f)(KEY, "same")
    assert torch.equal(same, same[:1].expand(5, 4))
    keys = random.split(random.split(KEY)[0], 5)
    different = torch.stack([2.0 * (random.uniform(key, (4,)) < 0.5) for key in keys])
    assert torch.equal(keyed(f)(KEY, "different"), different)
    with pytest.raises(RuntimeError, match=r"keyed: expected torch\.vmap with randomness"):
        keyed(f)(KEY, "error")


def test_a_gradient_inside_sees_the_same_draw():
    w = torch.linspace(1, 2, 8)
    mask = 2.0 * (random.uniform(random.split(KEY)[0], (8,)) < 0.5)
    inside = torch.func.grad(lambda w: nn.functional.dropout(w, 0.5).sum())
    assert torch.equal(keyed(inside)(KEY, w), mask)
    assert torch.equal(compiled(keyed(inside))(KEY, w), mask)


def block(w):
    return nn.functional.dropout(w.sin(), 0.5).cos() * torch.rand(8)


again = partial(checkpoint, use_reentrant=False)
CHECKPOINTED = {  # of `run`, which calls a function in a checkpoint or as it is
    "once": lambda run, w: run(block, w),
    "twice": lambda run, w: run(block, run(block, drop(w))),
    "nested": lambda run, w: run(lambda w: run(block, w), w),
    "nested and after": lambda run, w: drop(run(lambda w: block(run(block, run(block, w))), w)),
}


@pytest.mark.parametrize("run", [again, partial(again, preserve_rng_state=False)], ids=["restored", "not restored"])
@pytest.mark.parametrize("f", CHECKPOINTED.values(), ids=CHECKPOINTED)
def test_what_a_checkpoint_computes_again_draws_the_same(f, run):
    w = torch.linspace(1, 2, 8, dtype=double, requires_grad=True)
    recomputed = keyed(lambda w: f(run, w))
    expected = keyed(lambda w: f(lambda inner, w: inner(w), w))(KEY, w)
    gradient = torch.autograd.grad(expected.sum(), w)
    state = torch.get_rng_state()
    y = recomputed(KEY, w)
    assert torch.equal(y, expected)
    # The backward pass runs outside, and draws by others come between.
    other = recomputed(random.key(5), w)
    assert torch.equal(torch.autograd.grad(y.sum(), w)[0], gradient[0])
    assert not torch.equal(other, expected)
    assert torch.equal(torch.get_rng_state(), state)
    # Inside, too.
    inside = keyed(lambda w: torch.autograd.grad(f(run, w).sum(), w)[0] + 0 * torch.rand(8))
    assert torch.equal(inside(KEY, w), gradient[0])


def test_a_checkpoint_is_not_compiled_in_silence():
    w = torch.linspace(1, 2, 8, dtype=double, requires_grad=True)
    f = keyed(lambda w: CHECKPOINTED["twice"](again, w))
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(f)(KEY, w)


def test_reentrant_checkpoints_are_refused():
    w = torch.ones(8, requires_grad=True)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        keyed(lambda w: checkpoint(block, w, use_reentrant=True))(KEY, w)
    assert keyed(lambda w: checkpoint(torch.sin, w, use_reentrant=True))(KEY, w).shape == (8,)


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (lambda: torch.poisson(x), "poisson"),
        (lambda: torch.binomial(x, x / 50), "binomial"),
        (lambda: torch.distributions.Gamma(1.0, 1.0).sample(), "_standard_gamma"),
        (lambda: torch.distributions.Dirichlet(torch.ones(3)).sample(), "_sample_dirichlet"),
        (lambda: torch.native_dropout(x, 0.5, True), "native_dropout"),
        (lambda: torch.ops.aten.rand([3]), "rand"),
        (lambda: torch.ops.aten.rand.default([3]), "rand"),
        (lambda: torch.rand(3, generator=torch.Generator()), "rand without generator"),
        (lambda: torch.rand(3, out=torch.empty(3)), "rand without out"),
        (lambda: nn.Linear(2, 2), "kaiming_uniform_"),
        (lambda: nn.init.normal_(torch.empty(2)), "normal_"),
        (lambda: nn.functional.rrelu(-x, training=True), "rrelu"),
        (lambda: nn.RReLU()(x), "rrelu"),
        (lambda: nn.functional.fractional_max_pool2d(images, 2, output_size=2), "fractional_max_pool2d"),
        (lambda: nn.functional.gumbel_softmax(x), "gumbel_softmax"),
        (lambda: torch.randint(5, (2,)), "randint"),
        (lambda: torch.randint_like(x, 5), "randint_like"),
        (lambda: torch.empty(5).exponential_(), "exponential_"),
        (lambda: torch.empty(5).cauchy_(), "cauchy_"),
        (lambda: torch.empty(5).log_normal_(), "log_normal_"),
        (lambda: torch.empty(5).geometric_(0.3), "geometric_"),
        (lambda: torch.empty(5).random_(), "random_"),
    ],
)
def test_what_is_not_covered_is_refused_by_name(draw, name):
    state = torch.get_rng_state()
    with pytest.raises(RuntimeError, match=f"^keyed: .*{name}"):
        keyed(draw)(KEY)
    assert torch.equal(torch.get_rng_state(), state)


def test_what_else_no_stream_gives_raises():
    with pytest.raises(NotImplementedError, match=r"keyed: dtype must be float64, .* found torch\.complex64"):
        keyed(torch.randn)(KEY, 3, dtype=torch.complex64)
    assert torch.equal(keyed(nn.functional.rrelu)(KEY, -x), nn.functional.rrelu(-x))
    with pytest.raises(Exception, match="poisson"):
        compiled(keyed(torch.poisson))(KEY, x)
    with torch.random.fork_rng(), pytest.raises(RuntimeError, match="one has moved"):
        keyed(torch.manual_seed)(KEY, 3)


def test_every_function_in_python_that_draws_inside_is_known():
    for functions in torch.overrides.get_overridable_functions().values():
        for f in functions:
            if isinstance(f, FunctionType) and f.__module__ == "torch.nn.functional":
                source = inspect.getsource(inspect.unwrap(f)).split('"""')[-1].partition("\n")[2]
                if any(map(keyed_function.reads_generator, re.findall(r"(?:torch\.|_VF\.|\.)(\w+)\(", source))):
                    assert f in keyed_function._DRAWING or keyed_function.reads_generator(f.__name__), f


def test_nothing_is_left_to_the_collector():
    f = keyed(lambda: (torch.rand(3), nn.functional.dropout(x, 0.5), attend(x[None], x[None], x[None], dropout_p=0.5)))
    f(KEY)
    gc.collect()
    for _ in range(3):
        f(KEY)
    assert gc.collect() == 0


def regression(params, key, batch):
    hidden = keyed(lambda h: nn.functional.dropout(h, 0.5))(key, torch.tanh(batch @ params["a"]))
    return (hidden @ params["b"]).square()


@pytest.mark.parametrize("kind", ["plain", "per example"])
def test_every_row_of_every_engine_sees_the_same_draw(kind):
    a, b, batch = (random.normal(random.key(k), shape, dtype=double) for k, shape in enumerate([(3, 6), (6,), (4, 3)]))
    params = {"a": a, "b": b}
    if kind == "plain":
        losses, key, function = regression, KEY, regression
    else:
        losses, key = per_example(regression, (0, 0)), random.split(KEY, 4)
        function = lambda params, key, batch: torch.stack([regression(params, *pair) for pair in zip(key, batch)])  # noqa: B905
    state = torch.get_rng_state()
    expected = torch.func.jacrev(function)(params, key, batch)
    values = function(params, key, batch)
    for mode in ("vmap", "loop"):
        jacobian, found = jacobian_fn(losses, mode=mode)(params, key, batch)
        close((jacobian, found), (expected, values))
    weights = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=double)
    direction = {name: torch.tensordot(weights, row, 1) for name, row in expected.items()}
    for engine in (gramian_fn, weighted_fn):
        *_, found, pullback = engine(losses)(params, key, batch)
        close((found, pullback(weights)[0]), (values, direction))
    close(compiled(jacobian_fn(losses))(params, key, batch), (expected, values))
    assert torch.equal(torch.get_rng_state(), state)
