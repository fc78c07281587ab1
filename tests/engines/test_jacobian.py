"""The Jacobian engine against a loop of plain autograd: every model, kind of losses, mode and transform."""

import gc
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from bounds import check_derivatives, check_same, eps
from hypothesis import given
from hypothesis import strategies as st
from jacobian_by_hand import CASES, case_of, every_kind, flat, leaves, moved, rows_of, same, same_unscaled
from torch import nn
from torch.autograd import forward_ad
from torch.utils import _pytree
from zoo import MODELS, by_example, mlp, numbers, plain, tasks

import functional_jd as jd
from functional_jd import gramian_fn, jacobian_fn, multitask, per_example, squared_norms_fn, weighted_fn
from functional_jd.engines.by_name import MODES
from functional_jd.objectives import Multitask, PerExample

ZERO = torch.zeros((), dtype=torch.float64)

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")

every_mode = pytest.mark.parametrize("mode", MODES)


def jacobian_of(losses, params, *args):
    """What `jacobian_fn` should return, leaf by leaf: the heads' rows as a plain sum."""
    rows = rows_of(losses, params, *args)
    if not isinstance(losses, Multitask):
        return rows
    heads = len(leaves(params["heads"]))  # sorted before "shared"
    return [*rows[heads:], *[r.sum(0) for r in rows[:heads]]]


@every_mode
@every_kind
def test_rows_whose_scale_is_infinite_are_zeros_with_a_flag(kind, mode):
    """Finite scales are in `test_differential.py`."""
    case, m = kind(mlp()), 3 if kind is tasks else 4
    expected = jacobian_of(case.losses, case.params, *case.args)
    if kind is tasks:  # the heads have no rows
        expected = expected[: -len(leaves(case.params["heads"]))]
    by_row = torch.tensor([0.5, torch.inf, 3.0, 2.0**-20])[:m]
    for scale in (by_row, torch.tensor(torch.inf)):
        rows, values, finite = jacobian_fn(case.losses, mode=mode, scale=scale)(case.params, *case.args)
        assert torch.equal(finite, scale.isfinite())
        assert all(map(torch.equal, leaves(values), leaves(case.losses(case.params, *case.args))))
        kept = scale.isfinite().double().expand(m)
        zeroed = [torch.einsum("m,m...->m...", kept, each) for each in expected]
        same_unscaled(leaves(rows)[: len(expected)], zeroed)


Named = namedtuple("Named", ["z", "a"])


@every_mode
@pytest.mark.parametrize(
    "arrange",
    [
        lambda a, b: torch.cat([a[None], b]),
        lambda a, b: {"z": b, "a": a},
        lambda a, b: (a, [b, {"k": a}]),
        lambda a, b: Named(a, b),
        lambda a, b: {"same": a, "again": a, "none": b[:0], "grid": torch.outer(b, b)},
        lambda a, b: a,
        lambda a, b: {"constant": torch.ones(2, dtype=torch.float64), "b": b},
    ],
)
def test_rows_are_in_leaf_order_whatever_the_structure(arrange, mode):
    losses = lambda w: arrange((w**3).sum(), torch.sin(w))
    w = numbers(3)
    jacobian, values = jacobian_fn(losses, mode=mode)(w)
    same(jacobian, rows_of(losses, w))
    assert _pytree.tree_structure(values) == _pytree.tree_structure(losses(w))


@every_mode
def test_losses_that_depend_on_nothing_or_are_the_parameters_which_may_have_no_elements(mode):
    w = numbers(3)
    assert jacobian_fn(lambda w: torch.ones(2), mode=mode)(w)[0].count_nonzero() == 0
    assert torch.equal(jacobian_fn(lambda w: w, mode=mode)(w)[0], torch.eye(3, dtype=torch.float64))
    # What a closure captures is no input, even if it is the parameter itself.
    asking = numbers(3).requires_grad_()
    assert torch.equal(jacobian_fn(lambda p: p * asking, mode=mode)(asking)[0], torch.diag(w))
    params = {"empty": torch.zeros(0, 2), "w": torch.ones(2)}
    jacobian, _ = jacobian_fn(lambda p: p["w"] * (1 + p["empty"].sum()), mode=mode)(params)
    assert jacobian["empty"].shape == (2, 0, 2)
    assert torch.equal(jacobian["w"], torch.eye(2))


