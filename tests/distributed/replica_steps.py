"""Steps of replicas, and the collectives that they consist of."""

from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
from modes import Called
from replica_problems import EACH, TASKS, all_same, begin, begun, close, mine, plain, problem, same, step, trained
from torch.distributed import get_rank as rank
from torch.distributed import get_world_size as replicas
from torch.utils._pytree import tree_leaves, tree_map

import functional_jd as fj
from functional_jd import distributed
from functional_jd.aggregators.famo import famo
from functional_jd.aggregators.stch import stch


def check_a_modules_parameters_leave_their_graph_behind():
    linear, x = torch.nn.Linear(5, 2), torch.randn(4, 5)
    losses = lambda p, x: torch.func.functional_call(linear, p, (x,)).square().mean(0)
    method = {"losses": losses, "aggregator": fj.upgrad(), "optimizer": fj.adamw(0.1)}
    state = begin(dict(linear.named_parameters()), x, **method)
    after, info = step(state, x, **method)
    assert not any(leaf.requires_grad for leaf in tree_leaves((tuple(state), tuple(after), tuple(info))))


def check_replicas_stay_equal_and_equal_one_process_with_the_whole_batch():
    params, batch = problem()
    drawing = fj.graddrop(fj.random.key(3)), fj.random_weights(fj.random.key(5))
    cases = [(plain, rule, ()) for rule in (fj.upgrad(), fj.mean(), famo(), drawing[1])]
    cases += [(plain, rule, (2,)) for rule in (stch(), fj.nash_mtl(), drawing[0])]
    cases += [(TASKS, fj.upgrad(), (2,)), (TASKS, fj.upgrad(), ()), (TASKS, fj.constant([0.25, 4.0]), ())]
    cases += [(EACH, fj.upgrad(), ()), (EACH, stch(), ())]
    for losses, rule, shape in cases if replicas() == 2 else cases[:9:4]:
        how = {"losses": losses, "aggregator": rule, "optimizer": fj.adamw(1e-2)}
        scale = fj.scale_state(2.0**10, shape=shape)
        state, infos = trained(begin, step, how, scale, params, mine(batch))
        assert all_same((state, infos))
        assert all(info.finite.all() for info in infos)
        expected, expected_infos = trained(fj.train_state, fj.step, how, scale, params, batch)
        assert not same(state.params, params)
        close(state, expected)
        close([info[:2] for info in infos], [info[:2] for info in expected_infos])


def check_in_float16_the_replicas_stay_equal_too():
    params, batch = problem(torch.float32)
    for losses in (plain, TASKS):
        low, optimizer = fj.autocast(losses) if losses is plain else losses, fj.sgd(1e-2, momentum=0.9)
        how = {"losses": low, "aggregator": fj.upgrad(), "optimizer": optimizer}
        state, infos = trained(begin, step, how, fj.scale_state(), params, mine(batch))
        assert all_same((state, infos))
        assert not same(state.params, params)


def check_one_replicas_overflow_skips_the_step_on_all():
    for rule in (fj.upgrad(), fj.total()):
        for shape in ((), (2,)):
            given = {"scale": fj.scale_state(2.0**120, shape=shape), "dtype": torch.float32}
            params, (x, y, z), how, state = begun(plain, rule, fj.sgd(1e-2, momentum=0.9), **given)
            # Times the scale more than float32 holds: the first objective, on the last replica only.
            after, info = step(state, x, y + 1e6 if rank() == replicas() - 1 else y, z, **how)
            assert all_same((after, info.finite))
            assert same(after[:3], state[:3]), "nothing but the scale changes"
            own = [False, rule.view.products != "none"]  # in one backward pass, an overflow is everybody's
            finite = torch.tensor(own if shape else False)
            assert torch.equal(info.finite, finite)
            assert torch.equal(after.scale.scale, torch.where(finite, 2.0**120, 2.0**119))
            again, info = step(after, x, y, z, **how)
            assert info.finite.all()
            assert not same(again.params, params), "the next step is taken"


def check_a_rule_that_refuses_skips_the_step_but_not_the_scale():
    refusing = fj.stateless(fj.views.gramian, lambda G: G.diagonal() * torch.nan)
    _, batch, how, state = begun(rule=refusing, scale=fj.scale_state(4.0, growth_interval=1))
    after, info = step(state, *batch, **how)
    assert not info.finite.any()
    assert same(after[:3], state[:3])
    assert after.scale.scale == 8


def check_the_mean_is_that_of_all():
    dtypes = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
    shapes = [[()], [(3, 2)], [(0,), (2,)], [(3,), (), (2, 1)], [(1, 3), (2, 0), (3, 3)]]
    for case, (dtype, own) in enumerate(product(dtypes, shapes)):
        draw = torch.Generator().manual_seed(case)
        numbers = torch.randint(-9, 10, (replicas(), 8), generator=draw).float()
        compare_with_the_mean_by_hand(1 + case % 3, own, dtype, numbers)


