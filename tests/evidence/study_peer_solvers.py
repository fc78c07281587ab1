"""The cone programs of TorchJD's NashMTL and CAGrad, handed to the same solvers without being compiled anew each time.

TorchJD states both by cvxpy, which compiles them in every call: 7 ms for what ECOS solves in 0.1 ms, up to twenty times
a step. Here the numbers are written into the matrices that cvxpy compiles. Weights are the same to the last bit, which
`test_study_peers.py` shows; where a number is zero or not finite, cvxpy is asked as before.
"""

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchjd import aggregation as peer
from torchjd._linalg import normalize

Array = np.ndarray[Any, Any]


def nash_mtl(m: int) -> peer.NashMTL:
    """`NashMTL(m)`."""
    found = peer.NashMTL(m)
    weighting = found.weighting
    begin = weighting._init_optim_problem

    def begun() -> None:
        begin()
        weighting.prob = Bargaining(weighting)

    weighting._init_optim_problem = begun
    return found


class Bargaining:
    """In the place of a `cvxpy.Problem` of `NashMTL`.

    Minimise `sum(G a) + phi'(a) / n` where `log(a_i n) + log((G a)_i) >= 0` for all i. ECOS has variables `a`, and for
    each i the two logarithms; its cones are `(t, x, 1)` with `t <= log(x)`. Parameters and the variable become
    places for values, which cvxpy would look through each time.
    """

    NAMES = ("G_param", "normalization_factor_param", "prvs_alpha_param", "alpha_param")

    def __init__(self, weighting: Any):
        self.weighting, self.compiled = weighting, weighting.prob
        self.symbols = {name: getattr(weighting, name) for name in self.NAMES}
        for name in self.NAMES:
            setattr(weighting, name, Place(self.symbols[name]))
        m = weighting.n_tasks
        self.matrix, self.own, self.rows = _matrix_of_bargaining(m)
        self.h = np.tile([0.0, 0.0, 1.0], 2 * m)
        self.h = np.concatenate([np.zeros(2 * m), self.h])
        self.cones = {"f": 0, "l": 2 * m, "q": [], "e": 2 * m, "s": []}

    def solve(self, **options: Any) -> None:
        import ecos
        from cvxpy import ECOS, SolverError
        from cvxpy.reductions.solvers.conic_solvers.ecos_conif import ECOS as INTERFACE

        w = self.weighting
        G, n, before = (np.asarray(getattr(w, name).value, dtype=np.float64) for name in self.NAMES[:3])
        with np.errstate(all="ignore"):
            cost = G.sum(0) + (1 / before + (1 / (G @ before)) @ G) * (1 / n)
        if not (np.isfinite(cost).all() and np.isfinite(G).all() and G.all() and cost.all() and n.all()):
            self.ask_cvxpy(options)
            return
        assert options.pop("solver") == ECOS
        assert options.pop("warm_start")  # which the interface to ECOS does not use
        self.matrix.data[self.own] = -n
        self.matrix.data[self.rows] = -G
        cost = np.concatenate([cost, np.zeros(2 * len(cost))])
        found = ecos.solve(cost, self.matrix, self.h, self.cones, None, None, verbose=False, **options)
        status = INTERFACE.STATUS_MAP[found["info"]["exitFlag"]]
        if status in ("solver_error", "user_limit"):
            raise SolverError(status)
        w.alpha_param.found = found["x"][: w.n_tasks] if status.startswith("optimal") else None

    def ask_cvxpy(self, options: dict[str, Any]) -> None:
        """Solve it as TorchJD does."""
        for name, symbol in self.symbols.items():
            symbol.value = getattr(self.weighting, name).value
        self.compiled.solve(**options)
        self.weighting.alpha_param.found = self.symbols["alpha_param"].value


class Place:
    """A value in the place of a parameter or variable of cvxpy, which is asked only about what it might refuse."""

    def __init__(self, symbol: Any):
        self.symbol, self.found = symbol, symbol.value

    @property
    def value(self) -> Array | None:
        return self.found

    @value.setter
    def value(self, given: Array | None) -> None:
        if given is not None and not (np.isfinite(given) & ((given >= 0) | (not self.symbol.is_nonneg()))).all():
            self.symbol.value = given
        self.found = given


