"""Small models of many kinds, each with its losses: what an engine must be able to differentiate.

Every model is built from a fixed seed. `plain`, `by_example` and `tasks` make losses of each kind from any of them.
"""

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree, checkpoint

from functional_jd.objectives import multitask, per_example

BATCH, WIDTH = 4, 3


class Model(NamedTuple):
    """`predict(params, inputs) -> [batch, 3]`, where it is evaluated, and what torch cannot do with it."""

    params: Any
    predict: Callable[..., Tensor]
    inputs: Tensor
    vmap: bool = True  # torch.vmap(torch.autograd.grad) over rows
    func: bool = True  # torch.func.vjp
    single: bool = True  # a batch of one example
    examples: bool = True  # torch.vmap(torch.func.vjp) over examples
    module: nn.Module | None = None  # whose buffers are in use


class Case(NamedTuple):
    """Losses and the point where they are differentiated: `losses(params, *args)`."""

    params: Any
    losses: Any
    args: tuple[Tensor, ...]


def plain(model: Model) -> Case:
    """A nested dict of losses whose keys are not in sorted order: m = 4."""

    def losses(params, inputs, targets):
        outputs = model.predict(params, inputs)
        return {
            "error": ((outputs - targets) ** 2).mean(0)[:2],
            "also": {"size": (outputs**2).sum(), "mean": torch.sigmoid(outputs).mean()},
        }

    return Case(model.params, losses, (model.inputs, targets()))


def by_example(model: Model) -> Case:
    """One loss per example: m = 4."""

    def loss(params, inputs, targets):
        return ((model.predict(params, inputs[None])[0] - targets) ** 2).mean()

    return Case(model.params, per_example(loss), (model.inputs, targets()))


def tasks(model: Model) -> Case:
    """Three tasks on the model as their trunk; two of them share a parameter of the heads, one has none: m = 3."""

    def heads(params, features, inputs, targets):
        own = torch.tanh(features) @ params["own"] + params["bias"]
        return {
            "score": (own**2).mean(),
            "error": ((features @ params["common"] - targets) ** 2).mean(),
            "drift": features.mean() * params["bias"],
        }

    params = {"common": numbers(WIDTH, WIDTH, seed=7), "own": numbers(WIDTH, seed=8), "bias": numbers(seed=9)}
    losses = multitask(lambda shared, inputs, targets: model.predict(shared, inputs), heads)
    return Case({"shared": model.params, "heads": params}, losses, (model.inputs, targets()))


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normal draws."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def targets() -> Tensor:
    return numbers(BATCH, WIDTH, seed=99)


def mlp(sizes: tuple[int, ...] = (5, 4, WIDTH)) -> Model:
    pairs = list(pairwise(sizes))
    params = {f"layer{i}": {"w": numbers(a, b, seed=i), "b": numbers(b, seed=10 + i)} for i, (a, b) in enumerate(pairs)}

    def predict(params, x):
        for i in range(len(pairs)):
            x = x @ params[f"layer{i}"]["w"] + params[f"layer{i}"]["b"]
            x = torch.tanh(x) if i + 1 < len(pairs) else x
        return x

    return Model(params, predict, numbers(BATCH, sizes[0], seed=50))


def tied() -> Model:
    """The embedding is the output layer too."""

    def predict(params, tokens):
        hidden = torch.tanh(nn.functional.embedding(tokens, params["table"]) @ params["w"])
        return (hidden @ params["table"].mT).mean(1)

    return Model({"table": numbers(WIDTH, 4), "w": numbers(4, 4, seed=1)}, predict, tokens(WIDTH))


def reused() -> Model:
    """One weight in three places, once transposed."""

    def predict(params, x):
        return torch.tanh(torch.tanh(x @ params["w"]) @ params["w"].mT) @ params["w"]

    return Model({"w": numbers(WIDTH, WIDTH)}, predict, numbers(BATCH, WIDTH, seed=1))


def unused() -> Model:
    inner = mlp()
    params = {"used": inner.params, "idle": {"w": numbers(2, 2), "b": numbers()}}
    return Model(params, lambda params, x: inner.predict(params["used"], x), inner.inputs)


def frozen() -> Model:
    """Parameters that a closure captures: one that asks for no gradient, one that does."""
    fixed, asking = numbers(WIDTH, WIDTH, seed=1), numbers(WIDTH, seed=2).requires_grad_()
    predict = lambda params, x: torch.tanh(x @ params["w"]) @ fixed * asking
    return Model({"w": numbers(5, WIDTH)}, predict, numbers(BATCH, 5, seed=3))


