"""Recurrent layers as plain ops, step by step: torch has no rules to batch its fused ones, which vmap refuses."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from functional_jd.torch_compat.vmap_levels import vmaps_inside

State = list[Tensor]
"""What a layer hands to its next step: `[*, h]` each, the output first."""
Weights = Sequence[Any]
"""Tensors, or None for those that a layer does not have."""
Cell = Callable[[Tensor, State, Weights], State]
"""`cell(gates, state, weights)`: `gates` is what the input contributes; weight, bias and projection of the state."""


def batched_form(func: Any, args: Sequence[Any]) -> Callable[..., Any] | None:
    """The form of `torch.lstm`, `torch.gru`, `torch.rnn_tanh` or `torch.rnn_relu` that vmap takes, with the same
    arguments, where one is needed; None for everything else.

    Packed sequences, and dropout between layers, are left to torch, and so is a call outside of vmap.
    """
    if torch.compiler.is_compiling() or func not in _CELLS or len(args) != 9 or not isinstance(args[3], bool):
        return None
    layers, dropout, train = args[4:7]
    if (dropout and train and layers > 1) or not vmaps_inside(-1):
        return None
    return partial(_unrolled, _CELLS[func])


def _unrolled(
    cell: Cell,
    input: Tensor,
    start: Any,
    weights: Sequence[Tensor],
    biased: bool,
    layers: int,
    dropout: float,  # noqa: ARG001
    train: bool,  # noqa: ARG001
    both_ways: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """The outputs of the last layer, and every state at its end, stacked over layers and directions."""
    several = isinstance(start, list | tuple)
    given = list(start) if several else [start]
    ways = 2 if both_ways else 1
    each = len(weights) // (layers * ways)
    sequence, ends = input.movedim(1, 0) if batch_first else input, []
    for layer in range(layers):
        outputs: list[Tensor] = []
        for way in range(ways):
            index = layer * ways + way
            own = _sorted(weights[index * each : (index + 1) * each], biased)
            output, end = _layer(cell, sequence, [state[index] for state in given], own, backwards=way == 1)
            outputs.append(output)
            ends.append(end)
        sequence = torch.cat(outputs, -1)
    last = [torch.stack(parts) for parts in zip(*ends, strict=True)]
    return sequence.movedim(0, 1) if batch_first else sequence, *last


def _sorted(weights: Sequence[Tensor], biased: bool) -> Weights:
    """Weights of input and state, their biases, and the projection of the state, if there are any."""
    biases: Weights = [*weights[2:4]] if biased else [None, None]
    projection = [*weights[4 if biased else 2 :]]
    return [*weights[:2], *biases, *(projection or [None])]


def _layer(cell: Cell, sequence: Tensor, state: State, weights: Weights, *, backwards: bool) -> tuple[Tensor, State]:
    from_input, from_state, bias, state_bias, projection = weights
    gates = linear(sequence, from_input, bias)
    # Zeros that vary as the input does: a layer of the first state is then recorded as those of the others are.
    state = [x + gates.new_zeros(x.shape) for x in state]
    outputs: list[Tensor] = []
    for each in reversed(gates.unbind()) if backwards else gates.unbind():
        state = cell(each, state, (from_state, state_bias, projection))
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if backwards else outputs), state


def _lstm(gates: Tensor, state: State, weights: Weights) -> State:
    h, c = state
    weight, bias, projection = weights
    i, f, g, o = (gates + linear(h, weight, bias)).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    h = o.sigmoid() * c.tanh()
    return [h if projection is None else linear(h, projection), c]


def _gru(gates: Tensor, state: State, weights: Weights) -> State:
    (h,) = state
    weight, bias, _ = weights
    (r, z, n), (own_r, own_z, own_n) = (x.chunk(3, -1) for x in (gates, linear(h, weight, bias)))
    n = (n + (r + own_r).sigmoid() * own_n).tanh()
    return [n + (z + own_z).sigmoid() * (h - n)]


def _plain(activation: Callable[[Tensor], Tensor], gates: Tensor, state: State, weights: Weights) -> State:
    weight, bias, _ = weights
    return [activation(gates + linear(state[0], weight, bias))]


_CELLS: dict[Any, Cell] = {
    torch.lstm: _lstm,
    torch.gru: _gru,
    torch.rnn_tanh: partial(_plain, torch.tanh),
    torch.rnn_relu: partial(_plain, torch.relu),
}
RECURRENT = frozenset(_CELLS)
