"""Degenerate Jacobians: what goes wrong in rules goes wrong on rows like these."""

import torch
from hypothesis import settings
from hypothesis import strategies as st

# Eighty digits take time: the default is half of what other properties draw, and `HYPOTHESIS_PROFILE` changes both.
SOME = settings(max_examples=max(6, settings().max_examples // 2))


def gaussian(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def near(J, seed, distance, sign=1.0):
    """The last row is a positive combination of the others, times the sign, but for a small distance."""
    weights = gaussian(seed + 1, len(J) - 1).abs() + 0.25
    return torch.cat([J[:-1], (sign * weights @ J[:-1] + distance * J[-1]).unsqueeze(0)])


def integers(J):
    return (2 * J).round()


KINDS = {
    "generic": lambda J, seed: J,
    "integers": lambda J, seed: integers(J),
    "a row of zeros": lambda J, seed: torch.cat([0 * J[:1], J[1:]]),
    "equal rows": lambda J, seed: torch.cat([J[:-1], 2 * J[:1]]),
    "opposite rows": lambda J, seed: torch.cat([J[:-1], -4 * J[:1]]),
    "rank one": lambda J, seed: integers(J[:, :1]) * integers(J[:1]),
    "stationary": lambda J, seed: torch.cat([integers(J[:-1]), -integers(J[:-1]).sum(0, keepdim=True)]),
    "weakly stationary": lambda J, seed: torch.cat([integers(J[:1]), -2 * integers(J[:1]), J[2:]])[: len(J)],
    "nearly dependent": lambda J, seed: near(J, seed, 10.0 ** -(seed % 6), 1.0),
    "nearly stationary": lambda J, seed: near(J, seed, 10.0 ** -(seed % 6), -1.0),
    "beyond resolution": lambda J, seed: near(J, seed, 10.0 ** -(7 + seed % 8), (-1.0) ** seed),
}
SCALES = {
    "": lambda J, seed: 1.0,
    "tiny": lambda J, seed: 2.0**-100,
    "huge": lambda J, seed: 2.0**100,
    # Powers of two, so that dependent rows stay dependent.
    "spread": lambda J, seed: 2.0 ** (12 * gaussian(seed + 3, len(J), 1)).clamp(-40, 40).round(),
}
preferences = st.sampled_from(
    [lambda m: [1.0] * m, lambda m: [2.0**-k for k in range(m)], lambda m: [0.0] * (m - 1) + [3.0]]
)
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def degenerate(rows=None, columns=None, dtypes=tuple(DTYPES), kinds=tuple(KINDS), scales=tuple(SCALES)):
    """Jacobians `[m, n]` of some kind, scale and dtype, m <= 6, n <= 8; those of one row have no kind."""

    def built(m, n, kind, scale, dtype, seed):
        J = gaussian(seed, m, n)
        J = KINDS[kind](J, seed) if m > 1 else J
        return (J * SCALES[scale](J, seed)).to(dtype)

    sizes = (
        st.integers(1, 6) if rows is None else st.just(rows),
        st.integers(1, 8) if columns is None else st.just(columns),
    )
    names = (st.sampled_from(kinds), st.sampled_from(scales), st.sampled_from(dtypes), st.integers(0, 999))
    return st.builds(built, *sizes, *names)


def resolution(J):
    """The least singular value, beside zero, of any set of unit rows, and no less than a float64 Gramian resolves."""
    m = len(J)
    units = J.double() / torch.linalg.vector_norm(J.double(), dim=1, keepdim=True).clamp(min=1e-300)
    chosen = torch.arange(1, 2**m).unsqueeze(1).bitwise_and(2 ** torch.arange(m)).bool()
    values = torch.linalg.svdvals(units * chosen.unsqueeze(-1))
    return max(float(values[values > 4e-16].min()), 1e-8) if (values > 4e-16).any() else 1.0