def scalars() -> Model:
    """Parameters without dimensions."""
    params = {"slope": numbers(), "shift": numbers(seed=1)}
    return Model(params, lambda p, x: torch.sin(x * p["slope"] + p["shift"]), numbers(BATCH, WIDTH, seed=2))


def packed() -> Model:
    """Three weights in one, cut, transposed and cut again; some rows twice, some never; and in another dtype."""
    params = {"w": numbers(9, WIDTH) / 2, "b": numbers(9, seed=1), "idle": numbers(4, WIDTH, seed=2)}

    def predict(p, x):
        first, second, third = p["w"].chunk(3)
        shift = p["b"].split([3, 6])
        x = torch.tanh(nn.functional.linear(x, first, shift[0])) @ second.T
        x = torch.tanh(nn.functional.linear(torch.tanh(x), p["w"][3:], shift[1])) @ p["w"].mT[:, 3:].mT
        x = x @ third.to(torch.float64).to(x.dtype) + p["b"][2:5] * x + p["b"].view(3, 3)[1]
        return nn.functional.linear(x, p["idle"][1:4], p["b"].unflatten(0, (3, 3)).unbind()[2])

    return Model(params, predict, numbers(BATCH, WIDTH, seed=20))


def bare() -> Model:
    """The parameters are one tensor."""
    return Model(numbers(5, WIDTH), lambda w, x: torch.tanh(x @ w), numbers(BATCH, 5, seed=1))


def mixed() -> Model:
    """Parameters of two dtypes."""
    params = {"narrow": numbers(5, 4, dtype=torch.float32), "wide": numbers(4, WIDTH, seed=1)}
    return Model(params, lambda p, x: torch.tanh(x.float() @ p["narrow"]).double() @ p["wide"], mlp().inputs)


Pair = namedtuple("Pair", "w b")


@dataclass
class Block:
    inner: Pair
    gain: list[Tensor]


_pytree.register_dataclass(Block)


def nested() -> Model:
    """A registered dataclass of a NamedTuple and a list, in a tuple."""
    params = (Block(Pair(numbers(5, WIDTH), numbers(WIDTH, seed=1)), [numbers(seed=2), numbers(WIDTH, seed=3)]), [])

    def predict(params, x):
        block = params[0]
        return torch.tanh(x @ block.inner.w + block.inner.b) * block.gain[0] + block.gain[1]

    return Model(params, predict, mlp().inputs)


def complex_numbers() -> Model:
    def predict(params, x):
        wave = torch.fft.rfft(x @ params["w"], dim=-1)
        return (wave * torch.polar(torch.ones_like(params["phase"]), params["phase"])).abs()

    return Model({"w": numbers(5, 4), "phase": numbers(WIDTH, seed=1)}, predict, mlp().inputs)


def on_mlp(change: Callable[[Tensor, Tensor], Tensor], **cannot: bool) -> Callable[[], Model]:
    """Models whose prediction is `change(that of an mlp, inputs)`."""

    def made() -> Model:
        inner = mlp()
        return inner._replace(predict=lambda params, x: change(inner.predict(params, x), x), **cannot)

    return made


def overwritten(y, _):
    y *= 2
    y[:, 0] = torch.relu_(y[:, 1] + 0)
    return y.tanh_()


def checkpointed() -> Model:
    inner = mlp()

    def predict(params, x):
        return checkpoint.checkpoint(inner.predict, params, x, use_reentrant=False)

    return inner._replace(predict=predict, func=False, examples=False)


