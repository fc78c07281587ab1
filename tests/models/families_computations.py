"""Solvers, flows, routers and random codes: models that compute in unusual ways."""

from functools import partial

import torch
from families import Family, vectors, words
from torch import nn
from torch.utils.checkpoint import checkpoint

fn = nn.functional


class FixedPoint(torch.autograd.Function):
    """`z = tanh(W z + u)`: solved without a graph, differentiated by the implicit function theorem."""

    generate_vmap_rule = True

    @staticmethod
    def forward(weight, u):
        z = torch.zeros_like(u)
        for _ in range(200):
            z = torch.tanh(z @ weight.mT + u)
        return z

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0], output)
        ctx.save_for_forward(inputs[0], inputs[1], output)

    @staticmethod
    def backward(ctx, gradient):
        weight, z = ctx.saved_tensors
        slope = 1 - z.square()
        # v = D (g + W' v), with D the slopes: one linear system for each example.
        matrix = torch.eye(z.shape[-1], dtype=z.dtype) - slope[..., None] * weight.mT
        v = torch.linalg.solve(matrix, (slope * gradient)[..., None])[..., 0]
        return v.mT @ z, v

    @staticmethod
    def jvp(ctx, weight_tangent, u_tangent):
        weight, _, z = ctx.saved_tensors
        slope = 1 - z.square()
        matrix = torch.eye(z.shape[-1], dtype=z.dtype) - slope[..., None] * weight
        return torch.linalg.solve(matrix, (slope * (z @ weight_tangent.mT + u_tangent))[..., None])[..., 0]


class Equilibrium(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.inner, self.out = nn.Linear(5, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 2)

    def forward(self, x):
        weight = 0.5 * self.inner.weight / self.inner.weight.norm()
        return self.out(FixedPoint.apply(weight, self.into(x)))


class Flow(nn.Module):
    """A neural ODE by Runge-Kutta steps, each of them a checkpoint."""

    def __init__(self):
        super().__init__()
        self.field = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))

    def speed(self, t, x):
        return self.field(torch.cat([x, torch.full_like(x[:, :1], t)], 1))

    def advance(self, t, x, h=0.25):
        a = self.speed(t, x)
        b = self.speed(t + h / 2, x + h / 2 * a)
        c = self.speed(t + h / 2, x + h / 2 * b)
        return x + h / 6 * (a + 2 * b + 2 * c + self.speed(t + h, x + h * c))

    def forward(self, x):
        for k in range(4):
            x = checkpoint(partial(self.advance, k / 4), x, use_reentrant=False)
        return x


class Coupling(nn.Module):
    """A normalizing flow: couplings, an invertible matrix with its determinant, and the density of what comes out."""

    def __init__(self):
        super().__init__()
        self.nets = nn.ModuleList([nn.Sequential(nn.Linear(2, 6), nn.ELU(), nn.Linear(6, 4)) for _ in range(3)])
        self.mix, self.log_scale = nn.Parameter(torch.eye(4)), nn.Parameter(torch.zeros(4))

    def forward(self, x):
        volume = torch.linalg.slogdet(self.mix)[1] + self.log_scale.sum()
        x = (x @ self.mix) * self.log_scale.exp()
        for net in self.nets:
            left, right = x.chunk(2, -1)
            scale, shift = net(left).chunk(2, -1)
            x = torch.cat([right * scale.tanh().exp() + shift, left], -1)
            volume = volume + scale.tanh().sum(-1)
        return torch.cat([x, (volume - x.square().sum(-1) / 2)[:, None]], -1)


class Autoencoder(nn.Module):
    """A VAE with normal codes, relaxed categories, and batch norm in the decoder."""

    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(5, 7), nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 5))

    def forward(self, x):
        mean, log, choice = self.encode(x).split([2, 2, 3], -1)
        code = mean + (log / 2).exp() * torch.randn_like(mean)
        cut = fn.softmax((choice - (-torch.rand_like(choice).log()).log()) / 0.7, -1)  # Gumbel-softmax
        kl = (mean.square() + log.exp() - 1 - log).sum(-1, keepdim=True) / 2
        return torch.cat([self.decode(torch.cat([code, cut], -1)), kl], -1)


