"""Values that papers and peers print: torchjd 0.18 and LibMTL, in float64 unless the digits say otherwise."""

import pytest
import torch
from bounds import check_within, eps, gramian_bound
from scalarizations import LOSSES, ROWS
from sequences import DEPENDENT, J3, number, values

import functional_jd as jd
from functional_jd.aggregation.views import cross_gramian

TWO = torch.tensor([[-4.0, 1, 1], [6, 1, 1]], dtype=torch.float64)
SECOND = torch.tensor([[5.0, 2, -4, -2], [3, -2, -1, -5], [1, 3, 4, -1]], dtype=torch.float64)
FIVE = torch.tensor([[5.0, -8, 1], [6, 5, 0], [8, 5, 1], [5, -1, 9], [-4, -9, -1]], dtype=torch.float64)
SIX = torch.tensor([[-6.0, -4], [2, 7], [4, -8], [-4, 4], [2, -6], [8, -1]], dtype=torch.float64)
MIXED = torch.tensor(
    [
        [-3.0, 3, 0, 5, -2, 1],
        [4, -3, 5, -1, -1, 5],
        [2, 2, -4, -3, -3, -1],
        [-4, 3, 4, 1, -2, 2],
        [-5, -5, 5, -2, -4, 1],
        [-1, -4, 3, 4, 1, -1],
    ]
).double()
BARGAINS = [J3, J3.flip(0) + 1, 3 * J3.flip(1), J3 + J3.flip(1)]
NUMBERS = [number(k) for k in range(4)]
OTHERS = [number(k) + number(k + 4) / 2 for k in range(4)]
U, Z = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64), torch.tensor([0.1, -0.5, 0.25], dtype=torch.float64)
KEY = jd.random.key(7)
PREFER = [1.0, 2.0, 0.0]

