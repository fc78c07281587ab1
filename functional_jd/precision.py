"""Mixed precision: PyTorch's autocast op reference, the same on every device and under every transform.

Native autocast says whether, and in which dtype; the tables below say which op. They act where Python calls the op,
before a transform takes it apart: vmap splits a biased `linear` into parts that native autocast treats differently.
"""

from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import reduce, wraps
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from functional_jd.tree import tree_leaves
from functional_jd.types import Tree


def _names(words: str) -> frozenset[str]:
    return frozenset(words.split())


HALF = _names("""
    matmul __matmul__ __rmatmul__ linalg_matmul mm mv bmm addmm addmv addr addbmm baddbmm chain_matmul linalg_multi_dot
    linalg_vecdot einsum linear prelu scaled_dot_product_attention _scaled_dot_product_flash_attention
    conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution _convolution
    multi_head_attention_forward
    lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    _thnn_fused_lstm_cell _thnn_fused_gru_cell
""")
"""Ops computed in the autocast dtype."""

FLOAT32 = _names("""
    pow __pow__ __rpow__ square reciprocal rsqrt __rdiv__ __rtruediv__ exp expm1 log log10 log1p log2 logsumexp
    acos arccos asin arcsin cosh sinh tan erfinv softplus gelu
    softmax softmin log_softmax gumbel_softmax sum prod cumsum cumprod
    special_expm1 special_log1p special_erfinv special_logsumexp special_softmax special_log_softmax
    norm frobenius_norm nuclear_norm linalg_norm linalg_vector_norm linalg_matrix_norm renorm normalize
    dist cdist pdist pairwise_distance cosine_similarity
    layer_norm native_layer_norm group_norm native_group_norm rms_norm local_response_norm lp_pool1d lp_pool2d lp_pool3d
    cross_entropy cross_entropy_loss nll_loss nll_loss2d nll_loss_nd kl_div l1_loss smooth_l1_loss huber_loss mse_loss
    binary_cross_entropy_with_logits poisson_nll_loss gaussian_nll_loss cosine_embedding_loss hinge_embedding_loss
    margin_ranking_loss soft_margin_loss multi_margin_loss multilabel_margin_loss multilabel_soft_margin_loss
    triplet_margin_loss triplet_margin_with_distance_loss ctc_loss
    interpolate upsample upsample_nearest upsample_bilinear
    upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d
    upsample_bicubic2d _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
    _upsample_bilinear2d_aa _upsample_bicubic2d_aa
    quantile nanquantile stft istft polar complex view_as_complex
    fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2 fft_hfft2 fft_ihfft2
    fft_fftn fft_ifftn fft_rfftn fft_irfftn fft_hfftn fft_ihfftn
    cholesky cholesky_inverse cholesky_solve det inverse logdet slogdet lu_solve pinverse qr svd triangular_solve
    linalg_cholesky linalg_cholesky_ex linalg_cond linalg_det linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh
    linalg_inv linalg_inv_ex linalg_ldl_factor linalg_ldl_solve linalg_lstsq linalg_lu linalg_lu_factor linalg_lu_solve
    linalg_matrix_exp matrix_exp linalg_matrix_rank linalg_pinv linalg_qr linalg_slogdet linalg_solve linalg_solve_ex
    linalg_solve_triangular linalg_svd linalg_svdvals linalg_tensorinv linalg_tensorsolve linalg_householder_product
""")
"""Ops computed in float32: they overflow or cancel in half precision, or (the last lines) have no half kernels."""

PROMOTE = _names("""
    addcdiv addcmul atan2 arctan2 bilinear cat concat concatenate stack cross linalg_cross dot vdot inner tensordot
    equal where scatter_add index_put index_copy grid_sample grid_sampler
""")
"""Ops that need one dtype: computed in the widest among their tensors."""

WIDE = _names("""
    batch_norm instance_norm native_batch_norm
    avg_pool3d max_pool3d max_pool3d_with_indices adaptive_avg_pool3d adaptive_max_pool3d max_unpool2d max_unpool3d
""")
"""Ops computed in float32 and returned in the input's dtype: as CUDA's kernels do inside; the CPU's lack half ones."""

PLAIN = _names("grad backward pad trace")
"""Ops that run as if autocast were off: backward passes, which follow their forward pass; others of the CPU's list."""