class Cube(torch.autograd.Function):
    """In the old manner: one forward, no `setup_context`, no rule for vmap."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, gradient):
        return 3 * ctx.saved_tensors[0] ** 2 * gradient


class NumpyCube(Cube):
    """Leaves torch in its backward pass."""

    @staticmethod
    def backward(ctx, gradient):
        return torch.from_numpy(3 * ctx.saved_tensors[0].detach().numpy() ** 2 * gradient.numpy())


def sparse_embedding() -> Model:
    def predict(params, tokens):
        return torch.tanh(nn.functional.embedding(tokens, params["table"], sparse=True).mean(1) @ params["w"])

    params = {"table": numbers(6, 4), "w": numbers(4, WIDTH, seed=1)}
    return Model(params, predict, tokens(6), vmap=False, examples=False)


def of_module(make: Callable[[], nn.Module], inputs: Tensor, shape: Any = None, **cannot: bool) -> Model:
    """A module's parameters drawn anew, beside a linear layer from whatever it returns to `[batch, 3]`."""
    with torch.random.fork_rng():
        module = make().double()
    drawn = {name: 0.5 * numbers(*p.shape, seed=i) for i, (name, p) in enumerate(module.named_parameters())}
    enter = shape or (lambda x: x)

    def run(params, x):
        y = functional_call(module, params, (enter(x),))
        y = y[0] if isinstance(y, tuple) else y
        return y.reshape(len(x), -1)

    with torch.no_grad():
        features = run(drawn, inputs).shape[1]

    def predict(params, x):
        return torch.tanh(run(params["module"], x)) @ params["out"]

    return Model({"module": drawn, "out": numbers(features, WIDTH, seed=77)}, predict, inputs, module=module, **cannot)


def tokens(vocabulary: int) -> Tensor:
    return torch.randint(vocabulary, (BATCH, 5), generator=torch.Generator().manual_seed(3))


SEQUENCE, IMAGE, CHANNELS = numbers(BATCH, 3, 4, seed=5), numbers(BATCH, 2, 4, 4, seed=6), numbers(BATCH, 4, seed=7)


class Unrolled(nn.Module):
    """An RNN cell in a Python loop."""

    def __init__(self):
        super().__init__()
        self.cell = nn.RNNCell(4, 3)

    def forward(self, x):
        state = x.new_zeros(x.shape[0], 3)
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
        return state


class SelfAttention(nn.Module):
    def __init__(self, need_weights: bool):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.need_weights = need_weights

    def forward(self, x):
        return self.attention(x, x, x, need_weights=self.need_weights)[0]


class CrossAttention(nn.Module):
    """Queries of one kind, keys of another; and values of a third, or of the keys' own."""

    def __init__(self, apart: bool, **sizes: int):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True, **sizes)
        self.apart = apart

    def forward(self, x):
        keys = torch.tanh(x[:, :2])
        return self.attention(x, keys, keys * 2 if self.apart else keys, need_weights=False)[0]


def decoder() -> nn.Module:
    class Decoder(nn.TransformerDecoderLayer):
        def forward(self, x):
            return super().forward(x, torch.sin(x[:, :2]))

    return Decoder(4, 2, 6, dropout=0.0, batch_first=True)


def encoder(norm_first: bool) -> nn.Module:
    return nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True, norm_first=norm_first)


