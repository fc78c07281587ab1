"""Every rule on the simulated accelerator: the CPU's numbers, where the rows are, without mixing devices or waiting.

The bound of an error is what roundings of the Jacobian do to the same rule on the CPU.
"""

from inspect import signature

import pytest
import torch
from bounds import check_same, check_stable
from rule_table import RULES, builder, rule_of
from sequences import rows_of_condition
from simulated import TooManyLaunchesError, simulated
from torch.utils._pytree import tree_leaves, tree_map

from functional_jd import aggregate, constant, cosmos, epo, mean, pbi, random
from functional_jd.aggregation.aggregate import start
from functional_jd.aggregators import constrained

# Small dense problems take one round trip to the host, or at most 40 launches; the rest is of the rows.
LIMIT = 400
# With as many objectives as there are rows.
SIZED = {
    "constant": lambda m: constant([1.0] * (m - 1) + [-1.0]),
    "constrained": lambda m: constrained([0.1] * (m - 1) + [torch.inf]),
    "cosmos": lambda m: cosmos(1.0, [0.5] * m),
    "epo": lambda m: epo([1.0 / m] * m),
    "pbi": lambda m: pbi(5.0, [1.0] * m),
}
ROW_BY_ROW = pytest.mark.xfail(strict=True, raises=TooManyLaunchesError, reason="launches grow with the number of rows")
# The condition of 128 rows. A search for each row takes half a minute on ill-conditioned ones.
MANY = {"upgrad": 1e2, "cr_mogm": 1e2, "grouped": 1e2}
PROBLEMS = ((2, 1e1), (5, 1e7), (32, 1e4), (32, 1e7), (128, 1e7))


def rule(name, m):
    return SIZED[name](m) if name in SIZED else rule_of(name)


def problem(name, m, condition, seed=0):
    """Rows with singular values from 1 to 1 / condition, in the shape that the rule accepts, and losses."""
    rows = rows_of_condition(m, condition, seed, n=m + 10 + m % 2)
    like = RULES[name].like
    jacobian = rows if like is None else {"trunk": rows[:, 2:].reshape(m, 2, -1), "head": rows[:, :2]}
    return jacobian, torch.linspace(0.5, 2.0, m, dtype=torch.float64)


def direction(name, m, jacobian, other, losses):
    found = rule(name, m)
    return aggregate(found, jacobian, start(found, jacobian, other, losses=losses), other, losses=losses)


def cases():
    for name, entry in RULES.items():
        least = 1 if name in SIZED else entry.rows[0]
        for m, condition in PROBLEMS:
            if m >= least:
                yield name, m, MANY.get(name, condition) if m == 128 else condition


def there(f, *inputs, limit=LIMIT, **how):
    """What a function finds on the device, which is also where it leaves it."""
    with simulated(**how) as device:
        inputs = device.put(inputs)
        device.reset()
        device.limit = limit
        found = f(*inputs)
        assert all(x.device.type == "sim" for x in tree_leaves(found))
        return device.get(found)


@pytest.mark.parametrize(("name", "m", "condition"), list(cases()))
def test_a_direction_is_that_of_the_cpu(name, m, condition):
    (jacobian, losses), (other, _) = (problem(name, m, condition, seed) for seed in (0, 1))
    found = there(lambda *given: direction(name, m, *given), jacobian, other, losses).direction
    check_stable(found, lambda J, K: direction(name, m, J, K, losses).direction, jacobian, other)


@pytest.mark.parametrize("name", RULES)
def test_a_direction_without_float64_is_that_of_the_cpu(name):
    (jacobian, losses), (other, _) = (tree_map(torch.Tensor.float, problem(name, 5, 10.0, seed)) for seed in (0, 1))
    f = lambda *given: direction(name, 5, *given).direction
    check_same(there(f, jacobian, other, losses, limit=None, float64=False), f(jacobian, other, losses))


def test_many_ill_conditioned_rows_do_not_conflict():
    """Where the bound by roundings would take the search of each of the 128 rows several times."""
    jacobian, losses = problem("upgrad", 128, 1e7)
    found = there(lambda *given: direction("upgrad", 128, *given).direction, jacobian, jacobian, losses)
    mean = jacobian.mean(0)
    assert (jacobian @ found >= -1e-12 * jacobian.norm(dim=1) * found.norm()).all()
    assert (jacobian @ mean < -1e-3 * jacobian.norm(dim=1) * mean.norm()).any()


