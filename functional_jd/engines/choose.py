"""Choose between ways that all are possible: from shapes and dtypes to a name, with the measurement behind it.

Values never decide, so that eager and compiled steps choose alike. Measured on x86-64 CPUs, one thread, float32, unless
said otherwise. The choice between factors and rows of a layer is in `gramian/products.py`.
"""

from collections.abc import Sequence
from itertools import tee
from math import ceil, inf
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from functional_jd.core.tree import tree_leaves
from functional_jd.torch_compat.autograd_graph import graph_nodes, largest_gradient, words
from functional_jd.torch_compat.recomputation import in_checkpoint
from functional_jd.torch_compat.torch_internals import under_transform

if TYPE_CHECKING:
    from functional_jd.aggregation.views import View
    from functional_jd.engines.plan import Plan


class EngineChoice(NamedTuple):
    """An engine by name, and why.

    Attributes:
        engine: `"jacobian"`, `"gramian"` or `"weighted"`.
        reason: one sentence.
    """

    engine: str
    reason: str


# Engine

# Time of a step with the Gramian engine, by that with the Jacobian engine, eager, on a CPU. P: positions of a linear
# layer (examples times the length of a sequence); n: parameters with rows.
# - m = 2, 8 tasks on an MLP. P = 16: 0.85, 0.61 at n = 2^19. P = 64: 1.14, 1.04 at 2^17; 0.95, 0.67 at 2^19; 0.78, 0.37
#   at 2^21. P = 256: 1.17, 1.20 at 2^19; 1.11, 0.88 at 2^21.
# - m = 4 tasks on a transformer, P = 64: 1.04, 0.86, 0.67 at n = 2^18, 2^20, 2^22. m = 2 on convolutions: 0.94 at 2^20.
# - m examples. MLP, P = 1: 0.95 at m n = 2^14, 0.26 at 2^23. Transformer, P = 16: 1.06 at 2^18, 0.88 at 2^20.
_RECORDED_FROM = 1 << 17
# So many parameters for each position of all tasks; so many elements of rows for each position of one example. On an
# H100, tasks on GPT-2 small with 2^12 positions and n = 2^26.9: 1.5.
_BY_TASK, _BY_TASK_ON_DEVICE, _BY_EXAMPLE = 6_000, 40_000, 1 << 16
# Rows of so many elements, 32 MB, make the difference in memory larger than that in time.
MANY_ELEMENTS = 1 << 23
# A network of so many square layers keeps less for its rows than for their factors if n is at most so many times P^2.
_LAYERS = 16


