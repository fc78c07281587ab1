"""The tables of every name of TorchJD: none is missing, and what is called the same is the same."""

import importlib
import re
from itertools import chain
from pathlib import Path

import pytest
import torch
from bounds import eps

import functional_jd as jd

torchjd = pytest.importorskip("torchjd")
PAGE = Path(__file__).parents[1] / "docs" / "coming_from.md"
MODULES = ("aggregation", "scalarization", "autojac", "autogram", "linalg")
for module in MODULES:  # the package loads some of them only
    importlib.import_module(f"torchjd.{module}")
PART = PAGE.read_text(encoding="utf-8").partition("### Every name of TorchJD")[2].partition("## From GradScaler")[0]
TABLES = {
    head.partition("|")[0].strip(): [tuple(map(str.strip, line.strip("| ").split("|"))) for line in rows.splitlines()]
    for head, rows in re.findall(r"^\| (`torchjd.*)\n\| --- .*\n((?:\|.*\n)+)", PART, flags=re.MULTILINE)
}
U = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
REFERENCE = torch.tensor([0.1, -0.5, 0.25, 0.0], dtype=torch.float64)
LOSSES = torch.tensor([0.7, 1.3, 0.9, 2.1], dtype=torch.float64)
OTHER = 100  # seeds of second batches
AGGREGATORS = {  # a name's arguments there, and our rule
    "AlignedMTL": ((U, "rmse"), jd.aligned_mtl(U, "rmse")),
    "CAGrad": ((0.5,), jd.cagrad(0.5)),
    "ConFIG": ((U,), jd.config(U)),
    "Constant": ((U,), jd.constant(U)),
    "DualProj": ((U,), jd.dualproj(U)),
    "ExcessMTL": ((), jd.excess_mtl()),
    "FairGrad": ((2.0,), jd.fairgrad(2.0)),
    "IMTLG": ((), jd.imtl_g()),
    "Krum": ((1,), jd.krum(1)),
    "MGDA": ((), jd.mgda()),
    "Mean": ((), jd.mean()),
    "NashMTL": ((4,), jd.nash_mtl()),
    "PCD": ((), jd.pcd()),
    "Sum": ((), jd.total()),
    "TrimmedMean": ((1,), jd.trimmed_mean(1)),
    "UPGrad": ((U,), jd.upgrad(U)),
}
SCALARIZERS = {
    "COSMOS": ((2.0, U), jd.cosmos(2.0, U)),
    "Constant": ((U,), jd.constant(U)),
    "DWA": ((), jd.dwa()),
    "FAMO": ((4,), jd.famo()),
    "GeometricMean": ((), jd.geometric_mean()),
    "Mean": ((), jd.mean()),
    "PBI": ((5.0, U, REFERENCE), jd.pbi(5.0, U, REFERENCE)),
    "STCH": ((0.1, U, REFERENCE), jd.stch(0.1, U, REFERENCE)),
    "Sum": ((), jd.total()),
}
BY_LUCK = {"GradDrop", "GradVac", "PCGrad", "Random"}
OF_TWO = {"MoDoWeighting": jd.modo(), "SDMGradWeighting": jd.sdmgrad()}


def names(cell):
    return re.findall(r"`(\w+)", cell)


def beside(module, name):
    (found,) = [row[2] for row in TABLES[f"`torchjd.{module}`"] if name == names(row[0])[0]]
    return found


def matrix(seed, m=4):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(m, 6, generator=generator, dtype=torch.float64) / 6**0.5


def apart(ours, theirs):
    return float((ours - theirs).norm() / ours.norm())


def is_the_same(distance):
    return distance < 1e-13


def test_no_name_is_missing():
    public = chain(torchjd.__all__, *(importlib.import_module(f"torchjd.{module}").__all__ for module in MODULES))
    listed = [name for rows in TABLES.values() for row in rows for name in names(row[0])]
    assert {*public} == {*listed}
    for module in MODULES[:2]:  # the same names mean different things in both
        listed = [name for row in TABLES[f"`torchjd.{module}`"] for name in names(row[0])]
        assert sorted(listed) == sorted(importlib.import_module(f"torchjd.{module}").__all__)


