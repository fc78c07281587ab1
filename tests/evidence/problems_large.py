"""The larger problems, of 1e5 parameters: a convolutional net, a transformer on characters, a graph net."""

from math import pi

import torch
from held_out_data import characters, graphs
from problems_development import overlapping
from problems_held_out import PROPERTIES
from study_problem import Params, Problem, judged, splits, standardized
from torch import Tensor
from torch.nn.functional import conv2d, layer_norm, max_pool2d, relu


def _matrix(generator: torch.Generator, *shape: int) -> Tensor:
    """Weights of variance 2 over the number of inputs, which are all axes but the first."""
    inputs = shape[-1] if len(shape) == 2 else shape[1] * shape[2] * shape[3]
    return torch.randn(*shape, generator=generator) * (2 / inputs) ** 0.5


def _named(widths: dict[str, tuple[int, ...]], generator: torch.Generator) -> Params:
    """A weight for each name, and a bias of zeros."""
    weights = {name: _matrix(generator, *shape) for name, shape in widths.items()}
    return weights | {f"{name}_bias": torch.zeros(shape[0]) for name, shape in widths.items()}


def _linear(params: Params, name: str, x: Tensor) -> Tensor:
    return x @ params[name].T + params[f"{name}_bias"]


def convolutions() -> Problem:
    """Two digits overlap in an image of 8 x 12: name both and give the image back through 64 numbers."""
    shapes = {"first": (32, 1, 3, 3), "second": (64, 32, 3, 3), "narrow": (64, 1536), "last": (116, 64)}

    def values(params: Params, x: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
        h = relu(conv2d(x, params["first"], params["first_bias"], padding=1))
        h = relu(conv2d(h, params["second"], params["second_bias"], padding=1))
        out = _linear(params, "last", relu(_linear(params, "narrow", max_pool2d(h, 2).flatten(1))))
        return out.split([10, 10, 96], dim=1)

    return Problem(
        overlapping(4000, lambda x, left, right: (x[:, None], left, right)),
        lambda g: _named(shapes, g),
        *judged(values, lambda x, left, right: (left, right, x.flatten(1)), (10, 10, 0)),
        ("accuracy left", "accuracy right", "R² of the image"),
        m=3,
        batch=32,
        draws=3,
    )


WIDTH, LAYERS, HEADS, LETTERS, KINDS = 64, 2, 4, 96, 4


def _attention(params: Params, layer: int, h: Tensor) -> Tensor:
    """Causal attention of four heads, and two layers after it, each added to what came in."""
    n, length, _ = h.shape
    parts = _linear(params, f"qkv{layer}", layer_norm(h, (WIDTH,))).reshape(n, length, 3, HEADS, WIDTH // HEADS)
    q, k, v = parts.permute(2, 0, 3, 1, 4)
    # By hand: under vmap, torch computes its fused attention one by one.
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    near = torch.softmax((q @ k.mT / (WIDTH // HEADS) ** 0.5).masked_fill(later, float("-inf")), dim=-1)
    seen = (near @ v).transpose(1, 2).reshape(n, length, WIDTH)
    h = h + _linear(params, f"out{layer}", seen)
    return h + _linear(params, f"down{layer}", relu(_linear(params, f"up{layer}", layer_norm(h, (WIDTH,)))))


def transformer() -> Problem:
    """Texts of Python's own manual: the next character, the kind of the one after it (letter, digit, space, other;
    cross entropies), and how many characters the word goes on (squared error).
    """
    shapes: dict[str, tuple[int, ...]] = {"letters": (WIDTH, LETTERS), "last": (LETTERS + KINDS + 1, WIDTH)}
    for i in range(LAYERS):
        shapes |= {f"qkv{i}": (3 * WIDTH, WIDTH), f"out{i}": (WIDTH, WIDTH)}
        shapes |= {f"up{i}": (4 * WIDTH, WIDTH), f"down{i}": (WIDTH, 4 * WIDTH)}
    rows = characters()
    length = rows[0].shape[1]
    turns = torch.arange(length)[:, None] / 10 ** (torch.arange(WIDTH // 2) / (WIDTH / 8)) * 2 * pi / 10
    places = torch.cat([turns.sin(), turns.cos()], dim=1)

    def values(params: Params, x: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
        h = params["letters"].T[x] + places
        for layer in range(LAYERS):
            h = _attention(params, layer, h)
        out = _linear(params, "last", layer_norm(h, (WIDTH,))).flatten(0, 1)
        return out[:, :LETTERS], out[:, LETTERS:-1], out[:, -1]

    return Problem(
        lambda draw: splits(rows, draw, 4000),
        lambda g: _named(shapes, g),
        *judged(values, lambda x, *named: [y.flatten() for y in named], (LETTERS, KINDS, 0)),
        ("accuracy next", "accuracy kind", "R² of the distance"),
        m=3,
        batch=16,
        draws=3,
    )


def graph_net() -> Problem:
    """Molecules of rdkit with up to 20 atoms: five properties, each in its own unit, from atoms and bonds, by three
    rounds of messages.
    """
    atoms, bonds, properties = graphs()
    kinds, width = atoms.shape[2], 128
    shapes = {"enter": (width, kinds), "last": (5, width)}
    for i in range(3):
        shapes |= {f"own{i}": (width, width), f"near{i}": (width, width)}

    def values(params: Params, atoms: Tensor, bonds: Tensor, _: Tensor) -> tuple[Tensor, ...]:
        there = atoms.sum(2, keepdim=True)
        h = relu(_linear(params, "enter", atoms)) * there
        for i in range(3):
            h = h + relu(_linear(params, f"own{i}", h) + _linear(params, f"near{i}", bonds @ h)) * there / 2
        return _linear(params, "last", h.sum(1) / 10).unbind(1)

    return Problem(
        lambda draw: standardized(splits((atoms, bonds, properties), draw), 2),
        lambda g: _named(shapes, g),
        *judged(values, lambda atoms, bonds, y: y.unbind(1), (0,) * 5, [*properties.var(0)]),
        PROPERTIES,
        m=5,
        batch=32,
        draws=3,
    )