def choose_engine(
    view: "View", m: int, leaves: Sequence[Tensor], batch: tuple[Any, ...], kind: Any, *, sharded: bool = False
) -> EngineChoice:
    """The engine of a step, from the view of the rule, the number m of objectives or an estimate, and the parameters
    that have rows.

    The first tensor of the batch tells at how many positions a linear layer is applied: as many as it has elements,
    except for the last dimension of features. An example has its share of them.
    """
    if view.products == "none" and view.passes < max(2, m):
        passes = "one backward pass" if view.passes == 1 else f"{view.passes} backward passes"
        return EngineChoice("weighted", f"the rule needs no gradients: {passes}")
    if not view.inner_products_suffice:
        return EngineChoice("jacobian", f"the rule needs {view.needs}")
    if view.groups is not None and kind.several_sets:
        return EngineChoice("jacobian", "groups of parameters under several sets of examples have their rows")
    if sharded:
        return EngineChoice("jacobian", "sharded rows have the sum of the shards' Gramians: m^2 numbers travel")
    n, narrowest = 0, 8
    for leaf in leaves:
        n, narrowest = n + leaf.numel(), min(narrowest, leaf.dtype.itemsize)
    if narrowest < 4:
        # Rows in half precision may overflow where their factors do not: the engines would not skip the same steps.
        return EngineChoice("jacobian", "parameters in half precision have rows in half precision")
    positions, examples = _positions(batch), kind.rows_are_examples
    own = max(1, positions // m) if examples else positions
    if m * n >= MANY_ELEMENTS and n > _LAYERS * own**2:
        return EngineChoice("gramian", "m n is at least 2^23: the rows take much memory")
    by_task = _BY_TASK if not leaves or leaves[0].device.type in ("cpu", "meta") else _BY_TASK_ON_DEVICE
    few = m * n < _BY_EXAMPLE * own if examples else n < max(_RECORDED_FROM, by_task * positions)
    if few:
        return EngineChoice("jacobian", f"parameters are few {_BESIDE}: forming all gradients costs less than {_INNER}")
    return EngineChoice("gramian", f"parameters are many {_BESIDE}: {_INNER} costs less than forming all gradients")


def _positions(batch: tuple[Any, ...]) -> int:
    for argument in batch:
        for x in [argument] if isinstance(argument, Tensor) else tree_leaves(argument):
            if isinstance(x, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
                return x.shape[:-1].numel() if x.ndim > 1 and x.is_floating_point() and not x.is_nested else x.numel()
    return 1


_BESIDE = "beside the batch (examples times the length of a sequence)"
_INNER = "computing their inner products layer by layer"


# Rows


class _Room(NamedTuple):
    """The amounts that a kind of device takes at once."""

    few: int  # up to so many rows, a loop is never slower than vmap
    between: int  # `words` of the largest gradient between the layers, over all rows of a group
    written: int  # `words` of a group of rows, all parameters together: it is in memory as well as all rows
    smallest: int  # for fewer rows, vmap costs more than it saves
    convolution: int  # how often a gradient of a graph with convolutions counts: vmap slows their kernels down


_CPU = _Room(few=3, between=1 << 19, written=1 << 62, smallest=8, convolution=1)
# On an H100, upgrad, time of a step with vmap by that with a loop. Convolutions, 16 rows, and attention, 8 rows: 0.28.
# GPT-2 small, 16 x 256 tokens, 4 tasks: 1.64. ResNet-50, 64 images of 224^2, 3 tasks: 3.8, and 17 GB for 3.4 GB.
_DEVICE = _Room(few=1, between=1 << 23, written=1 << 27, smallest=4, convolution=4)
# Below so many elements, one torch.stack is faster than writing row by row: on an accelerator it saves m - 1 launches.
_STACKED, _STACKED_ELSEWHERE = 1 << 14, 1 << 22


def choose_rows(point: Any, m: int, plan: "Plan") -> tuple[str, int | None]:
    """How m rows of a `Vjp` are differentiated: `"loop"`, or `"auto"` (vmap, else a loop), and how many at once.

    vmap saves the fixed cost of every operation, and takes cache and memory. Rows with large activations go one by one,
    others in groups of about the same size. Under a transform all go together. Free memory would change the bits.
    """
    mode, chunk_size = plan.mode, plan.chunk_size
    if mode != "auto":
        return mode, chunk_size
    room = _CPU if not point.sizes and (not point.inputs or point.inputs[0].is_cpu) else _DEVICE
    if plan.on_shards:
        # Together, the gathered leaves and the reduced rows travel once for all rows. The sizes of shards differ from
        # rank to rank, which must all do the same: they have no say.
        return "loop" if m <= room.few else "auto", chunk_size
    hidden = not point.inputs and under_transform()
    if m > 1 and hidden and not point.sizes:
        return "auto", chunk_size
    # In a checkpoint, a backward pass runs all of it again, which must not be under vmap.
    if m <= room.few or (not hidden and in_checkpoint()):
        return "loop", chunk_size
    at_once = _rows_at_once(point, room)
    if at_once < room.smallest:
        return "loop", chunk_size
    if at_once < m:
        size = ceil(m / ceil(m / at_once))
        chunk_size = size if chunk_size is None else min(size, chunk_size)
    return "auto", chunk_size


def _rows_at_once(point: Any, room: _Room) -> float:
    """How many rows go at once. The graph of plain autograd is walked as far as it can matter, in every step."""
    if not point.inputs and not point.sizes:
        return inf
    if point.sizes:
        between, inputs, convolutions = point.sizes
    else:
        inputs = [words(x.shape, x.dtype) for x in point.inputs]
        most = max(room.written // max(1, sum(inputs)), room.between // max(1, *inputs))
        if most < room.smallest:
            return most
        enough = max(room.between // room.smallest, *inputs)
        nodes, again = tee(graph_nodes(point.outputs))
        between = largest_gradient(nodes, point.inputs, enough)
        convolutions = max(inputs) < between <= enough and any(x.name() == "ConvolutionBackward0" for x in again)
    if between <= max(inputs):
        return room.written // max(1, sum(inputs))
    return room.between // (between * room.convolution if convolutions else between)


def choose_heads(point: Any, own: Sequence[Tensor], m: int, plan: "Plan") -> str:
    """How the rows of `multitask` heads, a `Vjp`, are differentiated.

    One scalar per task: the loop walks each head once, where vmap walks every head for every row. Compiled, `"apart"`
    is one pass to all heads, and one from each loss to the features: 0.78 of vmap's time for 8 tasks, 0.5 for 32. A
    scale for each objective needs to know which row of the heads overflowed; half precision needs a sum in float32.
    """
    if plan.mode == "auto" and len(point.outputs) > 1:
        if point.inputs or not under_transform():
            return "loop"
        summable = (plan.scale is None or not plan.scale.ndim) and all(x.dtype.itemsize >= 4 for x in own)
        if torch.compiler.is_compiling() and summable and len(point.outputs) == m:
            return "apart"
    return choose_rows(point, m, plan)[0]


def stack_at_once(gradients: Sequence[Tensor | None], m: int) -> bool:
    """Whether the rows of each input are stacked by one call, or written one by one into preallocated memory.

    Memory holds all rows and those of one input, or all rows and one row of all inputs: the smaller is better. On an
    accelerator, stacking takes a launch for each input, writing one for each row.
    """
    total, largest, reached, on_host = 0, 0, 0, True
    for g in gradients:
        if g is not None:
            total, largest, reached, on_host = total + g.numel(), max(largest, g.numel()), reached + 1, g.is_cpu
    small = total < (_STACKED if on_host else _STACKED_ELSEWHERE) or m * largest <= total
    return (small and (on_host or reached <= m)) or under_transform()
