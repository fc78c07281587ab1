"""Which way back is taken: read from the graph, decided by shapes alone; and backward passes that lose gradients."""

import weakref
from itertools import pairwise

import pytest
import torch
from gramian_by_hand import Largest
from jacobian_by_hand import scaled_rows
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from zoo import Passed, numbers

import functional_jd as fj
from functional_jd import gramian_fn, jacobian_fn, multitask
from functional_jd.engines import Plan, row_vjps
from functional_jd.engines.choose import choose_rows
from functional_jd.engines.row_vjps import stack_rows
from functional_jd.engines.vjp import vjp
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


def resnet50():
    def block(i, width, stride):
        shapes = [(width, i, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)]
        return i, stride, [*shapes, (4 * width, i, 1, 1)] if i != 4 * width else shapes

    widths = [(64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)]
    blocks, i = [], 64
    for width, n, stride in widths:
        for k in range(n):
            blocks.append(block(i, width, stride if k == 0 else 1))
            i = 4 * width
    weights = [(64, 3, 7, 7), *(shape for _, _, shapes in blocks for shape in shapes), (3, 2048)]

    def losses(ws, images):
        rest = iter(ws)
        h = torch.conv2d(images, next(rest), stride=2, padding=3).relu()
        h = torch.max_pool2d(h, 3, 2, 1)
        for _, stride, shapes in blocks:
            x = torch.conv2d(h, next(rest)).relu()
            x = torch.conv2d(x, next(rest), stride=stride, padding=1).relu()
            x = torch.conv2d(x, next(rest))
            h = (x + (torch.conv2d(h, next(rest), stride=stride) if len(shapes) == 4 else h)).relu()
        return (h.mean((2, 3)) @ next(rest).mT).mean(0)

    return weights, losses


def mlp(*widths):
    def losses(ws, h):
        for w in ws:
            h = torch.nn.functional.linear(h, w).relu()
        return h.square().mean(0)

    return [(o, i) for i, o in pairwise(widths)], losses


def transformer(width, layers, heads, tasks, vocabulary=None):
    of_layer = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    table = [(vocabulary, width)] if vocabulary else []

    def losses(ws, h):
        *ws, out = ws
        if vocabulary:
            h = torch.nn.functional.embedding(h, ws.pop(0))
        for qkv, o, up, down in zip(*[iter(ws)] * 4, strict=True):
            parts = (h @ qkv.mT).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
            attended = torch.nn.functional.scaled_dot_product_attention(*parts)
            h = h + attended.transpose(1, 2).flatten(2) @ o.mT
            h = h + torch.nn.functional.gelu(h @ up.mT) @ down.mT
        return (h.mean(1) @ out.mT).mean(0)

    return [*table, *of_layer * layers, (tasks, width)], losses


@pytest.mark.parametrize(
    ("model", "batch", "m", "expected"),
    [
        (mlp(96, 200, 160, 8), torch.empty(64, 96, device="meta"), 8, ("auto", None)),
        (mlp(1024, 2048, 2048, 2048, 512, 8), torch.empty(128, 1024, device="meta"), 8, ("auto", None)),
        (transformer(64, 2, 4, 3), torch.empty(16, 16, 64, device="meta"), 3, ("auto", None)),
        (transformer(256, 2, 4, 3), torch.empty(32, 64, 256, device="meta"), 3, ("auto", None)),
        (resnet50(), torch.empty(64, 3, 224, 224, device="meta"), 3, ("loop", None)),
        (resnet50(), torch.empty(1, 3, 32, 32, device="meta"), 3, ("auto", None)),
        (resnet50(), torch.empty(1, 3, 32, 32, device="meta"), 16, ("auto", 4)),
        (transformer(768, 12, 12, 4, 50257), torch.empty(16, 256, dtype=torch.int64, device="meta"), 4, ("loop", None)),
        (transformer(768, 12, 12, 4, 50257), torch.empty(1, 8, dtype=torch.int64, device="meta"), 4, ("loop", None)),
    ],
    ids=["MLP", "large MLP", "layers", "wide layers", "ResNet-50", "one image", "rows", "GPT-2", "few tokens"],
)
def test_a_device_takes_rows_together_where_models_are_small(model, batch, m, expected):
    shapes, losses = model
    weights = [torch.empty(shape, device="meta") for shape in shapes]
    point = vjp(lambda ws: ([losses(ws, batch)], None), weights, options("auto", None))
    assert choose_rows(point, m, options("auto", None)) == expected


