"""DB-MTL: the paper's equations in plain loops, and directions that the current rows do not contain."""

import pytest
import torch
from bounds import check_within, eps
from sequences import number, values

from functional_jd.aggregation.aggregate import aggregate
from functional_jd.aggregators.cr_mogm import cr_mogm
from functional_jd.aggregators.db_mtl import db_mtl
from functional_jd.aggregators.grouped import grouped
from functional_jd.aggregators.mean import mean


def test_what_the_current_rows_do_not_contain_is_carried_over():
    rule, ones = db_mtl(0.5), torch.ones(2)
    state = aggregate(rule, torch.tensor([[0.0, 4.0], [4.0, 0.0]]), losses=ones).state
    direction = aggregate(rule, torch.tensor([[0.0, 0.0], [0.0, 0.0]]), state, losses=ones).direction
    assert direction.tolist() == [1.0, 1.0]


def test_every_group_carries_its_own_rows_and_averages_are_averaged():
    trees = [{"b": number(k)[:, :1], "w": number(k)[:, 1:]} for k in range(3)]
    both, first, second = grouped({"b": db_mtl(), "w": mean()}), None, None
    for k, tree in enumerate(trees):
        direction, _, first = aggregate(both, tree, first, losses=values(k))
        expected, _, second = aggregate(db_mtl(), tree["b"], second, losses=values(k))
        torch.testing.assert_close(direction, {"b": expected, "w": tree["w"].mean(0)})
    directions, state = [], None
    for k in range(2):
        direction, _, state = aggregate(cr_mogm(db_mtl(0.0), 0.25), number(0), state, losses=values(k))
        directions.append(direction)
    plain = [aggregate(db_mtl(0.0), number(0), losses=values(k)).direction for k in range(2)]
    torch.testing.assert_close(directions, [plain[0], 0.25 * plain[0] + 0.75 * plain[1]])


@pytest.mark.parametrize("scales", [[1e-18, 1.0, 1e18], [1e18] * 3, [1e-18] * 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_unit_of_a_loss_does_not_matter(scales, dtype):
    factors, rule, state, scaled = torch.tensor(scales, dtype=dtype), db_mtl(), None, None
    for k in range(3):
        expected, _, state = aggregate(rule, number(k).to(dtype), state, losses=values(k).to(dtype))
        rows, losses = factors.unsqueeze(1) * number(k).to(dtype), factors * values(k).to(dtype)
        direction, _, scaled = aggregate(rule, rows, scaled, losses=losses)
        check_within(direction, expected, 64 * eps(dtype) * expected.abs().max())