def _matrix_of_bargaining(m: int) -> tuple[Any, Array, Array]:
    """The matrix of the cones, where in its data -n stands `[m]`, and where -G stands `[m, m]`."""
    from scipy.sparse import csc_matrix

    dense = np.zeros((2 * m + 6 * m, 3 * m))
    own, rows = [], []
    for i in range(m):
        dense[i, i] = -1  # a >= 0
        dense[m + i, [m + 2 * i, m + 2 * i + 1]] = -1  # the sum of the logarithms is >= 0
        cone = 2 * m + 6 * i
        dense[cone, m + 2 * i] = dense[cone + 3, m + 2 * i + 1] = -1
        dense[cone + 1, i] = 2 + i  # marks, for a_i n
        dense[cone + 4, :m] = 2 + m + m * i + np.arange(m)  # marks, for (G a)_i
    matrix = csc_matrix(dense)
    place = {int(mark): k for k, mark in enumerate(matrix.data) if mark > 1}
    own = np.array([place[2 + i] for i in range(m)])
    rows = np.array([[place[2 + m + m * i + j] for j in range(m)] for i in range(m)])
    return matrix, own, rows


def cagrad(c: float) -> peer.CAGrad:
    """`CAGrad(c)`."""
    found = peer.CAGrad(c)
    found.gramian_weighting.forward = partial(_weights_of_cagrad, found.gramian_weighting)
    return found


def _weights_of_cagrad(self: Any, gramian: Tensor) -> Tensor:
    """`CAGradWeighting.forward`, line by line but for the program in its middle."""
    U, S, _ = torch.svd(normalize(gramian, self.norm_eps))
    reduced_matrix = U @ S.sqrt().diag()
    reduced_array = reduced_matrix.cpu().detach().numpy().astype(np.float64)
    dimension = gramian.shape[0]
    reduced_g_0 = reduced_array.T @ np.ones(dimension) / dimension
    sqrt_phi = self.c * np.linalg.norm(reduced_g_0, 2).item()

    w_opt = _lowest(reduced_array, reduced_array @ reduced_g_0, sqrt_phi)

    g_w_norm = np.linalg.norm(reduced_array.T @ w_opt, 2).item()
    if g_w_norm >= self.norm_eps:
        weight_array = np.ones(dimension) / dimension
        weight_array += (sqrt_phi / g_w_norm) * w_opt
    else:
        weight_array = np.zeros(dimension)
    return torch.from_numpy(weight_array).to(device=gramian.device, dtype=gramian.dtype)


def _lowest(R: Array, slope: Array, radius: float) -> Array:
    """The w that minimises `slope'w + radius |R'w|` where `w >= 0` and `sum(w) = 1`; Clarabel has `|R'w| <= t`, too."""
    import clarabel
    from scipy.sparse import csc_array

    m = len(R)
    cost = np.append(slope, radius)
    if not (np.isfinite(R).all() and R.all() and cost.all()):
        return _compiled(R, slope, radius)
    A = np.zeros((2 * m + 2, m + 1))
    A[0, :m] = 1
    A[1 : m + 1, :m] = -np.eye(m)
    A[m + 1, m] = -1
    A[m + 2 :, :m] = -R.T
    b = np.eye(1, 2 * m + 2)[0]
    cones = [clarabel.ZeroConeT(1), clarabel.NonnegativeConeT(m), clarabel.SecondOrderConeT(m + 1)]
    settings = clarabel.DefaultSettings()
    settings.verbose = False
    flat = csc_array((m + 1, m + 1))
    found = clarabel.DefaultSolver(flat, cost, csc_array(A), b, cones, settings).solve()
    return np.array(found.x[:m]) if str(found.status) == "Solved" else _compiled(R, slope, radius)


def _compiled(R: Array, slope: Array, radius: float) -> Array:
    """The same, as TorchJD states it."""
    import cvxpy as cp

    w = cp.Variable(shape=len(R))
    cost = slope.T @ w + radius * cp.norm(R.T @ w, 2)
    cp.Problem(objective=cp.Minimize(cost), constraints=[w >= 0, cp.sum(w) == 1]).solve(cp.CLARABEL)
    return w.value
