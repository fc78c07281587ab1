"""Which way back is taken: read from the graph, decided by shapes alone; and backward passes that lose gradients."""

import weakref

import pytest
import torch
from bounds import eps
from gramian_by_hand import Largest
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from zoo import Passed, numbers

import functional_jd as fj
from functional_jd import gramian_fn, jacobian_fn, multitask
from functional_jd.engines import Plan, row_vjps
from functional_jd.engines.choose import choose_rows
from functional_jd.engines.row_vjps import stack_rows
from functional_jd.engines.vjp import Vjp, vjp
from functional_jd.torch_compat.autograd_graph import graph_nodes, largest_gradient

SHAPES = {  # inputs of x @ a @ b: the widest gradient between them, the largest weight
    "images": [(70_000, 2), (2, 2), (2, 2)],
    "sequence": [(10_000, 2), (2, 3), (3, 2)],
    "weights": [(2, 300), (300, 100), (100, 2)],
    "small": [(4, 3), (3, 5), (5, 2)],
}


def options(mode, chunk_size):
    return Plan(False, None, False, mode, chunk_size)


def point(name, kind=torch.float32, differentiable=False):
    x, a, b = (numbers(*shape, seed=i, dtype=kind) for i, shape in enumerate(SHAPES[name]))
    return vjp(lambda ws: ([torch.tanh((x @ ws[0]) @ ws[1]).mean(0)], None), [a, b], Plan(False, None, differentiable))


@pytest.mark.parametrize(
    ("name", "m", "chunk_size", "expected"),
    [
        *[(name, m, None, ("loop", None)) for name in SHAPES for m in (1, 2, 3)],
        ("images", 40, None, ("loop", None)),
        ("weights", 40, None, ("auto", None)),
        ("weights", 40, 5, ("auto", 5)),
        ("small", 40, None, ("auto", None)),
        ("small", 40, 7, ("auto", 7)),
        ("sequence", 4, None, ("auto", None)),
        ("sequence", 40, None, ("auto", 14)),  # 17 would fit: three groups of about the same size
        ("sequence", 40, 6, ("auto", 6)),
    ],
)
def test_auto_goes_by_the_size_of_what_passes_between_the_layers(name, m, chunk_size, expected):
    assert choose_rows(point(name), m, options("auto", chunk_size)) == expected
    for mode in ("vmap", "loop"):
        assert choose_rows(point(name), m, options(mode, chunk_size)) == (mode, chunk_size)


DEVICE = {  # elements of the largest gradient between the layers, of the largest parameter and of the others; rows
    "MLP": (12_800, [32_000, 20_480], False, 8, ("auto", None)),
    "large MLP": (262_144, [4_194_304, 7_344_128], False, 8, ("auto", None)),
    "layers": (65_536, [16_384, 82_112], False, 3, ("auto", None)),
    "wide layers": (2_097_152, [262_144, 1_311_488], False, 3, ("auto", None)),
    "ResNet-50, 64 images": (51_380_224, [2_359_296, 21_101_760], True, 3, ("loop", None)),
    "ResNet-50, one image": (16_384, [2_359_296, 21_101_760], True, 3, ("auto", None)),
    "ResNet-50, one image, many rows": (16_384, [2_359_296, 21_101_760], True, 16, ("auto", 4)),
    "GPT-2": (12_582_912, [38_597_376, 84_937_728], False, 4, ("loop", None)),
    "GPT-2, few tokens": (24_576, [38_597_376, 84_937_728], False, 4, ("loop", None)),
}


@pytest.mark.parametrize(("between", "parameters", "convolutions", "m", "expected"), DEVICE.values(), ids=DEVICE)
def test_a_device_takes_rows_together_where_models_are_small(between, parameters, convolutions, m, expected):
    point = Vjp([], None, pytest.fail, sizes=(between, parameters, convolutions))
    assert choose_rows(point, m, options("auto", None)) == expected


products = lambda p, x: torch.tanh(x @ p["a"]).matmul(p["b"]).square().mean(0)
convolutions = lambda p, x: (
    torch.nn.functional.conv1d(x.mT, p["a"].mT[..., None]).tanh().mT.matmul(p["b"]).square().mean(0)
)


MODELS = [(products, 256, 8), (products, 1024, 1), (convolutions, 64, 8), (convolutions, 256, 1)]