# By rows: a rule, what it gives, and in which digit of a unit the printed numbers end.
ONE_CALL = {
    "aligned_mtl": [
        (jd.aligned_mtl(), TWO, [0.2133, 0.9673, 0.9673], 4),
        (jd.aligned_mtl(None, "rmse"), TWO, [0.5764, 2.6142, 2.6142], 4),
        (jd.aligned_mtl(), J3, [0.9260187082005386, 0.5069782320503369, -0.37433932001106557, 0.0861972526122182], 15),
        (
            jd.aligned_mtl(None, "median"),
            J3,
            [1.2383652924668196, 0.6779822492218645, -0.5006041642594364, 0.11527163003908714],
            15,
        ),
        (
            jd.aligned_mtl(None, "rmse"),
            J3,
            [1.317698271376313, 0.7214155978514816, -0.5326742003358573, 0.1226562376749627],
            15,
        ),
        (
            jd.aligned_mtl(PREFER),
            J3,
            [1.3206243148495003, 2.6524227821221014, -3.025115683532896, 1.0003708981018269],
            15,
        ),
        (jd.aligned_mtl(), DEPENDENT, [0.6130746261453612, 0.937210655671094], 15),
        (jd.aligned_mtl(PREFER), DEPENDENT, [-0.8831879840834715, 4.018955980622486], 15),
    ],
    "cagrad": [
        (jd.cagrad(0.5), TWO, [0.1835, 1.2041, 1.2041], 4),
        (jd.cagrad(0.4), TWO, [0.3468, 1.1633, 1.1633], 4),
        (jd.cagrad(0.4), SECOND, [3.31946, 1.95839, 0.94452, -2.98613], 4),
        (jd.cagrad(0.4), MIXED, [-0.74996, -0.24996, 1.33326, 0.04161, -2.45839, 0.95831], 4),
    ],
    "config": [
        (jd.config(), TWO, [0.1588, 2.0706, 2.0706], 4),
        (jd.config(), J3, [3.675160465653483, 1.4658987475504446, -1.7392615501315276, 0.8312680564704343], 15),
        (jd.config(PREFER), J3, [4 / 3, 5 / 3, -7 / 3, 1.0], 15),
        (jd.config(), DEPENDENT, [1.4530392462756851, 3.6208004827445803], 15),
        (jd.config(PREFER), DEPENDENT, [-0.5491796789846518, 2.048509474153692], 15),
    ],
    # By hand: the mean (1, 1, 1) conflicts with the first row by -2, of squared norm 18: add 2 / 18 of it.
    "dualproj": [(jd.dualproj(), TWO, [5 / 9, 10 / 9, 10 / 9], 15)],
    "excess_mtl": [(jd.excess_mtl(), TWO.float(), [4.80797, 1.0, 1.0], 4)],
    "fairgrad": [
        (jd.fairgrad(1.0), TWO, [0.0766, 0.9985, 0.9985], 4),
        (jd.fairgrad(2.0), TWO, [0.0313, 0.7908, 0.7908], 4),
        (jd.fairgrad(0.5), TWO, [0.1810, 1.2682, 1.2682], 4),
        (jd.fairgrad(0.0), TWO, [1.0, 1.0, 1.0], 15),
        (jd.fairgrad(0.5), J3, [1.9774264409306, 1.1074697461473, -0.7278867794337, 0.1156927701721], 7),
        (jd.fairgrad(1.0), J3, [1.4075910228833, 0.8085080177515, -0.5906040566302, 0.1272365742250], 7),
        (jd.fairgrad(5.0), J3, [0.7289004682097, 0.4160382130867, -0.3754599357669, 0.1208640257132], 7),
        (jd.fairgrad(0.5), DEPENDENT, [1.0659526207086, 1.9562114327112], 7),
        (jd.fairgrad(2.0), DEPENDENT, [0.4630150594148, 1.3804672061027], 7),
    ],
    "imtl_g": [
        (jd.imtl_g(), TWO, [0.0767, 1.0, 1.0], 4),
        (jd.imtl_g(), J3, [1.2307297640284434, 0.49089699253214925, -0.5824401348408894, 0.2783732434394071], 15),
        (jd.imtl_g(), DEPENDENT, [1.0773237463197796, 1.3690705014720885], 15),
    ],
    "krum": [
        (jd.krum(1, 1), SIX, [2.0, -6.0], 15),
        (jd.krum(2, 3), SIX, [2 / 3, -10 / 3], 15),
        (jd.krum(1, 2), SIX, [3.0, -7.0], 15),
    ],
    "mgda": [(jd.mgda(), TWO, [0.0, 1.0, 1.0], 15)],
    "nash_mtl": [
        (jd.nash_mtl(), TWO, [0.0542, 0.7061, 0.7061], 4),
        (jd.nash_mtl(0.0), TWO, [0.0766, 0.9985, 0.9985], 4),
    ],
    "pcd": [(jd.pcd(0.02), TWO, [-0.8200, 2.9434, 2.9434], 4), (jd.pcd(0.5), TWO, [2.0889, 2.6112, 2.6112], 4)],
    "pcgrad": [
        (jd.pcgrad(KEY), TWO, [0.5848, 3.8012, 3.8012], 4),
        (jd.pcgrad(KEY), torch.tensor([[1.0, 0, 2], [0, 2, -2]], dtype=torch.float64), [1.8, 3.0, 0.6], 15),
    ],
    "trimmed_mean": [
        (jd.trimmed_mean(1), FIVE, [16 / 3, -4 / 3, 2 / 3], 15),
        (jd.trimmed_mean(2), FIVE, [5.0, -1.0, 1.0], 15),
        (jd.trimmed_mean(0), TWO, [1.0, 1.0, 1.0], 15),
    ],
    # Both projections in closed form: g_1 + s g_2 with s = 22 / 38, g_2 + s g_1 with s = 22 / 18; then their mean.
    "upgrad": [(jd.upgrad(), TWO, [0.2923976608, 1.9005847953, 1.9005847953], 10)],
}


@pytest.mark.parametrize(("rule", "J", "expected", "digits"), [case for cases in ONE_CALL.values() for case in cases])
def test_the_direction_of_one_call(rule, J, expected, digits):
    expected = torch.tensor(expected, dtype=torch.float64)
    bound = 10.0**-digits + gramian_bound(J.double(), expected.abs().max()) + eps(J.dtype) * expected.abs()
    check_within(jd.aggregate(rule, J).direction, expected, bound)