@every_mode
@pytest.mark.parametrize("argnums", [0, 1, -1, (0,), (0, 2), [2, 0], (-1, 1)])
def test_argnums_choose_the_arguments(argnums, mode):
    args = numbers(3), {"b": numbers(seed=1), "a": numbers(2, seed=2)}, numbers(3, seed=3)
    losses = lambda x, y, z: {"one": (x * z).sin() * y["b"], "two": (y["a"] ** 3).sum() * z.sum()}
    jacobian, _ = jacobian_fn(losses, argnums=argnums, mode=mode)(*args)
    assert isinstance(argnums, int) or type(jacobian) is tuple
    positions, parts = ([argnums], [jacobian]) if isinstance(argnums, int) else (argnums, jacobian)
    for part, position in zip(parts, positions, strict=True):
        at = position % 3
        same(part, rows_of(lambda chosen, at=at: losses(*args[:at], chosen, *args[at + 1 :]), args[at]))


@every_mode
def test_other_arguments_of_structured_losses_are_differentiated_the_plain_way(mode):
    case = by_example(mlp())
    jacobian, _ = jacobian_fn(case.losses, argnums=1, mode=mode)(case.params, *case.args)
    same(jacobian, rows_of(lambda x: case.losses(case.params, x, case.args[1]), case.args[0]))


@every_mode
@every_kind
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_rows_come_out_in_the_parameters_dtype_and_unscaled_ones_in_float32(kind, mode, dtype):
    case = kind(mlp())
    exact = jacobian_of(case.losses, case.params, *case.args)
    params, args = _pytree.tree_map(lambda x: x.to(dtype), (case.params, case.args))
    for outer, scale in ((False, None), (False, torch.tensor(4.0)), (True, torch.tensor(4.0)), (True, None)):
        with torch.autocast("cpu", torch.bfloat16, enabled=outer):
            jacobian, values, *_ = jacobian_fn(case.losses, mode=mode, scale=scale)(params, *args)
        assert {x.dtype for x in leaves(jacobian)} == {dtype if scale is None else torch.float32}
        if not outer:
            assert {x.dtype for x in leaves(values)} == {dtype}
            for x, y in zip(leaves(jacobian), exact, strict=True):
                assert (x.double() - y).norm() <= 30 * torch.finfo(dtype).eps * (y.norm() + 1)


@every_mode
def test_complex_features_carry_the_gradient_to_the_trunk(mode):
    heads = lambda h, f: {"size": f.abs().sum() * h, "turn": f.imag.sum()}
    losses = multitask(lambda w: torch.complex(w, w**2), heads)
    w = numbers(3)
    jacobian, _ = jacobian_fn(losses, mode=mode)({"shared": w, "heads": torch.ones((), dtype=torch.float64)})
    expected = torch.stack([(w + 2 * w**3) / (w**2 + w**4).sqrt(), 2 * w])  # |w + i w^2| and its imaginary part
    same(jacobian.shared, [expected])


def test_several_dtypes_of_losses_and_parameters_in_one_call():
    params = {"half": torch.ones(2, dtype=torch.float16), "double": torch.ones(2, dtype=torch.float64)}
    losses = lambda p: {"a": p["half"] * 3, "b": (p["double"] * p["half"].double()).sum()}
    for mode in MODES:
        jacobian, values = jacobian_fn(losses, mode=mode)(params)
        assert {k: v.dtype for k, v in jacobian.items()} == {k: v.dtype for k, v in params.items()}
        assert jacobian["half"].tolist() == [[3, 0], [0, 3], [1, 1]]
        assert jacobian["double"].tolist() == [[0, 0], [0, 0], [1, 1]]
        assert values["a"].dtype == torch.float16


def test_an_overflow_in_one_objective_leaves_the_others_finite_in_the_loop():
    losses = lambda w: {"root": torch.sqrt((0 * w).sum()), "square": (w**2).sum()}
    jacobian, _ = jacobian_fn(losses, mode="loop")(torch.ones(3))
    assert not jacobian[0].isfinite().any()
    assert jacobian[1].tolist() == [2, 2, 2]
    heads = multitask(lambda s: s, lambda h, f: {"root": torch.sqrt((0 * f).sum()) * h, "square": (f**2).sum() * h})
    jacobian, _ = jacobian_fn(heads)({"shared": torch.ones(3), "heads": torch.tensor(1.0)})
    assert jacobian.shared[1].tolist() == [2, 2, 2]


