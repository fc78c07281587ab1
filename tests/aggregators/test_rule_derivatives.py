"""First and second derivatives of rules with a solver, by the rows and by numbers, are those of finite differences."""

import pytest
import torch
from sequences import DEPENDENT, J3, number, random_rows

import functional_jd as jd

SIZES = (1, 2, 3, 6)
EYE = torch.eye(3, dtype=torch.float64)


def direction(rule, J):
    return jd.aggregate(rule, J).direction


def conflicting(m):
    """The first row is long, and all others conflict with it."""
    J = random_rows(m, m + 1, seed=m)
    return torch.cat([5 * J[:1], J[1:] - 2 * J[:1]])


def alike(m):
    """Rows of nearly one length."""
    J = torch.nn.functional.normalize(random_rows(m, m + 1, seed=m), dim=1)
    return J * torch.linspace(1, 1.3, m, dtype=torch.float64).unsqueeze(1)


def twice(rule, J):
    return jd.aggregate(rule, J.sin(), jd.aggregate(rule, J).state).direction


def sdmgrad_twice(one, two, u):
    rule = jd.sdmgrad(0.1, n_steps=3, preference=u)
    return jd.aggregate(rule, two, jd.aggregate(rule, one, None, two).state, one).direction


def numbers(*values):
    return torch.tensor(values, dtype=torch.float64)


CASES = {
    **{f"upgrad, {m}": (lambda J, u: direction(jd.upgrad(u), J), random_rows(m, 4, seed=m + 1)) for m in SIZES},
    **{f"dualproj, {m}": (lambda J, u: direction(jd.dualproj(u), J), conflicting(m)) for m in SIZES},
    **{f"mgda, {m}": (lambda J: direction(jd.mgda(), J), random_rows(m, m + 1, seed=m)) for m in SIZES},
    **{f"capped mgda, {m}": (lambda J, c: direction(jd.mgda(cap=c), J), alike(m), numbers(1.4 / m)[0]) for m in (3, 5)},
    **{
        f"cagrad, {m}": (lambda J, c: direction(jd.cagrad(c), J), alike(m), numbers(c)[0])
        for m, c in ((1, 0.5), (2, 0.5), (3, 0.9), (4, 2.0))
    },
    **{
        f"fairgrad, {a}, {len(J[0])}": (lambda J, a: direction(jd.fairgrad(a), J), J, numbers(a)[0])
        for a in (0.1, 0.5, 1.0, 2.0, 4.0)
        for J in (J3, DEPENDENT)
        if a not in (0.1, 4.0) or J is J3
    },
    **{f"nash_mtl, {c}": (lambda J, c: direction(jd.nash_mtl(c), J), J3, numbers(c)[0]) for c in (0.1, 1.0)},
    "nash_mtl, not clipped": (lambda J: direction(jd.nash_mtl(0.0), J), J3),
    **{f"config, {k}": (lambda J: direction(jd.config(), J), J) for k, J in enumerate((J3, DEPENDENT, EYE))},
    "pcd, with its memory": (lambda J: twice(jd.pcd(0.4), J), number(2) / 5),
    "sdmgrad": (sdmgrad_twice, number(0), number(0) + number(4) / 2, numbers(0.2, 0.3, 0.5)),
}


@pytest.mark.parametrize("name", CASES)
def test_derivatives_are_those_of_finite_differences(name):
    f, J, *others = CASES[name]
    if name.startswith(("upgrad", "dualproj")):
        others = [torch.linspace(0.5, 1, len(J), dtype=torch.float64)]
        assert len(J) == 1 or not torch.allclose(f(J, *others), others[0] @ J)
    if name.startswith(("mgda", "cagrad")):
        rule = jd.mgda() if name.startswith("mgda") else jd.cagrad(*others)
        least = 0.0 if name.startswith("mgda") else 1 / len(J) + 1e-3
        assert len(J) == 1 or (jd.aggregate(rule, J).weights > least).sum() >= 2
    inputs = [x.clone().requires_grad_() for x in (J, *others)]
    assert torch.autograd.gradcheck(f, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(f, inputs)
