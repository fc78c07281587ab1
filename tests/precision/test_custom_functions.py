"""The laws of custom autograd functions: forward and backward in one state, whatever the road."""

import pytest
import torch
from bounds import eps
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

from functional_jd import autocast, jacobian_fn
from functional_jd.precision import custom

LOW = [torch.float16, torch.bfloat16]

both = pytest.mark.parametrize("dtype", LOW, ids=["float16", "bfloat16"])


def draw(*shape: int, key: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(key)) + 0.5


def state() -> torch.dtype | None:
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None


class Product(torch.autograd.Function):
    """Two inputs, half under autocast, with every rule there is."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, w):
        return x @ w

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, cotangent):
        x, w = ctx.saved_tensors
        return cotangent @ w.mT, x.mT @ cotangent

    @staticmethod
    def jvp(ctx, dx, dw):
        x, w = ctx.saved_tensors
        return dx @ w + x @ dw


class Strict(Product):
    """An imported function with a kernel for float32 only."""

    @staticmethod
    def forward(x, w):
        assert x.dtype == w.dtype == torch.float32
        assert state() is None
        return x @ w

    @staticmethod
    def backward(ctx, cotangent):
        assert cotangent.dtype == torch.float32
        assert state() is None
        return Product.backward(ctx, cotangent)


class Straight(torch.autograd.Function):
    """Rounds, and passes thrice the gradient on: nothing that differentiating the forward would find."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.round()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def vjp(ctx, cotangent):
        return 3 * cotangent


class Combined(torch.autograd.Function):
    """The old way, with ctx in forward."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    backward = Product.backward


@custom
class Batched(torch.autograd.Function):
    """A vmap rule that calls its own class; the others' rule is made by torch."""

    forward, setup_context, backward = Product.forward, Product.setup_context, Product.backward

    @staticmethod
    def vmap(info, in_dims, x, w):
        x = x.movedim(in_dims[0], 0) if in_dims[0] is not None else x.expand(info.batch_size, *x.shape)
        w = w.movedim(in_dims[1], 0) if in_dims[1] is not None else w.expand(info.batch_size, *w.shape)
        return Batched.apply(x, w), 0


FUNCTIONS = {
    "two inputs": custom(Product),
    "in float32": custom(cast_inputs=torch.float32)(Strict),
    "in float16": custom(Product, cast_inputs=torch.float16),
    "vmap rule": Batched,
}
JVP = ["two inputs", "in float32", "in float16"]


total = lambda f: lambda x, w: (f(x, w).float() ** 2).sum()
under_vmap = lambda road: lambda f: lambda x, w: vmap(road(f), in_dims=(0, None))(x[None], w)[0]


REVERSE = {
    "alone": lambda f: f,
    "grad of x": lambda f: grad(total(f)),
    "grad of w": lambda f: grad(total(f), argnums=1),
    "jacrev": jacrev,
    "vmap": under_vmap(lambda f: f),
    "vmap(grad)": under_vmap(lambda f: grad(total(f), argnums=1)),
    "vmap(jacrev)": under_vmap(jacrev),
    "grad of grad": lambda f: grad(lambda x, w: (grad(total(f))(x, w) ** 2).sum(), argnums=1),
}
FORWARD = {
    "jvp": lambda f: lambda x, w: jvp(f, (x, w), (w, x))[1],
    "jacfwd": jacfwd,
    "vmap(jacfwd)": under_vmap(jacfwd),
    "hessian": lambda f: hessian(total(f)),
}
DEEPEST = {"grad of w", "vmap(jacrev)", "vmap(jacfwd)", "hessian"}
CASES = [(name, road) for name in FUNCTIONS for road in REVERSE | (FORWARD if name in JVP else {})]