@pytest.mark.parametrize(("f", "width", "together"), MODELS)
def test_eager_rows_of_a_large_model_go_one_by_one_on_a_device(f, width, together):
    a, b, x = (torch.empty(*shape, device="meta") for shape in ((64, width), (width, 8), (4096, 64)))
    point = vjp(lambda ws: ([f(dict(zip("ab", ws, strict=True)), x)], None), [a, b], options("auto", None))
    assert choose_rows(point, 8, options("auto", None)) == ("loop" if together == 1 else "auto", None)


@pytest.mark.parametrize(
    ("f", "width", "device", "together"),
    [*((f, width, "meta", together) for f, width, together in MODELS), (products, 1024, "cpu", 8)],
)
def test_compiled_rows_of_a_large_model_go_one_by_one_on_a_device(f, width, device, together):
    params = {"a": torch.empty(64, width, device=device), "b": torch.empty(width, 8, device=device)}
    x, sizes = torch.empty(4096, 64, device=device), []

    def look(graph, _):
        for node in graph.graph.nodes:
            sizes.extend(y.numel() for y in tree_leaves(node.meta.get("val")) if isinstance(y, torch.Tensor))
        return graph

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=look)
    rows = torch.compile(lambda p: jacobian_fn(f)(p, x)[0], fullgraph=True, backend=backend)(params)
    assert rows["a"].shape == (8, 64, width)
    assert max(sizes) == together * 4096 * width


def test_within_a_transform_rows_go_together_as_they_always_did():
    def f(scale):
        recorded = point("images", differentiable=True)
        assert choose_rows(recorded, 40, options("auto", None)) == ("auto", None)
        assert choose_rows(recorded, 2, options("auto", None)) == ("auto", None)
        assert choose_rows(recorded, 1, options("auto", None)) == ("loop", None)
        return scale

    torch.vmap(f, randomness="same")(torch.ones(2))


def test_the_graph_tells_its_nodes_and_its_widest_gradient():
    w, x = torch.ones(50, 3, requires_grad=True), torch.ones(2, 50)
    y = (x @ w).tanh()
    found = [node.name() for node in graph_nodes([y, y, x])]
    assert found == ["TanhBackward0", "MmBackward0", "torch::autograd::AccumulateGrad"]
    assert largest_gradient(graph_nodes([y]), (w,)) == 6
    assert largest_gradient(graph_nodes([x.bfloat16() @ w.bfloat16()]), (w,)) == 3  # by memory
    assert largest_gradient(graph_nodes([y]), ()) == 150
    assert largest_gradient(graph_nodes([(x @ w.mT.mT.mT.mT).sum()]), (w,)) == 6
    assert ([*graph_nodes([x])], largest_gradient(graph_nodes([]), ())) == ([], 0)
    deep = y + y
    for _ in range(40):  # 2 ** 40 paths
        deep = deep + deep
    assert len([*graph_nodes([deep])]) == 44
    assert [largest_gradient(graph_nodes([deep.sum()]), (), enough) for enough in (0, 5, 6)] == [1, 6, 150]
    assert next(graph_nodes([deep])).name() == "AddBackward0"  # whoever has seen enough walks no further


@pytest.mark.parametrize("shapes", [[2000], [(20, 50), 999, ()]], ids=["one output", "several outputs"])
@pytest.mark.parametrize(("mode", "chunk_size"), [("vmap", 10), ("auto", 10), ("loop", None), ("auto", 1)])
def test_memory_follows_the_chunk_size_however_many_objectives(mode, chunk_size, shapes):
    x, p = numbers(2000, 3, dtype=torch.float64), numbers(3, seed=1, dtype=torch.float64)
    sizes = [torch.Size([shape] if isinstance(shape, int) else shape) for shape in shapes]

    def losses(p):
        values = torch.tanh(x @ p).split([size.numel() for size in sizes])
        return [value.reshape(size) for value, size in zip(values, sizes, strict=True)]

    scale = torch.linspace(1, 2, 2000, dtype=torch.float32)
    with Largest() as made:
        rows, _, _ = jacobian_fn(losses, mode=mode, chunk_size=chunk_size, scale=scale)(p)
    # A group of rows, or what the loop takes at once: not the [m, m] of all cotangents.
    assert made.numel <= max(10 * 2000, row_vjps._COTANGENTS) < 2000**2 // 50
    expected = x * (1 - torch.tanh(x @ p) ** 2).unsqueeze(1)
    close = {"rtol": 4 * eps(torch.float32), "atol": 2**8 * eps()}  # rows are divided by their scale in float32
    torch.testing.assert_close(rows, expected, **close)
    groups = jacobian_fn(losses, mode=mode, chunk_size=400, scale=scale)
    torch.testing.assert_close(torch.vmap(lambda p: groups(p)[0])(p[None])[0], expected, **close)


