"""One canary for each private name of torch: it fails when torch renames the name, or changes what it means."""

import subprocess
import sys
import tomllib
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from modes import Heard
from torch import nn
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from functional_jd.core.sharding import sharded_as
from functional_jd.torch_compat import autograd_graph
from functional_jd.torch_compat import torch_internals as internals


def test_active_transforms_are_known_and_counted():
    assert not internals.under_functorch()
    assert not internals.under_transform()
    assert internals.transform_level() == (None, -1) or internals.transform_level()[0] in (None, -1, 0)
    levels = []

    def f(x):
        levels.append((internals.under_functorch(), internals.under_transform(), internals.transform_level()))
        return x.sum()

    outside = internals.transform_level()
    torch.func.grad(f)(torch.ones(2))
    torch.vmap(torch.func.grad(f))(torch.ones(2, 2))
    assert all(functorch and transform for functorch, transform, _ in levels)
    assert len({outside, *(level for _, _, level in levels)}) == 3
    with forward_ad.dual_level():
        assert (internals.under_functorch(), internals.under_transform()) == (False, True)
        assert internals.transform_level() != outside


def test_batched_tensors_are_known_and_unwrapped():
    x = torch.arange(6.0).reshape(2, 3)
    found = []

    def f(row):
        first = internals.examples_first(row, 1)
        found.append((internals.is_batched(row, 1), internals.is_wrapped(row), internals.innermost(row), first))
        return row

    torch.vmap(f, in_dims=1, out_dims=1)(x)
    batched, wrapped, inner, first = found[0]
    assert (batched, wrapped, first.shape) == (True, True, (3, 2))
    assert inner is x
    assert not internals.is_batched("x", 1)
    assert not internals.is_wrapped(x)


def test_what_varies_in_a_vmap_is_told_from_what_does_not():
    def f(x, y):
        level = internals.transform_level()[0]
        return x * (2 if internals.is_batched(x, level) else 3) + (5 if internals.is_batched(y, level) else 7)

    for run in (f, torch.compile(f, backend="eager", fullgraph=True)):
        found = torch.vmap(run, in_dims=(0, None))(torch.ones(2), torch.ones(()))
        torch.testing.assert_close(found, torch.full((2,), 9.0))


def test_a_backward_pass_takes_cotangents_of_tensors_and_edges_and_tells_what_it_does_not_reach():
    x, other = (torch.tensor(number, dtype=torch.float64, requires_grad=True) for number in (3.0, 5.0))
    y, z = x * x, 2 * x
    outputs, cotangents = (y, torch.autograd.graph.get_gradient_edge(z)), (torch.tensor(10.0).double(),) * 2
    for create_graph in (False, True):
        how = True, create_graph, (x, other), True
        found = autograd_graph._run_backward(outputs, cotangents, *how, accumulate_grad=False)
        assert found[0].item() == 10 * (2 * 3 + 2)
        assert found[0].requires_grad is create_graph
        assert found[1] is None
        assert x.grad is None


def test_modes_that_see_what_is_computed_are_counted():
    assert internals.dispatch_modes() == 0
    with torch._subclasses.FakeTensorMode():
        assert internals.dispatch_modes() == 1
    seen = []
    make_fx(lambda x: seen.append(internals.dispatch_modes()) or x + 1)(torch.ones(1))
    assert seen[0] > 0


def test_modes_see_nothing_where_they_are_switched_off():
    with Heard() as seen, internals.torch_function_disabled():
        torch.ones(2).add(1)
    assert "add" not in seen.names


@pytest.mark.parametrize("compiled", [False, True])
def test_functional_transforms_are_told_from_the_compiler(compiled):
    f = lambda x: x + (internals.transform_level() != internals.NO_TRANSFORM)
    compile_ = partial(torch.compile, fullgraph=True, backend="eager") if compiled else lambda f: f
    x = torch.zeros(2)
    assert compile_(f)(x).tolist() == [0, 0]
    assert compile_(torch.vmap(f))(x).tolist() == [1, 1]
    assert torch.vmap(compile_(f))(x).tolist() == [1, 1]
    assert compile_(lambda x: torch.func.jvp(f, (x,), (x,))[0])(x).tolist() == [1, 1]
    assert compile_(lambda x: torch.func.grad(lambda x: (x * f(x)).sum())(x))(x).tolist() == [1, 1]


def test_weight_norm_is_what_the_parametrization_calls():
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(2, 3))
    with Heard() as seen:
        layer(torch.ones(1, 2))
    assert "_weight_norm" in seen.names
    v, g = torch.randn(3, 2), torch.ones(3, 1)
    torch.testing.assert_close(torch._weight_norm(v, g, 0), v / v.norm(dim=1, keepdim=True))


def test_changes_in_place_are_counted_below_vmap_too():
    x = torch.ones(2)
    before = internals.version(x)
    x.add_(1)
    assert internals.version(x) == before + 1

    def f(row):
        before = internals.version(row)
        row.add_(1)
        assert internals.version(row) == before + 1
        return row

    torch.vmap(f)(torch.ones(2, 2))