@both
@pytest.mark.parametrize(("name", "road"), CASES)
def test_every_road_is_near_float64(name, road, dtype):
    x, w = draw(3, 3), draw(3, 3, key=1)
    way = (REVERSE | FORWARD)[road]
    expected = way(lambda x, w: x @ w)(x.double(), w.double())
    found = way(autocast(lambda x, w: FUNCTIONS[name](x, w), dtype))(x, w)
    exact = name == "in float32"
    unit = 64 * torch.finfo(torch.float32).eps if exact else 20 * eps(dtype)
    assert (found - expected).abs().max() <= unit * expected.abs().max()
    if road in ("alone", "vmap", *FORWARD) and road != "hessian":
        assert found.dtype == (torch.float32 if exact else torch.float16 if name == "in float16" else dtype)
    else:
        assert found.dtype == torch.float32


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_road_compiles_in_one_graph(name):
    torch.compiler.reset()
    x, w = draw(3, 3), draw(3, 3, key=1)
    f = autocast(lambda x, w: FUNCTIONS[name](x, w), torch.bfloat16)
    roads = REVERSE | (FORWARD if name in JVP else {})
    if name != "two inputs":  # the roads that go through the others
        roads = {road: way for road, way in roads.items() if road in DEEPEST}
    everything = lambda x, w: {road: way(f)(x, w) for road, way in roads.items()}
    expected, found = everything(x, w), torch.compile(everything, fullgraph=True, backend="aot_eager")(x, w)
    for road, value in expected.items():
        assert found[road].dtype == value.dtype, road
        assert (found[road].float() - value.float()).abs().max() <= 2.0**-6 * value.float().abs().max(), road


def test_compiled_derivatives_are_those_of_the_function():
    torch.compiler.reset()
    straight, x = custom(Straight), draw(4)
    f = lambda x: straight.apply(x).sum()
    for road in (grad(f), lambda x: vmap(grad(f))(x[None])[0], lambda x: grad(lambda x: f(x * x))(x) / (2 * x)):
        for run in (road, torch.compile(road, fullgraph=True, backend="aot_eager")):
            assert torch.allclose(run(x), torch.full((4,), 3.0))


INTEGERS = st.lists(st.integers(-3, 3), min_size=8, max_size=8)


@given(
    values=INTEGERS,
    given_dtype=st.sampled_from([*LOW, torch.float32, torch.float64]),
    dtype=st.sampled_from([None, *LOW]),
    cast_inputs=st.sampled_from([None, *LOW, torch.float32]),
)
def test_dtypes_follow_the_state_and_small_integers_are_exact(values, given_dtype, dtype, cast_inputs):
    x, w = torch.tensor(values, dtype=given_dtype).reshape(2, 2, 2)
    f = custom(Product, cast_inputs=cast_inputs)
    product = f if dtype is None else autocast(lambda x, w: f(x, w), dtype)
    left_alone = dtype is None or given_dtype == torch.float64
    expected = given_dtype if left_alone else cast_inputs or dtype
    exact = torch.tensor(values).reshape(2, 2, 2)
    assert product(x, w).dtype == vmap(product)(x[None], w[None]).dtype == expected
    assert torch.equal(product(x, w).long(), exact[0] @ exact[1])
    gradients = grad(lambda x, w: product(x, w).sum(), argnums=(0, 1))(x, w)
    assert [g.dtype for g in gradients] == [given_dtype] * 2
    assert torch.equal(gradients[0].long(), exact[1].sum(1).expand(2, 2))
    assert torch.equal(gradients[1].long(), exact[0].sum(0)[:, None].expand(2, 2))


@both
def test_mixed_inputs_get_gradients_in_their_own_dtypes(dtype):
    x, w = draw(2, 2).to(dtype), draw(2, 2, key=1)
    for cast_inputs in (None, dtype, torch.float32):
        f = autocast(custom(Product, cast_inputs=cast_inputs), dtype)
        found = grad(lambda x, w, f=f: f(x, w).float().sum(), argnums=(0, 1))(x, w)
        assert [g.dtype for g in found] == [dtype, torch.float32]


@both
@pytest.mark.parametrize("split", [True, False])
def test_backward_runs_in_the_state_of_its_forward(split, dtype):
    seen = []

    class Watched(Product if split else Combined):
        @staticmethod
        def backward(ctx, cotangent):
            seen.append(state())
            return Product.backward(ctx, cotangent)

    f = custom(Watched)
    x, w = draw(2, 2).requires_grad_(), draw(2, 2, key=1)
    inside = autocast(lambda: f(x, w), dtype)()
    torch.autograd.grad(inside.float().sum(), x)
    outside = f(x, w).sum()
    with torch.autocast("cpu", dtype):
        gradient = torch.autograd.grad(outside, x)[0]
    assert torch.equal(gradient, w.sum(1).expand(2, 2))
    assert seen == [dtype, None]
    if split:
        grad(lambda x: autocast(lambda x: f(x, w), dtype)(x).float().sum())(x.detach())
        vmap(grad(lambda x: autocast(lambda x: f(x, w), dtype)(x).float().sum()))(x.detach()[None])
        with torch.autocast("cpu", dtype):
            jacrev(lambda x: f(x, w))(x.detach())
        assert seen[2:] == [dtype] * 3


