"""Explicit keys: the bits, their independence, the distributions, and the same bits under every transform."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch.func import grad, jacrev, jvp
from torch.fx.experimental.proxy_tensor import make_fx

from functional_jd import compiled, random
from functional_jd.random import keys as streams

DTYPES = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
DRAWS = {
    "split": lambda key: random.split(key, 3),
    "uniform": lambda key: random.uniform(key, (5, 2)),
    "uniform64": lambda key: random.uniform(key, (5,), dtype=torch.float64),
    "uniform16": lambda key: random.uniform(key, (7,), dtype=torch.float16),
    "normal": lambda key: random.normal(key, (3, 3)),
    "normal16": lambda key: random.normal(key, (5,), dtype=torch.bfloat16),
    "permutation": lambda key: random.permutation(key, 9),
    "fold_in": lambda key: random.fold_in(key, 5),
    "mixture": lambda key: random.uniform(random.split(key)[1], (4,)) + random.normal(random.split(key)[0], (4,)),
}
# torch's own modules still script functions when forward mode or inductor is first used.
torch_scripts = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
every_draw = pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
seeds = st.integers(-(2**63), 2**64 - 1)


# The definition once more, in NumPy's unsigned integers, which wrap and shift zeros in by definition.


def splitmix64(state):
    word = (state ^ (state >> 30)) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> 27)) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> 31)


def murmur_finaliser(word):
    word = (word ^ (word >> 33)) * np.uint64(0xFF51AFD7ED558CCD)
    word = (word ^ (word >> 33)) * np.uint64(0xC4CEB9FE1A85EC53)
    return word ^ (word >> 33)


def stream(keys, n, number):
    """`[*, n]`: the words of the stream of this number, of keys `[*, 2]`."""
    words = keys.numpy().view(np.uint64)
    first, second = words[..., :1], words[..., 1:]
    counter = np.arange(1, n + 1, dtype=np.uint64) + (np.uint64(number) << np.uint64(60))
    return murmur_finaliser(splitmix64(first + counter * np.uint64(0x9E3779B97F4A7C15)) ^ second)


def significant(bits_of_words, width, kept):
    """The leading bits of each integer of this width, with the sign's bit turned over, as a fraction of one."""
    integers = bits_of_words.view(f"uint{width}")
    return ((integers ^ integers.dtype.type(1 << (width - 1))) >> integers.dtype.type(width - kept)) / 2.0**kept


def bits(words):
    """`[*, 64]` booleans."""
    return (words[..., None] >> torch.arange(64)) & 1 == 1


def same_bits(left, right):
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)


def test_key_is_the_published_splitmix64_sequence_mixed_once_more():
    published = np.array([6457827717110365317, 3203168211198807973], dtype=np.uint64)  # of the number 1234567
    pi = np.uint64(0x243F6A8885A308D3)
    assert random.key(1234567).numpy().view(np.uint64).tolist() == murmur_finaliser(published ^ pi).tolist()


@given(seeds, st.integers(0, 70))
def test_split_is_its_definition(seed, n):
    key = random.key(seed)
    assert random.split(key, n).numpy().view(np.uint64).reshape(-1).tolist() == stream(key, 2 * n, 1).tolist()


@given(seeds, st.integers(0, 70), st.sampled_from(list(DTYPES)))
def test_uniform_is_its_definition(seed, n, dtype):
    key, width = random.key(seed), {torch.bfloat16: 16}.get(dtype, torch.finfo(dtype).bits)
    expected = significant(stream(key, n, 2), width, DTYPES[dtype])[:n]
    assert random.uniform(key, (n,), dtype=dtype).double().tolist() == expected.tolist()


@given(seeds, st.integers(0, 70))
def test_permutation_sorts_the_words_of_its_own_stream(seed, n):
    key = random.key(seed)
    assert random.permutation(key, n).tolist() == np.argsort(stream(key, n, 4).view(np.int64), kind="stable").tolist()


