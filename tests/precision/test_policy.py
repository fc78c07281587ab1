"""The laws of policies: casts at the door, norms and losses in float32."""

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.utils.checkpoint import checkpoint

from functional_jd.engines.jacobian import jacobian_fn
from functional_jd.precision import op_tables
from functional_jd.precision.op_tables import LOSS_FUNCTIONS, NORM_LAYERS
from functional_jd.precision.policy import Policy, policy

LOW = {"float16": torch.float16, "bfloat16": torch.bfloat16}
EPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7}

both = pytest.mark.parametrize("half", LOW)


def draw(*shape: int, key: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(key)) + 0.1


def dtypes(rule: Policy) -> tuple[torch.dtype, ...]:
    x = torch.zeros(2)
    return tuple(cast(x).dtype for cast in rule)


SHORT = {  # jmp's names
    torch.float16: ["half", "f16", "float16"],
    torch.bfloat16: ["bf16", "bfloat16"],
    torch.float32: ["full", "f32", "float32"],
    torch.float64: ["f64", "float64"],
}
NAMES = st.sampled_from([(name, dtype) for dtype, names in SHORT.items() for name in names])
ROLES = ["params", "compute", "output"]


@given(
    parts=st.dictionaries(st.sampled_from(ROLES), NAMES, min_size=1),
    order=st.permutations(ROLES),
    short=st.booleans(),
    blank=st.sampled_from(["", " "]),
)
def test_what_is_left_out_follows_what_stands_before_it(parts, order, short, blank):
    words = [f"{role[0] if short else role}{blank}={blank}{parts[role][0]}" for role in order if role in parts]
    params = parts["params"][1] if "params" in parts else torch.float32
    compute = parts["compute"][1] if "compute" in parts else params
    output = parts["output"][1] if "output" in parts else compute
    assert dtypes(policy(f",{blank}".join(words))) == (params, compute, output)


@given(NAMES)
def test_one_dtype_stands_for_all_three(pair):
    assert dtypes(policy(pair[0])) == (pair[1],) * 3


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "float8",
        "params=",
        "=float16",
        "params=float32,",
        "compute:float16,output=half",
        "weights=half",
        "p=f16,params=f16",
    ],
)
def test_malformed_descriptions_are_refused_with_their_cure(wrong):
    with pytest.raises(ValueError, match=r"policy: expected .*, found .*\. (Write|Leave)"):
        policy(wrong)


@pytest.mark.parametrize("wrong", [None, torch.float16, {"params": "float32"}])
def test_only_strings_describe_a_policy(wrong):
    with pytest.raises(TypeError, match="policy: expected a string, found"):
        policy(wrong)


def test_a_policy_needs_a_function():
    with pytest.raises(TypeError, match="policy: expected a function, found Tensor"):
        policy("half")(draw(2))


def test_casts_leave_integers_and_what_is_no_tensor_alone():
    tree = {
        "x": draw(2),
        "double": draw(2).double(),
        "labels": torch.arange(2),
        "mask": torch.ones(2).bool(),
        "name": "a",
    }
    cast = policy("f16").cast_to_compute(tree)
    assert [cast[name].dtype for name in ("x", "double", "labels", "mask")] == [
        torch.float16,
        torch.float16,
        torch.int64,
        torch.bool,
    ]
    assert cast["name"] == "a"
    assert tree["x"].dtype == torch.float32


@both
def test_functions_see_the_compute_dtype_and_callers_the_output_dtype(half):
    seen = []

    def f(params, *batch, scale):
        """What it does."""
        seen.extend([params["w"].dtype, batch[0].dtype, scale.dtype])
        return {"y": batch[0] @ params["w"], "labels": batch[1]}

    g = policy(f"compute={half},output=float64")(f)
    result = g({"w": draw(3, 2)}, draw(4, 3), torch.arange(4), scale=draw(1))
    assert seen == [LOW[half]] * 3
    assert result["y"].dtype == torch.float64
    assert torch.equal(result["labels"], torch.arange(4))
    assert g.__name__ == "f"
    assert g.__doc__ == "What it does."