@both
@pytest.mark.parametrize("cast_inputs", [None, torch.float32])
def test_combined_forwards_give_the_bits_of_custom_fwd(cast_inputs, dtype):
    class Original(torch.autograd.Function):
        forward = staticmethod(torch.amp.custom_fwd(Combined.forward, device_type="cpu", cast_inputs=cast_inputs))
        backward = staticmethod(torch.amp.custom_bwd(Combined.backward, device_type="cpu"))

    x, w = draw(4, 4).requires_grad_(), draw(4, 4, key=1).requires_grad_()
    results = []
    for f in (Original.apply, custom(Combined, cast_inputs=cast_inputs)):
        with torch.autocast("cpu", dtype):
            y = f(x, w)
        results.append((y, *torch.autograd.grad((y.float() ** 2).sum(), (x, w))))
    for expected, found in zip(*results, strict=True):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    square = lambda x: autocast(custom(Combined, cast_inputs=torch.float32), dtype)(x, x).sum(0)
    jacobian, _ = jacobian_fn(square, mode="loop")(x.detach())  # without torch.func
    assert torch.allclose(jacobian, jacrev(lambda x: (x @ x).sum(0))(x.detach()))


@both
def test_ops_within_follow_the_tables_with_vmap_and_without(dtype):
    seen = []

    def note(x, w):
        """The linear layer is float32 under native autocast and vmap, the softmax half under that of the CPU."""
        linear = torch.nn.functional.linear(x.float(), w.float(), w[0].float())
        seen.append((linear.dtype, torch.softmax(x.to(dtype), -1).dtype))

    class Noting(Product):
        @staticmethod
        def forward(x, w):
            note(x, w)
            return x @ w

        @staticmethod
        def backward(ctx, cotangent):
            note(*ctx.saved_tensors)
            return Product.backward(ctx, cotangent)

        @staticmethod
        def jvp(ctx, dx, dw):
            note(*ctx.saved_tensors)
            return Product.jvp(ctx, dx, dw)

    x, w = draw(4, 4), draw(4, 4, key=1)
    f = autocast(custom(Noting), dtype)
    for road in ("alone", "vmap", "grad of x", "vmap(grad)", "jvp", "vmap(jacfwd)"):
        seen.clear()
        (REVERSE | FORWARD)[road](f)(x, w)
        assert len(seen) == (1 if road in ("alone", "vmap") else 2)
        assert set(seen) == {(dtype, torch.float32)}


def test_tensors_may_come_by_name_beside_what_is_no_tensor():
    class Power(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x, exponent):
            return x**exponent

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(inputs[0])
            ctx.exponent = inputs[1]

        @staticmethod
        def backward(ctx, cotangent):
            (x,) = ctx.saved_tensors
            return ctx.exponent * x ** (ctx.exponent - 1) * cotangent, None

    f = autocast(custom(Power, cast_inputs=torch.float32))
    x = torch.tensor([300.0], dtype=torch.float16)  # the square overflows in half
    assert f(x=x, exponent=2).item() == 90000
    assert vmap(grad(lambda x: f(x, exponent=2)))(x).item() == 600
    assert f(torch.tensor([3]), 2).item() == 9


def test_same_inputs_give_the_same_bits_and_the_class_stays_as_it_is():
    rules = dict(vars(Product))
    f = jacrev(autocast(custom(Product)))
    x, w = draw(4, 4), draw(4, 4, key=1)
    assert torch.equal(f(x, w), f(x, w))
    assert dict(vars(Product)) == rules
    assert (custom(Product).__name__, custom(Product).__doc__) == ("Product", Product.__doc__)
    assert state() is None


@pytest.mark.parametrize("wrong", [Product.apply, torch.sin, torch.nn.Linear, 3])
def test_only_autograd_functions_are_taken(wrong):
    with pytest.raises(TypeError, match=r"custom: expected a subclass of torch\.autograd\.Function, found"):
        custom(wrong)
