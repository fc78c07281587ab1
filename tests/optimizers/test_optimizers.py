"""The optimizers: what torch.optim and TorchOpt compute, step by step, but pure and under every transform."""

import math
from collections import Counter, namedtuple
from functools import partial

import numpy
import pytest
import torch
import torchopt
from bounds import check_within, eps
from hypothesis import given
from hypothesis import strategies as st
from optimizers.steps import assert_close, run, run_torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend

import functional_jd as fj
from functional_jd import Optimizer, adamw, by_label, from_torch, from_transformation, line_search, noised, sgd
from functional_jd.core.tree import tree_flatten, tree_leaves, tree_map
from functional_jd.optimizers import clip_by_norm, global_norm
from functional_jd.optimizers.adamw import fused_adamw_op
from functional_jd.random import key

seeds = st.integers(0, 2**16)


def tree(seed, dtype=torch.float64):
    """Leaves of several ranks, one of them empty, in an order that is not the sorted one."""
    draw = torch.Generator().manual_seed(seed)
    shapes = {"w": (3, 2), "b": (), "a": (0, 4), "nest": (5,)}
    leaves = {k: torch.randn(s, generator=draw, dtype=torch.float64).to(dtype) for k, s in shapes.items()}
    return {"w": leaves["w"], "b": leaves["b"], "nest": [leaves["nest"], leaves["a"]]}


def differentiated(optimizer):
    """The same optimizer where somebody asks for derivatives, so that it takes the road of formulas."""

    def update(direction, state, params):
        params = tree_map(lambda p: p.detach().clone().requires_grad_(), params)
        return tree_map(torch.Tensor.detach, optimizer.update(direction, state, params))

    return Optimizer(optimizer.init, update)


def described(state):
    leaves, structure = tree_flatten(state)
    return structure, [(leaf.shape, leaf.dtype, leaf.device) for leaf in leaves]


Momentum = namedtuple("Momentum", "init update")


def optax_momentum(lr):
    """A pair in optax's own signature."""

    def update(updates, state, params=None):
        state = tree_map(lambda s, u: 0.9 * s + u, state, updates)
        return tree_map(lambda s: -lr * s, state), state

    return Momentum(lambda params: tree_map(torch.zeros_like, params), update)


def labelled(lr):
    """Two groups."""
    groups = {"single": sgd(lr, momentum=0.9), "others": adamw(lr, eps=1e-3)}
    return by_label(groups, lambda name, leaf: "others" if leaf.ndim else "single")