# Weights, which are directions for the rows of the identity, to the last digit that is printed.
OF_LOSSES_END = 1e-9
OF_LOSSES = {
    "cosmos": (
        jd.cosmos(2.0, U),
        "0.152800512 0.276400256 0.523599744 | 0.071472591 0.440885813 0.141606264 | "
        "0.442923611 -0.024750512 0.230226937 | 0.380694024 0.252169229 -0.562906026",
    ),
    "geometric_mean": (
        jd.geometric_mean(),
        "0.666666667 0.333333333 0.166666667 | 0.763142828 0.127190471 0.381571414 | "
        "0.151426716 1.211413729 0.201902288 | 0.166666667 0.166666667 1.333333333",
    ),
    "imtl_l, 0.1": (
        jd.imtl_l(0.1),
        "1.0 1.0 1.0 | 1.0 0.904837418 0.740818221 | "
        "1.051271096 0.762272462 0.760269866 | 0.941525149 0.826539115 0.749669901",
    ),
    "imtl_l, 0.25": (
        jd.imtl_l(0.25),
        "1.0 1.0 1.0 | 1.0 0.778800783 0.472366553 | "
        "1.133148453 0.557607155 0.53897201 | 0.825658337 0.691459267 0.565408872",
    ),
    "pbi": (
        jd.pbi(5.0, U),
        "-3.577552021 -1.247555676 3.412437014 | -0.371202594 4.850258361 -1.528791178 | "
        "4.732193738 -1.845592278 0.447360673 | 3.560543699 3.042276622 -2.016700652",
    ),
    "pbi with a reference": (
        jd.pbi(5.0, U, Z),
        "-4.136980549 2.697004163 1.269472523 | -0.415936981 4.851923824 -1.511896701 | "
        "5.053969357 -0.347958063 -0.579930105 | 2.338651411 4.010427395 -2.108834201",
    ),
    "stch": (
        jd.stch(1.0),
        "0.065181898 0.090968667 0.177182769 | 0.07436598 0.171114328 0.087853025 | "
        "0.138627987 0.077359289 0.117346057 | 0.121343724 0.121343724 0.090645885",
    ),
    "stch with all": (
        jd.stch(0.1, U, Z),
        "9e-09 3.902e-06 0.499993475 | 1.2242e-05 0.299630806 0.000584719 | "
        "0.015624274 0.004974331 0.452648763 | 0.012524886 0.279550404 0.002770446",
    ),
    "uw, 0.1": (
        jd.uw(0.1),
        "0.5 0.5 0.5 | 0.5 0.475614712 0.430353988 | "
        "0.51265756 0.433513824 0.433361694 | 0.486422013 0.450827976 0.426907963",
    ),
    "uw, 0.5": (
        jd.uw(0.5),
        "0.5 0.5 0.5 | 0.5 0.389400392 0.236183276 | "
        "0.566574227 0.278803578 0.269486005 | 0.412829169 0.345729634 0.282704436",
    ),
}
# Directions on `number(k)` and `values(k)`, or weights, which are three numbers.
OF_ROWS = {
    "db_mtl": (
        jd.db_mtl(0.9, 0.0),
        "-2.420577 -0.6 1.220577 0.765704 | -2.932991 -0.033379 1.384251 0.728936 | "
        "-4.297512 0.654527 0.933582 1.284174 | -3.914278 0.530153 1.03701 1.272249",
        5,
    ),
    "db_mtl, decayed": (
        jd.db_mtl(0.9, 0.5),
        "-2.420577 -0.6 1.220577 0.765704 | -4.005637 1.511207 2.093893 -0.596849 | "
        "-14.915213 7.927028 0.575995 3.051266 | -4.655124 2.430477 2.867924 2.226245",
        5,
    ),
    "excess_mtl": (
        jd.excess_mtl(0.1, 0),
        "0.344253 0.344253 0.311493 | 0.342748 0.340252 0.317 | 0.341374 0.338312 0.320314",
        5,
    ),
    "excess_mtl after a warm-up": (
        jd.excess_mtl(0.5, 2),
        "0.333333 0.333333 0.333333 | " * 2 + "0.328428 0.329497 0.342076 | 0.319834 0.340607 0.339559",
        5,
    ),
    # LibMTL adds 1e-8 to norms.
    "moco": (
        jd.moco(),
        "-0.397082 -0.062031 0.273021 -0.075582 | -0.400857 0.191835 0.220896 -0.097287 | "
        "-0.399906 0.275795 0.069273 0.016312 | -0.398785 0.284672 0.032297 0.166863",
        5.7,
    ),
    "moco of other numbers": (
        jd.moco(0.8, 0.3, 0.2, beta_sigma=0.2, gamma_sigma=0.1),
        "-0.609897 -0.105257 0.399383 -0.033214 | -0.463783 0.432259 0.211962 -0.112856 | "
        "-0.429635 0.444357 -0.093988 0.12818 | -0.309868 0.34817 -0.001959 0.41409",
        5.7,
    ),
    "modo": (
        jd.modo(0.01, 0.1),
        "0.243333 0.26 0.496667 | 0.100257 0.576323 0.32342 | 0.121114 0.520987 0.357899 | 0.439142 0.354583 0.206275",
        5.7,
    ),
    "nash_mtl": (
        jd.nash_mtl(1.0, 1),
        "0.812673 0.466792 -0.340985 0.07346 | 0.715141 0.574886 0.153124 0.366923 | "
        "0.07346 -0.340985 0.466792 0.812673 | 0.66056 0.252311 0.252311 0.66056",
        4.7,
    ),
    "nash_mtl every other": (
        jd.nash_mtl(1.0, 2),
        "0.812673 0.466792 -0.340985 0.07346 | 0.722124 0.565918 0.161287 0.363677 | "
        "0.07346 -0.340985 0.466792 0.812673 | 0.511609 0.072635 0.072635 0.511609",
        4.7,
    ),
    "nash_mtl, not clipped": (
        jd.nash_mtl(0.0, 2),
        "1.407591 0.808508 -0.590604 0.127237 | 2.56124 2.007205 0.572054 1.289895 | "
        "0.127237 -0.590604 0.808508 1.407591 | 0.511609 0.072635 0.072635 0.511609",
        4.7,
    ),
    "pcd": (
        jd.pcd(0.3),
        "-5.819791 -1.917432 1.984927 2.124513 | -3.427574 4.571223 2.51333 -1.427875 | "
        "-3.011148 3.846151 0.126534 2.474692 | -4.106092 0.404532 0.465304 4.975928",
        5,
    ),
    "sdmgrad": (
        jd.sdmgrad(rate=0.02),
        "0.244037 0.270997 0.484966 | 0.119908 0.531999 0.348093 | "
        "0.182636 0.455441 0.361923 | 0.429557 0.345736 0.224707",
        5.7,
    ),
    "sdmgrad preferring": (
        jd.sdmgrad(n_steps=3, preference=[0.2, 0.3, 0.5]),
        "0.046154 0.069231 0.884615 | 0.046154 0.069231 0.884615 | "
        "0.046154 0.241608 0.712238 | 0.815385 0.069231 0.115385",
        5.7,
    ),
}