def test_scalars_are_told_apart_in_their_stack_unless_something_comes_between():
    a, b = (torch.tensor(x, requires_grad=True) for x in (1.0, 2.0))
    stacked = lambda: torch.stack([a * b, b])
    pairs = autograd_graph.scalars_of_stack(stacked())
    assert [value.item() for value, _ in pairs] == [2.0, 2.0]
    gradients = [torch.autograd.grad([y], [a, b], [torch.ones(())], allow_unused=True) for _, y in pairs]
    assert gradients == [(torch.tensor(2.0), torch.tensor(1.0)), (None, torch.tensor(1.0))]
    hooked = stacked()
    hooked.register_hook(lambda g: 2 * g)
    others = [hooked, stacked() + 1, torch.stack([a, torch.ones(())]), torch.stack([a, b.double()]), a]
    for y in [*others, torch.stack([a[None], b[None]]), stacked().detach()]:
        ((value, source),) = autograd_graph.scalars_of_stack(y)
        assert value is source is y


def test_functions_that_are_one_op_to_a_mode_show_the_ops_inside():
    layer = nn.MultiheadAttention(4, 2)
    x = torch.randn(3, 1, 4)
    arguments = (x, x, x, 4, 2, layer.in_proj_weight, layer.in_proj_bias, None, None, False, 0.0)
    rest = (layer.out_proj.weight, layer.out_proj.bias)
    (f, inside) = next(iter(internals.TRANSPARENT.items()))
    with Heard() as outer:
        expected = f(*arguments, *rest)
    with Heard() as inner:
        found = inside(*arguments, *rest)
    assert outer.names["multi_head_attention_forward"] == 1
    assert "linear" not in outer.names
    assert "linear" in inner.names
    torch.testing.assert_close(found, expected)


def test_modes_see_the_getters_of_the_graph_and_vmap_hides_what_they_return():
    class Answers(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            getter = func in internals.GRAPH_ATTRIBUTES
            return internals.graph_attribute(func, *args) if getter else func(*args, **(kwargs or {}))

    def f(x):
        told = x.requires_grad
        with Answers():
            answers.append((told, x.requires_grad))
            with pytest.raises(RuntimeError, match="all examples together"):
                (x * 2).grad_fn  # noqa: B018
        return x.sum()

    answers = []
    torch.vmap(f)(torch.ones(2, 3, requires_grad=True))
    assert answers == [(False, True)]
    with Answers():
        assert (torch.ones(1, requires_grad=True) * 2).grad_fn is not None


def test_the_supported_versions_are_those_of_the_package():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert internals.SUPPORTED in project["dependencies"]


def test_vmaps_and_their_randomness_are_known():
    found = []

    def f(x):
        found.append((internals.functorch_depth(), internals.vmaps_inside(0), internals.vmaps_inside(2)))
        return x.sum()

    assert (internals.functorch_depth(), internals.vmaps_inside(0)) == (0, [])
    inner = torch.vmap(torch.func.grad(f), randomness="different")
    torch.vmap(inner, randomness="same")(torch.ones(2, 3, 4))
    assert found == [(3, [(1, 2, "same"), (2, 3, "different")], [])]


def test_torch_compile_shows_every_function_to_a_mode_that_is_asked_for():
    class Sevens(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return torch.full((2,), 7.0)

    def f(x):
        with Sevens():
            return torch.rand_like(x), torch.normal(x, x)

    internals.show_to_compiled_modes([torch.rand_like, torch.normal])
    torch.compiler.reset()
    for y in torch.compile(f, backend="eager", fullgraph=True)(torch.ones(2)):
        assert torch.equal(y, torch.full((2,), 7.0))


def test_a_shard_is_closed_with_the_layout_of_another_leaf(tmp_path):
    """By the private attribute, and without it as a differentiable shard is."""
    dist.init_process_group("gloo", init_method=(tmp_path / "store").as_uri(), rank=0, world_size=1)
    try:
        like = distribute_tensor(torch.ones(3, 2), init_device_mesh("cpu", (1,)), [Shard(0)])
        for differentiable in (False, True):
            closed = sharded_as(torch.zeros(3, 2), like, differentiable=differentiable)
            assert (type(closed), closed._spec) == (DTensor, like._spec)
            assert torch.equal(closed.full_tensor(), torch.zeros(3, 2))
    finally:
        dist.destroy_process_group()


def test_constants_while_tracing_are_marked_as_torch_marks_them():
    def ours():
        return 1

    def theirs():
        return 1

    assert vars(internals.constant_while_tracing(ours)) == vars(torch.compiler.assume_constant_result(theirs)) != {}


def test_the_compiler_is_imported_where_something_is_compiled_only():
    code = "import functional_jd as fj, sys, torch\n"
    code += "how = dict(losses=lambda p: {'a': p.square().sum()}, aggregator=fj.upgrad(), optimizer=fj.adamw())\n"
    code += "fj.step(fj.train_state(torch.ones(2), **how), **how)\n"
    code += "print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.strip() == "False"