class Shaped(nn.Module):
    def __init__(self, *shape: int):
        super().__init__()
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(-1, *self.shape)


LAYERS = {
    "LayerNorm": lambda: nn.LayerNorm(6),
    "GroupNorm": lambda: nn.GroupNorm(2, 6),
    "BatchNorm1d": lambda: nn.BatchNorm1d(6, track_running_stats=False),
    "InstanceNorm1d": lambda: nn.Sequential(Shaped(2, 3), nn.InstanceNorm1d(2, affine=True)),
    "RMSNorm": lambda: nn.RMSNorm(6),
    "LocalResponseNorm": lambda: nn.Sequential(Shaped(6, 1), nn.LocalResponseNorm(2)),
}


def network(name):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 6), LAYERS[name](), nn.Flatten(), nn.Tanh(), nn.Linear(6, 3))
    params = {name: value.detach() for name, value in model.named_parameters()}

    def losses(params, x):
        return F.mse_loss(functional_call(model, params, (x,)), x[:, :3], reduction="none").mean(0)

    return losses, params


def of_sum(transform):
    return lambda f: lambda p, x: transform(lambda p: f(p, x).sum())(p)


def of_bias(transform):
    def way(f):
        return lambda p, x: {"0.bias": transform(lambda bias: f({**p, "0.bias": bias}, x).sum())(p["0.bias"])}

    return way


ROADS = {
    "grad": of_sum(grad),
    "jacrev": jacrev,
    "jacfwd": jacfwd,
    "vmap(grad)": lambda f: lambda p, x: vmap(of_sum(grad)(f), in_dims=(None, 0))(p, x[None]),
    "vmap(jacrev)": lambda f: lambda p, x: vmap(jacrev(f), in_dims=(None, 0))(p, x[None]),
    "jvp": lambda f: lambda p, x: {"value": jvp(lambda p: f(p, x), (p,), (p,))[1]},
    "jacobian_fn": lambda f: lambda p, x: jacobian_fn(f)(p, x)[0],
    "hessian": of_bias(hessian),
}


@both
@pytest.mark.filterwarnings("ignore:There is a performance drop because:UserWarning")  # vmap's own loops over rows
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("road", ROADS)
def test_derivatives_are_near_float64_and_in_the_dtype_of_the_params(layer, road, half):
    losses, params = network(layer)
    x = draw(8, 5, key=1)
    low = policy(f"params=float32,compute={half},output=float32")(losses)
    expected = ROADS[road](losses)({name: value.double() for name, value in params.items()}, x.double())
    found = ROADS[road](low)(params, x)
    scale = max(value.abs().max() for value in expected.values()) + (0.1 if road == "hessian" else 0)
    for name, value in expected.items():
        assert found[name].dtype == torch.float32
        assert (found[name] - value).abs().max() <= 40 * EPS[half] * scale


def test_params_kept_in_half_get_their_gradients_in_half():
    rule = policy("params=bf16,compute=f16,output=f32")
    losses, params = network("LayerNorm")
    found = grad(lambda p, x: rule(losses)(p, x).sum())(rule.cast_to_param(params), draw(8, 5))
    assert {value.dtype for value in found.values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("layer", "half"), [("LayerNorm", "float16"), ("BatchNorm1d", "bfloat16"), ("GroupNorm", "float16")]
)
def test_compiles_in_one_graph(layer, half):
    torch.compiler.reset()
    losses, params = network(layer)
    x = draw(8, 5, key=1)
    f = jacrev(policy(f"compute={half},output=float32")(losses))
    expected, found = f(params, x), torch.compile(f, fullgraph=True, backend="aot_eager")(params, x)
    scale = max(value.abs().max() for value in expected.values())
    for name, value in expected.items():
        assert found[name].dtype == torch.float32
        assert (found[name] - value).abs().max() <= 20 * EPS[half] * scale