def differentiated(name, m):
    """The gradient of the direction's length by the rows, for a batch of Jacobians."""

    def length(jacobian, other, losses):
        return sum(x.square().sum() for x in tree_leaves(direction(name, m, jacobian, other, losses).direction))

    return torch.vmap(torch.func.grad(length), in_dims=(0, 0, None))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[ROW_BY_ROW] if name == "gradvac" else []) for name in RULES]
)
def test_derivatives_and_batches_are_those_of_the_cpu(name):
    m = 5
    (jacobian, losses), (other, _) = (problem(name, m, 10.0, seed) for seed in (0, 1))
    batches = tree_map(lambda x: torch.stack([x, x.flip(-1)]), (jacobian, other))
    found = there(differentiated(name, m), *batches, losses)
    check_stable(found, lambda J, K: differentiated(name, m)(J, K, losses), *batches, roundings=2**12)


SOLVERS = {
    **dict.fromkeys(("upgrad", "dualproj", "mgda", "aligned_mtl", "config", "imtl_g", "nash_mtl"), lambda m: ()),
    "cagrad": lambda m: (0.5,),
    "fairgrad": lambda m: (1.0,),
    "epo": lambda m: ([1.0 / m] * m,),
    "pcgrad": lambda m: (random.key(0),),
    "gradvac": lambda m: (random.key(0),),
    "sdmgrad": lambda m: (),
    "pcd": lambda m: (),
    "protect": lambda m: (mean(), [0, m - 1]),
}
"""What else rules take that may be solved on the device."""


MOST = {"upgrad": 32, "epo": 32, "cagrad": 5}
"""The most rows for which a fixed number of rounds takes less than seconds on a CPU."""


def solved(name, m, solver, J, K, losses):
    rule = builder(name)(*SOLVERS[name](m), solver=solver)
    return aggregate(rule, J, start(rule, J, K, losses=losses), K, losses=losses).direction


@pytest.mark.parametrize(
    ("name", "m"), [(name, m) for name in SOLVERS for m in (2, 5, 32, 128) if m <= MOST.get(name, 128)]
)
def test_a_fixed_number_of_rounds_finds_what_the_host_finds(name, m):
    """On a CPU, which takes the same rounds without the price of a simulation."""
    (jacobian, losses), (other, _) = (problem(name, m, 1e7, seed) for seed in (0, 1))
    found = solved(name, m, "device", jacobian, other, losses)
    check_stable(found, lambda J, K: solved(name, m, "host", J, K, losses), jacobian, other)


@pytest.mark.parametrize("name", SOLVERS)
def test_a_rule_that_is_solved_on_the_device_copies_nothing_to_the_host(name):
    m = 3 if name in ("epo", "fairgrad", "nash_mtl") else 2
    (jacobian, losses), (other, _) = (problem(name, m, 1e2, seed) for seed in (0, 1))
    with simulated() as device:
        inputs = device.put((jacobian, other, losses))
        device.reset()
        device.limit = 3000  # of a search, whose first rounds show it
        try:
            solved(name, m, "device", *inputs)
        except TooManyLaunchesError:
            assert name in ("cagrad", "fairgrad", "nash_mtl", "pcd")
        assert device.copies_to_host == 0


def test_every_rule_with_a_solver_is_solved_on_the_device():
    named = {name for name in RULES if "solver" in signature(builder(name)).parameters}
    assert named == SOLVERS.keys()


def captured():
    yield from ((name, 5, 1e4) for name in ("upgrad", "dualproj", "mgda"))
    yield from ((name, 5, 10.0) for name in ("cagrad", "fairgrad", "nash_mtl"))
    yield "upgrad", 32, 1e7


@pytest.mark.parametrize(("name", "m", "condition"), list(captured()))
def test_a_search_is_captured_in_a_graph_of_launches(name, m, condition):
    jacobian, losses = problem(name, m, condition)
    with simulated() as device:
        inputs = device.put((jacobian, losses))
        device.capturing = True
        found = device.get(direction(name, m, inputs[0], inputs[0], inputs[1]).direction)
    check_stable(found, lambda J: direction(name, m, J, J, losses).direction, jacobian)