@pytest.mark.parametrize("f", [jacobian_fn, gramian_fn, weighted_fn, squared_norms_fn, jd.weights_fn])
@pytest.mark.parametrize("make", [plain, by_example])
def test_no_derivative_is_taken_in_inference_mode(f, make):
    """Torch 2.11 returns zeros there."""
    case = make(mlp())
    with torch.inference_mode(), pytest.raises(ValueError, match=r"_fn: expected .* outside of torch.inference_mode"):
        f(case.losses, *[jd.mean()] * (f is jd.weights_fn))(case.params, *case.args)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the memory of the process from Linux")
def test_no_memory_grows_under_autocast():
    params, x = torch.ones(512, 512), torch.ones(2, 512)

    def resident():
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    with torch.autocast("cpu", torch.bfloat16):
        f = jacobian_fn(lambda w, x: (x @ w).sum(1))
        for call in range(110):
            if call == 10:
                before = resident()
            f(params, x)
        grown = resident() - before
    assert grown < 20e6  # one more cast weight each call would be 50 MB


def out_of_autocast(losses):
    """The same losses, which no autocast around reaches."""

    def alone(f):
        def run(*args):
            with torch.autocast("cpu", enabled=False):
                return f(*args)

        return run

    if isinstance(losses, PerExample):
        return per_example(alone(losses.loss))
    if isinstance(losses, Multitask):
        return multitask(alone(losses.features), alone(losses.heads))
    return alone(losses)


@every_mode
@every_kind
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_autocast_around_the_engine_reaches_the_losses_only(kind, mode, dtype):
    """Neither the backward pass nor the engine's own work."""
    case = kind(mlp())
    params, args = _pytree.tree_map(lambda x: x.to(dtype), (case.params, case.args))
    scale = torch.tensor([1.1, 3.3, 0.7, 9.1][: 3 if kind is tasks else 4])
    f = jacobian_fn(out_of_autocast(case.losses), mode=mode, scale=scale)
    expected = f(params, *args)
    with torch.autocast("cpu", torch.bfloat16):
        found = f(params, *args)
    assert all(torch.equal(x, y) for x, y in zip(leaves(found), leaves(expected), strict=True))


def reading(f, params, *args):
    """One number that looks at every entry of the Jacobian and every loss."""
    parts = leaves(f(params, *args))
    waves = [torch.arange(1.0 + i, 1.0 + i + x.numel(), dtype=torch.float64).cos() for i, x in enumerate(parts)]
    return sum((x.double() * wave.reshape(x.shape)).sum() for x, wave in zip(parts, waves, strict=True))


# No second derivative in torch, or (mixed) a float32 that finite differences cannot resolve.
# Dropout draws anew at every point.
ONCE = {"fused_attention", "encoder", "encoder_norm_first", "embedding_bag", "numpy_backward", "mixed", "dropout"}
SPARSE = {"sparse_embedding"}  # double backward of sparse gradients: torch cannot reshape them
TWICE = [(name, kind) for name, kind in CASES if name not in ONCE]


@pytest.mark.parametrize(("name", "kind"), TWICE)
def test_a_derivative_of_the_jacobian_is_that_of_finite_differences(name, kind):
    case, model = case_of(name, kind), MODELS[name]()
    direction = _pytree.tree_map(lambda x: numbers(*x.shape, seed=123), case.params)
    along = lambda slopes: sum((g * v).sum() for g, v in zip(slopes, leaves(direction), strict=True))
    for mode in ("auto", "loop"):
        f = jacobian_fn(case.losses, mode=mode)
        found, at = [], lambda t, f=f: reading(f, moved(case.params, direction, t), *case.args)
        if name not in SPARSE:
            asking = _pytree.tree_map(lambda x: x.clone().requires_grad_(), case.params)
            how = {"materialize_grads": True, "allow_unused": True}
            found.append(along(torch.autograd.grad(reading(f, asking, *case.args), leaves(asking), **how)))
        if model.func and name != "frozen":  # torch warns of a captured tensor that requires grad
            found.append(along(leaves(torch.func.grad(lambda p, f=f: reading(f, p, *case.args))(case.params))))
        for value in found:
            check_derivatives(value, at, ZERO)


