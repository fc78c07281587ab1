"""Ops that torch gets wrong under vmap, without an error, or that it refuses there, in a form that is right."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

from functional_jd.torch_compat.autograd_graph import graph_nodes
from functional_jd.torch_compat.batch_statistics import BATCH_NORMS, refuse_statistics_of_one
from functional_jd.torch_compat.torch_internals import traceable, under_transform

_WITHOUT_PRODUCTS: Any = "donot_use_mm_for_euclid_dist"
# Up to so many points torch takes no matrix products by itself.
_FEW_POINTS = 25


class _Distances(Function):
    """`torch.cdist` without matrix products, of tensors with the same batch dimensions, for transforms.

    The rule by which torch batches `_cdist_backward` goes by the points, and gives wrong numbers where only the
    gradients are batched. Here the points are batched where they are.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, y: Tensor, p: float) -> Tensor:
        return torch.cdist(x, y, p, _WITHOUT_PRODUCTS)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:  # noqa: ARG004
        *points, ctx.p = inputs
        ctx.save_for_backward(*points)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return *_of_points(gradients[0], ctx.saved_tensors, ctx.p), None


def _of_points(gradient: Tensor, points: Sequence[Tensor], p: float) -> tuple[Tensor, Tensor]:
    """The gradients of the points, from that of their distances."""
    none = torch.zeros_like(gradient).sum()  # batched as the gradient is, and 0 where that is not finite
    distances = lambda x, y: torch.cdist(x, y, p, _WITHOUT_PRODUCTS)
    return torch.func.vjp(distances, *[x + none for x in points])[1](gradient)


@contextmanager
def rows_repaired(outputs: list[Tensor]) -> Generator[None]:
    """A context in which the rows of these outputs may be differentiated together, by `torch.vmap`, though plain
    `torch.cdist` made them.
    """
    nodes = [] if under_transform() else [node for node in graph_nodes(outputs) if node.name() == "CdistBackward0"]
    hooks = [node.register_hook(partial(_repaired_gradients, node)) for node in nodes]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _repaired_gradients(node: Any, found: Any, gradients: Any) -> Any:
    """In the place of what torch found."""
    (gradient,), x, y = gradients, node._saved_x1, node._saved_x2
    if gradient is None:
        return found
    whole = [points.expand(*gradient.shape[:-2], *points.shape[-2:]) for points in (x, y)]
    right = _of_points(gradient, whole, node._saved_p)
    pairs = zip(found, right, (x, y), strict=True)
    return tuple(None if wrong is None else g.sum_to_size(points.shape) for wrong, g, points in pairs)


def cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: str = "use_mm_for_euclid_dist_if_necessary") -> Tensor:
    """`torch.cdist`, whose rows may be differentiated together; bit for bit where nothing is compiled."""
    if min(x1.ndim, x2.ndim) < 2 or (p == 2 and _takes_products(x1, x2, compute_mode)):
        return torch.cdist(x1, x2, p, compute_mode)
    if torch.compiler.is_compiling():  # to rounding: it cannot trace the function below, and fuses the differences
        return torch.linalg.vector_norm(x1.unsqueeze(-2) - x2.unsqueeze(-3), p, -1)
    batch = torch.broadcast_shapes(x1.shape[:-2], x2.shape[:-2])
    x, y = (points.expand(*batch, *points.shape[-2:]) for points in (x1, x2))
    return _Distances.apply(x, y, float(p))


def _takes_products(x1: Tensor, x2: Tensor, compute_mode: str) -> bool:
    if compute_mode == "use_mm_for_euclid_dist_if_necessary":
        return max(x1.shape[-2], x2.shape[-2]) > _FEW_POINTS
    return compute_mode != "donot_use_mm_for_euclid_dist"


def select_scatter(input: Tensor, src: Tensor, dim: int, index: int) -> Tensor:
    """`torch.select_scatter`. torch's own, of examples under vmap, takes the gradient of `src` from another place when
    the examples are differentiated together.
    """
    if not -input.ndim <= dim < input.ndim or not -input.shape[dim] <= index < input.shape[dim]:
        return torch.select_scatter(input, src, dim, index)  # which says what is wrong
    at = index % input.shape[dim]
    return torch.slice_scatter(input, src.unsqueeze(dim % input.ndim), dim, at, at + 1)


def linear_cross_entropy(*args: Any, options: Any = None, **kwargs: Any) -> Tensor:
    """The one of `torch.nn.functional`, which in chunks has gradients under vmap that are wrong without an error."""
    if options is not None and under_transform():
        raise RuntimeError("linear_cross_entropy with options has no derivatives under a transform. Pass options=None.")
    return nn.functional.linear_cross_entropy(*args, options=options, **kwargs)


def one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    """The one of `torch.nn.functional`, which reads the smallest and the largest class, as no vmap can."""
    if num_classes >= 0 and under_transform():
        one = tensor.new_ones(()).expand(*tensor.shape, 1)
        return tensor.new_zeros(*tensor.shape, num_classes).scatter(-1, tensor.unsqueeze(-1), one)
    try:
        return nn.functional.one_hot(tensor, num_classes)
    except RuntimeError as error:
        if "vmap" not in str(error):
            raise
        raise RuntimeError("one_hot counts the classes of each example. Pass num_classes.") from error


REPAIRED: dict[Any, Any] = {
    torch.cdist: cdist,
    torch.select_scatter: select_scatter,
    Tensor.select_scatter: select_scatter,
    nn.functional.one_hot: one_hot,
}
if hasattr(nn.functional, "linear_cross_entropy"):  # from torch 2.13 on
    REPAIRED[nn.functional.linear_cross_entropy] = linear_cross_entropy
"""By op, what computes the same, bit for bit, but for distances in compiled functions; or raises what sends an engine
another way.
"""


class RepairedOps(TorchFunctionMode):
    """Calls the repaired forms, which torch.compile traces.

    Args:
        one: in whose name batch normalization of one example raises; None lets it pass.
    """

    def __init__(self, one: str | None = None):
        super().__init__()
        self.one = one

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func, kwargs = traceable(func), kwargs or {}
        if self.one is not None and func in BATCH_NORMS:
            refuse_statistics_of_one(args, kwargs, self.one)
        return REPAIRED.get(func, func)(*args, **kwargs)