def compare_with_the_mean_by_hand(m, shapes, dtype, numbers):
    def jacobian(r):
        draw = [numbers[r].repeat(4)[: m * torch.Size(s).numel()].reshape(m, *s) for s in shapes]
        return {str(i): leaf.to(dtype) for i, leaf in enumerate(draw)}

    local = jacobian(rank())
    before = tree_map(torch.clone, local)
    mean = distributed.mean_jacobian(local)
    assert same(local, before)
    assert all_same(mean)
    wanted = {k: sum(jacobian(r)[k].double() for r in range(replicas())) / replicas() for k in local}
    assert same(mean, tree_map(lambda leaf: leaf.to(dtype), wanted)), "small whole numbers: exact"
    # Losses that are linear have this Jacobian everywhere, and `total` of a Gramian rule needs every column once.
    rule = fj.stateless(fj.views.gramian, lambda G: torch.ones_like(G[0]))
    params = tree_map(lambda leaf: torch.zeros_like(leaf[0]), local)

    def losses(p):
        return sum((p[k] * local[k]).unsqueeze(-1).flatten(1).sum(1) for k in p)

    how = {"losses": losses, "aggregator": rule, "optimizer": fj.sgd(1.0)}
    state = fj.TrainState(params, (), how["optimizer"].init(params), (), fj.precision.no_scale())
    after, _ = step(state, **how)
    close(after.params, tree_map(lambda leaf: -leaf.sum(0).to(dtype), wanted), 32)
    assert all_same(after)


def check_small_leaves_travel_together():
    tree = {f"a{i}": torch.full((i,), float(rank() + i)) for i in range(4)} | {"b": torch.ones(2, 3).double()}
    large = {"a4": torch.zeros(1 << 22), "a5": torch.ones(())}
    with Called() as seen:
        mean = distributed.mean_jacobian(tree | large)
    assert sum(n for name, n in seen.names.items() if "all_reduce" in name) == 4, (
        "four leaves, the large one, the one after it, and the one of another dtype"
    )
    half = (replicas() - 1) / 2
    assert same(mean, {f"a{i}": torch.full((i,), half + i) for i in range(4)} | {"b": tree["b"]} | large)


def check_a_mean_of_finite_values_is_finite():
    largest = torch.full((2, 3), torch.finfo(torch.float32).max)
    assert torch.isfinite(distributed.mean_jacobian(largest)).all()
    half = torch.full((2, 3), 65504.0, dtype=torch.float16)
    assert torch.equal(distributed.mean_jacobian(half), half)
    nan = torch.where(torch.tensor(rank() == 0), torch.nan, 1.0).reshape(1, 1)
    assert distributed.mean_jacobian(nan).isnan().all()


def check_a_flag_holds_where_it_holds_on_all():
    for everywhere in range(2 ** replicas()):
        flags = [bool(everywhere >> r & 1) for r in range(replicas())]
        assert torch.equal(distributed.agree(torch.tensor(flags[rank()])), torch.tensor(all(flags)))
    by_row = torch.arange(replicas()) != rank()
    assert torch.equal(distributed.agree(torch.cat([by_row, torch.tensor([True])]))[-1:], torch.tensor([True]))
    assert not distributed.agree(by_row).any()


def check_the_mean_is_linear_under_every_transform():
    x = torch.arange(12.0, dtype=torch.float64).reshape(4, 3) + 10 * rank()
    mean = torch.arange(12.0, dtype=torch.float64).reshape(4, 3) + 5 * (replicas() - 1)
    f = distributed.mean_jacobian
    torch.testing.assert_close(torch.vmap(f)(x), mean)
    torch.testing.assert_close(torch.vmap(f, in_dims=1, out_dims=1)(x), mean)

    # Every replica's own loss, r + 1 times the sum of squares: the cotangents' mean has the mean of r + 1.
    def loss(x):
        return (f(x) ** 2).sum() * (rank() + 1)

    gradient = 2 * mean * (replicas() + 1) / 2
    torch.testing.assert_close(torch.func.grad(loss)(x), gradient)
    torch.testing.assert_close(torch.vmap(torch.func.grad(loss))(x), gradient)
    leaf = x.clone().requires_grad_()
    loss(leaf).backward()
    torch.testing.assert_close(leaf.grad, gradient)
    value, tangent = torch.func.jvp(f, (x,), (x * 2,))
    torch.testing.assert_close((value, tangent), (mean, mean * 2))
    hessian = torch.func.hessian(lambda x: (f(x) ** 2).sum() / 2)(x[0])
    torch.testing.assert_close(hessian, torch.eye(3, dtype=torch.float64))  # all replicas move by the same tangent
    flags = torch.vmap(distributed.agree)(torch.arange(3) != rank())
    assert flags.tolist() == [i >= replicas() for i in range(3)]


def check_a_step_of_a_step_can_be_differentiated():
    """The derivative with respect to a learning rate, is that of one process."""
    params, batch = problem()

    def after(take, batch, rate):
        how = {"losses": plain, "aggregator": fj.upgrad(), "optimizer": fj.sgd(lambda _: rate)}
        state = fj.TrainState(params, (), how["optimizer"].init(params), (), fj.precision.no_scale())
        for _ in range(2):
            state, info = take(state, *batch, **how)
        return sum((leaf**2).sum() for leaf in tree_leaves(state.params)) + sum(info.losses.values())

    rate = torch.tensor(0.05, dtype=torch.float64)
    whole = torch.func.grad(partial(after, fj.step, batch))(rate)
    f = partial(after, step, mine(batch))
    torch.testing.assert_close(torch.func.jvp(f, (rate,), (torch.ones_like(rate),))[1], whole)


