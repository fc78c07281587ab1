"""Layers by hand: sequences, sets, graphs, tables, fields."""

from functools import partial

import torch
from families import Family, images, vectors, words
from torch import nn
from torch.nn.utils import rnn

fn = nn.functional


class Packed(nn.Module):
    """A recurrent net over sequences of different lengths, the longest first."""

    def __init__(self, **options):
        super().__init__()
        self.cells = nn.LSTM(4, 5, 2, batch_first=True, **options)
        self.head = nn.Linear(options.get("proj_size", 5) * (2 if options.get("bidirectional") else 1), 2)

    def forward(self, x):
        lengths = torch.arange(x.shape[1], x.shape[1] - len(x), -1)
        out, _ = self.cells(rnn.pack_padded_sequence(x, lengths, batch_first=True))
        return self.head(rnn.pad_packed_sequence(out, batch_first=True)[0].sum(1))


class Cells(nn.Module):
    """Steps in a loop of Python, with the state updated in place and a gate that stops."""

    def __init__(self):
        super().__init__()
        self.lstm, self.gru, self.stop = nn.LSTMCell(4, 5), nn.GRUCell(5, 3), nn.Linear(3, 1)

    def forward(self, x):
        h, c, g = x.new_zeros(len(x), 5), x.new_zeros(len(x), 5), x.new_zeros(len(x), 3)
        left, out = x.new_ones(len(x), 1), x.new_zeros(len(x), x.shape[1], 3)
        for t in range(x.shape[1]):
            h, c = self.lstm(x[:, t], (h, c))
            g = self.gru(h, g)
            left = left * self.stop(g).sigmoid()
            out[:, t] = left * g
        return out


