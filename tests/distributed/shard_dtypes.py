"""Steps on shards of several models, with several rules, in every dtype: those of whole parameters."""

import torch
from shard_models import (
    ADAMW_EPS,
    EXAMPLES,
    OPTIMIZERS,
    RATE,
    STEPS,
    all_same,
    by_part,
    cases,
    close,
    keeps_placements,
    mesh,
    mine,
    placed,
    same,
    spread,
    total_weight,
    trained,
)
from torch.utils._pytree import tree_leaves

import functional_jd as fj
from functional_jd import distributed

SCALE, OVERFLOW, NOT_A_NUMBER = 2.0**12, 1, 3
"""In float16: the scale, and the steps in which the last rank's first loss overflows or is not a number."""


def method(losses, rule, optimizer):
    return {"losses": losses, "aggregator": rule, "optimizer": OPTIMIZERS[optimizer]()}


def compare(dtype, optimizer, first, bound):
    """Steps on shards with steps on whole parameters; `bound(params, losses, batch, infos)` is that of an entry."""

    def alone(params, losses, batch, rule):
        return trained(params, batch, method(losses, rule, optimizer))

    problems = list(cases(first, dtype, half=dtype == torch.float64))
    for (params, losses, batch, rule), expected in zip(problems, spread(alone, problems), strict=True):
        own, (expected, expected_infos) = placed(params), expected
        state, infos = trained(own, mine(batch), method(distributed.sharded(losses, mesh()), rule, optimizer))
        assert keeps_placements(state, own)
        assert all_same((state, infos))
        error = bound(params, losses, batch, expected_infos)
        close(state.params, expected.params, error)
        close(state[1:], expected[1:], 10 * error)  # of a velocity, a tenth moves the parameters
        close([info.losses for info in infos], [info.losses for info in expected_infos], 10 * error)
        assert all(info.moved for info in infos)


def check_float32_steps_of_sgd_equal_those_of_whole_parameters():
    compare(torch.float32, "sgd", 0, lambda *_: 1e-6)


def check_steps_of_adamw_equal_those_of_whole_parameters_to_its_eps():
    """In float64: in float32 the roundings of a direction are a thousandth of eps."""

    def bound(params, losses, batch, infos):
        """A step moves a small entry by `rate / eps` of the direction: so of its roundings, too."""
        J, _ = fj.jacobian_fn(losses)(params, *batch)
        terms = EXAMPLES * max(float(leaf.abs().max()) for leaf in tree_leaves(J)) * total_weight(infos)
        return STEPS * RATE / ADAMW_EPS * torch.finfo(torch.float64).eps * terms

    compare(torch.float64, "adamw", 3, bound)


def check_bfloat16_steps_equal_those_of_the_mean_over_the_ranks():
    def alone(params, losses, batch, rule):
        return trained(params, batch, method(by_part(fj.autocast(losses, torch.bfloat16)), rule, "plain"))

    problems = list(cases(1, half=True))
    for (params, losses, batch, rule), expected in zip(problems, spread(alone, problems), strict=True):
        low = fj.autocast(distributed.sharded(losses, mesh()), torch.bfloat16)  # keeps what is declared
        state, infos = trained(placed(params), mine(batch), method(low, rule, "plain"))
        assert all_same((state, infos))
        # The parts' gradients are added in another order, in float32, and rounded to bfloat16 on their way.
        close(state.params, expected[0].params, bound_of(torch.bfloat16, expected[1]))


def bound_of(dtype, infos):
    """Rows of size 1, rounded to the dtype on their way to each of the steps of size .1."""
    return 2 * STEPS * 0.1 * torch.finfo(dtype).eps * max(1.0, total_weight(infos))


def marked(losses):
    """In float16, three losses of which the first is multiplied by a factor, and something is added to it."""

    def of_marked(p, factor, added, *batch):
        values = torch.cat([leaf.reshape(-1).float() for leaf in tree_leaves(losses(p, *batch))])
        return values * torch.cat([factor.amax(0), factor.new_ones(2)]) + torch.cat([added.amax(0), added.new_zeros(2)])

    return fj.autocast(of_marked, torch.float16)


def marks(k):
    """The factors, and what is added, of the examples: the last one is on the last rank."""
    factor, added = torch.ones(EXAMPLES, 1), torch.zeros(EXAMPLES, 1)
    factor[-1] = 2.0**30 if k == OVERFLOW else 1.0
    added[-1] = torch.nan if k == NOT_A_NUMBER else 0.0
    return factor, added


def check_an_overflow_on_one_rank_backs_off_its_own_scale_and_nan_none():
    """With a scale per objective. An overflow and NaN skip the step on all ranks."""
    scale = fj.scale_state(SCALE, shape=(3,))

    def alone(params, losses, batch, rule):
        how = method(by_part(marked(losses)), rule, "plain")
        state, infos = fj.train_state(params, *marks(0), *batch, scale=scale, **how), []
        for k in range(STEPS):
            state, info = fj.step(state, *marks(k), *batch, **how)
            infos.append(info)
        return state, infos

    problems = list(cases(2))
    for (params, losses, batch, rule), expected in zip(problems, spread(alone, problems), strict=True):
        how = method(distributed.sharded(marked(losses), mesh()), rule, "plain")
        state = fj.train_state(placed(params), *mine((*marks(0), *batch)), scale=scale, **how)
        for k in range(STEPS):
            before, skipped = state, k in (OVERFLOW, NOT_A_NUMBER)
            state, info = fj.step(state, *mine((*marks(k), *batch)), **how)
            others = k != OVERFLOW or rule.view.products != "none"  # in one backward pass, an overflow is everybody's
            assert info.finite.tolist() == [not skipped, others, others]
            assert same(state[:4], before[:4]) == skipped, "a skipped step changes nothing but the scale"
            assert all_same((state, info))
        others = SCALE if rule.view.products != "none" else SCALE / 2
        assert state.scale.scale.tolist() == [SCALE / 2, others, others], "no scale would mend NaN"
        assert same(state.scale, expected[0].scale)
        assert keeps_placements(state, before.params)
        close(state.params, expected[0].params, bound_of(torch.float16, expected[1]))
