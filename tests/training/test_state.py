"""What is no state, or the state of another method, is refused with what to do."""

import re
from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import functional_jd as fj

X = torch.arange(12.0).reshape(4, 3) / 12
PARAMS = {"bias": torch.ones(2), "weight": torch.ones(2, 3)}


def losses(p, x):
    return (x @ p["weight"].T + p["bias"]).square().mean(0)


def method(**changes):
    return {"losses": losses, "aggregator": fj.upgrad(), "optimizer": fj.adamw()} | changes


def begun(params=PARAMS, **changes):
    return fj.train_state(params, X, **method(**changes))


def refused(match, run, error=ValueError):
    with pytest.raises(error, match=match):
        run()


def noted(match, run):  # on an error of torch or of Python
    with pytest.raises(Exception) as failed:  # noqa: PT011
        run()
    assert re.search(match, "\n".join(failed.value.__notes__))


def test_what_is_no_state_scale_flag_or_function_is_refused():
    how = {"losses": losses, "aggregator": fj.upgrad()}
    take = lambda state=None, **more: fj.step(begun() if state is None else state, X, **(method() | more))
    for state in (PARAMS, (PARAMS, ()), fj.scale_state()):
        words = rf"state must be a TrainState, found {type(state).__name__}\. .*train_state\("
        refused(f"^step: {words}", lambda state=state: take(state), TypeError)
        refused(f"^chosen_engine: {words}", lambda state=state: fj.chosen_engine(state, X, **how), TypeError)
    for scale in (8.0, torch.tensor(8.0)):
        words = "scale must be a ScaleState, found "
        refused(rf"^train_state: {words}.*scale_state\(", lambda scale=scale: begun(scale=scale), TypeError)
        refused(rf"^step: {words}.*no_scale", lambda scale=scale: take(begun()._replace(scale=scale)), TypeError)
    for flag in (1, None, "yes", torch.tensor(True)):
        refused("^step: has_aux must be True or False", lambda flag=flag: take(has_aux=flag), TypeError)
        refused("^train_state: has_aux must be True or False", lambda flag=flag: begun(has_aux=flag), TypeError)
    refused("^step: losses must be a function, found Tensor", lambda: take(losses=X), TypeError)
    refused("^train_state: losses must be a function, found NoneType", lambda: begun(losses=None), TypeError)
    wrong = how | {"losses": X}
    refused("^chosen_engine: losses must be a function", lambda: fj.chosen_engine(begun(), X, **wrong), TypeError)
    named = {"losses": lambda p, x: {"fit": losses(p, x).sum(), "n": 2}, "aggregator": fj.mean()}
    refused("^step: losses must be .* found 2 in 'n'", lambda: take(**named, engine="weighted"), TypeError)
    uneven = fj.stateless(fj.views.full_jacobian, lambda J: torch.ones(3))
    refused(r"^step: expected one weight per row, \[2\], found \[3\]", lambda: take(aggregator=uneven))


Values = namedtuple("Values", "fit size")


ENGINES = ["auto", "jacobian", "gramian", fj.engines.jacobian_engine("loop"), fj.engines.gramian_engine()]


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine if isinstance(engine, str) else "made")
def test_engines_speak_of_the_function_that_was_called(engine):
    """And of an objective by its name."""
    wrong = method(losses=lambda p, x: Values(losses(p, x), 2.0), engine=engine)
    refused("^step: losses must be .* found 2.0 in 'size'", lambda: fj.step(begun(), X, **wrong), TypeError)
    refused("^train_state: losses .* found 2.0 in 'size'", lambda: fj.train_state(PARAMS, X, **wrong), TypeError)


def test_slow_ways_in_a_step_are_told_in_its_name():
    """An op without a rule for vmap: `gramian_fn` would speak of itself."""
    rows = fj.per_example(lambda p, x: (p["weight"] @ x).sum() * (1.0 if x.sum().item() else 2.0))
    with pytest.warns(UserWarning, match="no loss reaches 'bias' on this batch"):
        state = fj.train_state(PARAMS, X, losses=rows, aggregator=fj.mean(), optimizer=fj.sgd(0.1))
    with pytest.warns(fj.SlowPathWarning, match=r"^step: "):
        fj.step(state, X, losses=rows, aggregator=fj.upgrad(), optimizer=fj.sgd(0.1), engine="gramian")


OPTIMIZERS = {"adamw": fj.adamw(), "sgd": fj.sgd(0.1), "momentum": fj.sgd(0.1, momentum=0.9)}
OPTIMIZERS |= {cls.__name__: fj.from_torch(cls) for cls in (torch.optim.Adam, torch.optim.RMSprop)}


@pytest.mark.parametrize("other", OPTIMIZERS)
@pytest.mark.parametrize("one", OPTIMIZERS)
def test_a_state_of_another_optimizer_or_model_is_refused(one, other):
    state, how = begun(optimizer=OPTIMIZERS[one]), method(optimizer=OPTIMIZERS[other])
    if one != other:
        noted("^step: the state must be one of this optimizer.*Start again", lambda: fj.step(state, X, **how))
        return
    assert fj.step(state, X, **how)[1].moved
    larger = state._replace(params={name: torch.ones(5, *p.shape[1:]) for name, p in PARAMS.items()})
    if one == "sgd":  # which remembers nothing of the model
        assert fj.step(larger, X, **how)[1].moved
    else:
        words = "^step: the state must be one of this optimizer for these parameters"
        noted(words, lambda: fj.step(larger, X, **how))


WITH_MEMORIES = (fj.famo, fj.uw, fj.dwa, fj.gradnorm, fj.nash_mtl, fj.excess_mtl, fj.db_mtl, fj.moco, fj.imtl_l)
STATEFUL = {rule.__name__: rule for rule in WITH_MEMORIES} | {"gradvac": lambda: fj.gradvac(fj.random.key(0))}
MEMORIES = STATEFUL | {"pcgrad": lambda: fj.pcgrad(fj.random.key(0)), "upgrad": fj.upgrad}


