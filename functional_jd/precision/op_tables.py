"""The op tables of autocast: which op computes in which dtype, as CUDA's autocast has it."""

from functools import reduce
from typing import Any

import torch
from torch import Tensor


def op_names(words: str) -> frozenset[str]:
    return frozenset(words.split())


HALF = op_names("""
    matmul __matmul__ __rmatmul__ linalg_matmul mm mv bmm addmm addmv addr addbmm baddbmm chain_matmul linalg_multi_dot
    linalg_vecdot einsum linear prelu scaled_dot_product_attention _scaled_dot_product_flash_attention
    conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution _convolution
    multi_head_attention_forward
    lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    _thnn_fused_lstm_cell _thnn_fused_gru_cell
""")
"""Ops computed in the autocast dtype."""

FLOAT32 = op_names("""
    pow __pow__ __rpow__ square reciprocal rsqrt __rdiv__ __rtruediv__ exp expm1 log log10 log1p log2 logsumexp
    acos arccos asin arcsin cosh sinh tan erfinv softplus
    softmax softmin log_softmax gumbel_softmax sum trace prod cumsum cumprod
    special_expm1 special_log1p special_erfinv special_logsumexp special_softmax special_log_softmax
    norm frobenius_norm nuclear_norm linalg_norm linalg_vector_norm linalg_matrix_norm renorm normalize
    dist cdist pdist pairwise_distance cosine_similarity
    layer_norm native_layer_norm group_norm native_group_norm local_response_norm lp_pool1d lp_pool2d lp_pool3d
    cross_entropy cross_entropy_loss nll_loss nll_loss2d nll_loss_nd kl_div l1_loss smooth_l1_loss huber_loss mse_loss
    binary_cross_entropy_with_logits poisson_nll_loss gaussian_nll_loss cosine_embedding_loss hinge_embedding_loss
    margin_ranking_loss soft_margin_loss multi_margin_loss multilabel_margin_loss multilabel_soft_margin_loss
    triplet_margin_loss triplet_margin_with_distance_loss ctc_loss
    interpolate upsample upsample_nearest upsample_bilinear
    upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d
    upsample_bicubic2d _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
    _upsample_bilinear2d_aa _upsample_bicubic2d_aa
    quantile nanquantile stft istft polar complex view_as_complex
    cholesky cholesky_inverse cholesky_solve det inverse logdet slogdet lu_solve pinverse qr svd triangular_solve
    linalg_cholesky linalg_cholesky_ex linalg_cond linalg_det linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh
    linalg_inv linalg_inv_ex linalg_ldl_factor linalg_ldl_solve linalg_lstsq linalg_lu linalg_lu_factor linalg_lu_solve
    linalg_matrix_exp matrix_exp linalg_matrix_rank linalg_matrix_sqrth linalg_pinv linalg_polar linalg_qr
    linalg_slogdet linalg_solve linalg_solve_ex linalg_solve_triangular linalg_svd linalg_svdvals linalg_tensorinv
    linalg_tensorsolve linalg_householder_product
""").union(
    {f"fft_{name}" for name in vars(torch.fft) if name.endswith(("fft", "fft2", "fftn"))},
    ["rms_norm"] * (torch.__version__ >= "2.12"),
)
"""Ops computed in float32: they overflow or cancel in half precision, or (the last lines) have no half kernels."""

PROMOTE = op_names("""
    addcdiv addcmul atan2 arctan2 bilinear cat concat concatenate stack cross linalg_cross dot vdot inner tensordot
    equal where scatter_add index_put index_copy grid_sample grid_sampler
""")
"""Ops that need one dtype: computed in the widest among their tensors."""

WIDE = op_names("""
    batch_norm instance_norm native_batch_norm
    avg_pool3d max_pool3d max_pool3d_with_indices adaptive_avg_pool3d adaptive_max_pool3d
    adaptive_max_pool3d_with_indices max_unpool2d max_unpool3d
""")
"""Ops computed in float32 and returned in the input's dtype: as CUDA's kernels do inside; the CPU's lack half ones."""

PLAIN = op_names("grad backward pad")
"""Ops that run as if autocast were off: backward passes, which follow their forward pass; one of the CPU's list."""

LISTED = HALF | FLOAT32 | PROMOTE | WIDE | PLAIN | {"binary_cross_entropy"}

ELIGIBLE = frozenset((torch.float16, torch.bfloat16, torch.float32))

_OPERATOR = type(torch.ops.aten.mm)


def compute_dtype(name: str, device: str, tensors: list[Tensor]) -> torch.dtype | None:
    """The dtype in which the op computes; `None` keeps those of its tensors."""
    if name in HALF:
        return torch.get_autocast_dtype(device)
    if name in FLOAT32 or name in WIDE:
        return torch.float32
    if name in PROMOTE:
        dtypes = [tensor.dtype for tensor in tensors if tensor.dtype in ELIGIBLE]
        return reduce(torch.promote_types, dtypes) if dtypes else None
    if name == "binary_cross_entropy":
        raise RuntimeError(
            "autocast: expected losses that half precision can hold, found binary_cross_entropy, whose logarithms "
            "overflow. Drop the sigmoid and call binary_cross_entropy_with_logits, or leave autocast around it: "
            "with torch.autocast(device, enabled=False)."
        )
    return None


def is_foreign_operator(func: Any) -> bool:
    """Whether an op has the name of a listed op, but is another: operators of other libraries may be called `norm` or
    `linear` too, and `torch.foreach.pow`, which no autocast list names, takes lists.
    """
    if isinstance(func, _OPERATOR):
        return getattr(torch.ops.aten, func.__name__, None) is not func
    return getattr(func, "__module__", None) == "torch.foreach"
