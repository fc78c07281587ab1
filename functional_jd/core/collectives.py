"""Functional collectives with derivatives and vmap rules."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from functional_jd.torch_compat.private_names import private

if torch.distributed.is_available():
    # DTensor imports it late, and defaults of its functions then keep a group for ever: see `distributed.leave`.
    import torch.distributed.nn.functional  # pyright: ignore[reportUnusedImport]

_OPERATORS: Any = private(
    "ops._c10d_functional", "replicas",
    "all_reduce", "broadcast", "reduce_scatter_tensor", "all_gather_into_tensor", "wait_tensor",
)  # fmt: skip
"""Collectives as operators, which torch.compile and make_fx trace."""


def collective(kind: str, value: Tensor, group: str, size: int) -> Tensor:
    """Apply a collective to the tensors that all ranks of a group pass at the same time.

    Args:
        kind: `"sum"`, `"mean"`, `"least"`, `"most"` and `"first"` keep the shape; `"scatter"` adds up `[R, ...]` and
            returns this rank's part `[...]`, `"gather"` is the reverse. `"same"` and `"share"` send nothing: they are
            what the derivatives of `"sum"` and `"mean"` are adjoint to, the value itself and a share 1/R of it.
        value: the same shape and dtype on all ranks.
        group: the name of the process group.
        size: its number of ranks R.
    """
    result: Any = _Collective.apply(value, kind, group, size)
    return result


_ADJOINT = {"sum": "sum", "scatter": "gather", "gather": "scatter", "same": "sum", "mean": "share", "share": "mean"}

_WITHOUT = {
    "first": "what all ranks take over from the first (replicate, train_state with replicated())",
    "least": "a smallest value or a flag of all ranks (agree)",
    "most": "a largest value of all ranks",
}
"""Those whose derivatives in reverse mode are not told."""

_REDUCTIONS = {"sum": "sum", "mean": "sum", "least": "min", "most": "max"}

# NCCL takes no others of 16 bits than floating ones, and none of 32 bits without a sign.
_SENT_AS = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}

_LARGE = 1 << 20
"""Rows of more elements are scattered one by one: together they would be copied, as ranks come before rows."""


class _Collective(Function):
    """A functional collective with derivatives and a vmap rule.

    The derivative of `"mean"` is that of a value which all ranks have in common and which counts once.
    """

    @staticmethod
    def forward(value: Tensor, kind: str, name: str, replicas: int) -> Tensor:
        if kind == "same":
            return value.view_as(value)
        if kind == "share":
            return value / replicas
        dtype, value = value.dtype, value.to(_SENT_AS.get(value.dtype, value.dtype)).contiguous()
        ops, wait = _OPERATORS, _OPERATORS.wait_tensor
        try:
            if kind in _REDUCTIONS:
                result = ops.all_reduce(value / replicas if kind == "mean" else value, _REDUCTIONS[kind], name)
            elif kind == "first":
                result = ops.broadcast(value, 0, name)
            elif kind == "scatter":
                result = ops.reduce_scatter_tensor(value, "sum", replicas, name).squeeze(0)
            else:
                result = ops.all_gather_into_tensor(value.unsqueeze(0), replicas, name)
            return wait(result).to(dtype)
        except RuntimeError as error:
            found = str(error).partition("\n")[0]
            raise RuntimeError(
                f"distributed: expected an answer of all {replicas} replicas, found {found!r}. "
                "A replica stopped, fell out of step or hangs: see the first error of all processes, and restart from "
                "the last checkpoint."
            ) from error

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004
        _, *ctx.collective_args = inputs

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        kind, *group = ctx.collective_args
        if kind not in _ADJOINT:
            raise RuntimeError(
                f"distributed: expected no derivative in reverse mode by {_WITHOUT[kind]}, found one. Start from the "
                "state that train_state returned, take forward mode, or detach what all ranks take over."
            )
        return _Collective.apply(cotangents[0], _ADJOINT[kind], *group), None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return _Collective.apply(tangents[0], *ctx.collective_args)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        value, *collective_args = args
        if args[1] == "scatter" and value.numel() > _LARGE * info.batch_size:
            rows = [_Collective.apply(row, *collective_args) for row in value.unbind(in_dims[0])]
            return torch.stack(rows), 0
        return _Collective.apply(value.movedim(in_dims[0], -1), *collective_args), -1