def numbers_in(text):
    return torch.tensor([[float(x) for x in row.split()] for row in text.split("|")], dtype=torch.float64)


def replayed(rule, rows, losses, dtype=torch.float64):
    """Weights and direction of each call."""
    state = None
    for k, J in enumerate(rows):
        others = (OTHERS[k].to(dtype),) if rule.view is cross_gramian else ()
        result = jd.aggregate(rule, J.to(dtype), state, *others, losses=losses[k].to(dtype))
        state = result.state
        yield result


@pytest.mark.parametrize("name", OF_LOSSES)
def test_the_weights_of_four_calls(name):
    rule, expected = OF_LOSSES[name]
    found = torch.stack([result.weights for result in replayed(rule, [ROWS] * 4, LOSSES)])
    check_within(found, numbers_in(expected), OF_LOSSES_END)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", OF_ROWS)
def test_the_directions_of_calls_on_other_rows(name, dtype):
    rule, expected, digits = OF_ROWS[name]
    rows, losses = BARGAINS if "nash" in name else NUMBERS, [values(k) for k in range(4)]
    for result, J, wanted in zip(replayed(rule, rows, losses, dtype), rows, numbers_in(expected), strict=False):
        assert result.direction.dtype == dtype
        if len(wanted) == 4:
            check_within(result.direction, wanted, 10.0**-digits + 64 * eps(dtype) * wanted.abs().max())
        else:
            check_within(result.weights, wanted, 10.0**-digits + 64 * eps(dtype))
            check_within(result.direction, wanted @ J, (10.0**-digits + 64 * eps(dtype)) * J.abs().sum(0))