def autocast(f: Callable[..., Any], dtype: torch.dtype = torch.float16) -> Callable[..., Any]:
    """Run a function in mixed precision, op by op as PyTorch's autocast op reference says.

    `y = f(x)`, where an op of `HALF` computes in `dtype`, one of `FLOAT32` in float32, one of `PROMOTE` in the widest
    dtype among its tensors; the others follow their inputs, and float64 stays float64.

    Args:
        f: any function of tensors; its shapes and units stay what they are.
        dtype: `torch.float16` or `torch.bfloat16`.

    Returns:
        A function with the signature of `f`. Inside, autocast is on for the CPU and for the accelerator, if
            there is one.

    Raises:
        TypeError: `f` cannot be called.
        ValueError: another dtype.
        RuntimeError: when `f` calls `binary_cross_entropy`, whose logarithms overflow in half precision.

    Laws:
        The dtype of every op is the same on every device and under vmap, grad, jacrev, jacfwd, jvp, vjp, hessian and
        compile. Gradients come out in the dtype of what is differentiated (but `jacfwd` and `jvp` return the output's).
        `with torch.autocast(device, enabled=False)` inside is float32, forward and backward: put `autocast` inside what
        is differentiated, `grad(autocast(f))`, so that the backward pass runs as its forward pass did.
        A weight used twice gets its gradients added in its own dtype. Same inputs, same bits.

    Source:
        PyTorch, "Automatic Mixed Precision: Autocast Op Reference" (the CUDA lists) and `ATen/autocast_mode.h`.

    Differs:
        gelu, square, local_response_norm, fft and matrix decompositions are computed in float32 too. batch_norm and
        instance_norm, which the reference leaves alone, are computed in float32 and come back in their input's dtype.
        An inner `torch.autograd.grad` runs with autocast off. There is no cache of weights cast to half. Parameters and
        buffers belong in float32: running statistics in half precision are not updated.
    """
    if dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(
            f"autocast: dtype must be torch.float16 or torch.bfloat16, found {dtype}. "
            "Call the function as it is for full precision."
        )
    followed = portable(f)

    @wraps(f)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _switched(_devices(), enabled=True, dtype=dtype):
            return followed(*args, **kwargs)

    return run


def portable(f: Callable[..., Any]) -> Callable[..., Any]:
    """Make native autocast, inside a function or around it, follow the op tables; `autocast` says how.

    `portable(f)(x) = f(x)`, bit for bit, wherever native autocast is off.

    Args:
        f: any function of tensors, with or without `with torch.autocast(...)` in it; shapes and units stay.

    Returns:
        A function with the signature of `f`.

    Raises:
        TypeError: `f` cannot be called.
        RuntimeError: when `f` calls `binary_cross_entropy` under autocast.

    Laws:
        Idempotent. Composes with every transform, inside and outside. Nothing of a call stays in autocast's cache.

    Differs:
        From native autocast, in what `autocast` lists. An operator of one's own, which no table names, runs under
        native autocast: it reaches the ops inside. What torch calls again by itself is out of reach: hand
        `torch.utils.checkpoint` the wrapped block, `checkpoint(portable(block), x)`.
    """
    if not callable(f):
        raise TypeError(
            f"autocast: expected a function, found {type(f).__name__}. Hand over the function, not its value: "
            "autocast(losses), not autocast(losses(params))."
        )

    @wraps(f)
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # the compiler never uses the cache, and cannot trace its switch
            with _OpTables():
                return f(*args, **kwargs)
        cached = torch.is_autocast_cache_enabled()
        try:
            with _OpTables():
                return f(*args, **kwargs)
        finally:
            torch.set_autocast_cache_enabled(cached)

    return run


def full_precision(tree: Tree) -> AbstractContextManager[Any]:
    """A context in which native autocast is off for the devices of a tree's tensors.

    Args:
        tree: pytree of tensors of any shapes; leaves that are no tensors are passed over.

    Returns:
        A context manager, to be entered at once and once.

    Laws:
        Inside, `x @ y` has the dtype of `x` and `y`, whatever autocast surrounds it; afterwards all is as it was.

    Example:
        >>> with torch.autocast("cpu", torch.bfloat16), full_precision(x):
        ...     (x @ x).dtype
        torch.float32
    """
    # Where it is off already, and that is nearly always, torch.autocast would only cost time.
    return _switched([device for device in _device_types(tree) if torch.is_autocast_enabled(device)], enabled=False)


