"""Loss scaling against torch's own kernels and GradScaler; its laws; its transforms."""

import math

import pytest
import torch
from bounds import check_within, eps
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_leaves as flat

from functional_jd import scale_state, unscale, update_scale
from functional_jd.core.heads import MultitaskJacobian
from functional_jd.precision import ScaleState, no_scale, scale, scale_state_from_dict, scale_state_to_dict, select
from functional_jd.precision.loss_scale import FLOOR, multiplier

floats32 = st.floats(width=32, allow_nan=True, allow_infinity=True)
positive32 = st.floats(min_value=2.0**-149, max_value=torch.finfo(torch.float32).max, width=32)
factors = st.one_of(
    st.sampled_from([0.0, 0.5, 1.0, 2.0, math.inf]),
    st.floats(min_value=1e-3, max_value=1e3),
    st.floats(width=64, allow_nan=False),
)


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Equal to the bit; any NaN equals any NaN."""
    if left.dtype == torch.bool:
        return torch.equal(left, right)
    width = {4: torch.int32, 8: torch.int64, 2: torch.int16}[left.element_size()]
    nan = left.isnan() & right.isnan() if left.is_floating_point() else torch.tensor(False)
    same = (left.contiguous().view(width) == right.contiguous().view(width)) | nan
    return left.dtype == right.dtype and left.shape == right.shape and bool(same.all())


def record(scale, tracker, growth, backoff, interval) -> ScaleState:
    dtypes = torch.float32, torch.int32, torch.float64, torch.float64, torch.int32
    values = scale, tracker, growth, backoff, interval
    return ScaleState(*(torch.tensor(x, dtype=dtype) for x, dtype in zip(values, dtypes, strict=True)))


def stacked(states: list[ScaleState]) -> ScaleState:
    return ScaleState(*(torch.stack(column) for column in zip(*states, strict=True)))


def by_torch(scale, tracker, found_inf, growth, backoff, interval):
    """The kernel of torch, but for what it makes of a scale of zero, and of one that backs off below the floor."""
    before = torch.where(scale == 0, FLOOR, scale)
    after, count = before.clone(), tracker.clone()
    torch._amp_update_scale_(after, count, found_inf, growth, backoff, interval)
    lifted = found_inf.item() != 0 and after < min(before.item(), FLOOR)
    return before.clamp(max=FLOOR) if lifted else after, count


def rows_strategy(m: int = 3, magnitude: int = 8) -> st.SearchStrategy[Tensor]:
    row = st.lists(st.integers(-magnitude, magnitude).map(float), min_size=4, max_size=4)
    return st.lists(row, min_size=m, max_size=m).map(torch.tensor)


@given(floats32, st.integers(-(2**31), 2**31 - 2), factors, factors, st.integers(-(2**31), 2**31 - 1), st.booleans())
def test_update_scale_agrees_with_torch_from_any_state(value, tracker, growth, backoff, interval, overflowed):
    state = record(value, tracker, growth, backoff, interval)
    new = update_scale(state, torch.tensor(not overflowed))
    settings = (growth, backoff, interval)
    their_scale, their_tracker = by_torch(state.scale, state.growth_tracker, torch.tensor(float(overflowed)), *settings)
    assert same_bits(new.scale, their_scale)
    assert same_bits(new.growth_tracker, their_tracker)
    assert all(map(same_bits, new[2:], state[2:]))


@pytest.mark.parametrize(
    ("before", "finite", "after"),
    [
        (record(8.0, 0, 2.0, 0.5, 2), True, (8.0, 1)),
        (record(8.0, 1, 2.0, 0.5, 2), True, (16.0, 0)),
        (record(8.0, 1, 2.0, 0.5, 2), False, (4.0, 0)),
        (record(2.0**127, 0, 2.0, 0.5, 1), True, (2.0**127, 0)),  # growth to inf is refused
        (record(2.0**-13, 5, 2.0, 0.5, 9), False, (2.0**-14, 0)),
        (record(2.0**-14, 5, 2.0, 0.5, 9), False, (2.0**-14, 0)),  # the floor
        (record(2.0**-30, 5, 2.0, 0.5, 9), False, (2.0**-30, 0)),  # a smaller scale was somebody's choice
        (record(2.0**-30, 0, 2.0, 0.5, 1), True, (2.0**-29, 0)),
        (record(0.0, 0, 2.0, 0.5, 9), True, (2.0**-14, 1)),
        (record(0.0, 5, 2.0, 0.5, 9), False, (2.0**-14, 0)),
        (record(8.0, 0, 2.0, 0.5, 0), True, (8.0, 1)),
        (record(8.0, 5, 2.0, 0.5, 3), True, (8.0, 6)),
    ],
)
def test_update_scale_by_hand(before, finite, after):
    new = update_scale(before, torch.tensor(finite))
    assert (new.scale.item(), new.growth_tracker.item()) == after


def scaled_in_float16(state, gradient):
    """The gradient as it comes out of a backward pass in float16, unscaled."""
    return unscale(state, scale(state, gradient).half())


@pytest.mark.parametrize("shape", [(), (2,)])
@given(corrupt=st.integers(0, 400), size=st.floats(2.0**-10, 2.0**10))
def test_training_is_back_after_a_corrupt_stretch_of_any_length(shape, corrupt, size):
    state, gradient = scale_state(growth_interval=2, shape=shape), torch.full((2,), size)
    for _ in range(corrupt):
        state = update_scale(state, unscale(state, torch.full((2,), math.nan))[1])
    taken = []
    for step in range(50):
        found, finite = scaled_in_float16(state, gradient)
        assert not finite.any() or found[finite if shape else ...].all()  # a step that is taken moves something
        taken += [found] if finite.all() and step >= 47 else []
        state = update_scale(state, finite)
    assert taken  # an overflow is followed by growth_interval steps without
    # As many bits as ever: half a unit in the last place of float16.
    check_within(taken[-1], gradient, eps(torch.float16) / 2 * gradient)


@given(st.data())
@pytest.mark.parametrize("shape", [(), (3,)])
def test_a_loss_that_is_not_finite_leaves_no_trace_in_the_scale(shape, data):
    flags = st.lists(st.booleans(), min_size=3, max_size=3) if shape else st.booleans()
    walk = data.draw(st.lists(st.tuples(flags, flags), max_size=12))
    state = scale_state(growth_interval=2, shape=shape)
    alone = [scale_state(growth_interval=2) for _ in range(3 if shape else 1)]
    for finite, losses_finite in walk:
        state = update_scale(state, torch.tensor(finite), losses_finite=torch.tensor(losses_finite))
        pairs = zip(finite, losses_finite, strict=True) if shape else [(finite, losses_finite)]
        for i, (row, loss) in enumerate(pairs):
            alone[i] = update_scale(alone[i], torch.tensor(row)) if loss else alone[i]
    assert all(map(same_bits, state, stacked(alone) if shape else alone[0]))


def test_one_flag_serves_all_scales_and_flags_that_would_change_the_shape_are_refused():
    state, one, each = scale_state(8.0, shape=2), torch.tensor(False), torch.tensor([False, True])
    assert update_scale(state, one).scale.tolist() == [4.0, 4.0]
    assert update_scale(state, each).scale.tolist() == [4.0, 8.0]
    assert update_scale(state, each, losses_finite=one).scale.tolist() == [8.0, 8.0]
    assert update_scale(state, each, losses_finite=~one).scale.tolist() == [4.0, 8.0]
    words = r"update_scale: .* in losses_finite. For one scale, pass losses_finite.all()"
    for flags in (torch.tensor([True, False]), torch.tensor([True])):
        with pytest.raises(ValueError, match=r"update_scale: expected one flag per scale \[\], found \[\d\] in finite"):
            update_scale(scale_state(), flags)
        with pytest.raises(ValueError, match=words):
            update_scale(scale_state(), flags.all(), losses_finite=flags)


@given(st.lists(st.booleans(), max_size=5))
def test_no_scale_never_changes(walk):
    state = no_scale()
    for finite in walk:
        state = update_scale(state, torch.tensor(finite))
    assert all(map(same_bits, state[:2], no_scale()[:2]))
    assert state[2:] == ((), (), ())
    assert state.scale.item() == 1.0
    # For a GradScaler, it is a scale whose factors are 1.
    again = scale_state_from_dict(scale_state_to_dict(state))
    for finite in walk:
        again = update_scale(again, torch.tensor(finite))
    assert again.scale.item() == 1.0


@given(rows_strategy(), st.lists(st.integers(-60, 60), min_size=3, max_size=3), st.sampled_from([16, 32, 64]))
def test_unscale_inverts_scale_for_powers_of_two(rows, exponents, bits):
    rows = rows.to(getattr(torch, f"float{bits}"))
    tree = {"b": rows[:, :1], "a": (rows.reshape(3, 2, 2), rows[:, 3])}
    state = scale_state(shape=3)._replace(scale=torch.tensor([2.0**e for e in exponents]))
    for each in (state, scale_state(2.0 ** exponents[0])):
        back, finite = unscale(each, scale(each, tree))
        assert list(back) == ["b", "a"]
        assert finite.shape == each.scale.shape
        assert finite.all()
        wide = [leaf.to(torch.promote_types(rows.dtype, torch.float32)) for leaf in flat(tree)]
        assert all(map(same_bits, flat(back), wide))


@given(
    st.lists(floats32, min_size=1, max_size=8),
    st.floats(min_value=2.0**-126, max_value=torch.finfo(torch.float32).max, width=32),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_unscale_agrees_with_the_kernel_of_torch(values, value, dtype):
    scaled = torch.tensor(values, dtype=dtype)
    theirs, found_inf = scaled.clone(), torch.zeros(1)
    inverse = torch.tensor([value]).double().reciprocal().float()
    torch._amp_foreach_non_finite_check_and_unscale_([theirs], found_inf, inverse)
    ours, finite = unscale(torch.tensor(value), scaled)
    assert bool(finite) == bool(theirs.isfinite().all())
    assert same_bits(ours, theirs if finite else torch.zeros_like(theirs))
    if value >= 1:
        assert bool(finite) == (found_inf.item() == 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@given(
    rows=rows_strategy(), bad=st.sampled_from([math.nan, math.inf, -math.inf]), i=st.integers(0, 2), j=st.integers(0, 3)
)
def test_one_bad_row_is_zeroed_and_leaves_the_others_alone(dtype, rows, bad, i, j):
    state = scale_state(shape=3)._replace(scale=torch.tensor([2.0, 3.0, 5.0]))
    fine = {"w": rows.to(dtype).reshape(3, 2, 2), "b": rows.to(dtype)}
    spoiled = rows.to(dtype).clone()
    spoiled[i, j] = bad
    clean, _ = unscale(state, fine)
    found, finite = unscale(state, {"w": fine["w"], "b": spoiled})
    assert finite.tolist() == [row != i for row in range(3)]
    for leaf, expected in ((found["w"], clean["w"]), (found["b"], clean["b"])):
        assert not leaf[i].any()
        assert same_bits(leaf[finite], expected[finite])
    together, flag = unscale(scale_state(), {"w": fine["w"], "b": spoiled})
    assert not flag
    assert not together["w"].any()
    assert not together["b"].any()


@given(st.floats(min_value=0.0, max_value=2.0**-120, width=32))
def test_tiny_scales_are_floored_and_scales_that_are_not_finite_never_give_nan(value):
    factor = multiplier(torch.tensor(value))
    assert factor.item() == max(value, 2.0**-126)
    assert (1 / factor).isfinite()
    assert unscale(torch.tensor(value), torch.tensor([1.0]))[1]
    for state in (torch.full(shape, no_number) for shape in ((), (2,)) for no_number in (math.nan, math.inf)):
        out, finite = unscale(state, scale(state, torch.ones(2, 3)))
        assert not finite.any()
        assert not out.any()


@pytest.mark.parametrize("around", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_native_autocast_around_changes_nothing(dtype, around):
    rows = {"w": torch.tensor([[4.0, 8.0], [1.0, torch.inf]], dtype=dtype), "b": torch.ones(2)}
    for state in (scale_state(2.0, shape=2), scale_state(2.0)):
        with torch.autocast("cpu", around):
            found = unscale(state, rows)
        assert all(map(torch.equal, flat(found), flat(unscale(state, rows))))


def test_losses_are_scaled_in_leaf_order():
    state = record([2.0, 4.0, 8.0], [0] * 3, [2.0] * 3, [0.5] * 3, [1] * 3)
    losses = {"b": torch.tensor([1.0, 10.0]), "a": torch.tensor(1.0, dtype=torch.float16)}
    scaled = scale(state, losses)
    assert {key: value.tolist() for key, value in scaled.items()} == {"b": [4.0, 80.0], "a": 2.0}
    assert scaled["a"].dtype == torch.float32


@pytest.mark.parametrize("tree", [torch.ones(2), torch.ones(()), {"a": torch.ones(3, 2), "b": torch.ones(2, 3)}])
def test_trees_that_do_not_fit_m_scales_are_refused_and_empty_ones_are_finite(tree):
    with pytest.raises(ValueError, match=r"scale: m = 3 scales need .* found torch.float32 .* in '(value|b)'"):
        scale(scale_state(shape=3), tree)
    with pytest.raises(ValueError, match=r"unscale: m = 3 scales need"):
        unscale(scale_state(shape=3), tree)
    for state in (2.0, torch.tensor(2), torch.ones(2, 2), None):
        with pytest.raises(TypeError, match="functional_jd: expected a ScaleState or a floating-point tensor"):
            multiplier(state)
    for shape in ((), (2,)):
        out, finite = unscale(torch.ones(shape), {"a": torch.ones(2, 0), "b": {}})
        assert finite.all()
        assert (finite.shape, out["a"].shape) == (shape, (2, 0))


@given(rows_strategy(2), st.sampled_from(["none", "shared", "heads"]), st.booleans())
def test_heads_are_unscaled_already_and_flag_every_row(rows, where, per_row):
    state = scale_state(4.0, shape=2 if per_row else ())
    shared, heads = rows.clone(), rows[0].clone().half()
    if where == "shared":
        shared[1, 2] = math.inf
    if where == "heads":
        heads[0] = math.nan
    out, finite = unscale(state, MultitaskJacobian({"w": shared}, [heads]))
    expected = {"none": [True, True], "heads": [False, False], "shared": [per_row, False]}[where]
    assert finite.tolist() == (expected if per_row else expected[0])
    assert isinstance(out, MultitaskJacobian)
    assert out.heads[0].dtype == torch.float32
    flags = torch.tensor(expected)
    assert torch.equal(out.shared["w"], torch.where(flags[:, None], rows / 4, 0.0))
    assert torch.equal(out.heads[0], rows[0] if flags.any() else torch.zeros(4))
    scaled = scale(state, MultitaskJacobian({"w": rows}, [rows[0]]))  # which leaves heads alone too
    assert torch.equal(scaled.shared["w"], 4 * rows)
    assert torch.equal(scaled.heads[0], rows[0])


def test_inputs_are_left_alone():
    tree = torch.tensor([[1.0, math.inf], [1.0, 2.0]])
    before, state = tree.clone(), scale_state(shape=2)
    _, finite = unscale(state, scale(state, tree))
    update_scale(state, finite)
    select(finite, tree, tree + 1)
    unscale(no_scale(), tree)
    assert same_bits(tree, before)
    assert all(map(same_bits, state, scale_state(shape=2)))


@given(
    st.lists(st.booleans(), min_size=0, max_size=3),
    st.sampled_from(
        [torch.float16, torch.float32, torch.float64, torch.int64, torch.bool, torch.uint8, torch.complex64]
    ),
)
def test_select_takes_one_tree_whole(flags, dtype):
    new, old = [torch.ones(2, dtype=dtype)], [torch.zeros(2, dtype=dtype)]
    (leaf,) = select(torch.tensor(flags) if flags else torch.tensor(True), new, old)
    assert leaf.dtype == dtype
    assert torch.equal(leaf, new[0] if all(flags) else old[0])


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_nothing_leaks_from_the_tree_that_was_not_selected(poison):
    bad, good = torch.full((2,), poison), torch.tensor([1.0, 2.0])
    for finite, new, old in ((torch.tensor([True, False]), bad, good), (torch.tensor(True), good, bad)):
        out, towards = torch.func.vjp(lambda a, b, finite=finite: select(finite, {"w": a}, {"w": b})["w"], new, old)
        assert torch.equal(out, good)
        gradients = towards(torch.ones(2))
        expected = [1.0, 0.0] if finite.all() else [0.0, 1.0]
        assert [g.tolist() for g in gradients] == [[e, e] for e in expected]
        _, tangent = torch.func.jvp(lambda a, b, finite=finite: select(finite, a, b), (new, old), (new, old))
        assert torch.equal(tangent, good)


@pytest.mark.parametrize(
    ("new", "old", "error", "words"),
    [
        ({"a": [1.0]}, {"a": [2.0]}, TypeError, r"every leaf must be a tensor.*found 1.0 and 2.0 in 'a\.0'"),
        ({"a": torch.ones(2)}, {"a": torch.ones(3)}, TypeError, r"\[2\] and .*\[3\] in 'a'"),
        ({"a": torch.ones(2)}, {"a": torch.ones(2).half()}, TypeError, "torch.float32 .* and torch.float16 .* in 'a'"),
        ({"a": torch.ones(2)}, {"b": torch.ones(2)}, ValueError, "the same structure"),
        ({"a": torch.ones(2)}, {"a": None}, TypeError, "None in 'a'"),
    ],
)
def test_select_names_what_differs(new, old, error, words):
    with pytest.raises(error, match=f"select: .*{words}"):
        select(torch.tensor(True), new, old)


@pytest.mark.parametrize("shape", [(), 1, 3, (2,)])
def test_a_fresh_state_is_that_of_grad_scaler(shape):
    state = scale_state(shape=shape)
    assert [tensor.dtype for tensor in state] == [torch.float32, torch.int32, torch.float64, torch.float64, torch.int32]
    sizes = (shape,) if isinstance(shape, int) else shape
    assert all(tensor.shape == sizes for tensor in state)
    fresh = torch.amp.GradScaler("cpu").state_dict()
    for key, entry in scale_state_to_dict(scale_state()).items():
        assert entry == fresh[key]
    assert list(scale_state_to_dict(state)) == list(fresh)


@pytest.mark.parametrize(
    ("name", "value"),
    [("init_scale", v) for v in (0.0, -1.0, math.nan, math.inf, 1e39, 1e-60)]
    + [("growth_factor", v) for v in (0.99, -2.0, math.nan, math.inf)]
    + [("backoff_factor", v) for v in (0.0, 1.5, -0.5, math.nan)]
    + [("growth_interval", v) for v in (2.0, 2**31, True)]
    + [("shape", v) for v in ((2, 2), 0, (0,), -1)],
)
def test_settings_out_of_range_are_named(name, value):
    with pytest.raises(ValueError, match=f"scale_state: {name} must be .*found "):
        scale_state(**{name: value})


@given(
    positive32,
    st.floats(min_value=1.0, max_value=1e6, exclude_min=True),
    st.floats(min_value=1e-6, max_value=1.0, exclude_max=True),
    st.integers(1, 2**31 - 1),
    st.integers(0, 2**31 - 1),
)
def test_round_trip_through_grad_scaler_keeps_every_bit(value, growth, backoff, interval, tracker):
    state = record(value, tracker, growth, backoff, interval)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))  # from here on GradScaler keeps its state in tensors
    scaler.load_state_dict(scale_state_to_dict(state))
    assert all(map(same_bits, scale_state_from_dict(scaler.state_dict()), state))


def test_a_number_beside_lists_serves_all_and_the_dict_of_a_disabled_scaler_names_the_cure():
    state = scale_state_from_dict(scale_state_to_dict(scale_state()) | {"scale": [2.0, 4.0]})
    assert all(tensor.shape == (2,) for tensor in state)
    assert state.growth_interval.tolist() == [2000, 2000]
    with pytest.raises(ValueError, match=r"disabled GradScaler .*no_scale\(\)"):
        scale_state_from_dict(torch.amp.GradScaler("cpu", enabled=False).state_dict())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"_growth_tracker": None}, "_growth_tracker must be an integer"),
        ({"_growth_tracker": 1.0}, "_growth_tracker must be an integer"),
        ({"growth_interval": 2**31}, "growth_interval must be an integer"),
        *(({"scale": x}, "scale must be positive and finite") for x in ("65536", True, torch.tensor(2.0), [[2.0]])),
        ({"scale": [2.0, 4.0], "growth_factor": [2.0]}, "every list must have m numbers"),
        ({"scale": []}, "every list must have m numbers"),
        *(({"scale": x}, "scale must be positive and finite") for x in (0, -0.0, -1.0, math.inf, math.nan, 1e-60)),
        ({"scale": [2.0, 1e39]}, r"scale must be positive and finite in float32, found 1e\+39"),
        *(({"growth_factor": x}, "growth_factor must be finite and at") for x in (0.5, 0, math.nan, math.inf)),
        *(({"backoff_factor": x}, r"backoff_factor must be in \(0, 1\]") for x in (0.0, 1.5, -0.5, math.nan)),
        ({"growth": 2.0}, r"missing or unknown \['growth'\]"),
    ],
)
def test_entries_that_are_wrong_are_named(change, words):
    with pytest.raises((TypeError, ValueError), match=f"scale_state_from_dict: .*{words}"):
        scale_state_from_dict(scale_state_to_dict(scale_state()) | change)
    for key, entries in ((key, scale_state_to_dict(scale_state())) for key in scale_state_to_dict(scale_state())):
        del entries[key]
        with pytest.raises(ValueError, match=rf"missing or unknown \['{key}'\]"):
            scale_state_from_dict(entries)


@pytest.mark.filterwarnings("ignore:torch.cuda.amp.GradScaler is enabled, but CUDA is not available:UserWarning")
def test_one_scale_of_a_scaler_becomes_one_for_each_loss():
    entries = scale_state_to_dict(scale_state(2.0**10)._replace(growth_tracker=torch.tensor(7, dtype=torch.int32)))
    for shape in (3, (3,)):
        state = scale_state_from_dict(entries, shape=shape)
        assert state.scale.tolist() == [2.0**10] * 3
        assert state.growth_tracker.tolist() == [7] * 3
    assert scale_state_from_dict(scale_state_to_dict(state), shape=3).scale.tolist() == [2.0**10] * 3
    for wrong, words in (((2,), "that of the lists"), ("many", "one per objective")):
        with pytest.raises(ValueError, match=f"scale_state_from_dict: shape must be .*{words}"):
            scale_state_from_dict(scale_state_to_dict(state), shape=wrong)


def cycle(state: ScaleState, jacobian, params):
    """One step: everything in this file that runs in a step."""
    rows, finite = unscale(state, jacobian)
    moved = {key: params[key] - rows[key].sum(0) / multiplier(state).amax() for key in params}
    new = update_scale(state, finite, losses_finite=params["b"] < 1)
    return select(finite, moved, params), new, scale(state, rows), finite


def example(overflow: bool = False, seed: int = 0):
    draw = torch.Generator().manual_seed(seed)
    jacobian = {"w": torch.randn(3, 2, 2, generator=draw), "b": torch.randn(3, generator=draw)}
    if overflow:
        jacobian["b"][1] = math.inf
    return jacobian, {"w": torch.randn(2, 2, generator=draw), "b": torch.randn((), generator=draw)}


@pytest.mark.parametrize("shape", [(), (3,)])
def test_vmap_over_replicas_is_a_loop_over_them(shape):
    states = [scale_state(2.0**i, growth_interval=1, shape=shape) for i in range(2)]
    batch = [example(overflow=i == 1, seed=i) for i in range(2)]
    together = torch.utils._pytree.tree_map(lambda *leaves: torch.stack(leaves), *batch)
    for of_state, of_rows in ((0, 0), (0, None), (None, 0)):  # which of them are mapped
        given = stacked(states) if of_state == 0 else states[0], *(together if of_rows == 0 else batch[0])
        found = flat(torch.func.vmap(cycle, in_dims=(of_state, of_rows, of_rows))(*given))
        for i in range(2):
            alone = cycle(states[i if of_state == 0 else 0], *batch[i if of_rows == 0 else 0])
            assert all(map(same_bits, flat(alone), [leaf[i] for leaf in found]))


@pytest.mark.parametrize("shape", [(), (3,)])
@pytest.mark.parametrize("direction", [1.0, -1.0])
def test_derivatives_in_the_scale_are_those_of_the_division(shape, direction):
    rows, value = example()[0]["w"], torch.full(shape, 4.0)
    for f, expected in ((scale, rows), (lambda s, t: unscale(s, t)[0], -rows / 16)):
        out, tangent = torch.func.jvp(lambda s, f=f: f(s, rows), (value,), (direction * torch.ones(shape),))
        torch.testing.assert_close(tangent, direction * expected)
        gradient = torch.func.grad(lambda s, f=f: f(s, rows).sum())(value)
        torch.testing.assert_close(gradient, expected.sum() if shape == () else expected.sum((1, 2)))
        assert out.isfinite().all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("shape", [(), (3,)])
def test_derivatives_are_zero_where_not_finite(bad, shape):
    rows = torch.tensor([[1.0, 2.0], [3.0, bad], [5.0, 6.0]])
    state = torch.full(shape, 2.0)
    towards = torch.func.grad(lambda s, t: unscale(s, t)[0].sum(), argnums=(0, 1))(state, rows)
    fine = torch.tensor([1.0, 0.0, 1.0]) if shape else torch.zeros(3)
    assert torch.equal(towards[1], 0.5 * fine[:, None].expand(3, 2))
    expected = -fine * torch.tensor([3.0, 0.0, 11.0]) / 4
    assert torch.equal(towards[0], expected if shape else expected.sum())
    tangents = (torch.ones(shape), torch.full((3, 2), bad))
    _, tangent = torch.func.jvp(lambda s, t: unscale(s, t)[0], (state, rows), tangents)
    assert not tangent[fine == 0].any()


@pytest.mark.parametrize("shape", [(), (3,)])
def test_compiles_to_one_graph_that_serves_every_value(shape):
    torch._dynamo.reset()
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(cycle, fullgraph=True, backend=count)
    for seed, value in enumerate((1.0, 2.0**16, 3.0)):
        state, (jacobian, params) = scale_state(value, shape=shape), example(overflow=seed == 1, seed=seed)
        out, expected = compiled(state, jacobian, params), cycle(state, jacobian, params)
        assert all(map(same_bits, flat(out), flat(expected)))
        compiled(expected[1], jacobian, params)  # what update_scale returns is a state like the others
    assert len(graphs) == 1
    for f in (scale_state, no_scale):
        built = torch.compile(lambda x, f=f: (f(), x + 1), fullgraph=True, backend="aot_eager")
        assert all(map(same_bits, flat(built(torch.ones(1))[0]), flat(f())))


@pytest.mark.inductor
def test_inductor_keeps_the_bits():
    compiled = torch.compile(cycle, fullgraph=True)
    state = record([3.0, 5.0, 7.0], [0] * 3, [1.7] * 3, [0.3] * 3, [1] * 3)
    for inputs in (example(False), example(True)):
        assert all(map(same_bits, flat(compiled(state, *inputs)[1:]), flat(cycle(state, *inputs)[1:])))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.parametrize("m", [None, 3])
def test_sparse_tensors_are_unscaled_as_dense_ones(layout, m):
    dense = torch.tensor([[0.0, 2.0], [torch.inf, 0.0], [4.0, 8.0]])
    state = scale_state(4.0, shape=() if m is None else m)
    expected, flags = unscale(state, {"w": dense})
    found, finite = unscale(state, {"w": dense.to_sparse(layout=layout)})
    assert torch.equal(finite, flags)
    assert same_bits(found["w"], expected["w"])


def test_the_sparse_gradient_of_an_embedding_is_unscaled_with_repeated_indices_added_up():
    weight = torch.ones(4, 2, requires_grad=True)
    rows = torch.nn.functional.embedding(torch.tensor([1, 1, 3]), weight, sparse=True)
    (sparse,) = torch.autograd.grad((rows * 6.0e4).half().float().sum(), weight)
    assert (sparse.is_sparse, sparse.is_coalesced()) == (True, False)
    found, finite = unscale(torch.tensor(6.0e4), {"w": sparse})
    assert finite
    torch.testing.assert_close(found["w"], sparse.to_dense() / 6.0e4)
