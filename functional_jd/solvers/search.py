"""What the searches share: small products and solves, and how a search that looks at values hides from transforms."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from functional_jd.core.torch_internals import under_transform


def opaque(name: str, search: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """A search as one operation, which may look at values, for whoever traces or transforms it.

    Args:
        name: of the operation, unique.
        search: a function of tensors `[*, ...]` and numbers that gives several tensors, of the same batch dimensions.
            It is constant to derivatives.
        fake: the same for shapes and dtypes only.

    Returns:
        A function like `search`; its attribute `op` is the operation.
    """
    op = torch.library.custom_op(name, search, mutates_args=())
    op.register_fake(fake)

    @op.register_vmap
    def _(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Any, tuple[int, ...]]:
        batched = [
            (x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)) if isinstance(x, Tensor) else x
            for x, dim in zip(inputs, in_dims, strict=True)
        ]
        found = op(*batched)
        return found, (0,) * len(found)

    def run(*inputs: Any) -> Any:
        # Hiding takes as long as a small problem itself.
        return op(*inputs) if under_transform() else search(*inputs)

    run.op = op  # pyright: ignore[reportFunctionMemberAccess]
    return run


def times(matrix: Tensor, vector: Tensor) -> Tensor:
    """Matrices `[*, m, m]` times vectors `[*, m]`."""
    return (matrix @ vector.unsqueeze(-1)).squeeze(-1)


def solve(factor: Tensor, right: Tensor) -> Tensor:
    """By a lower Cholesky factor."""
    return torch.cholesky_solve(right.unsqueeze(-1), factor).squeeze(-1)


def solve_upper(factor: Tensor, right: Tensor) -> Tensor:
    """By an upper one, in two steps while transforms are active: nobody can trace the forward derivative of one."""
    if not under_transform():
        return torch.cholesky_solve(right.unsqueeze(-1), factor, upper=True).squeeze(-1)
    half = torch.linalg.solve_triangular(factor.mT, right.unsqueeze(-1), upper=False)
    return torch.linalg.solve_triangular(factor, half, upper=True).squeeze(-1)


def on_host(x: Tensor) -> bool:
    """Whether it costs nothing to look at values."""
    return x.device.type == "cpu"