class WaveNet(nn.Module):
    """Causal dilated convolutions with gates and skips."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv1d(4, 8, 2, dilation=2**k) for k in range(3)])
        self.skips = nn.ModuleList([nn.Conv1d(4, 4, 1) for _ in range(3)])

    def forward(self, x):
        x = x.mT
        total = torch.zeros_like(x)
        for layer, skip in zip(self.layers, self.skips, strict=True):
            y = fn.glu(layer(fn.pad(x, (layer.dilation[0], 0))), 1)
            total = total + skip(y)
            x = x + y
        return total


class Graph(nn.Module):
    """Messages along the edges of one graph: sums by `index_add`, softmax over neighbours by `scatter_reduce`."""

    def __init__(self):
        super().__init__()
        self.message, self.score, self.own = nn.Linear(8, 4), nn.Linear(4, 1), nn.Linear(4, 4, bias=False)
        self.edge, self.out = nn.Parameter(torch.randn(7, 4)), nn.Linear(4, 2)
        self.register_buffer("source", torch.tensor([0, 0, 1, 2, 3, 4, 4]))
        self.register_buffer("target", torch.tensor([1, 2, 2, 3, 4, 0, 1]))

    def forward(self, x):
        for _ in range(2):
            pair = torch.cat([x[:, self.source], x[:, self.target]], -1)
            message = torch.tanh(self.message(pair) + self.edge)
            score = fn.leaky_relu(self.score(message))
            at = self.target[:, None].expand_as(score)
            top = score.new_full((*x.shape[:2], 1), -9.0).scatter_reduce(1, at, score.detach(), "amax")
            weight = (score - top.gather(1, at)).exp()
            total = weight.new_zeros(*x.shape[:2], 1).scatter_add(1, at, weight)
            weight = weight / total.gather(1, at)
            x = self.own(x) + torch.zeros_like(x).index_add(1, self.target, weight * message)
        return self.out(x)


class Sets(nn.Module):
    """Set transformer: induced points attend to a set, and it to them; seeds pool."""

    def __init__(self, width=4):
        super().__init__()
        self.points, self.seed = nn.Parameter(torch.randn(1, 3, width)), nn.Parameter(torch.randn(1, 1, width))
        heads = partial(nn.MultiheadAttention, width, 2, batch_first=True)
        self.read, self.back, self.pool, self.norm = heads(), heads(), heads(), nn.LayerNorm(width)

    def forward(self, x):
        points = self.read(self.points.expand(len(x), -1, -1), x, x)[0]
        x = self.norm(x + self.back(x, points, points)[0])
        return self.pool(self.seed.repeat(len(x), 1, 1), x, x)[0].squeeze(1)


class Grouped(nn.Module):
    """Grouped queries, rotations of pairs, a causal mask and a learned bias by distance."""

    def __init__(self):
        super().__init__()
        self.q, self.kv, self.bias, self.out = nn.Linear(4, 8), nn.Linear(4, 4), nn.Embedding(9, 4), nn.Linear(8, 2)

    def rotate(self, x):
        angle = torch.arange(x.shape[2], dtype=x.dtype)[:, None]
        even, odd, cos, sin = x[..., ::2], x[..., 1::2], angle.cos(), angle.sin()
        return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)

    def forward(self, x):
        q = self.q(x).unflatten(-1, (4, 2)).transpose(1, 2)
        k, v = (part.unflatten(-1, (1, 2)).transpose(1, 2) for part in self.kv(x).chunk(2, -1))
        at = torch.arange(x.shape[1])
        mask = self.bias((at[:, None] - at).clamp(-4, 4) + 4).permute(2, 0, 1)
        mask = mask.masked_fill(at[:, None] < at, -torch.inf).to(q.dtype)
        y = fn.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, attn_mask=mask[None], enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Tables(nn.Module):
    """DLRM: bags of embeddings, dense features, and inner products of all pairs."""

    def __init__(self):
        super().__init__()
        self.bag, self.weighted = nn.EmbeddingBag(32, 4, mode="mean"), nn.EmbeddingBag(32, 4, mode="sum")
        self.one, self.dense, self.top = nn.Embedding(32, 4, sparse=True), nn.Linear(6, 4), nn.Linear(10, 2)

    def forward(self, ids):
        dense = self.dense(ids.to(self.dense.weight.dtype) / 32)
        weights = dense.new_full(ids.shape, 0.5)
        flat = self.bag(ids.flatten(), torch.arange(0, ids.numel(), ids.shape[1]))
        parts = torch.stack([dense, flat, self.weighted(ids, per_sample_weights=weights), self.one(ids[:, 0])], 1)
        pairs = (parts @ parts.mT)[:, *torch.tril_indices(4, 4, -1)]
        return self.top(torch.cat([dense, pairs], 1))


class Tied(nn.Module):
    """One matrix that looks up, scores, and, transposed, decodes."""

    def __init__(self):
        super().__init__()
        self.embedding, self.out = nn.Embedding(32, 6, padding_idx=0), nn.Linear(6, 32, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, ids):
        h = torch.tanh(self.embedding(ids))
        scores = self.out(h).softmax(-1)
        return self.out(h + scores @ self.embedding.weight[:, :])


class Fourier(nn.Module):
    """A Fourier neural operator: complex weights on the lowest frequencies, cut and put in place."""

    def __init__(self):
        super().__init__()
        self.lift, self.drop = nn.Conv2d(2, 4, 1), nn.Conv2d(4, 1, 1)
        self.weight, self.side = nn.Parameter(torch.randn(4, 4, 2, 2, 2)), nn.Conv2d(4, 4, 1)

    def forward(self, x):
        x = self.lift(x)
        f = torch.fft.rfft2(x)
        w = torch.view_as_complex(self.weight)
        low = torch.einsum("bixy,ioxy->boxy", f[:, :, :2, :2], w)
        out = torch.zeros_like(f)
        out[:, :, :2, :2] = low
        return self.drop(fn.gelu(torch.fft.irfft2(out, s=x.shape[-2:]) + self.side(x)))


class Complex(nn.Module):
    """Complex numbers whose parameters are real: phases and a complex linear layer."""

    def __init__(self):
        super().__init__()
        self.real, self.phase = nn.Linear(5, 6), nn.Parameter(torch.randn(2, 3, 2))

    def forward(self, x):
        z = torch.view_as_complex(self.real(x).reshape(-1, 3, 2).to(self.phase.dtype))
        z = fn.linear(z, torch.view_as_complex(self.phase)) * torch.exp(1j * z.angle().sum(1, keepdim=True))
        return torch.cat([z.abs(), z.real], 1)


sequence = lambda: vectors(5, 4)
LAYERS = {
    "lstm": lambda: Family(Packed, sequence()),
    "lstm_both_ways": lambda: Family(partial(Packed, bidirectional=True, proj_size=3), sequence()),
    "cells": lambda: Family(Cells, sequence()),
    "wavenet": lambda: Family(WaveNet, sequence()),
    "graph": lambda: Family(Graph, vectors(5, 4)),
    "sets": lambda: Family(Sets, sequence()),
    "grouped": lambda: Family(Grouped, sequence()),
    "tables": lambda: Family(Tables, words()),
    "tied": lambda: Family(Tied, words()),
    "fourier": lambda: Family(Fourier, images(8, 2)),
    "complex": lambda: Family(Complex, vectors()),
    "encoder": lambda: Family(lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), sequence(), draws=True),
    "decoder": lambda: Family(
        lambda: nn.TransformerDecoderLayer(4, 2, 8, batch_first=True, norm_first=True),
        sequence(),
        lambda call, x: call(x, x.flip(1), tgt_mask=nn.Transformer.generate_square_subsequent_mask(5, dtype=x.dtype)),
        draws=True,
    ),
}
