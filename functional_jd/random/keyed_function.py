"""Functions that draw random numbers, as pure functions of a key."""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from functional_jd.core.arguments import check_function
from functional_jd.random.draws import DRAWS, on_device
from functional_jd.random.keys import UNIFORM_BITS, check_key, draw, split
from functional_jd.torch_compat.recomputation import RecomputedMode, in_reentrant_checkpoint
from functional_jd.torch_compat.slow_path import random_state
from functional_jd.torch_compat.torch_internals import (
    add_batch_dim,
    constant_while_tracing,
    function_name,
    functorch_depth,
    ignoring_modes,
    show_to_compiled_modes,
    traceable,
    vmaps_inside,
)

# Keys are split off in advance, as one call of `split` takes longer than an index; more only where more are needed.
_AHEAD = 32
# On an accelerator, uniform numbers of one length are drawn for the next calls too, up to so many: a draw takes thirty
# launches, of however many keys.
_TOGETHER = 1 << 18

_F: Any = nn.functional


def keyed(f: Callable[..., Any]) -> Callable[..., Any]:
    """Make all randomness inside a function a pure function of a key.

    `keyed(f)(key, *args, **kwargs) = f(*args, **kwargs)`. The k-th call that needs random numbers takes them from
    the key `split(key, k + 1)[k]`.

    Args:
        f: any function of tensors: a module, a function that calls modules, losses. Inside, these take their numbers
            from the key: `torch.rand`, `randn`, `rand_like`, `randn_like`, `randperm`, `normal`, `bernoulli`,
            `multinomial`; the methods `uniform_`, `normal_`, `bernoulli_`; dropout of every kind, in attention too; the
            distributions of `torch.distributions` that are made of these.

    Returns:
        A function with a key, int64 `[2]`, before the arguments of `f`. Do not use the key again.

    Raises:
        RuntimeError: `f` needs other random numbers, such as those of `torch.randint`, `torch.poisson`, dropout
            between recurrent layers or an explicit generator; the message names the function. Or torch's generator
            moved.

    Guarantees:
        The same key gives the same bits on one device: under vmap, grad, jvp and compile, for every row of a Jacobian,
        and where `torch.utils.checkpoint` runs a part of `f` again. On another device, they are equal to rounding.
        Under vmap, every key has its own numbers; a key that is not batched gives all elements the same. A `torch.vmap`
        inside `f` does what its `randomness` says. torch's own generators are not used.

    Source:
        The numbers are those of `uniform` and `normal`: SplitMix64 with a second round of mixing, whose increment is a
        counter. It is not meant for secrets.

    Differences:
        The values of probabilities in tensors are not checked. A tensor that is filled in place under a batched key
        must have been made by `empty`, `empty_like` or `new_empty`, or be batched itself. With dropout, attention is
        computed by plain products. Other generators (`random`, NumPy), and the backward pass of a custom autograd
        function, are out of reach. `out=` and checkpoints with `use_reentrant=True` raise, and so does torch.compile
        for a checkpoint inside `keyed`.

    Example:
        >>> dropout = keyed(torch.nn.Dropout(0.5))
        >>> x, key = torch.ones(1000), functional_jd.random.key(0)
        >>> torch.equal(dropout(key, x), dropout(key, x))
        True
    """
    check_function("f", f, "Pass the function, not its value.")

    def run(key: Tensor, /, *args: Any, **kwargs: Any) -> Any:
        check_key(key)
        compiling = torch.compiler.is_compiling()
        if compiling:
            _show_draws()
        before = [] if compiling else random_state()
        with _Keyed(key, []):
            result = f(*args, **kwargs)
        if not compiling and not all(map(torch.equal, before, random_state())):
            raise RuntimeError(
                "keyed: expected a function that leaves torch's generators alone, found that one has moved: an op that "
                "torch shows to no mode drew from it, torch.manual_seed was called, or another thread drew. Draw with "
                "the functions of functional_jd.random instead."
            )
        return result

    return wraps(f)(run) if hasattr(f, "__name__") else run