NORM_CALLS = {
    "layer_norm": lambda x, w: F.layer_norm(x, (4,), weight=w, bias=w),
    "group_norm": lambda x, w: F.group_norm(x, 2, w, w),
    "batch_norm": lambda x, w: F.batch_norm(x, None, None, w, w, training=True),
    "instance_norm": lambda x, w: F.instance_norm(input=x[None], weight=w[:3], bias=None),
    "rms_norm": lambda x, w: F.rms_norm(x, (4,), w),
    "local_response_norm": lambda x, w: F.local_response_norm(x[None], 2),
}
LOSS_CALLS = {
    "cross_entropy": lambda x, y: F.cross_entropy(x, y),
    "nll_loss": lambda x, y: F.nll_loss(-x, torch.arange(4)),
    "kl_div": lambda x, y: F.kl_div(x.log(), y, reduction="sum"),
    "l1_loss": F.l1_loss,
    "smooth_l1_loss": F.smooth_l1_loss,
    "huber_loss": F.huber_loss,
    "mse_loss": F.mse_loss,
    "ctc_loss": lambda x, y: F.ctc_loss(
        x[:, None].log_softmax(-1), torch.tensor([[1, 2]]), torch.tensor([4]), torch.tensor([2])
    ),
    "binary_cross_entropy": lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid()),
    "binary_cross_entropy_with_logits": F.binary_cross_entropy_with_logits,
    "poisson_nll_loss": F.poisson_nll_loss,
    "gaussian_nll_loss": lambda x, y: F.gaussian_nll_loss(x, y, 1.0),
    "cosine_embedding_loss": lambda x, y: F.cosine_embedding_loss(x, y, torch.tensor([1.0, -1.0, 1.0, -1.0])),
    "hinge_embedding_loss": lambda x, y: F.hinge_embedding_loss(x, y.sign()),
    "margin_ranking_loss": lambda x, y: F.margin_ranking_loss(x, y, x.sign()),
    "soft_margin_loss": lambda x, y: F.soft_margin_loss(x, y.sign()),
    "multi_margin_loss": lambda x, y: F.multi_margin_loss(x, torch.arange(4)),
    "multilabel_margin_loss": lambda x, y: F.multilabel_margin_loss(x, torch.tensor([[0, 1, -1, -1]] * 4)),
    "multilabel_soft_margin_loss": lambda x, y: F.multilabel_soft_margin_loss(x, y.sign()),
    "triplet_margin_loss": lambda x, y: F.triplet_margin_loss(x, y, x.flip(0)),
    "triplet_margin_with_distance_loss": lambda x, y: F.triplet_margin_with_distance_loss(
        x, y, x.flip(0), distance_function=lambda a, b: (a - b).abs().sum(-1)
    ),
}
ALONE = {"ctc_loss", "multilabel_margin_loss", "multi_margin_loss"}  # torch itself has no vmap rule, or a looping one


def test_every_norm_and_loss_is_called_below():
    assert NORM_CALLS.keys() == NORM_LAYERS
    assert LOSS_CALLS.keys() == LOSS_FUNCTIONS
    assert NORM_LAYERS <= op_tables.FLOAT32 | op_tables.WIDE
    assert LOSS_FUNCTIONS - {"binary_cross_entropy"} <= op_tables.FLOAT32
    assert {name for name in op_tables.FLOAT32 if name.endswith("_loss") and hasattr(F, name)} <= LOSS_FUNCTIONS


@both
@pytest.mark.filterwarnings("ignore:There is a performance drop because:UserWarning")
@pytest.mark.parametrize("name", NORM_CALLS)
def test_norms_round_once_and_return_their_inputs_dtype(name, half):
    dtype = LOW[half]
    x, w = draw(3, 4) * 100, draw(4, key=1)
    rule = policy(f"compute={half}")
    expected = NORM_CALLS[name](x.to(dtype).float(), w.to(dtype).float()).to(dtype)
    found = rule(NORM_CALLS[name])(x, w)
    assert found.dtype == dtype
    assert torch.equal(found, expected)
    batched = vmap(rule(NORM_CALLS[name]), in_dims=(0, None), randomness="different")(x[None], w)[0]
    assert batched.dtype == dtype
    assert torch.allclose(batched.float(), expected.float(), rtol=2 * EPS[half], atol=2 * EPS[half])