_LISTED = HALF | FLOAT32 | PROMOTE | WIDE | PLAIN | {"binary_cross_entropy"}
_ELIGIBLE = frozenset((torch.float16, torch.bfloat16, torch.float32))
_OPERATOR = type(torch.ops.aten.mm)


class _OpTables(TorchFunctionMode):
    """Sees every op that Python calls, before the transforms do, and gives it the dtype of its table."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name not in _LISTED:
            _forget_weights()
            return func(*args, **kwargs)
        tensors = _tensors((*args, *kwargs.values()))
        device = _device_type(tensors)
        if device == "meta" or not torch.is_autocast_enabled(device) or _foreign(func):
            return func(*args, **kwargs)
        dtype = _dtype(name, device, tensors)
        if dtype is None or kwargs.get("out") is not None:
            return _without_autocast(device, func, args, kwargs)
        cast = {key: _cast(value, dtype) for key, value in kwargs.items()}
        result = _without_autocast(device, func, [_cast(value, dtype) for value in args], cast)
        return _cast(result, tensors[0].dtype) if name in WIDE else result


def _dtype(name: str, device: str, tensors: list[Tensor]) -> torch.dtype | None:
    """What the op computes in; `None` leaves its tensors as they are."""
    if name in HALF:
        return torch.get_autocast_dtype(device)
    if name in FLOAT32 or name in WIDE:
        return torch.float32
    if name in PROMOTE:
        dtypes = [tensor.dtype for tensor in tensors if tensor.dtype in _ELIGIBLE]
        return reduce(torch.promote_types, dtypes) if dtypes else None
    if name == "binary_cross_entropy":
        raise RuntimeError(
            "autocast: expected losses that half precision can hold, found binary_cross_entropy, whose logarithms "
            "overflow. Drop the sigmoid and call binary_cross_entropy_with_logits, or leave autocast around it: "
            "with torch.autocast(device, enabled=False)."
        )
    return None


def _without_autocast(device: str, func: Any, args: Any, kwargs: Any) -> Any:
    """Native autocast must not see what a transform makes of the op, or it would change the dtypes again."""
    if torch.compiler.is_compiling():
        with torch.autocast(device, enabled=False):
            return func(*args, **kwargs)
    # The bare switch takes 0.3 us, torch.autocast 2.5: as much as a small op itself.
    torch.set_autocast_enabled(device, False)
    try:
        return func(*args, **kwargs)
    finally:
        torch.set_autocast_enabled(device, True)


def _forget_weights() -> None:
    """At every op, since whoever enters `torch.autocast` switches the cache on again; `portable` restores it."""
    if not torch.compiler.is_compiling() and torch.is_autocast_cache_enabled():
        torch.set_autocast_cache_enabled(False)


def _switched(devices: list[str], enabled: bool, dtype: torch.dtype | None = None) -> AbstractContextManager[Any]:
    if not devices:
        return nullcontext()
    context = torch.autocast(devices[0], dtype=dtype, enabled=enabled, cache_enabled=False)
    return context if len(devices) == 1 else _nested(context, _switched(devices[1:], enabled, dtype))


@contextmanager
def _nested(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Generator[None]:
    """An ExitStack of two: the compiler traces this one."""
    with outer, inner:
        yield


def _foreign(func: Any) -> bool:
    """Other libraries may call their operators `norm` or `linear` too."""
    return isinstance(func, _OPERATOR) and getattr(torch.ops.aten, func.__name__, None) is not func


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.dtype is not dtype and value.dtype in _ELIGIBLE else value
    if isinstance(value, list):
        return [_cast(part, dtype) for part in value]
    return tuple(_cast(part, dtype) for part in value) if isinstance(value, tuple) else value


def _device_type(tensors: list[Tensor]) -> str:
    """The accelerator's, if there is one: single numbers on the CPU may join in."""
    for tensor in tensors:
        if not tensor.is_cpu:  # a fifth of what asking for the type takes
            return tensor.device.type
    return "cpu"


def _device_types(tree: Tree) -> list[str]:
    found = {leaf.device.type for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)}  # pyright: ignore[reportUnnecessaryIsInstance]
    return sorted(device for device in found if torch.amp.is_autocast_available(device))


def _devices() -> list[str]:
    """Not only those of the arguments: a function may bring tensors of its own."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return ["cpu"] if accelerator is None else ["cpu", accelerator.type]