def test_each_row_is_freed_before_the_next_one_is_differentiated():
    made = []

    def row(value):
        assert not [reference for reference in made if reference() is not None]
        gradient = torch.full((1 << 15,), value)
        made.append(weakref.ref(gradient))
        return [gradient]

    (rows,) = stack_rows((row(float(i)) for i in range(3)), 3)
    assert len(made) == 3
    assert torch.equal(rows, torch.arange(3.0)[:, None].expand(3, 1 << 15))


def test_rows_of_inputs_of_one_size_are_freed_as_they_are_stacked():
    made, alive = [], []

    def row(value):
        gradient = [torch.full((1 << 13,), value) for _ in range(4)]
        made.extend(map(weakref.ref, gradient))
        return gradient

    class Stacks(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.stack.default:
                alive.append(sum(reference() is not None for reference in made))
            return func(*args, **(kwargs or {}))

    with Stacks():
        rows = stack_rows((row(float(i)) for i in range(3)), 3)
    assert alive == [12, 9, 6, 3]
    assert all(torch.equal(x, torch.arange(3.0)[:, None].expand(3, 1 << 13)) for x in rows)


def test_losses_of_tasks_that_are_stacked_walk_one_head_each():
    walked = []

    def heads(own, h, joined):
        found = [Passed.apply((h * v).square().sum(), walked) for v in own]
        return torch.stack(found) if joined else found

    params = {"shared": numbers(3), "heads": [numbers(3, seed=i) for i in range(4)]}
    losses = multitask(lambda shared, joined: torch.tanh(shared), heads)
    for engine in (jacobian_fn, gramian_fn):
        apart, joined = (engine(losses)(params, joined)[0] for joined in (False, True))
        assert len(walked) == 8
        walked.clear()
        torch.testing.assert_close(joined, apart, rtol=0, atol=0)


class Recomputed(torch.autograd.Function):
    """Runs a function without a graph and again in its backward, as reversible models do."""

    @staticmethod
    def forward(ctx, x, f):
        ctx.f = f
        ctx.save_for_backward(x)
        return f(x)

    @staticmethod
    def backward(ctx, *gradients):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.f(x), *gradients)
        return x.grad, None


PARAMS = {"w": torch.ones(3, 3, dtype=torch.float64), "u": torch.eye(3, dtype=torch.float64)}
BATCH = torch.arange(6.0, dtype=torch.float64).reshape(2, 3)


def loss(params, x):
    return Recomputed.apply(x @ params["u"], lambda h: (h @ params["w"]).tanh()).square().sum()


def losses(params, x):
    return {"a": loss(params, x), "b": loss(params, x + 1)}


def recomputed_tasks():
    features = lambda shared, x: Recomputed.apply(x @ shared["u"], lambda h: h @ shared["w"])
    heads = lambda own, h, x: {name: (own[name] * h).sum() for name in own}
    return fj.multitask(features, heads), {"shared": PARAMS, "heads": {name: torch.ones(3).double() for name in "ab"}}


KINDS = {"plain": (losses, PARAMS), "examples": (fj.per_example(loss), PARAMS), "multitask": recomputed_tasks()}


@pytest.mark.filterwarnings("ignore:train_state. no loss reaches:UserWarning")  # the graph does not show it
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rule", "engine"), [("upgrad", "jacobian"), ("upgrad", "gramian"), ("mean", "auto")])
def test_a_backward_pass_that_adds_to_the_leaves_is_refused_by_the_function_that_was_called(kind, rule, engine):
    objective, params = KINDS[kind]
    how = {"losses": objective, "aggregator": getattr(fj, rule)(), "optimizer": fj.sgd(0.1)}
    with pytest.raises(ValueError, match=r"^(train_state|step): .* torch\.autograd\.backward"):
        fj.step(fj.train_state(params, BATCH, **how), BATCH, engine=engine, **how)
    for take in (fj.jacobian_fn, fj.gramian_fn) if kind == "plain" else ():
        with pytest.raises(ValueError, match=f"^{take.__name__}: "):
            take(objective)(params, BATCH)
    assert all(p.grad is None for p in tree_leaves(params))