@given(
    seeds,
    st.lists(st.integers(0, 10**5), max_size=9),
    st.sampled_from(["uniform", "normal"]),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_numbers_at_positions_are_those_of_the_whole_draw(seed, positions, what, dtype):
    key, n = random.key(seed), max(positions, default=0) + 1
    whole = getattr(random, what)(key, (n,), dtype=dtype)
    found = streams.draw_at(key, torch.tensor(positions, dtype=torch.int64), what, dtype)
    assert found.dtype == dtype
    assert torch.equal(found, whole[positions])


def test_draws_larger_than_the_cache_are_their_definition():
    key, n = random.key(3), 200_001
    assert random.split(key, n).numpy().view(np.uint64).reshape(-1).tolist() == stream(key, 2 * n, 1).tolist()
    for dtype, kept in DTYPES.items():
        width = torch.finfo(dtype).bits
        expected = significant(stream(key, n, 2), width, kept)[:n]
        np.testing.assert_array_equal(random.uniform(key, (n,), dtype=dtype).double().numpy(), expected)


def test_more_keys_than_the_cache_holds_are_their_definition():
    keys = random.split(random.key(4), 70_001)
    drawn = torch.vmap(lambda key: random.uniform(key, (3,), dtype=torch.float64))(keys)
    np.testing.assert_array_equal(drawn.numpy(), significant(stream(keys, 3, 2), 64, 53))


def test_normal_is_box_and_muller_in_extended_precision():
    key, n = random.key(5), 100_001
    words = stream(key, n + 1, 3)
    radius_word, angle_word = words[0::2] ^ np.uint64(1 << 63), words[1::2].view(np.int64)
    u = ((radius_word >> np.uint64(12)).astype(np.longdouble) + 0.5) / 2.0**52
    angle = (angle_word >> 11).astype(np.longdouble) / 2.0**52 * np.arcsin(np.longdouble(1))
    radius = np.sqrt(-2 * np.log(u)) * (1 - 2 * (angle_word & 1))
    expected = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=-1).reshape(-1)[:n]
    actual = random.normal(key, (n,), dtype=torch.float64).numpy()
    assert (np.abs(actual - expected) < 1e-15 * np.abs(radius).repeat(2)[:n]).all()


@every_dtype
def test_normal_is_rounded_from_float64(dtype):
    key = random.key(6)
    wide = random.normal(key, (1001,), dtype=torch.float64)
    assert same_bits(random.normal(key, (1001,), dtype=dtype), wide.to(dtype))


def test_normal_is_finite_and_reaches_far_at_the_extreme_words():
    extremes = torch.tensor([-(2**63), -(2**63) + 4095, -(2**62), -1, 0, 1, 2**62, 2**63 - 4096, 2**63 - 1])
    drawn = streams._normal(torch.cartesian_prod(extremes, extremes))
    assert drawn.isfinite().all()
    assert 8.5 < drawn.abs().max() < 8.6


@given(seeds, seeds)
def test_different_integers_give_different_keys(one, other):
    assert torch.equal(random.key(one), random.key(other)) == ((one - other) % 2**64 == 0)


def test_a_recorded_graph_follows_the_key():
    draw = lambda key: random.normal(key, (3,))
    recorded = make_fx(draw)(random.key(0))
    assert same_bits(recorded(random.key(1)), draw(random.key(1)))