@every_mode
@every_kind
def test_jvp_and_jacrev_of_the_jacobian_agree_with_finite_differences(kind, mode):
    case = kind(mlp())
    f = jacobian_fn(case.losses, mode=mode)
    direction = _pytree.tree_map(lambda x: numbers(*x.shape, seed=5), case.params)
    at = lambda t: flat(f(moved(case.params, direction, t), *case.args))
    pushed = torch.func.jvp(lambda p: f(p, *case.args), (case.params,), (direction,))[1]
    check_derivatives(flat(pushed), at, ZERO)
    slopes = torch.func.jacrev(lambda p: f(p, *case.args)[1])(case.params)
    first = leaves(slopes)[: len(leaves(case.params))] if kind is by_example else leaves(slopes)
    assert all(x.isfinite().all() for x in first)
    if mode in ("auto", "vmap", "loop"):
        with forward_ad.dual_level():
            dual = _pytree.tree_map(forward_ad.make_dual, case.params, direction)
            tangents = [forward_ad.unpack_dual(x).tangent for x in leaves(f(dual, *case.args))]
        check_derivatives(flat(tangents), at, ZERO)


@every_mode
@every_kind
def test_derivatives_in_the_scale(kind, mode):
    """Whatever the scale, unscaled rows are the same."""
    case, m = kind(mlp()), 3 if kind is tasks else 4
    scales = 2.0 ** numbers(2, m, dtype=torch.float32)
    unscaled = lambda scale: jacobian_fn(case.losses, mode=mode, scale=scale)(case.params, *case.args)
    size = sum(rows.abs().sum() for rows in leaves(unscaled(scales[0])[0]))
    rounding = 4 * eps(torch.float32) * size * (scales[1].max() / scales[0].min())
    for tangent in leaves(torch.func.jvp(lambda s: unscaled(s)[:2], (scales[0],), (scales[1],))[1]):
        assert tangent.abs().max() <= rounding
    asking = scales[0].clone().requires_grad_()
    (slope,) = torch.autograd.grad(leaves(unscaled(asking))[0].sum(), asking)
    assert slope.abs().max() <= rounding


def together(w, x):
    return jacobian_fn(lambda w, x: torch.tanh(x @ w))(w, x)


COMPILED = {
    "the loop": lambda w, x: jacobian_fn(lambda w, x: torch.tanh(x @ w), mode="loop")(w, x),
    "around vmap": lambda w, x: torch.vmap(lambda w: together(w, x))(torch.stack([w, 2 * w])),
    "around grad": lambda w, x: torch.func.grad(lambda w: (together(w, x)[0] ** 2).sum())(w),
    "unflattened": lambda w, x: jacobian_fn(lambda x: x.square().flatten().unflatten(0, (2, 3)).sum(1))(x),
    "layer_norm": None,
    "encoder": None,
}


COMPILING = [(name, "aot_eager") for name in COMPILED]
COMPILING += [pytest.param("together", "inductor", marks=[pytest.mark.slow, pytest.mark.inductor])]


@pytest.mark.parametrize(("name", "backend"), COMPILING)
def test_compiles_whatever_is_around_or_inside(name, backend):
    torch.compiler.reset()
    args, f = (numbers(3), numbers(2, 3, seed=1)), COMPILED.get(name, together)
    if f is None:
        case = case_of(name, "plain" if name == "layer_norm" else "by_example")
        args, f = (case.params, *case.args), jacobian_fn(case.losses)
    same(torch.compile(f, fullgraph=True, backend=backend)(*args), leaves(f(*args)))