BUILDERS = {
    "sgd": sgd,
    "sgd-momentum": lambda lr: sgd(lr, momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd-schedule": lambda lr: sgd(lambda steps: lr / (1 + steps)),
    "adamw": lambda lr: adamw(lr, eps=1e-3),
    "adamw-schedule": lambda lr: adamw(lambda steps: lr * 0.5**steps, eps=1e-3),
    "by_label": labelled,
    "from_transformation": lambda lr: from_transformation(optax_momentum(lr)),
}
COMPOSING = {name: build(0.1) for name, build in BUILDERS.items()}
ALL = {name: optimizer for name, optimizer in COMPOSING.items() if name != "from_transformation"} | {
    "from_torch-SGD": from_torch(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5),
    "from_torch-Adam-fused": from_torch(torch.optim.Adam, lr=0.1, fused=True),
    "from_torch-schedule": from_torch(torch.optim.SGD, lr=lambda steps: 0.1 / (1 + steps)),
    "from_transformation-adam": from_transformation(torchopt.adam(0.1)),
}
every_optimizer = pytest.mark.parametrize("optimizer", ALL.values(), ids=ALL)
every_composing = pytest.mark.parametrize("optimizer", COMPOSING.values(), ids=COMPOSING)
plain_road = lambda optimizer: optimizer
both_roads = pytest.mark.parametrize("road", [plain_road, differentiated], ids=["fused", "formulas"])


@given(
    optimizer=st.sampled_from([adamw(0.1), labelled(0.1)]),
    seed=seeds,
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    road=st.sampled_from([plain_road, differentiated]),
    flags=st.lists(st.booleans(), min_size=1, max_size=4),
)
def test_a_guarded_update_stands_where_it_is_told_not_to_move(optimizer, seed, dtype, road, flags):
    state, params = optimizer.init(tree(seed, dtype)), tree(seed, dtype)
    left, kept = state, params
    for step, flag in enumerate(flags):
        direction = tree(seed + step + 1, dtype)
        spoiled = direction if flag else tree_map(lambda d: torch.full_like(d, torch.nan), direction)
        update = partial(optimizer.guarded_update, torch.tensor(flag))
        params, state = road(optimizer._replace(update=update)).update(spoiled, state, params)
        if flag:
            kept, left = road(optimizer).update(direction, left, kept)
    assert_close((params, state), (kept, left), roundings=0)


@pytest.mark.parametrize("bad", [torch.ones(2), torch.tensor(1j), None, "0.1", math.nan, -0.1, True])
@pytest.mark.parametrize("build", [sgd, adamw, partial(from_torch, torch.optim.SGD)])
def test_a_schedule_returns_one_rate(build, bad):
    optimizer, p = build(lr=lambda _: bad), torch.ones(2)
    words = r"^\w+: lr\(steps\) must be .*, found .* A schedule returns one rate"
    with pytest.raises((TypeError, ValueError), match=words):
        optimizer.update(p, optimizer.init(p), p)


@given(
    seed=seeds,
    lr=st.floats(0, 1),
    momentum=st.sampled_from([0.0, 0.5, 0.9]),
    nesterov=st.booleans(),
    weight_decay=st.sampled_from([0.0, 0.1]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
)
def test_sgd_is_torch_sgd(seed, lr, momentum, nesterov, weight_decay, dtype):
    hyper = {"momentum": momentum, "nesterov": nesterov and momentum > 0, "weight_decay": weight_decay}
    directions = [tree(seed + i, dtype) for i in range(1, 6)]
    found, state = run(sgd(lr, **hyper), tree(seed, dtype), directions)
    expected = run_torch(torch.optim.SGD, tree(seed, dtype), directions, lr=lr, **hyper)
    assert_close(found, expected, roundings=0)
    assert state.steps == 5


@given(
    seed=seeds,
    lr=st.floats(0, 1),
    betas=st.sampled_from([(0.9, 0.999), (0.0, 0.0), (0.5, 0.99)]),
    eps=st.sampled_from([1e-8, 1e-2]),
    weight_decay=st.sampled_from([0.0, 0.1]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    road=st.sampled_from([plain_road, differentiated]),
)
def test_adamw_is_torch_adamw(seed, lr, betas, eps, weight_decay, dtype, road):
    hyper = {"betas": betas, "eps": eps, "weight_decay": weight_decay}
    directions = [tree(seed + i, dtype) for i in range(1, 6)]
    found, state = run(road(adamw(lr, **hyper)), tree(seed, dtype), directions)
    expected = run_torch(torch.optim.AdamW, tree(seed, dtype), directions, lr=lr, foreach=False, fused=False, **hyper)
    assert_close(found, expected, roundings=32)
    assert state.steps == 5


def test_defaults_are_those_of_torch():
    directions = [tree(i) for i in range(1, 4)]
    assert_close(run(adamw(), tree(0), directions)[0], run_torch(torch.optim.AdamW, tree(0), directions))
    assert_close(run(sgd(1e-3), tree(0), directions)[0], run_torch(torch.optim.SGD, tree(0), directions))


@both_roads
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_adamw_is_fused_torch_adamw_within_a_rounding(dtype, road):
    directions = [tree(i, dtype) for i in range(1, 11)]
    found, state = run(road(adamw(1e-2)), tree(0, dtype), directions)
    expected = run_torch(torch.optim.AdamW, tree(0, dtype), directions, lr=1e-2, fused=True)
    for mine, theirs in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        check_within(mine, theirs, eps(dtype) * (2 * theirs.abs() + 1e-2))  # a step is a hundredth
    wide = torch.float32 if dtype == torch.float16 else dtype  # squares of directions below 2e-4 are zero in float16
    assert {leaf.dtype for leaf in tree_leaves((state.first, state.second))} == {wide}


def test_adam_of_torch_raises_for_float16_where_its_eps_is_zero():
    """Else a step without a direction makes NaN of the parameters, and is reported as taken."""
    params = {"w": torch.ones(2), "v": torch.ones(2).half()}
    with pytest.raises(ValueError, match=r"params must be of a dtype in which eps is not zero.*float16"):
        from_torch(torch.optim.Adam, lr=1e-3).init(params)
    how = {"losses": lambda p: (1e-4 * p["v"]).square().sum() + 0 * p["w"].sum(), "aggregator": fj.mean()}
    how["optimizer"] = from_torch(torch.optim.Adam, lr=1e-3, eps=1e-4)
    with pytest.warns(UserWarning, match="float16"):
        state = fj.train_state(params, **how)
    state, info = fj.step(state, **how)
    assert info.moved
    assert state.params["v"].isfinite().all()


def test_adamw_raises_for_averages_in_float16_by_name():
    params = {"w": torch.ones(2), "v": torch.ones(2).half()}
    state = adamw(1e-2).init(params)
    assert state.second["v"].dtype == torch.float32
    moved, _ = adamw(1e-2).update({name: 1e-4 * p for name, p in params.items()}, state, params)
    check_within(moved["v"], moved["w"], eps(torch.float16) * moved["w"])
    old = state._replace(second={"w": torch.zeros(2), "v": torch.zeros(2).half()})
    with pytest.raises(ValueError, match=r"adamw: the average of 'v' must be in float32, found torch\.float16"):
        adamw(1e-2).update(params, old, params)


@pytest.mark.parametrize("lr", [1e-3, torch.tensor(1e-3)])
def test_a_decay_that_is_a_tensor_has_the_digits_of_its_parameters(lr):
    decay, p = torch.tensor(0.01), torch.ones(3, dtype=torch.float64)
    steps = [adamw(lr, weight_decay=x).update(0 * p, adamw().init(p), p)[0] for x in (decay, decay.item())]
    assert ((steps[0] - steps[1]).abs() <= 4 * eps(p.dtype)).all()


@both_roads
def test_adamw_leaves_entries_without_direction_alone_in_float16(road):
    params = torch.tensor([1.0, 2.0], dtype=torch.float16)
    found, _ = run(road(adamw(1e-2, weight_decay=0.0)), params, [torch.tensor([0.0, 1.0], dtype=torch.float16)] * 3)
    assert found[-1][0] == 1.0
    torch.testing.assert_close(found[-1][1], torch.tensor(1.97, dtype=torch.float16))


@every_optimizer
def test_memory_layout_does_not_matter(optimizer):
    draw = torch.Generator().manual_seed(0)
    both = lambda w: {"w": w, "b": w.new_ones(())}
    params = torch.randn(3, 3, generator=draw).expand(2, 3, 3)
    directions = [torch.randn(3, 3, 2, generator=draw).permute(2, 1, 0) for _ in range(3)]
    contiguous = [both(direction.contiguous()) for direction in directions]
    expected, _ = run(optimizer, both(params.contiguous()), contiguous)
    assert_close(run(optimizer, both(params), [*map(both, directions)])[0], expected, roundings=8)
    strided = params.permute(0, 2, 1).contiguous().permute(0, 2, 1)
    assert_close(run(optimizer, both(strided), contiguous)[0], expected, roundings=8)


@every_optimizer
def test_updates_are_pure_and_match_dicts_by_key(optimizer):
    params, direction = tree(0), tree(1)
    _, state = run(optimizer, params, [tree(2)])
    inputs = (params, direction, state)
    before = tree_map(torch.clone, inputs)
    first = optimizer.update(direction, state, params)
    optimizer.update(tree_map(lambda d: d * float("nan"), direction), state, params)  # a step that is not taken
    for again in (direction, dict(reversed(direction.items()))):
        assert_close(optimizer.update(again, state, params), first, roundings=0)
    assert_close(inputs, before, roundings=0)
    pointers = {leaf.data_ptr() for leaf in tree_leaves(inputs) if leaf.numel()}
    moved = [leaf.data_ptr() for leaf in tree_leaves(first[0]) if leaf.numel()]
    assert not pointers.intersection(moved)


@every_optimizer
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_params_and_state_keep_their_structure_and_dtypes_when_the_direction_has_another(optimizer, dtype):
    params, directions = tree(0, dtype), [tree(i, torch.float32) for i in range(1, 4)]
    found, state = run(optimizer, params, directions)
    assert described(state) == described(optimizer.init(params))
    assert {leaf.dtype for leaf in tree_leaves(found)} == {dtype}


@every_composing
def test_vmap_over_replicas_is_the_loop(optimizer):
    replicas = [tree(i) for i in range(3)]
    directions = [[tree(10 * i + k) for k in range(4)] for i in range(3)]
    stack = lambda trees: tree_map(lambda *leaves: torch.stack(leaves), trees[0], *trees[1:])
    params = stack(replicas)
    state = torch.vmap(optimizer.init)(params)
    for k in range(4):
        params, state = torch.vmap(optimizer.update)(stack([d[k] for d in directions]), state, params)
    expected = stack([run(optimizer, p, d)[0][-1] for p, d in zip(replicas, directions, strict=True)])
    assert_close(params, expected)


def searched(rate):
    optimizer = line_search(sgd(1.0), torch.stack([rate, 0 * rate]) if isinstance(rate, torch.Tensor) else [rate, 0.0])
    nearer = lambda params: -sum(x.square().sum() for x in tree_leaves(params))  # of all rates the largest
    return Optimizer(optimizer.init, partial(optimizer.search, nearer))


def clipping(clip):
    inner = sgd(0.1)
    return Optimizer(inner.init, lambda direction, state, params: inner.update(clip(direction), state, params))


ONES, of_adam, of_sgd = torch.ones(2), partial(from_torch, torch.optim.Adam), partial(from_torch, torch.optim.SGD)
# What may be a tensor, with numbers to put in its place; or where it is refused.
SETTINGS = {
    "sgd lr": (sgd, [0.0, 0.1, 0.5]),
    "sgd momentum": (lambda x: sgd(0.1, momentum=x), r"sgd: momentum must be a number, .* lr only"),
    "sgd nesterov": (lambda x: sgd(0.1, momentum=0.9, nesterov=x), r"sgd: nesterov must be True or False"),
    "sgd weight_decay": (lambda x: sgd(0.1, weight_decay=x), r"sgd: weight_decay must be a number, .* lr only"),
    "adamw lr": (adamw, [0.0, 0.1, 0.5]),
    "adamw betas[0]": (lambda x: adamw(betas=(x, 0.9)), r"adamw: betas\[0\] must be a number in \[0, 1\)"),
    "adamw betas[1]": (lambda x: adamw(betas=(0.9, x)), r"adamw: betas\[1\] must be a number in \[0, 1\)"),
    "adamw eps": (lambda x: adamw(0.1, eps=x), [1e-3, 0.1, 2.0]),
    "adamw weight_decay": (lambda x: adamw(0.1, weight_decay=x), [0.0, 0.1, 3.0]),
    "from_torch betas": (lambda x: of_adam(betas=(0.9, x)), "from_torch: betas must be without tensors, .* lr only"),
    "from_torch momentum": (lambda x: of_sgd(momentum=x), "from_torch: momentum must be .* lr only"),
    "by_label": (labelled, [0.0, 0.1, 0.5]),
    "noised multiplier": (lambda x: noised(sgd(0.1), key(0), x, 1.0, 2), [0.0, 0.5, 2.0]),
    "noised max_norm": (lambda x: noised(sgd(0.1), key(0), 1.0, x, 2), [0.0, 0.5, 2.0]),
    "noised batch_size": (lambda x: noised(sgd(0.1), key(0), 1.0, 1.0, x), [1.0, 3.0]),
    "line_search rates": (searched, [0.1, 0.5]),
    "clip_by_norm max_norm": (lambda x: clipping(lambda d: clip_by_norm(d, x)), [0.5, 1.0]),
    "clip_by_norm norm_type": (lambda x: clip_by_norm(ONES, 1.0, x), "clip_by_norm: norm_type must be a number"),
    "global_norm norm_type": (lambda x: global_norm(ONES, x), "global_norm: norm_type must be a number"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_are_tensors_are_the_numbers_with_derivatives_or_refused(name):
    build, numbers = SETTINGS[name]
    if isinstance(numbers, str):
        with pytest.raises(TypeError, match=numbers):
            build(torch.tensor(0.9))
        return
    params, directions = tree(0, torch.float64), [tree(i, torch.float64) for i in range(1, 4)]
    last = lambda value: run(build(value), params, directions)[0][-1]
    values = torch.tensor(numbers, dtype=torch.float64)
    together = torch.vmap(last)(values)
    size = lambda value: sum(x.square().sum() for x in tree_leaves(last(value)))
    for i, number in enumerate(numbers):
        expected = last(number)
        assert_close(last(values[i]), expected)
        assert_close(tree_map(lambda x, i=i: x[i], together), expected)
        point, h = values[i] + 1e-4, 1e-6  # off zero, so that both sides are in range
        difference = (size(point + h) - size(point - h)) / (2 * h)
        # Rounding divided by h, and h^2 times a third derivative, which 1/eps^4 bounds.
        bound = float(size(point)) * 64 * eps() / h + h**2 / min(1.0, float(point)) ** 4
        assert abs(torch.func.grad(size)(point) - difference) <= bound
        assert abs(torch.func.jvp(size, (point,), (torch.ones_like(point),))[1] - difference) <= bound
        leaf = point.clone().requires_grad_()
        assert torch.equal(torch.autograd.grad(size(leaf), leaf)[0], torch.func.grad(size)(point))


def trained(build):
    """Three steps down a quartic, as a function of the learning rate and the first params."""

    def final(lr, w, b):
        params, optimizer = {"w": w, "b": b}, build(lr)
        state = optimizer.init(params)
        for _ in range(3):
            direction = tree_map(lambda p: p**3 + p.sum() / 2, params)
            params, state = optimizer.update(direction, state, params)
        return params["w"], params["b"]

    return final


@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)
def test_derivatives_through_steps_are_finite_differences(build):
    inputs = (torch.tensor(0.05), torch.tensor([0.5, -1.0, 0.7]), torch.tensor(0.3))
    inputs = tuple(x.double().requires_grad_() for x in inputs)
    assert torch.autograd.gradcheck(trained(build), inputs, check_forward_ad=True, check_batched_grad=True)


def test_derivative_of_adamw_is_right_where_the_direction_is_zero():
    optimizer, params = adamw(0.1, eps=0.5, weight_decay=0.0), torch.zeros(2, dtype=torch.float64)
    first_step = lambda direction: optimizer.update(direction, optimizer.init(params), params)[0]
    # The first step is - lr d / (|d| + eps), whose slope at zero is - lr / eps.
    for derivative in (torch.func.jacrev, torch.func.jacfwd):
        torch.testing.assert_close(derivative(first_step)(params), -0.2 * torch.eye(2, dtype=torch.float64))


@every_composing
def test_compiles_once_for_all_steps(optimizer):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = Optimizer(optimizer.init, torch.compile(optimizer.update, fullgraph=True, backend=counter))
    directions = [tree(i) for i in range(1, 5)]
    first, state = run(compiled, tree(0), directions[:1])
    frames = counter.frame_count
    found, state = run(compiled, first[0], directions[1:], state)
    expected, expected_state = run(optimizer, tree(0), directions)
    assert frames > 0
    assert counter.frame_count == frames
    assert_close((found, state), (expected[1:], expected_state))


@pytest.mark.slow
@pytest.mark.inductor
def test_compiles_with_the_default_backend():
    def turned(update):
        """The compiler may leave the direction turned, and the operator reads memory as it lies."""
        return lambda direction, state, params: update(direction | {"w": (direction["w"] * 2).T}, state, params)

    params = tree(0) | {"more": many(0)}
    directions = [tree(i) | {"w": tree(i)["w"].T.contiguous(), "more": many(i)} for i in range(1, 4)]
    plain = Optimizer(adamw().init, turned(adamw().update))
    compiled = Optimizer(adamw().init, torch.compile(turned(adamw().update), fullgraph=True))
    expected = run_torch(torch.optim.AdamW, params, [d | {"w": d["w"].T * 2} for d in directions])
    assert_close(run(compiled, params, directions)[0], expected)
    assert_close(run(plain, params, directions)[0], expected)


def many(seed):
    """Leaves of which adamw makes one operator."""
    return list(torch.randn(16, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))


def operators(f, *args):
    """The operators of the graph of `f(*args)`, by name, and what the graph returns."""
    seen = []

    def keep(graph, _):
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    found = torch.compile(f, fullgraph=True, backend=aot_autograd(fw_compiler=keep))(*args)
    return Counter(seen), found


@pytest.mark.parametrize(
    ("rate", "moving"), [(0.1, None), (torch.tensor(0.1), True), (lambda steps: 0.1 / (1 + steps), False)]
)
def test_a_graph_holds_adamw_as_one_operator(rate, moving):
    optimizer, params = adamw(lr=rate), tree(0) | {"half": torch.ones(2, dtype=torch.bfloat16), "more": many(0)}
    direction, state = tree_map(torch.ones_like, params), optimizer.init(params)
    update = optimizer.update if moving is None else partial(optimizer.guarded_update, torch.tensor(moving))
    seen, found = operators(update, direction, state, params)
    fused = [name for name in seen.elements() if "fused_adamw" in name]
    assert len(fused) == 2, seen  # one for each dtype
    assert not any("lerp" in name or "sqrt" in name for name in seen), seen
    assert_close(found, (params, state) if moving is False else update(direction, state, params), roundings=0)


@pytest.mark.parametrize("rate", [None, torch.tensor(0.1, dtype=torch.float64)])
@pytest.mark.parametrize("moving", [None, torch.tensor(True)])
def test_the_operator_obeys_torchs_own_rules(rate, moving):
    columns = [[torch.ones(3, 2).T, torch.ones(2)] for _ in range(4)]
    numbers = (0.0 if rate is not None else 0.1, rate, 0.9, 0.999, 0.01, 1e-8)
    torch.library.opcheck(fused_adamw_op, (*columns, torch.tensor(3), moving, *numbers))


@pytest.mark.parametrize("why", ["few leaves", "derivative", "vmap"])
def test_a_graph_holds_the_formulas_where_the_operator_does_not_serve(why):
    optimizer, params = adamw(lr=0.1), {"w": torch.arange(1.0, 7).reshape(3, 2)}
    more = [] if why == "few leaves" else many(0)

    def update(d, p):
        d, p = d | {"more": more}, p | {"more": more}
        return optimizer.update(d, optimizer.init(p), p)[0]["w"]

    direction = {"w": torch.full((3, 2), 2.0)}
    if why == "derivative":
        f = lambda d, p: torch.func.grad(lambda p: update(d, p).sum())(p)["w"]
        expected = torch.full((3, 2), 1 - 0.1 * 0.01)
    else:
        f = torch.vmap(update) if why == "vmap" else update
        expected = run_torch(torch.optim.AdamW, params, [direction], lr=0.1)[0]["w"]
    if why == "vmap":
        params, direction = ({"w": x["w"][None]} for x in (params, direction))
        expected = expected[None]
    seen, found = operators(f, direction, params)
    assert not any("fused_adamw" in name for name in seen), seen
    torch.testing.assert_close(found, expected)


# --- Any class of torch.optim

CLASSES = {
    "SGD": (torch.optim.SGD, {}),
    "SGD-dampening": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    "Adam": (torch.optim.Adam, {}),
    "Adam-amsgrad": (torch.optim.Adam, {"amsgrad": True}),
    "AdamW": (torch.optim.AdamW, {}),
    "AdamW-fused": (torch.optim.AdamW, {"fused": True}),
    "AdamW-foreach": (torch.optim.AdamW, {"foreach": True}),
    "Adagrad": (torch.optim.Adagrad, {"initial_accumulator_value": 0.1, "lr_decay": 0.1}),
    "Adadelta": (torch.optim.Adadelta, {}),
    "Adamax": (torch.optim.Adamax, {}),
    "NAdam": (torch.optim.NAdam, {}),
    "RAdam": (torch.optim.RAdam, {}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "Rprop": (torch.optim.Rprop, {}),  # the rate is that of the first step
    "ASGD": (torch.optim.ASGD, {"t0": 2}),
    "Adafactor": (torch.optim.Adafactor, {}),
    "Muon": (torch.optim.Muon, {}),
}


def matrices(seed, n):
    draw = torch.Generator().manual_seed(seed)
    return [{"b": torch.randn(3, 3, generator=draw), "a": torch.randn(4, 2, generator=draw)} for _ in range(n)]


@pytest.mark.parametrize("name", CLASSES)
@given(seed=seeds, lr=st.floats(1e-3, 1), decay=st.sampled_from([None, 0.5, 1.0]))
def test_from_torch_is_the_class_with_a_number_a_tensor_or_a_schedule(name, seed, lr, decay):
    (cls, hyper), (first, *directions) = CLASSES[name], matrices(seed, 9)
    taken = []

    def after_step(optimizer):
        taken.append(1)
        optimizer.param_groups[0]["lr"] = lr * (decay or 1.0) ** len(taken)

    expected = run_torch(cls, first, directions, after_step, lr=lr, **hyper)
    fixed = [lr, torch.tensor(lr, dtype=torch.float64), lambda _: lr]
    for rate in fixed if decay is None else [lambda steps: lr * decay ** steps.double()]:
        optimizer = from_torch(cls, lr=rate, **hyper)
        found, state = run(optimizer, first, directions)
        assert_close(found, expected, roundings=0)
        assert described(state) == described(optimizer.init(first))
        assert state.steps == 8


def test_schedules_are_called_with_the_number_of_steps_taken():
    seen, params = [], torch.ones(2)
    for build in (sgd, partial(from_torch, torch.optim.SGD)):
        run(build(lr=lambda steps: seen.append(steps) or torch.tensor(0.1)), params, [params] * 3)
    assert {(steps.dtype, steps.shape) for steps in seen} == {(torch.int64, ())}
    assert {int(steps) for steps in seen} == {0, 1, 2}


def test_from_torch_covers_every_class_of_torch_that_needs_no_closure():
    everything = {name for name, cls in vars(torch.optim).items() if isinstance(cls, type)}
    needs_more = {"Optimizer", "LBFGS", "SparseAdam"}  # the base class, a closure, sparse gradients
    assert everything - needs_more == {name.split("-")[0] for name in CLASSES}


def test_from_torch_needs_and_gives_no_graph():
    params = torch.ones(3, requires_grad=True)
    optimizer = from_torch(torch.optim.Adam)
    moved, state = optimizer.update(torch.ones(3, requires_grad=True), optimizer.init(params), params)
    assert not any(leaf.requires_grad for leaf in tree_leaves((moved, state)))


@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp"])
def test_from_torch_refuses_transforms(transform):
    optimizer, params = from_torch(torch.optim.Adam), torch.ones(3)
    state = optimizer.init(params)
    transformed = {
        "vmap": lambda f, x: torch.vmap(f)(x[None]),
        "grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
        "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    }[transform]
    words = r"from_torch: torch\.optim must be outside of transforms"
    for f in (lambda x: optimizer.update(x, state, params)[0], lambda x: optimizer.init(x).entries[0]["exp_avg"]):
        with pytest.raises(ValueError, match=words):
            transformed(f, torch.ones(3))


@pytest.mark.parametrize("lr", [0.1, lambda steps: 0.1 / (1 + steps)])
def test_from_torch_compiles_with_a_graph_break(lr):
    optimizer = from_torch(torch.optim.SGD, lr=lr, momentum=0.9, dampening=0.5)
    compiled = Optimizer(optimizer.init, torch.compile(lambda d, s, p: optimizer.update(d, s, p), backend="aot_eager"))
    directions = [tree(i) for i in range(1, 4)]
    assert_close(run(compiled, tree(0), directions), run(optimizer, tree(0), directions), roundings=0)


class CountsInState(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"k": torch.zeros(())})

    def step(self):
        for p in self.param_groups[0]["params"]:
            self.state[p]["count"] = 1


class CountsInGroup(CountsInState):
    def step(self):
        self.param_groups[0]["k"] += 1


class CountsLater(CountsInState):
    count = 0

    def step(self):
        self.count += int(self.param_groups[0]["params"][0].grad.any())


@pytest.mark.parametrize(
    ("cls", "error", "message"),
    [
        (CountsInState, TypeError, "from_torch: the state of CountsInState .*found.*'count'"),
        (CountsInGroup, TypeError, "from_torch: the state of CountsInGroup .*found.*'k'"),
        (CountsLater, TypeError, "from_torch: the state of CountsLater .*found.*'count'"),
        (torch.optim.LBFGS, TypeError, "closure"),
        (torch.optim.SparseAdam, RuntimeError, "SparseAdam does not support dense gradients"),
        (partial(torch.optim.Adam), TypeError, "from_torch: cls must be a class of torch.optim, found partial"),
    ],
)
def test_from_torch_raises_for_classes_that_it_cannot_make_pure(cls, error, message):
    x = torch.ones(2)
    with pytest.raises(error, match=message):
        from_torch(cls).update(x, from_torch(cls).init(x), x)


# --- Any optax-style pair

TRANSFORMATIONS = {
    "sgd": lambda: torchopt.sgd(0.1, momentum=0.9, weight_decay=0.1),
    "adam": lambda: torchopt.adam(0.1),
    "adamw": lambda: torchopt.adamw(0.1),
    "chain": lambda: torchopt.chain(torchopt.clip.clip_grad_norm(1.0), torchopt.rmsprop(0.1)),
}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
@given(seed=seeds)
def test_from_transformation_is_the_loop_of_torchopt(name, seed):
    params, directions = tree(seed), [tree(seed + i) for i in range(1, 6)]
    found, _ = run(from_transformation(TRANSFORMATIONS[name]()), params, directions)
    transformation = TRANSFORMATIONS[name]()
    state = transformation.init(params)
    for direction, step in zip(directions, found, strict=True):
        updates, state = transformation.update(direction, state, params=params, inplace=False)
        params = torchopt.apply_updates(params, updates, inplace=False)
        assert_close(step, params, roundings=0)


def test_from_transformation_needs_a_pair_and_leaves_params_without_update():
    freeze = Momentum(lambda params: (), lambda updates, state, params: ({"a": None, "b": -updates["b"]}, state))
    params = {"a": torch.ones(2), "b": torch.ones(2)}
    moved, _ = from_transformation(freeze).update(params, (), params)
    with pytest.raises(TypeError, match="from_transformation: transformation must be an object with functions"):
        from_transformation(torch.optim.Adam)
    assert_close(moved, {"a": torch.ones(2), "b": torch.zeros(2)})


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: sgd(0.1, nesterov=True), "sgd: nesterov needs momentum > 0"),
        (lambda: adamw(betas=(1.0, 0.9)), r"adamw: betas\[0\] must be in \[0, 1\), found 1.0"),
        (lambda: adamw(betas=(0.9, -0.1)), r"adamw: betas\[1\] must be in \[0, 1\), found -0.1"),
    ],
)
def test_bad_hyper_parameters_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


WITH_RATES = {"sgd": sgd, "adamw": adamw, "from_torch": lambda lr: from_torch(torch.optim.SGD, lr=lr)}


@pytest.mark.parametrize("name", WITH_RATES)
def test_rates_are_numbers_that_are_not_negative_or_tensors_which_are_not_read(name):
    with pytest.raises(ValueError, match=f"^{name}: lr must be finite and not negative, found nan"):
        WITH_RATES[name](numpy.float32("nan"))
    for lr in (0, 0.0, 1, numpy.float32(0.1), torch.tensor(math.nan), torch.tensor(-1.0)):
        optimizer, params = WITH_RATES[name](lr), torch.ones(2)
        optimizer.update(params, optimizer.init(params), params)


@pytest.mark.parametrize("optimizer", [sgd(0.1), adamw(), from_torch(torch.optim.Adam), labelled(0.1)])
def test_params_must_be_floating(optimizer):
    with pytest.raises(TypeError, match=r"floating-point tensors, found torch\.int64 .* in 'n'"):
        optimizer.init({"n": torch.arange(3)})
    with pytest.raises(ValueError, match="at least one parameter"):
        optimizer.init({})


def test_adamw_counts_its_steps_exactly_whatever_the_default_dtype_is():
    params, direction = torch.ones(3), torch.full((3,), 0.5)
    optimizer, ordinary = adamw(0.1), torch.nn.Parameter(torch.ones(3))
    state = optimizer.init(params)._replace(steps=torch.tensor(300))  # 301 is no number of bfloat16
    reference = torch.optim.AdamW([ordinary], lr=0.1)
    zeros = torch.zeros(3)
    reference.state[ordinary] = {"step": torch.tensor(300.0), "exp_avg": zeros, "exp_avg_sq": zeros.clone()}
    ordinary.grad = direction.clone()
    reference.step()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        found, after = optimizer.update(direction, state, params)
    finally:
        torch.set_default_dtype(before)
    assert_close(found, ordinary.detach(), roundings=8)
    assert after.steps == 301