products = lambda p, x: torch.tanh(x @ p["a"]).matmul(p["b"]).square().mean(0)
convolutions = lambda p, x: (
    torch.nn.functional.conv1d(x.mT, p["a"].mT[..., None]).tanh().mT.matmul(p["b"]).square().mean(0)
)


@pytest.mark.parametrize(
    ("f", "width", "device", "together"),
    [
        (products, 256, "meta", 8),
        (products, 1024, "meta", 1),
        (products, 1024, "cpu", 8),
        (convolutions, 64, "meta", 8),
        (convolutions, 256, "meta", 1),
    ],
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
    assert [node.name() for node in graph_nodes([y, y, x])] == [
        "TanhBackward0",
        "MmBackward0",
        "torch::autograd::AccumulateGrad",
    ]
    assert largest_gradient([y], (w,)) == 6
    assert largest_gradient([y], ()) == 150
    assert largest_gradient([(x @ w.mT.mT.mT.mT).sum()], (w,)) == 6
    assert ([*graph_nodes([x])], largest_gradient([], ())) == ([], 0)
    deep = y + y
    for _ in range(40):  # 2 ** 40 paths
        deep = deep + deep
    assert len([*graph_nodes([deep])]) == 44
    assert [largest_gradient([deep.sum()], (), enough) for enough in (0, 5, 6)] == [1, 6, 150]
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
        rows, _ = scaled_rows(losses, scale, mode, chunk_size)(p)
    # A group of rows, or what the loop takes at once: not the [m, m] of all cotangents.
    assert made.numel <= max(10 * 2000, row_vjps._COTANGENTS) < 2000**2 // 50
    expected = scale.unsqueeze(1) * x * (1 - torch.tanh(x @ p) ** 2).unsqueeze(1)
    torch.testing.assert_close(rows, expected)
    torch.testing.assert_close(torch.vmap(lambda p: scaled_rows(losses, scale, mode, 400)(p)[0])(p[None])[0], expected)


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


@pytest.mark.parametrize("engine", ["jacobian", "gramian", "weighted"])
@pytest.mark.parametrize("freeze", [lambda x: x.requires_grad_(False), lambda x: setattr(x, "requires_grad", False)])
def test_a_parameter_that_losses_leave_frozen_has_the_gradient_of_what_came_before(freeze, engine):
    """As a discriminator stays for the loss of the generator, until its own turn comes."""

    def losses(params):
        real = (BATCH @ params["w"]).square().mean()
        freeze(params["w"])
        return {"real": real, "fake": (BATCH @ params["u"] @ params["w"]).mean()}

    points = {name: x.clone().requires_grad_() for name, x in PARAMS.items()}
    real = (BATCH @ points["w"]).square().mean()
    fake = (BATCH @ points["u"] @ PARAMS["w"]).mean()
    expected = torch.autograd.grad(real + fake, list(points.values()))
    rule = fj.total()
    how = {"losses": losses, "aggregator": rule, "optimizer": fj.sgd(1.0), "engine": engine}
    if engine == "gramian":
        how["aggregator"] = fj.aggregation.Aggregator(fj.views.gramian, rule.init, lambda view, s: (torch.ones(2), s))
    after, _ = fj.step(fj.train_state(PARAMS, **how), **how)
    for x, y, g in zip(PARAMS.values(), after.params.values(), expected, strict=True):
        torch.testing.assert_close(x - y, g)