@both
@pytest.mark.filterwarnings("ignore:There is a performance drop because:UserWarning")
@pytest.mark.parametrize("name", LOSS_CALLS)
def test_losses_compute_in_float32_and_stay_there(name, half):
    dtype = LOW[half]
    x, y = draw(4, 4), draw(4, 4, key=1)
    inner = []

    def f(x, y):
        inner.append(LOSS_CALLS[name](x, y))
        return inner[-1]

    found = policy(f"compute={half},output=float32")(f)(x, y)
    expected = LOSS_CALLS[name](x.to(dtype).double(), y.to(dtype).double())
    assert inner[0].dtype == torch.float32
    assert abs(found - expected) <= 4 * EPS[half] * (1 + expected.abs())
    if name not in ALONE:
        assert torch.allclose(
            vmap(policy(f"compute={half},output=float32")(LOSS_CALLS[name]))(x[None], y[None])[0], found
        )


def test_means_of_huge_losses_and_huge_activations_stay_finite():
    rule = policy("params=float32,compute=float16,output=float32")
    x = torch.full((8, 8), 1000.0)
    assert rule(F.mse_loss)(x, -x).item() == 4e6
    assert rule(lambda x: F.mse_loss(x, -x, reduction="sum"))(x).item() == 2.56e8
    assert torch.allclose(rule(lambda x: F.rms_norm(x, (8,)))(x), torch.ones(8, 8))
    logits = torch.tensor([[1000.0, 0.0]])
    assert rule(lambda z: F.cross_entropy(z, torch.tensor([[0.5, 0.5]])))(logits).item() == 500


def test_running_statistics_in_the_module_stay_float32_and_are_updated():
    layer, twin = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    x = draw(8, 4)
    params = {name: value.detach() for name, value in layer.named_parameters()}
    policy("compute=float16")(lambda p, x: functional_call(layer, p, (x,)))(params, x)
    twin(x.half().float())
    assert torch.equal(layer.running_mean, twin.running_mean)
    assert torch.equal(layer.running_var, twin.running_var)


@given(st.lists(st.integers(-4, 4), min_size=9, max_size=9), st.sampled_from(["full", "f64"]))
def test_a_policy_of_the_dtype_that_comes_in_changes_nothing(values, name):
    dtype = torch.float32 if name == "full" else torch.float64
    x = torch.tensor(values, dtype=dtype).reshape(3, 3) / 3

    def f(x):
        return F.mse_loss(F.layer_norm(x @ x, (3,)), x, reduction="none").sum(0)

    assert torch.equal(policy(name)(f)(x), f(x))
    assert torch.equal(jacrev(policy(name)(f))(x), jacrev(f)(x))


@given(st.lists(st.floats(-6e4, 6e4, width=32), min_size=1, max_size=5))
def test_casts_round_as_ieee_says(values):
    import numpy as np

    found = policy("params=f32,compute=f16,output=f64").cast_to_compute(torch.tensor(values, dtype=torch.float32))
    assert np.array_equal(found.numpy(), np.array(values, dtype=np.float32).astype(np.float16))


def test_a_weight_used_twice_adds_its_gradients_in_the_compute_dtype():
    w, x = torch.ones(1), torch.full((1,), 40000.0)
    twice = lambda w: (w * x.half()).float().sum() + (w * x.half()).float().sum()
    assert grad(policy("c=f16,o=f32")(twice))(w).item() == math.inf  # what `autocast` avoids


@both
def test_checkpoints_run_again_under_the_policy(half):
    block = lambda x, w: F.layer_norm(x @ w, (4,)).exp() @ w
    x, w = draw(4, 4), draw(4, 4, key=1).requires_grad_()

    def gradient(run):
        losses = policy(f"params=float32,compute={half},output=float32")(lambda w: run(x.to(w.dtype), w).sum())
        return torch.autograd.grad(losses(w), w)[0]

    assert torch.equal(gradient(lambda *args: checkpoint(block, *args, use_reentrant=False)), gradient(block))