def norm(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """A norm layer between two others, so that its backward pass matters."""
    return lambda: nn.Sequential(nn.Linear(4, 4), make(), nn.GELU(), nn.Linear(4, 2))


def conv_norm(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Conv2d(2, 4, 3), make(), nn.GELU())


def volume(x: Tensor) -> Tensor:
    return x.reshape(len(x), 2, 2, 2, 4)


# torch.func refuses to change running statistics in place.
RUNNING = {"func": False, "examples": False}

MODELS: dict[str, Callable[[], Model]] = {
    "mlp": mlp,
    "deep": lambda: mlp((2, 3, 3, 3, 3, WIDTH)),
    "tied": tied,
    "reused": reused,
    "unused": unused,
    "frozen": frozen,
    "scalars": scalars,
    "bare": bare,
    "mixed": mixed,
    "nested": nested,
    "complex": complex_numbers,
    # A Python `if` on values.
    "branching": on_mlp(lambda y, _: y.sin() if bool((y.sum() > 0).item()) else y.cos(), examples=False, func=False),
    # Boolean masks and advanced indexing.
    "masked": on_mlp(lambda y, x: y[:, [2, 0, 0]] + y[x[:, 0] > 0].sum(), examples=False),
    "in_place": on_mlp(overwritten),
    # Draws from torch's global generator: equal only from the same seed and when evaluated once, all rows together.
    # Forward mode evaluates once per parameter, and vmap over examples draws in another order than a loop.
    "dropout": on_mlp(lambda y, _: nn.functional.dropout(y, 0.5), single=False),
    "checkpointed": checkpointed,
    "custom_function": on_mlp(lambda y, _: Cube.apply(y), func=False, examples=False),
    "numpy_backward": on_mlp(lambda y, _: NumpyCube.apply(y), func=False, examples=False, vmap=False),
    "sparse_embedding": sparse_embedding,
    "rnn_cell": lambda: of_module(Unrolled, SEQUENCE),
    "rnn": lambda: of_module(lambda: nn.RNN(4, 3, batch_first=True), SEQUENCE, examples=False),
    "lstm": lambda: of_module(lambda: nn.LSTM(4, 3, batch_first=True), SEQUENCE, examples=False),
    "gru": lambda: of_module(lambda: nn.GRU(4, 3, batch_first=True), SEQUENCE, examples=False),
    "attention": lambda: of_module(lambda: SelfAttention(True), SEQUENCE),
    "fused_attention": lambda: of_module(lambda: SelfAttention(False), SEQUENCE),
    "encoder": lambda: of_module(lambda: encoder(False), SEQUENCE),
    "encoder_norm_first": lambda: of_module(lambda: encoder(True), SEQUENCE),
    "layer_norm": lambda: of_module(norm(lambda: nn.LayerNorm(4)), CHANNELS),
    "rms_norm": lambda: of_module(norm(lambda: nn.RMSNorm(4)), CHANNELS),
    "group_norm": lambda: of_module(norm(lambda: nn.GroupNorm(2, 4)), CHANNELS),
    "batch_norm_1d": lambda: of_module(norm(lambda: nn.BatchNorm1d(4)), CHANNELS, **RUNNING, single=False),
    "batch_norm_2d": lambda: of_module(conv_norm(lambda: nn.BatchNorm2d(4)), IMAGE, **RUNNING, single=False),
    "batch_norm_no_statistics": lambda: of_module(
        conv_norm(lambda: nn.BatchNorm2d(4, track_running_stats=False)), IMAGE, single=False
    ),
    "batch_norm_eval": lambda: of_module(lambda: norm(lambda: nn.BatchNorm1d(4))().eval(), CHANNELS),
    "instance_norm": lambda: of_module(conv_norm(lambda: nn.InstanceNorm2d(4, affine=True)), IMAGE),
    "conv1d": lambda: of_module(lambda: nn.Conv1d(3, 2, 2), SEQUENCE),
    "conv2d": lambda: of_module(lambda: nn.Conv2d(2, 3, 3, padding=1), IMAGE),
    "conv3d": lambda: of_module(lambda: nn.Conv3d(2, 2, 2), IMAGE, volume),
    "conv_transpose": lambda: of_module(lambda: nn.ConvTranspose2d(2, 2, 2, stride=2), IMAGE),
    "conv_grouped": lambda: of_module(lambda: nn.Conv2d(2, 4, 2, groups=2, dilation=2), IMAGE),
    "embedding": lambda: of_module(lambda: nn.Embedding(6, 3), tokens(6)),
    "embedding_bag": lambda: of_module(lambda: nn.EmbeddingBag(6, 3), tokens(6)),
    "prelu": lambda: of_module(norm(lambda: nn.PReLU(4)), CHANNELS),
}

MORE: dict[str, Callable[[], Model]] = {
    "packed": packed,
    "cross_attention": lambda: of_module(lambda: CrossAttention(False), SEQUENCE),
    "attention_apart": lambda: of_module(lambda: CrossAttention(True), SEQUENCE),
    "attention_unpacked": lambda: of_module(lambda: CrossAttention(True, kdim=4, vdim=4), SEQUENCE),
    "attention_biased": lambda: of_module(lambda: CrossAttention(False, add_bias_kv=True), SEQUENCE),
    "decoder": lambda: of_module(decoder, SEQUENCE),
    "weight_norm": lambda: of_module(norm(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))), CHANNELS),
    "spectral_norm": lambda: of_module(
        lambda: norm(lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)))().eval(), CHANNELS
    ),
}
"""For the Gramian engine: layers that differ to it, and not to rows."""


class Passed(torch.autograd.Function):
    """The identity, which notes the cotangents that come back, pass by pass."""

    @staticmethod
    def forward(ctx, x, seen):
        ctx.seen = seen
        return x.clone()

    @staticmethod
    def backward(ctx, cotangent):
        ctx.seen.append(cotangent.clone())
        return cotangent, None


def with_hook(ask):
    """A loss of one example with a hook that turns a gradient round, where `ask` says that there will be one."""

    def loss(p, x):
        h = torch.tanh(x @ p["w"])
        if ask(h):
            h.register_hook(lambda g: -g)
        return (h @ p["v"]) ** 2

    return loss


ASKS = {
    "always": lambda h: True,
    "requires_grad": lambda h: h.requires_grad,
    "grad_fn": lambda h: h.grad_fn is not None,
}
"""How code asks whether autograd records a tensor."""
