"""Values that papers and peers print: torchjd 0.18 and LibMTL, in float64 unless the digits say otherwise."""

import pytest
import torch
from bounds import check_within, eps, gramian_bound

import functional_jd as jd

TWO = torch.tensor([[-4.0, 1, 1], [6, 1, 1]], dtype=torch.float64)
FIVE = torch.tensor([[5.0, -8, 1], [6, 5, 0], [8, 5, 1], [5, -1, 9], [-4, -9, -1]], dtype=torch.float64)
SIX = torch.tensor([[-6.0, -4], [2, 7], [4, -8], [-4, 4], [2, -6], [8, -1]], dtype=torch.float64)

KEY = jd.random.key(7)

# By rows: a rule, what it gives, and in which digit of a unit the printed numbers end. Other arguments: `tests/exact`.
ONE_CALL = [
    (jd.aligned_mtl(), TWO, [0.2133, 0.9673, 0.9673], 4),
    (jd.cagrad(0.5), TWO, [0.1835, 1.2041, 1.2041], 4),
    (jd.config(), TWO, [0.1588, 2.0706, 2.0706], 4),
    # By hand: the mean (1, 1, 1) conflicts with the first row by -2, of squared norm 18: add 2 / 18 of it.
    (jd.dualproj(), TWO, [5 / 9, 10 / 9, 10 / 9], 15),
    (jd.excess_mtl(), TWO.float(), [4.80797, 1.0, 1.0], 4),
    (jd.fairgrad(1.0), TWO, [0.0766, 0.9985, 0.9985], 4),
    (jd.imtl_g(), TWO, [0.0767, 1.0, 1.0], 4),
    (jd.krum(1, 1), SIX, [2.0, -6.0], 15),
    (jd.mgda(), TWO, [0.0, 1.0, 1.0], 15),
    (jd.nash_mtl(), TWO, [0.0542, 0.7061, 0.7061], 4),
    (jd.nash_mtl(0.0), TWO, [0.0766, 0.9985, 0.9985], 4),
    (jd.pcd(0.02), TWO, [-0.8200, 2.9434, 2.9434], 4),
    (jd.pcgrad(KEY), TWO, [0.5848, 3.8012, 3.8012], 4),
    (jd.trimmed_mean(1), FIVE, [16 / 3, -4 / 3, 2 / 3], 15),
    # Both projections in closed form: g_1 + s g_2 with s = 22 / 38, g_2 + s g_1 with s = 22 / 18; then their mean.
    (jd.upgrad(), TWO, [0.2923976608, 1.9005847953, 1.9005847953], 10),
]


@pytest.mark.parametrize(("rule", "J", "expected", "digits"), ONE_CALL)
def test_the_direction_of_one_call(rule, J, expected, digits):
    expected = torch.tensor(expected, dtype=torch.float64)
    bound = 10.0**-digits + gramian_bound(J.double(), expected.abs().max()) + eps(J.dtype) * expected.abs()
    check_within(jd.aggregate(rule, J).direction, expected, bound)
