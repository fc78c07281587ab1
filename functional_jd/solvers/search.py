"""Helpers of the iterative solvers: small products and solves, and searches as custom operators."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from functional_jd.torch_compat.torch_internals import transform_level, under_functorch, under_transform

# From so many elements of all factors on, two triangular solves take half the time of `torch.cholesky_solve`, which
# copies the factors. The bits are the same.
_LARGE = 1 << 16


def opaque(name: str, search: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """A search as one custom operator, which may branch on values: transforms and tracers do not enter it.

    Args:
        name: of the operator, unique.
        search: a function of tensors `[*, ...]` and numbers that returns one or several tensors with the same batch
            dimensions. It is constant to derivatives.
        fake: `search` for shapes and dtypes only.

    Returns:
        A function like `search`; its attribute `op` is the operator.
    """
    op = torch.library.custom_op(name, search, mutates_args=())
    op.register_fake(fake)

    @op.register_vmap
    def _(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Any, int | tuple[int, ...]]:
        batched = [
            (x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)) if isinstance(x, Tensor) else x
            for x, dim in zip(inputs, in_dims, strict=True)
        ]
        found = op(*batched)
        return found, 0 if isinstance(found, Tensor) else (0,) * len(found)

    def run(*inputs: Any) -> Any:
        # The dispatch of an operator takes as long as a small problem.
        return op(*inputs) if under_transform() else search(*inputs)

    run.op = op  # pyright: ignore[reportFunctionMemberAccess]
    return run


def may_be_differentiated(*inputs: Tensor) -> bool:
    """Whether derivatives of a function of the inputs may be asked for, now or later."""
    if under_functorch() or transform_level()[1] >= 0:
        return True
    return torch.is_grad_enabled() and any(x.requires_grad for x in inputs)


def per_problem(number: float | Tensor, vectors: Tensor) -> Tensor:
    """A number, or one for each problem, `[]` or `[*, 1]`, as a tensor `[*, 1]` for vectors `[*, m]`."""
    number = torch.as_tensor(number, dtype=vectors.dtype, device=vectors.device)
    return number.expand(*vectors.shape[:-1], 1)


def matvec(matrix: Tensor, vector: Tensor) -> Tensor:
    """Products of matrices `[*, m, m]` and vectors `[*, m]`."""
    return (matrix @ vector.unsqueeze(-1)).squeeze(-1)


def solve(factor: Tensor, right: Tensor) -> Tensor:
    """Solve for vectors `[*, m]`, given lower Cholesky factors `[*, m, m]`."""
    if factor.numel() < _LARGE:
        return torch.cholesky_solve(right.unsqueeze(-1), factor).squeeze(-1)
    half = torch.linalg.solve_triangular(factor, right.unsqueeze(-1), upper=False)
    return torch.linalg.solve_triangular(factor.mT, half, upper=True).squeeze(-1)


def solve_upper(factor: Tensor, right: Tensor) -> Tensor:
    """The same for upper factors; as two triangular solves under transforms, which cannot trace the jvp of one."""
    if not under_transform():
        return torch.cholesky_solve(right.unsqueeze(-1), factor, upper=True).squeeze(-1)
    half = torch.linalg.solve_triangular(factor.mT, right.unsqueeze(-1), upper=False)
    return torch.linalg.solve_triangular(factor, half, upper=True).squeeze(-1)


def on_host(x: Tensor) -> bool:
    """Whether reading values needs no synchronization."""
    return x.device.type == "cpu"