class Experts(nn.Module):
    """The best two of three experts, to which tokens are sent by index, with a noisy gate."""

    def __init__(self):
        super().__init__()
        self.gate, self.noise = nn.Linear(4, 3, bias=False), nn.Parameter(torch.randn(4, 3))
        self.up, self.down = nn.Parameter(torch.randn(3, 4, 6)), nn.Parameter(torch.randn(3, 6, 4))

    def forward(self, x):
        flat = x.flatten(0, 1)
        scores = self.gate(flat) + torch.randn(len(flat), 3, dtype=x.dtype) * fn.softplus(flat @ self.noise)
        best, chosen = scores.topk(2, -1)
        weight, out = best.softmax(-1), torch.zeros_like(flat)
        for k in range(3):
            mine = (chosen == k).to(weight.dtype)
            y = fn.silu(flat @ self.up[k]) @ self.down[k]
            out = out + (weight * mine).sum(-1, keepdim=True) * y
        return out.view_as(x)


class Sorted(nn.Module):
    """Tokens in order of their expert, one matrix product for each, and back by `index_add`: sizes depend on values."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(4, 3), nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x):
        flat = x.flatten(0, 1)
        weight, chosen = self.gate(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for k, expert in enumerate(self.experts):
            (mine,) = torch.where(chosen == k)
            out.index_add_(0, mine, expert(flat[mine]) * weight[mine, None])
        return out.view_as(x)


class Energy(nn.Module):
    """Forces: the output contains a derivative of an energy with respect to the input."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 6), nn.Softplus(), nn.Linear(6, 1))

    def forward(self, x):
        return torch.func.grad(lambda x: self.net(x).sum())(x)


class Splines(nn.Module):
    """A layer of learned functions of one variable (KAN): bases in a broadcast, mixed by einsum."""

    def __init__(self):
        super().__init__()
        self.coefficients, self.base = nn.Parameter(torch.randn(5, 3, 4)), nn.Parameter(torch.randn(3, 5))
        self.centres = nn.Parameter(torch.linspace(-2, 2, 4))

    def forward(self, x):
        hats = (1 - (x[..., None] - self.centres).abs()).relu()
        return torch.einsum("bik,iok->bo", hats, self.coefficients) + fn.silu(x) @ self.base.T


class Process(nn.Module):
    """A Gaussian process: kernel, Cholesky factor, triangular solve, with a mean that is learned."""

    def __init__(self):
        super().__init__()
        self.points, self.values = nn.Parameter(torch.randn(4, 5)), nn.Parameter(torch.randn(4, 2))
        self.length, self.noise = nn.Parameter(torch.tensor(0.3)), nn.Parameter(torch.tensor(-1.0))

    def forward(self, x):
        kernel = lambda a, b: torch.exp(-(a[:, None] - b).square().sum(-1) / (2 * self.length.exp() ** 2 * 5))
        noise = self.noise.exp() * torch.eye(4, dtype=x.dtype)
        factor = torch.linalg.cholesky(kernel(self.points, self.points) + noise)
        return kernel(x, self.points) @ torch.cholesky_solve(self.values, factor)


COMPUTATIONS = {
    "equilibrium": lambda: Family(Equilibrium, vectors()),
    "ode_with_checkpoints": lambda: Family(Flow, vectors()),
    "coupling": lambda: Family(Coupling, vectors(4)),
    "autoencoder": lambda: Family(Autoencoder, vectors(), draws=True),
    "experts": lambda: Family(Experts, vectors(5, 4), draws=True),
    "sorted_experts": lambda: Family(Sorted, vectors(5, 4)),
    "energy": lambda: Family(Energy, vectors()),
    "splines": lambda: Family(Splines, vectors()),
    "process": lambda: Family(Process, vectors()),
    "bag": lambda: Family(lambda: nn.EmbeddingBag(32, 4, sparse=True), words()),
}