@pytest.mark.parametrize("rule", MEMORIES)
def test_a_state_of_another_rule_is_refused(rule):
    state, how = begun(aggregator=fj.pcd()), method(aggregator=MEMORIES[rule]())
    refused("^step: the state must be one of this rule.*Start it again", lambda: fj.step(state, X, **how))
    for memory in (0.5, {"a": 1.0}, [None]):  # which need not be tensors
        other = state._replace(aggregator=memory)
        refused("^step: the state must be one of this rule", lambda other=other: fj.step(other, X, **how))
    if rule in STATEFUL:  # and so is one for another number of objectives
        state = begun(aggregator=STATEFUL[rule]())
        one = how | {"losses": lambda p, x: losses(p, x)[:1]}
        more = how | {"losses": lambda p, x: torch.cat([losses(p, x), losses(p, x)])}
        for start, taken in ((state, more), (state, one), (fj.train_state(PARAMS, X, **one), how)):
            words = "^step: the state must be one of this rule for the same number of objectives"
            refused(words, lambda start=start, taken=taken: fj.step(start, X, **taken))


def test_a_compiled_step_refuses_states_of_other_sizes():
    how = method(aggregator=fj.uw())
    one = how | {"losses": lambda p, x: losses(p, x)[:1]}
    for begun_with, taken_with in ((one, how), (how, one)):
        torch.compiler.reset()
        compiled = torch.compile(fj.step, fullgraph=True, backend="eager")
        state = fj.train_state(PARAMS, X, **begun_with)
        with pytest.raises(torch._dynamo.exc.Unsupported, match="the state must be one of this rule"):
            compiled(state, X, **taken_with)


def test_aggregate_refuses_states_of_other_rules():
    state = fj.aggregate(fj.famo(), torch.ones(2, 3), losses=torch.ones(2)).state
    words = "^aggregate: the state must be one of this rule.*expected NashState, found FamoState"
    refused(words, lambda: fj.aggregate(fj.nash_mtl(), torch.ones(2, 3), state))


def test_other_errors_come_through_as_they_are_and_no_more_memory_is_asked_for():
    calls = []

    def init(given):
        calls.append(given)
        return ()

    for error in (type("FailingError", (RuntimeError,), {}), torch.OutOfMemoryError):

        def update(*_, error=error):
            raise error("of the user")

        state, how = begun(), method(optimizer=fj.Optimizer(init, update))
        refused("^of the user", lambda state=state, how=how: fj.step(state, X, **how), error)
        if error is torch.OutOfMemoryError:
            how = method(aggregator=fj.Aggregator(fj.views.gramian, init, update))
            refused("^of the user", lambda state=state, how=how: fj.step(state, X, **how), error)
            assert not calls
        calls.clear()


NET = nn.Linear(3, 2)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (NET, r"found Linear in 'value'.*dict\(module.named_parameters"),
        (NET.parameters(), r"found generator in 'value'.*dict\(module.named_parameters"),
        (list(NET.named_parameters()), r"found 'weight' in '0.0'.*dict\(module.named_parameters"),
        (nn.ParameterDict({"a": nn.Parameter(torch.ones(1))}), r"found ParameterDict.*dict\(module.named_parameters"),
        ({"w": torch.ones(2, dtype=torch.complex64)}, "found torch.complex64 .* in 'w'.*view_as_real"),
        ({"w": torch.ones(2, dtype=torch.int64)}, "found torch.int64 .* in 'w'.*further arguments"),
    ],
)
def test_what_are_no_parameters_is_refused_with_the_cure(params, words):
    refused(f"^train_state: .*{words}", lambda: begun(params), TypeError)
    refused(f"^jacobian_fn: .*{words}", lambda: fj.jacobian_fn(lambda p: p)(params), TypeError)


def test_what_is_no_setting_is_refused_with_the_cure():
    schedule = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(NET.parameters(), lr=0.1), 10)
    for run, words in (
        (lambda: fj.adamw(NET.parameters(), 1e-3), "adamw: lr .* found generator.* given to train_state"),
        (lambda: fj.sgd(NET), "sgd: lr .* found Linear.* given to train_state"),
        (lambda: fj.adamw(lr=schedule), "adamw: lr must be a number, a tensor or a schedule, found StepLR"),
        (lambda: fj.adamw(1e-3, 0.9), "adamw: betas must be a pair of numbers, found 0.9"),
        (lambda: fj.from_torch(torch.optim.Adam(NET.parameters())), "from_torch: cls must be .* found Adam"),
        (lambda: fj.from_torch(SimpleNamespace), "from_torch: cls must be a class of torch.optim, found the class"),
    ):
        refused(f"^{words}", run, TypeError)


@pytest.mark.parametrize("fn", [fj.jacobian_fn, fj.gramian_fn, fj.weighted_fn])
def test_losses_of_examples_that_fail_say_what_they_received_and_strings_as_aux_are_refused(fn):
    found = fj.per_example(lambda p, x: (losses(p, x[None]).sum(), "name"))
    refused("_fn: losses and aux of per_example .* 'name'", lambda: fn(found, has_aux=True)(PARAMS, X), TypeError)
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 3))
    apply = fj.functional(net)
    found = fj.per_example(lambda p, x: apply(p, {}, x)[0].square().sum())
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        fn(found)(dict(net.named_parameters()), torch.ones(4, 1, 8, 8))
    assert any(re.search(r"per_example.*\[1, 8, 8\].*unsqueeze\(0\)", note) for note in caught.value.__notes__)