class _Keyed(RecomputedMode):
    """Gets every function of torch that Python calls, and gives their numbers to those that need random ones.

    Args:
        key: int64 `[2]`.
        drawn: has one entry for every call that has drawn; from outside, as torch.compile loses attributes of a mode.
    """

    def __init__(self, key: Tensor, drawn: list[int]):
        super().__init__()
        self.key, self.drawn, self.ahead = key, drawn, split(key, _AHEAD)
        self.depth = functorch_depth()
        # By length, dtype and device: the first call, and numbers `[calls, n]`.
        self.rows: dict[tuple[int, torch.dtype, torch.device], tuple[int, Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.note_checkpoints()
        func = traceable(func)
        if func in _EMPTY:
            return self.batched(func(*args, **kwargs))
        if func not in _DRAWING:
            _check_covered(func, args, kwargs)
            return func(*args, **kwargs)
        for name in ("generator", "out"):
            if kwargs.get(name) is not None:
                raise RuntimeError(f"keyed: expected {function_name(func)} without {name}=, found one. Leave it out.")
        kwargs = {name: value for name, value in kwargs.items() if name not in ("generator", "out")}
        return self.call(func, args, kwargs)

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        values = (*args, *kwargs.values())
        if func is _F.scaled_dot_product_attention and has_torch_function(values) and _under_autocast(values):
            return handle_torch_function(_AsOneOp(self, func), values, *args, **kwargs)
        if func in DRAWS:
            return DRAWS[func](self, *args, **kwargs)
        with self:
            return _IN_PYTHON[func](*args, **kwargs)

    def take(self) -> Tensor:
        """The key of the next call that draws."""
        if not torch.compiler.is_compiling() and in_reentrant_checkpoint():
            raise RuntimeError(
                "keyed: expected torch.utils.checkpoint with use_reentrant=False, found use_reentrant=True, which "
                "draws again in the backward pass, out of reach. Pass use_reentrant=False."
            )
        k = len(self.drawn)
        self.drawn.append(k)
        keys = self.ahead if k < len(self.ahead) else split(self.key, 2 * k)
        if not torch.compiler.is_compiling() and functorch_depth() == self.depth:
            self.ahead = keys
        return self.of_elements(keys[k])

    def draw(self, what: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Numbers of one kind: "uniform", "normal" or "exponential"."""
        if dtype not in UNIFORM_BITS:
            raise NotImplementedError(
                f"keyed: dtype must be float64, float32, float16 or bfloat16, found {dtype}. Draw in one of these, "
                "then convert."
            )
        return draw(on_device(self.take(), device), math.prod(shape), what, dtype).reshape(tuple(shape))

    def uniform(self, n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Uniform numbers `[n]`, which are only read."""
        k, key = len(self.drawn), self.take()
        if device.type in ("cpu", "meta") or torch.compiler.is_compiling() or functorch_depth() != self.depth:
            return draw(on_device(key, device), n, "uniform", dtype)
        first, rows = self.rows.get((n, dtype, device), (k, None))
        if rows is None or k - first >= len(rows):
            examples = math.prod(size for _, size, _ in vmaps_inside(0))
            several = min(len(self.ahead) - k, _TOGETHER // max(1, n * examples))
            if several < 2:
                return draw(on_device(key, device), n, "uniform", dtype)
            first, rows = k, draw(on_device(self.ahead[k : k + several], device), n, "uniform", dtype)
            self.rows[n, dtype, device] = first, rows
        return rows[k - first]

    def of_elements(self, key: Tensor) -> Tensor:
        """The key, or one key for each element of a `torch.vmap` inside the function."""
        for level, size, randomness in vmaps_inside(self.depth):
            if randomness == "error":
                raise RuntimeError(
                    "keyed: expected torch.vmap with randomness='different' or 'same' around what draws, found "
                    "randomness='error'. Pass one of the two."
                )
            if randomness == "different":
                key = add_batch_dim(split(key, size), 0, level)
        return key

    def batched(self, x: Tensor) -> Tensor:
        """A new tensor with the hidden dimensions of the key, so that draws can be written into it."""
        if functorch_depth() == 0 or x.requires_grad:
            return x
        return torch.where(self.of_elements(self.ahead[0])[0] == 0, x, x)

    def again(self) -> Callable[[], Any]:
        """A checkpoint that runs again draws the same once more."""
        key, drawn = self.key, len(self.drawn)
        return lambda: _Keyed(key, [*range(drawn)])


class _AsOneOp:
    """An op that is made of several, which autocast around `keyed` gets as one op first."""

    def __init__(self, mode: _Keyed, func: Any):
        self.mode, self.func, self.__name__ = mode, func, func.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.mode.call(self.func, args, kwargs)


@constant_while_tracing  # it runs while tracing
def _show_draws() -> None:
    random = [f for name, f in vars(torch).items() if callable(f) and reads_generator(name)]
    show_to_compiled_modes([*DRAWS, *_EMPTY, *random])


def _under_autocast(values: Any) -> bool:
    return any(isinstance(x, Tensor) and torch.is_autocast_enabled(x.device.type) for x in values)


def _check_covered(func: Any, args: Any, kwargs: Any) -> None:
    """Raise an error if a function would read torch's generator."""
    name = function_name(func)
    if isinstance(func, _OPERATORS):
        random = _is_tagged(func)
    elif not reads_generator(name) or isinstance(func, _AsOneOp):
        return
    elif name in _RECURRENT:  # `(data, hidden, weights, biased, layers, p, train, ...)`, or with sizes before `hidden`
        layers, p, train = args[4:7] if isinstance(args[3], bool) else args[5:8]
        random = layers > 1 and p > 0 and train
    elif name in ("rrelu", "rrelu_"):  # `(input, lower, upper, training, ...)`
        random = kwargs.get("training", args[3] if len(args) > 3 else False)
    else:
        random = True
    if random:
        raise RuntimeError(
            f"keyed: random numbers must come from the key, found {name}, which reads torch's generator. Use "
            "torch.rand or torch.randn, or draw outside, with the functions of functional_jd.random."
        )


@constant_while_tracing  # torch.compile traces no tags
def reads_generator(name: str) -> bool:
    """Whether torch's function of this name may read torch's generator."""
    return _reads_generator(name)


@lru_cache(maxsize=4096)  # a name that torch does not have takes long
def _reads_generator(name: str) -> bool:
    packet = getattr(torch.ops.aten, name, None)
    return name in _IN_PARTS or (isinstance(packet, _OPERATORS[0]) and _is_tagged(packet))


@constant_while_tracing
def _is_tagged(func: Any) -> bool:
    packet = isinstance(func, _OPERATORS[0])
    overloads = [getattr(func, name) for name in func.overloads()] if packet else [func]
    return any(torch.Tag.nondeterministic_seeded in overload.tags for overload in overloads)


_IN_PYTHON: dict[Any, Callable[..., Any]] = {
    getattr(_F, name): ignoring_modes(getattr(_F, name))
    for name in """
        dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout multi_head_attention_forward
    """.split()  # noqa: SIM905
}
"""Functions in Python that torch shows to a mode as one op, in a form that shows what they call."""

_DRAWING = frozenset([*DRAWS, *_IN_PYTHON])
_EMPTY = frozenset(
    [torch.empty, torch.empty_like, Tensor.new_empty, Tensor.new, torch.zeros, torch.zeros_like, Tensor.new_zeros]
)
_OPERATORS: tuple[Any, ...] = (type(torch.ops.aten.rand), type(torch.ops.aten.rand.default))
_RECURRENT = frozenset(["lstm", "gru", "rnn_tanh", "rnn_relu"])
_IN_PARTS = frozenset(
    ["kaiming_uniform_", "gumbel_softmax"]
    + [f"fractional_max_pool{d}d{more}" for d in (2, 3) for more in ("", "_with_indices")]
)
"""Functions in Python that torch shows to a mode as one op, and that read its generator."""