def check_the_step_compiles_in_a_full_graph():
    params, batch = {"w": torch.ones(5, 3, dtype=torch.float64)}, problem()[1][:1]
    losses = lambda p, x: torch.tanh(x @ p["w"]).mean(0)
    rule = fj.stateless(fj.views.gramian, lambda G: torch.softmax(-G.diagonal(), dim=0))
    how = {"losses": losses, "aggregator": rule, "optimizer": fj.sgd(1e-2)}
    state = begin(params, *mine(batch), scale=fj.scale_state(), **how)
    take = partial(step, **how)
    compiled = torch.compile(take, fullgraph=True, backend="aot_eager")
    close(compiled(state, *mine(batch)), take(state, *mine(batch)))
    mean = torch.compile(distributed.mean_jacobian, fullgraph=True, backend="aot_eager")
    assert torch.equal(mean(batch[0] * rank()), distributed.mean_jacobian(batch[0] * rank()))


def check_the_first_replicas_state_counts():
    params, batch = problem()
    own = tree_map(lambda p: p + rank(), params)
    how = {"losses": plain, "aggregator": fj.random_weights(fj.random.key(rank())), "optimizer": fj.sgd(1e-2)}
    state = begin(own, *mine(batch), **how)
    assert same(state.params, params)
    assert all_same(state)
    odd = {"flag": torch.tensor(rank() == 0), "count": torch.tensor([rank()]), "none": torch.zeros(0)}
    first = {"flag": torch.tensor(True), "count": torch.tensor([0]), "none": torch.zeros(0)}
    assert same(distributed.replicate(odd), first)


def check_replicas_that_differ_are_told_when_training_starts():
    params, batch = problem()
    how = {"losses": plain, "aggregator": fj.upgrad(), "optimizer": fj.sgd(1e-2)}
    last = rank() == replicas() - 1
    wide = params | {"heads": params["heads"] | {"two": torch.ones(3, 2 if last else 1, dtype=torch.float64)}}
    with pytest.raises(ValueError, match=r"train_state: expected parameters and .* heads.two float64 \[3, [12]\]"):
        begin(wide, *mine(batch), **how)
    scale = fj.scale_state(shape=(2,) if last else ())
    with pytest.raises(ValueError, match="train_state: expected parameters and states with the same names"):
        begin(params, *mine(batch), scale=scale, **how)
    more = lambda p, x, y, z: torch.stack([*plain(p, x, y, z).values()][: None if last else 1])
    for rule in (fj.upgrad(), stch()):
        with pytest.raises(ValueError, match=r"train_state: expected losses .*value float64 \[[12]\]"):
            begin(params, *mine(batch), **how | {"losses": more, "aggregator": rule})
    weights = fj.constant([1.0, 2.0]), fj.constant([2.0, 1.0])  # which nothing but their values tells apart
    for one, other in ((fj.upgrad(), fj.mean()), (fj.cagrad(0.4), fj.cagrad(0.5)), weights):
        with pytest.raises(ValueError, match="train_state: expected the same rule on all ranks, found different ones"):
            begin(params, *mine(batch), **how | {"aggregator": other if last else one})
    for one, other in (
        (fj.sgd(1e-2), fj.sgd(1e-3)),
        (fj.adamw(1e-2), fj.adamw(1e-2, weight_decay=0.1)),
        (fj.from_torch(torch.optim.Adam, lr=1e-2), fj.from_torch(torch.optim.AdamW, lr=1e-2)),
    ):
        with pytest.raises(ValueError, match="train_state: expected the same optimizer on all ranks, found different"):
            begin(params, *mine(batch), **how | {"optimizer": other if last else one})
    named = lambda p, *batch: dict(zip(("b", "a") if last else ("b", "c"), plain(p, *batch).values(), strict=True))
    with pytest.raises(ValueError, match=r"expected losses with the same names.*this rank: [ab] float64 \[\], [bc] "):
        begin(params, *mine(batch), **how | {"losses": named})


def check_only_the_members_of_a_group_count():
    first, second = (dist.new_group(list(part)) for part in torch.arange(replicas()).chunk(2))
    group, other = (first, second) if rank() < replicas() // 2 else (second, first)
    members = dist.get_process_group_ranks(group)
    mean = distributed.mean_jacobian(torch.tensor([float(rank())]), group)
    assert mean.item() == sum(members) / len(members)
    with pytest.raises(ValueError, match="a process group that this process is in"):
        distributed.mean_jacobian(torch.ones(1), other)


def check_nothing_runs_in_half_under_autocast_outside():
    _, batch, how, state = begun(fj.autocast(plain, torch.bfloat16), dtype=torch.float32)
    within = step(state, *batch, **how)
    with torch.autocast("cpu", torch.bfloat16):
        around = step(state, *batch, **how)
    assert same(within, around)
