"""Values that papers and peers print: torchjd 0.18 and LibMTL, in float64 unless the digits say otherwise."""

import pytest
import torch
from bounds import check_within, eps, gramian_bound
from sequences import DEPENDENT, J3, number, values

import functional_jd as jd
from functional_jd.aggregation.views import cross_gramian

TWO = torch.tensor([[-4.0, 1, 1], [6, 1, 1]], dtype=torch.float64)
SECOND = torch.tensor([[5.0, 2, -4, -2], [3, -2, -1, -5], [1, 3, 4, -1]], dtype=torch.float64)
FIVE = torch.tensor([[5.0, -8, 1], [6, 5, 0], [8, 5, 1], [5, -1, 9], [-4, -9, -1]], dtype=torch.float64)
SIX = torch.tensor([[-6.0, -4], [2, 7], [4, -8], [-4, 4], [2, -6], [8, -1]], dtype=torch.float64)

BARGAINS = [J3, J3.flip(0) + 1, 3 * J3.flip(1), J3 + J3.flip(1)]
NUMBERS = [number(k) for k in range(4)]
OTHERS = [number(k) + number(k + 4) / 2 for k in range(4)]
KEY = jd.random.key(7)
PREFER = [1.0, 2.0, 0.0]

# By rows: a rule, what it gives, and in which digit of a unit the printed numbers end. More arguments: `tests/exact`.
ONE_CALL = [
    (jd.aligned_mtl(), TWO, [0.2133, 0.9673, 0.9673], 4),
    (jd.aligned_mtl(None, "rmse"), TWO, [0.5764, 2.6142, 2.6142], 4),
    (jd.aligned_mtl(PREFER), DEPENDENT, [-0.8831879840834715, 4.018955980622486], 15),
    (jd.cagrad(0.5), TWO, [0.1835, 1.2041, 1.2041], 4),
    (jd.cagrad(0.4), TWO, [0.3468, 1.1633, 1.1633], 4),
    (jd.cagrad(0.4), SECOND, [3.31946, 1.95839, 0.94452, -2.98613], 4),
    (jd.config(), TWO, [0.1588, 2.0706, 2.0706], 4),
    (jd.config(PREFER), DEPENDENT, [-0.5491796789846518, 2.048509474153692], 15),
    # By hand: the mean (1, 1, 1) conflicts with the first row by -2, of squared norm 18: add 2 / 18 of it.
    (jd.dualproj(), TWO, [5 / 9, 10 / 9, 10 / 9], 15),
    (jd.excess_mtl(), TWO.float(), [4.80797, 1.0, 1.0], 4),
    (jd.fairgrad(1.0), TWO, [0.0766, 0.9985, 0.9985], 4),
    (jd.fairgrad(2.0), TWO, [0.0313, 0.7908, 0.7908], 4),
    (jd.fairgrad(0.5), TWO, [0.1810, 1.2682, 1.2682], 4),
    (jd.fairgrad(2.0), DEPENDENT, [0.4630150594148, 1.3804672061027], 7),
    (jd.imtl_g(), TWO, [0.0767, 1.0, 1.0], 4),
    (jd.imtl_g(), DEPENDENT, [1.0773237463197796, 1.3690705014720885], 15),
    (jd.krum(1, 1), SIX, [2.0, -6.0], 15),
    (jd.krum(2, 3), SIX, [2 / 3, -10 / 3], 15),
    (jd.krum(1, 2), SIX, [3.0, -7.0], 15),
    (jd.mgda(), TWO, [0.0, 1.0, 1.0], 15),
    (jd.nash_mtl(), TWO, [0.0542, 0.7061, 0.7061], 4),
    (jd.nash_mtl(0.0), TWO, [0.0766, 0.9985, 0.9985], 4),
    (jd.pcd(0.02), TWO, [-0.8200, 2.9434, 2.9434], 4),
    (jd.pcd(0.5), TWO, [2.0889, 2.6112, 2.6112], 4),
    (jd.pcgrad(KEY), TWO, [0.5848, 3.8012, 3.8012], 4),
    (jd.pcgrad(KEY), torch.tensor([[1.0, 0, 2], [0, 2, -2]], dtype=torch.float64), [1.8, 3.0, 0.6], 15),
    (jd.trimmed_mean(1), FIVE, [16 / 3, -4 / 3, 2 / 3], 15),
    (jd.trimmed_mean(2), FIVE, [5.0, -1.0, 1.0], 15),
    (jd.trimmed_mean(0), TWO, [1.0, 1.0, 1.0], 15),
    # Both projections in closed form: g_1 + s g_2 with s = 22 / 38, g_2 + s g_1 with s = 22 / 18; then their mean.
    (jd.upgrad(), TWO, [0.2923976608, 1.9005847953, 1.9005847953], 10),
]


@pytest.mark.parametrize(("rule", "J", "expected", "digits"), ONE_CALL)
def test_the_direction_of_one_call(rule, J, expected, digits):
    expected = torch.tensor(expected, dtype=torch.float64)
    bound = 10.0**-digits + gramian_bound(J.double(), expected.abs().max()) + eps(J.dtype) * expected.abs()
    check_within(jd.aggregate(rule, J).direction, expected, bound)


# Directions on `number(k)` and `values(k)`, or weights, which are three numbers.
OF_ROWS = {
    "db_mtl, decayed": (
        jd.db_mtl(0.9, 0.5),
        "-2.420577 -0.6 1.220577 0.765704 | -4.005637 1.511207 2.093893 -0.596849 | "
        "-14.915213 7.927028 0.575995 3.051266 | -4.655124 2.430477 2.867924 2.226245",
        5,
    ),
    "excess_mtl after a warm-up": (
        jd.excess_mtl(0.5, 2),
        "0.333333 0.333333 0.333333 | " * 2 + "0.328428 0.329497 0.342076 | 0.319834 0.340607 0.339559",
        5,
    ),
    # LibMTL adds 1e-8 to norms.
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
    "nash_mtl every other": (
        jd.nash_mtl(1.0, 2),
        "0.812673 0.466792 -0.340985 0.07346 | 0.722124 0.565918 0.161287 0.363677 | "
        "0.07346 -0.340985 0.466792 0.812673 | 0.511609 0.072635 0.072635 0.511609",
        4.7,
    ),
    "pcd": (
        jd.pcd(0.3),
        "-5.819791 -1.917432 1.984927 2.124513 | -3.427574 4.571223 2.51333 -1.427875 | "
        "-3.011148 3.846151 0.126534 2.474692 | -4.106092 0.404532 0.465304 4.975928",
        5,
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", OF_ROWS)
def test_the_directions_of_calls_on_other_rows(name, dtype):
    (rule, expected, digits), state = OF_ROWS[name], None
    for k, wanted in enumerate(numbers_in(expected)):
        J, others = (BARGAINS if "nash" in name else NUMBERS)[k], [OTHERS[k].to(dtype)] * (rule.view is cross_gramian)
        result = jd.aggregate(rule, J.to(dtype), state, *others, losses=values(k).to(dtype))
        state = result.state
        assert result.direction.dtype == dtype
        if len(wanted) == 4:
            check_within(result.direction, wanted, 10.0**-digits + 64 * eps(dtype) * wanted.abs().max())
        else:
            check_within(result.weights, wanted, 10.0**-digits + 64 * eps(dtype))
            check_within(result.direction, wanted @ J, (10.0**-digits + 64 * eps(dtype)) * J.abs().sum(0))
