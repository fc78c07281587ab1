"""Helpers of the iterative solvers: small products and solves, and searches as custom operators."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from functional_jd.core.host import is_capturing, run_on_host
from functional_jd.torch_compat.torch_internals import (
    differentiates,
    dispatch_modes,
    innermost,
    transform_level,
    under_functorch,
    under_transform,
)

Solver: TypeAlias = Literal["auto", "host", "device"]
"""Where a search runs: on the host, until it converges, or where its inputs stand, in a fixed number of steps."""


def opaque(name: str, search: Callable[..., Any], fake: Callable[..., Any], inputs: int) -> Callable[..., Any]:
    """A search as custom operators, which may branch on values: transforms and tracers do not enter them.

    `search` takes so many tensors `[*, ...]` and a flag `fixed`: unless that is set, it may look at values. It returns
    tensors with the same batch dimensions, constant to derivatives; `fake` returns empty ones like these.

    Returns:
        A function `run(*tensors, solver)`; its attribute `op` is the operator that searches on the host.
    """
    example = fake(*[torch.empty(1, 1, device="meta")] * inputs)
    results = "Tensor" if isinstance(example, Tensor) else f"({', '.join(['Tensor'] * len(example))})"
    schema = f"({', '.join(f'Tensor x{k}' for k in range(inputs))}) -> {results}"

    def on_host(*inputs: Tensor) -> Any:
        if inputs[0].is_cpu:
            return search(*inputs, False)
        if is_capturing(inputs[0]):
            return search(*inputs, True)
        return run_on_host(partial(search, fixed=False), *inputs, apart=True)

    # What waits for the device cannot be part of a CUDA graph: the compiler cuts its graphs there.
    host_op = _operator(name, on_host, fake, schema, (torch.Tag.cudagraph_unsafe,))
    device_op = _operator(f"{name}_on_device", lambda *inputs: search(*inputs, True), fake, schema, ())

    def run(*inputs: Tensor, solver: Solver = "host") -> Any:
        # The dispatch of an operator takes as long as a small problem, but what records or fakes it must not enter.
        if under_transform() or dispatch_modes() or type(inputs[0]) is not Tensor or inputs[0].is_meta:
            return (host_op if solver == "host" else device_op)(*inputs)
        if solver == "device":
            return search(*inputs, True)
        return search(*inputs, False) if inputs[0].is_cpu else on_host(*inputs)

    run.op = host_op  # pyright: ignore[reportFunctionMemberAccess]
    return run


def empty(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A contiguous tensor of the shape of another."""
    return like.new_empty(like.shape, dtype=dtype)


def _operator(
    name: str, search: Callable[..., Any], fake: Callable[..., Any], schema: str, tags: tuple[torch.Tag, ...]
) -> Any:
    op = torch.library.custom_op(name, search, mutates_args=(), schema=schema, tags=tags)
    op.register_fake(fake)

    @op.register_vmap
    def _(info: Any, in_dims: tuple[int | None, ...], *inputs: Tensor) -> tuple[Any, int | tuple[int, ...]]:
        batched = [
            x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
            for x, dim in zip(inputs, in_dims, strict=True)
        ]
        found = op(*batched)
        return found, 0 if isinstance(found, Tensor) else (0,) * len(found)

    return op


def may_be_differentiated(*inputs: Tensor) -> bool:
    """Whether derivatives of a function of the inputs may be asked for, now or later."""
    inside = under_functorch()
    # torch.compile traces no list of transforms.
    if (inside and (torch.compiler.is_compiling() or differentiates())) or transform_level()[1] >= 0:
        return True
    if not torch.is_grad_enabled():
        return False
    return any((innermost(x) if inside else x).requires_grad for x in inputs)


def per_problem(number: float | Tensor, vectors: Tensor) -> Tensor:
    """A number, or one for each problem, `[]` or `[*, 1]`, as a tensor `[*, 1]` for vectors `[*, m]`."""
    shape = (*vectors.shape[:-1], 1)
    if not isinstance(number, Tensor):
        return vectors.new_full(shape, number)
    return number.to(vectors).expand(shape)


def matvec(matrix: Tensor, vector: Tensor) -> Tensor:
    """Products of matrices `[*, m, m]` and vectors `[*, m]`."""
    return (matrix @ vector.unsqueeze(-1)).squeeze(-1)


def solve(factor: Tensor, right: Tensor) -> Tensor:
    """Solve for vectors `[*, m]`, given lower Cholesky factors; `torch.cholesky_solve` is in no CUDA graph."""
    half = torch.linalg.solve_triangular(factor, right.unsqueeze(-1), upper=False)
    return torch.linalg.solve_triangular(factor.mT, half, upper=True).squeeze(-1)