W = torch.ones(3)
SUM = lambda w: w.sum()
MISTAKES = {
    "no function": (lambda: jacobian_fn(SUM(W)), TypeError, "losses must be a function, found Tensor"),
    "mode": (lambda: jacobian_fn(SUM, mode="reverse"), ValueError, "auto, vmap, loop, found 'reverse'"),
    "columns": (lambda: jacobian_fn(SUM, mode="forward"), ValueError, "found 'forward'. .*torch.func.jacfwd"),
    "chunk": (lambda: jacobian_fn(SUM, chunk_size=0), ValueError, "at least 1, found 0"),
    "argument": (lambda: jacobian_fn(SUM, argnums=1)(W), ValueError, "the 1 arguments, each once, found 1"),
    "far back": (lambda: jacobian_fn(SUM, argnums=-2)(W), ValueError, "found -2"),
    "twice": (lambda: jacobian_fn(SUM, argnums=(0, -2))(W, W), ValueError, r"each once, found \(0, -2\)"),
    "no argnums": (lambda: jacobian_fn(SUM, argnums=())(W), ValueError, r"found \(\)"),
    "no arguments": (lambda: jacobian_fn(per_example(SUM))(), ValueError, "the 0 arguments"),
    "integers": (lambda: jacobian_fn(SUM)({"a": W, "n": W.int()}), TypeError, "found torch.int32 .* in 'n'"),
    "no parameters": (lambda: jacobian_fn(lambda p: W)({}), ValueError, "at least one parameter tensor"),
    "no tensor": (lambda: jacobian_fn(lambda w: {"a": w, "b": 2.0})(W), TypeError, "found 2.0 in 'b'.*has_aux"),
    "integer losses": (lambda: jacobian_fn(lambda w: w.int())(W), TypeError, "found torch.int32 .* in 'value'"),
    "complex losses": (lambda: jacobian_fn(lambda w: w + 1j)(W), TypeError, "found torch.complex64"),
    "no losses": (lambda: jacobian_fn(lambda w: {"a": w[:0]})(W), ValueError, "at least one objective, found none"),
    "nothing": (lambda: jacobian_fn(lambda w: None)(W), TypeError, "found None in 'value'"),
    "no pair": (lambda: jacobian_fn(SUM, has_aux=True)(W), TypeError, r"a pair \(losses, aux\), as has_aux=True"),
    "scale": (
        lambda: jacobian_fn(lambda w: w, scale=torch.ones(2))(W),
        ValueError,
        r"\[\] or \[3\].*\[2\].*shape=\(3,\)",
    ),
    "scale's type": (lambda: jacobian_fn(SUM, scale=2.0), TypeError, "ScaleState or a floating.*found 2.0"),
    "no scalar": (
        lambda: jacobian_fn(per_example(lambda w, x: w * x))(W, torch.ones(2, 3)),
        ValueError,
        r"must be one scalar, found \[\[3\]\].*a name of its own.*\.mean\(\) is for losses.*loss\[0\]",
    ),
    "shared": (lambda: jacobian_fn(multitask(SUM, SUM))({"trunk": W}), ValueError, r"'heads', found \['trunk'\]"),
    "no trunk": (
        lambda: jacobian_fn(multitask(lambda s: W, lambda h, f: h["b"] * f))({"shared": {}, "heads": {"b": W}}),
        ValueError,
        r"\(shared\): expected at least one",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("scaled", [False, True])
def test_mistakes_are_named_with_their_cure(mistake, scaled):
    make, kind, message = MISTAKES[mistake]
    with pytest.raises(kind, match=message), torch.autocast("cpu", torch.bfloat16, enabled=scaled):
        make()


@given(st.data())
def test_rows_are_written_where_they_belong_whatever_is_missing(data):
    """Which of the large leaves a loss reaches is drawn: rows that are not written must be zeros."""
    m = data.draw(st.integers(1, 6), "rows")
    reached = data.draw(st.lists(st.sets(st.integers(0, 2)), min_size=m, max_size=m), "leaves by row")
    params = [numbers(90, 100, seed=i) for i in range(3)]

    def losses(params):
        return [sum((params[k].sum() * (i + 1) for k in sorted(chosen)), params[0].new_zeros(())) for i, chosen in rows]

    rows = list(enumerate(reached))
    for mode, chunk_size in (("auto", None), ("loop", None), ("auto", 2)):
        jacobian, _ = jacobian_fn(losses, mode=mode, chunk_size=chunk_size)(params)
        for k, found in enumerate(jacobian):
            expected = torch.tensor([(i + 1.0) * (k in chosen) for i, chosen in rows], dtype=torch.float64)
            assert torch.equal(found, expected[:, None, None].expand(m, 90, 100))


def test_heads_that_share_a_gradient_do_not_share_its_memory():
    losses = multitask(lambda s: s, lambda h, f: [h["a"] + h["b"] + f.sum(), f.sum() * h["a"]])
    heads = jacobian_fn(losses)({"shared": W, "heads": {"a": torch.ones(()), "b": torch.ones(())}})[0].heads
    assert heads["a"].data_ptr() != heads["b"].data_ptr()
    assert (heads["a"], heads["b"]) == (4, 1)


def test_a_derivative_through_weight_norm_is_that_of_finite_differences():
    magnitude, v, move = numbers(3, 1).abs() + 1, numbers(3, 4), numbers(3, 4, seed=1)
    losses = lambda v: torch._weight_norm(v, magnitude, 0).sin().sum(1)
    f = lambda v: jacobian_fn(losses)(v)[0].sin().sum()
    x = v.clone().requires_grad_()
    for slope in (torch.autograd.grad(f(x), x)[0], torch.func.grad(f)(v)):
        check_derivatives((slope * move).sum(), lambda t: f(v + t * move), ZERO)


@pytest.mark.parametrize("differentiable", [False, True])
@pytest.mark.parametrize("engine", [jacobian_fn, gramian_fn, weighted_fn])
def test_heads_that_reach_the_trunk_other_than_by_its_features_are_refused(engine, differentiable):
    left = []

    def features(shared, x):
        hidden = nn.functional.linear(x, shared)
        left[:] = [hidden.square().mean()]
        return hidden

    aside = multitask(features, lambda own, h, x: [(h @ own).mean() + left[0], h.mean()])
    kept = multitask(features, lambda own, h, x: [(h @ own).mean() + left[0].detach(), h.mean()])
    params = {"shared": numbers(2, 3), "heads": numbers(2, seed=1)}
    params = _pytree.tree_map(lambda p: p.requires_grad_(differentiable), params)
    x = numbers(4, 3, seed=2)
    with pytest.raises(ValueError, match=r"depend on the trunk by its features only.*Return from features"):
        engine(aside)(params, x)
    engine(kept)(params, x)


def test_a_compiled_function_inside_the_losses_serves_every_mode_one_after_the_other():
    net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh())

    @torch.compile(backend="aot_eager")
    def losses(p, x):
        return torch.func.functional_call(net, p, (x,)).square().sum(-1)

    params, x = {name: p.detach() for name, p in net.named_parameters()}, torch.randn(5, 3)
    expected = jacobian_fn(losses, mode="loop")(params, x)[0]
    for kind, mode in ((per_example, "auto"), (per_example, "loop"), (lambda f: f, "auto")):
        found = jacobian_fn(kind(losses), mode=mode)(params, x)[0]
        check_same(found, expected)
    torch.compiler.reset()


def test_compiled_heads_are_differentiated_one_by_one():
    """A cotangent of zero through the other head's infinite derivative would be NaN."""
    params = {"shared": {"w": torch.ones(3)}, "heads": {"a": torch.ones(3), "b": torch.zeros(3)}}
    losses = multitask(lambda p, x: x * p["w"], lambda p, h, x: {"a": h @ p["a"], "b": (h @ p["b"]).sqrt()})
    torch._dynamo.reset()
    find = torch.compile(jacobian_fn(losses), fullgraph=True, backend="aot_eager")
    found, values = find(params, torch.arange(3.0))
    assert values == {"a": 3, "b": 0}
    assert found.shared["w"][0].tolist() == [0, 1, 2]
    assert found.shared["w"][1].isnan().all()
    assert found.heads["a"].tolist() == [0, 1, 2]
    assert found.heads["b"][1:].isinf().all()


def test_compiled_rows_of_heads_in_half_precision_are_added_in_float32():
    """Two rows of 40,000 each, multiplied by their scale: their sum is no float16."""
    params = {"shared": {"w": torch.ones(2)}, "heads": {"v": torch.ones(2, dtype=torch.float16)}}
    losses = multitask(lambda p, x: x * p["w"], lambda p, h, x: {name: (h @ p["v"].float()) for name in "ab"})
    torch._dynamo.reset()
    find = torch.compile(jacobian_fn(losses, scale=torch.tensor(8.0)), fullgraph=True, backend="aot_eager")
    found, _, finite = find(params, torch.full((2,), 5000.0))
    assert found.heads["v"].tolist() == [10000, 10000]
    assert finite