@every_draw
def test_draws_are_pure_and_have_the_same_bits_in_every_context(draw):
    key, state = random.key(11), torch.get_rng_state()
    expected = draw(key)
    assert torch.equal(key, random.key(11))
    assert torch.equal(torch.get_rng_state(), state)
    with torch.random.fork_rng():
        torch.rand(3)
        assert same_bits(draw(key), expected)
    with torch.inference_mode():
        assert same_bits(draw(random.key(11)), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert same_bits(draw(random.key(11)), expected)
    noncontiguous = torch.stack([random.key(11), random.key(12)], dim=1)[:, 0]
    assert same_bits(draw(noncontiguous), expected)
    drawn = draw(random.key(0, device="meta"))
    assert (drawn.device.type, drawn.shape, drawn.dtype) == ("meta", expected.shape, expected.dtype)


@pytest.mark.parametrize("half", [0, 1])
def test_one_bit_of_a_key_turns_over_half_of_its_children(half):
    n = 1024
    keys = random.split(random.key(22), n)
    single = torch.zeros(64, 2, dtype=torch.int64)
    single[:, half] = 1 << torch.arange(64)
    children = torch.vmap(lambda key: random.split(key, 1)[0])
    flipped = children(keys) ^ torch.vmap(children)(keys ^ single[:, None])
    rates = bits(flipped).double().mean(1).reshape(64, 128)  # how often each bit of a child turns over, by bit of a key
    assert ((rates - 0.5).abs() * 2 * math.sqrt(n)).max() < 6
    assert abs(rates.mean() - 0.5) < 0.002


@given(seeds, st.integers(-(2**63), 2**63 - 1))
def test_fold_in_is_its_definition(seed, number):
    """Two words of the key in a range of their own, a stride for each number, and two words of the sum, by NumPy."""
    key = random.key(seed)
    words = stream(key, 2, 7)
    words[:1] += np.array([number % 2**64], np.uint64) * np.array([streams.ROOT % 2**64], np.uint64)  # modulo 2^64
    expected = stream(torch.from_numpy(words.view(np.int64)), 2, 0)
    assert np.array_equal(random.fold_in(key, number).numpy().view(np.uint64), expected)
    for same in (torch.tensor(number), np.int64(number)):
        assert torch.equal(random.fold_in(key, same), random.fold_in(key, number))


def test_folded_keys_never_collide():
    key = random.key(0)
    numbers = torch.arange(-500, 20000)
    found = torch.vmap(lambda number: random.fold_in(key, number))(numbers)
    words = torch.cat([found, random.split(key, 1000), key[None]]).flatten().tolist()
    assert len(set(words)) == len(words)
    assert torch.equal(found[507], random.fold_in(key, 7))
    for wrong in (torch.tensor(1, dtype=torch.int32), 2**63):
        with pytest.raises(TypeError, match="fold_in: number must be an integer of 64 bits, or an int64 tensor"):
            random.fold_in(key, wrong)


def test_keys_of_one_and_of_different_parents_never_collide():
    words = random.split(random.key(23), 1 << 16).reshape(-1)
    assert len(words.unique()) == 1 << 17
    levels = [random.key(24)[None]]
    for _ in range(4):
        levels.append(torch.vmap(lambda key: random.split(key, 16))(levels[-1]).reshape(-1, 2))
    words = torch.cat(levels).reshape(-1)
    assert len(words) == 2 * sum(16**level for level in range(5))
    assert len(words.unique()) == len(words)


@given(seeds)
def test_one_key_never_gives_two_draws_the_same_word(seed):
    key, n = random.key(seed), 1 << 10
    split = random.split(key, n // 2).reshape(-1).numpy()
    uniform = random.uniform(key, (n,), dtype=torch.float64).numpy()
    both = np.concatenate([significant(split, 64, 53), uniform])
    assert len(np.unique(both)) == 2 * n
    assert not np.array_equal(np.argsort(significant(split, 64, 53)), random.permutation(key, n).numpy())
    assert not np.array_equal(np.argsort(uniform), random.permutation(key, n).numpy())


@pytest.mark.parametrize(
    "keys",
    [
        random.split(random.key(26), 64),
        torch.stack([random.key(seed) for seed in range(64)]),
        torch.vmap(random.split)(random.split(random.key(27), 32)).reshape(64, 2),
    ],
    ids=["siblings", "consecutive", "cousins"],
)
def test_streams_of_different_keys_are_uncorrelated(keys):
    n = 1 << 14
    x = torch.vmap(lambda key: random.normal(key, (n,), dtype=torch.float64))(keys)
    assert (torch.corrcoef(x).fill_diagonal_(0).abs() * math.sqrt(n)).max() < 5
    # Nor does one stream run after the other.
    assert len(torch.cat([x[:, 0], x[:, -1]]).unique()) == 128
    first, all_words = x[:, 0].numpy(), x.reshape(-1).numpy()
    assert np.isin(all_words, first).sum() == 64


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_follow_scipys_distribution(seed, dtype):
    u, z = (
        draw(random.key(seed), (200_000,), dtype=dtype).double().numpy() for draw in (random.uniform, random.normal)
    )
    assert stats.kstest(u, "uniform").pvalue > 1e-3
    assert stats.chisquare(np.histogram(u, bins=1000, range=(0, 1))[0]).pvalue > 1e-3
    assert stats.kstest(z, "norm").pvalue > 1e-3
    assert stats.kstest((z[0::2] ** 2 + z[1::2] ** 2) / 2, "expon").pvalue > 1e-3  # both of a pair, independent


@pytest.fixture
def compiler():
    torch.compiler.reset()  # else every vmapped function in this process counts as a recompilation of vmap
    return torch.compile


@every_draw
def test_vmap_draws_what_a_loop_over_keys_draws(draw):
    keys = random.split(random.key(40), 6)
    loop = torch.stack([draw(key) for key in keys])
    assert same_bits(torch.vmap(draw)(keys), loop)
    assert same_bits(torch.vmap(draw, in_dims=1)(keys.T.contiguous()), loop)
    assert same_bits(torch.vmap(draw, chunk_size=2)(keys), loop)
    nested = torch.vmap(torch.vmap(draw), in_dims=1)(keys.reshape(2, 3, 2))
    assert same_bits(nested, loop.reshape(2, 3, *loop.shape[1:]).transpose(0, 1))
    of_one_key = torch.vmap(lambda x: draw(keys[0]) + x.long())(torch.zeros(3))
    assert same_bits(of_one_key, loop[0].expand(3, *loop[0].shape))


@every_draw
def test_compile_draws_the_same_bits(compiler, draw):
    key = random.key(42)
    compiled = compiler(draw, fullgraph=True, backend="aot_eager")
    assert same_bits(compiled(key), draw(key))
    batch = compiler(torch.vmap(draw), fullgraph=True, backend="aot_eager")
    assert same_bits(batch(random.split(key, 3)), torch.vmap(draw)(random.split(key, 3)))


def test_compile_takes_sizes_and_integers_that_change(compiler):
    @compiler(fullgraph=True, backend="aot_eager")
    def draw(seed, n):
        key = random.key(seed)
        return random.uniform(key, (n, 2)), random.permutation(key, n), random.split(key, n)

    for seed, n in ((3, 4), (5, 6), (-7, 9), (2**62, 11)):
        key = random.key(seed)
        expected = random.uniform(key, (n, 2)), random.permutation(key, n), random.split(key, n)
        assert all(map(same_bits, draw(seed, n), expected))


@pytest.mark.slow
@torch_scripts
@pytest.mark.inductor
def test_machine_code_draws_the_same_bits(compiler):
    drop = random.keyed(torch.nn.functional.dropout)

    def draw_all(key):
        drawn = [draw(key) for draw in DRAWS.values()] + [random.split(key), drop(key, torch.ones(5, 7), 0.5) * 2]
        return [*drawn, random.normal(key, (70_001,)).mul(3).add(1)]

    mapped, key = torch.vmap(draw_all), random.key(43)
    runs = [(compiler(draw_all, fullgraph=True), draw_all, key), (compiled(draw_all), draw_all, key)]
    for machine, f, keys in [*runs, (compiler(mapped, fullgraph=True), mapped, random.split(key, 3))]:
        assert all(map(same_bits, machine(keys), f(keys)))


def test_draws_are_one_operator_in_written_graphs():
    seen = []

    def backend(graph, _):
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    draws = compiled(lambda key: (random.uniform(key, (3,)), random.split(key)), backend=backend)
    expected = random.uniform(random.key(1), (3,)), random.split(random.key(1))
    assert all(map(same_bits, draws(random.key(1)), expected))
    assert seen.count("functional_jd.draw.default") == 2
    assert not any("shift" in name for name in seen)


@pytest.mark.parametrize(
    ("what", "dtype"), [("split", torch.int64), ("uniform", torch.float16), ("normal", torch.float32)]
)
def test_operation_obeys_torchs_own_rules(what, dtype):
    torch.library.opcheck(streams.draw_op, (random.split(random.key(44), 3), 5, what, dtype))


@torch_scripts
@pytest.mark.parametrize("draw", [random.uniform, random.normal])
def test_functions_that_draw_can_be_differentiated(compiler, draw):
    key = random.key(45)
    x = torch.arange(1.0, 5.0)
    drawn = draw(key, (4,))

    def f(x, key):
        return (x * x * draw(key, (4,))).sum()

    assert torch.equal(grad(f)(x, key), 2 * x * drawn)
    assert torch.equal(jvp(lambda x: x * draw(key, (4,)), (x,), (torch.ones(4),))[1], drawn)
    assert torch.equal(jacrev(grad(f))(x, key), torch.diag(2 * drawn))
    keys = random.split(key, 3)
    batched = torch.vmap(grad(f), in_dims=(None, 0))(x, keys)
    assert torch.equal(batched, 2 * x * torch.stack([draw(key, (4,)) for key in keys]))
    assert torch.equal(compiler(grad(f), fullgraph=True, backend="aot_eager")(x, key), 2 * x * drawn)


def test_several_keys_and_too_large_integers_are_refused():
    for draw in (random.split, random.uniform, random.normal, lambda key: random.permutation(key, 3)):
        with pytest.raises(ValueError, match=r"found torch.int64 \[5, 2\].*vmap"):
            draw(random.split(random.key(0), 5))
    for wrong in (2**64, -(2**63) - 1):
        with pytest.raises(ValueError, match="key: seed must be a Python integer of at most 64 bits"):
            random.key(wrong)


def test_sizes_and_dtypes_that_cannot_be_drawn_are_refused():
    key = random.key(0)
    for draw in (random.uniform, random.normal):
        with pytest.raises(ValueError, match=rf"{draw.__name__}: shape must be sizes of at least 0, found \(2, -1\)"):
            draw(key, (2, -1))
        for dtype in (torch.int64, torch.complex64, torch.bool):
            with pytest.raises(TypeError, match=rf"{draw.__name__}: dtype must be one .* found {dtype}"):
                draw(key, (2,), dtype=dtype)
