"""An absent objective, whose loss is exactly 0 with a row of zeros: no rule changes what it remembers of it."""

import re
from pathlib import Path

import pytest
import torch
from rule_table import RULES, rule_of

import functional_jd as jd
from functional_jd.core.tree import tree_leaves, tree_map

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "recipes.md"


def drawn(name, seed, absent=None):
    """Rows and losses, of which one objective may be absent."""
    rows, like = RULES[name].rows, RULES[name].like
    m = rows if isinstance(rows, int) else rows[1]
    draw = torch.Generator().manual_seed(seed)
    like = torch.zeros(4) if like is None else like
    present = torch.arange(m) != (m if absent is None else absent)
    leaf = lambda p: torch.randn(m, *p.shape, generator=draw, dtype=torch.float64)
    J = tree_map(lambda p: leaf(p) * present.reshape(m, *[1] * p.ndim), like)
    return J, (1 + torch.rand(m, generator=draw, dtype=torch.float64)) * present


def run(rule, cases, state=None):
    rule = rule_of(rule) if isinstance(rule, str) else rule
    for J, losses in cases:
        found = jd.aggregate(rule, J, state, J, losses=losses)
        state = found.state
    return found


def of_row(state, m, i):
    """What is remembered of one objective: floating numbers that have one entry for each."""
    leaves = [x for x in tree_leaves(state) if x.is_floating_point() and x.shape[:1] == (m,)]
    return [torch.cat([x[i], x[:, i]]) if x.shape == (m, m) else x[i] for x in leaves]


@pytest.mark.parametrize("name", RULES)
def test_the_memory_of_an_absent_objective_stays(name):
    before = run(name, [drawn(name, seed) for seed in range(2)])
    m = len(drawn(name, 0)[1])
    after = run(name, [drawn(name, 2 + seed, absent=1) for seed in range(5)], before.state)
    for old, new in zip(of_row(before.state, m, 1), of_row(after.state, m, 1), strict=True):
        assert torch.equal(old, new)
    if kind_of(name) != "skips the step":
        assert all(x.isfinite().all() for x in tree_leaves((after.direction, after.state)))
    others = zip(of_row(before.state, m, 0), of_row(after.state, m, 0), strict=True)
    assert all(torch.equal(*pair) for pair in others) == (not of_row(after.state, m, 0))


def test_rows_that_are_remembered_keep_the_row_and_no_column_of_an_absent_objective():
    """The rows of a parameter with m entries are `[m, m]` too, and their columns are entries."""
    rule = jd.Aggregator(jd.views.full_jacobian, torch.zeros_like, lambda J, _: (torch.ones(3), J.clone()))
    draw = torch.Generator().manual_seed(0)
    old, J = torch.randn(3, 3, generator=draw), torch.randn(3, 3, generator=draw)
    J[1] = 0
    found = jd.aggregate(rule, J, old, losses=torch.tensor([1.0, 0.0, 2.0])).state
    assert torch.equal(found, torch.stack([J[0], old[1], J[2]]))


AROUND = {"cr_mogm": jd.cr_mogm, "normalized": jd.aggregators.normalized}
AROUND["protect"] = lambda rule: jd.aggregators.protect(rule, 0)
AROUND["grouped"] = lambda rule: jd.grouped(dict.fromkeys(RULES["grouped"].like, rule))


def kind_of(name, rule=None):
    """What the rule does with a row of zeros whose loss is 0, beside two batches with that objective."""
    around = name in AROUND
    if around and rule is None:
        kinds = [kind_of(name, AROUND[name](inner)) for inner in (jd.total(), jd.mean())]
        return "does what the rule inside does" if kinds == ["is left out", "counts as one of m rows"] else kinds
    rule = rule or rule_of(name)
    state = run(rule, [drawn(name, seed) for seed in range(2)]).state
    J, losses = drawn(name, 5, absent=len(drawn(name, 0)[1]) - 1)
    found = run(rule, [(J, losses)], state)
    direction = torch.cat([x.flatten() for x in tree_leaves(found.direction)])
    if not direction.isfinite().all():
        return "skips the step"
    if direction.norm() < 1e-6:
        return "stops all"
    if not isinstance(RULES[name].rows, int):
        m, kept = len(losses), tree_map(lambda x: x[:-1], J)
        fewer = tree_map(lambda x: x[:-1, :-1] if x.shape == (m, m) else x[:-1] if x.shape[:1] == (m,) else x, state)
        flat = lambda *given: torch.cat([x.flatten() for x in tree_leaves(run(rule, *given).direction)])
        first_and_later = [(None, None), (state, fewer)]
        if around or any(x.shape == (2,) for x in tree_leaves(state)):  # a key draws other numbers for fewer rows
            first_and_later.pop()
        pairs = [(flat([(J, losses)], old), flat([(kept, losses[:-1])], cut)) for old, cut in first_and_later]
        for what, factor in (("is left out", 1.0), ("counts as one of m rows", 1 - 1 / m)):
            if all((first - factor * without).norm() < 1e-9 * without.norm() for first, without in pairs):
                return what
    return "has its own weights"


def test_transforms_keep_it_too():
    rule, (J, losses) = jd.gradnorm(), drawn("gradnorm", 0, absent=1)
    before = run("gradnorm", [drawn("gradnorm", 7)]).state
    follow = lambda J, losses: jd.aggregate(rule, J, before, losses=losses).state.logits
    for f in (follow, torch.compile(follow, fullgraph=True, backend="aot_eager")):
        assert f(J, losses)[1] == before.logits[1]
    batched = torch.vmap(follow)(torch.stack([J, J + 1]), torch.stack([losses, losses + 1]))
    assert batched[0, 1] == before.logits[1] != batched[1, 1]
    slope = torch.func.grad(lambda J: follow(J, losses).square().sum())(J)
    assert slope.isfinite().all()
    _, tangent = torch.func.jvp(lambda J: follow(J, losses), (J,), (J,))
    assert tangent[1] == 0


def test_the_table_of_the_recipe_has_all_rules():
    text = PAGE.read_text(encoding="utf-8").partition("## Missing labels")[2].partition("\n## ")[0]
    table = {}
    for line in text.splitlines():
        if line.startswith("| ") and not line.startswith(("| ---", "| a row of")):
            what, rules = line.strip("| ").split(" | ")
            table |= dict.fromkeys(re.findall(r"`(\w+)`", rules), what.partition(":")[0])
    assert table == {name: kind_of(name) for name in RULES}