def test_what_stands_beside_them_is_there():
    ours = {name for rows in TABLES.values() for row in rows for name in names(row[1])}
    assert [name for name in ours if not hasattr(jd, name)] == []
    assert {"upgrad", "per_example", "scalarized"} <= ours


def test_every_rule_is_compared_or_draws():
    listed = {names(row[0])[0] for row in TABLES["`torchjd.aggregation`"][:-2]}
    assert listed == AGGREGATORS.keys() | BY_LUCK | OF_TWO.keys() | {"CRMOGMWeighting"}


@pytest.mark.filterwarnings("ignore:You are solving a parameterized problem")  # what NashMTL brings along
@pytest.mark.parametrize("name", AGGREGATORS)
def test_an_aggregator_is_the_same_where_the_table_says_so(name):
    given, rule = AGGREGATORS[name]
    distances = []
    for seed in range(40 if name == "Krum" else 4):
        theirs, state = getattr(torchjd.aggregation, name)(*given), None
        for rows in (matrix(seed), matrix(seed + OTHER)):
            ours = jd.aggregate(rule, rows, state)
            state = ours.state
            distances.append(apart(ours.direction, theirs(rows)))
    assert beside("aggregation", name).startswith("the same") == is_the_same(max(distances))


@pytest.mark.parametrize("name", ["UPGrad", "DualProj"])
def test_with_an_exact_projector_they_are_the_same(name):
    projector = torchjd.linalg.QuadprogProjector(reg_eps=1e-14)
    theirs = getattr(torchjd.aggregation, name)(U, projector=projector)
    for seed in range(4):
        ours = jd.aggregate(AGGREGATORS[name][1], matrix(seed)).direction
        assert apart(ours, theirs(matrix(seed))) < 2**12 * eps()


def test_a_weighting_around_another_is_the_same():
    theirs = torchjd.aggregation.CRMOGMWeighting(torchjd.aggregation.IMTLGWeighting())
    state = None
    for seed in range(4):
        ours = jd.aggregate(jd.cr_mogm(jd.imtl_g()), matrix(seed), state)
        state = ours.state
        assert is_the_same(apart(ours.weights, theirs(matrix(seed) @ matrix(seed).T)))
    assert beside("aggregation", "CRMOGMWeighting").startswith("the same")


def test_combinations_of_losses_are_the_rows_of_jac_tensors():
    x, combinations = matrix(0), matrix(1)[:, :4]
    w = torch.ones(6, dtype=torch.float64, requires_grad=True)
    torchjd.autojac.backward(torch.tanh(x @ w), jac_tensors=combinations, parallel_chunk_size=1)
    ours, _ = jd.jacobian_fn(lambda w: combinations @ torch.tanh(x @ w), chunk_size=1)(w.detach())
    assert is_the_same(apart(ours, w.jac))


@pytest.mark.parametrize("name", OF_TWO)
def test_weightings_of_two_batches_are_the_same(name):
    theirs, state = getattr(torchjd.aggregation, name)(), None
    for seed in range(3):
        rows, others = matrix(seed), matrix(seed + OTHER)
        ours = jd.aggregate(OF_TWO[name], rows, state, others)
        state = ours.state
        assert is_the_same(apart(ours.weights, theirs(rows @ others.T)))
    assert beside("aggregation", name).startswith("the same")


@pytest.mark.parametrize("name", SCALARIZERS)
def test_a_scalarizer_is_the_same_where_the_table_says_so(name):
    given, rule = SCALARIZERS[name]
    theirs = getattr(torchjd.scalarization, name)(*given).double()
    losses = LOSSES.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(theirs(losses), losses)
    rows = torch.eye(4, dtype=torch.float64)
    ours = jd.aggregate(rule, rows, losses=LOSSES).weights
    assert beside("scalarization", name).startswith("the same") == is_the_same(apart(ours, gradient))
    taken = jd.aggregate(jd.scalarized(theirs), rows, losses=LOSSES).weights
    assert is_the_same(apart(taken, gradient))


def test_two_rows_have_no_order_to_draw():
    ours = jd.aggregate(jd.pcgrad(jd.random.key(0)), matrix(0, 2)).direction
    assert is_the_same(apart(ours, torchjd.aggregation.PCGrad()(matrix(0, 2))))
    assert "the same for two rows" in beside("aggregation", "PCGrad")
