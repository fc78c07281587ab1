"""The laws of derivatives hold for rules that obey them, and notice each way of breaking them; domains of losses."""

import hypothesis
import pytest
import torch
from rule_table import RULES, jacobians_for, rule_of

import functional_jd as jd
from functional_jd.aggregation.views import gramian, no_gradients
from functional_jd.testing import differentiable, hyper_parameters_are_values, laws_of

J = torch.tensor([[1.0, 2.0], [0.0, 1.0], [-1.0, 1.0]], dtype=torch.float64)


def rule(weigh, least=-10.0, most=10.0):
    """A rule with one number t, whose weights are `weigh(t) ones`."""

    def build(t):
        if not isinstance(t, torch.Tensor) and not least <= t <= most:
            raise ValueError(f"t must be from {least} to {most}, found {t}")
        return jd.stateless(gramian, lambda G: torch.ones_like(G[0]) * weigh(torch.as_tensor(t, dtype=torch.float64)))

    return build


@pytest.mark.parametrize("t", [-3.0, -1e-3, 0.0, 0.7, 3.0])
@pytest.mark.parametrize("weigh", [torch.exp, torch.sin, torch.square, torch.abs, torch.relu, torch.floor])
def test_smooth_weights_kinks_and_jumps_are_allowed(weigh, t):
    hyper_parameters_are_values(rule(weigh), {"t": t}, J)


@pytest.mark.parametrize("t", [0.0, 1.0, 0.5])
def test_at_the_end_of_a_range_differences_are_one_sided(t):
    hyper_parameters_are_values(rule(torch.exp, 0.0, 1.0), {"t": t}, J)
    with pytest.raises(AssertionError, match=rf"t={t:.6g}: jacfwd differs from differences"):
        hyper_parameters_are_values(rule(lambda x: x.exp().detach(), 0.0, 1.0), {"t": t}, J)


def test_where_a_range_begins_a_steep_slope_is_that_of_the_near_difference():
    hyper_parameters_are_values(rule(lambda t: torch.exp(-20 * t), least=1.0), {"t": 1.0}, J)


def test_derivatives_in_later_steps_are_tried():
    def build(wrong_from):
        def weigh(t):
            t = torch.as_tensor(t, dtype=torch.float64)
            values = lambda steps: torch.where(steps < wrong_from, t, t.detach())
            return lambda view, steps: (torch.ones_like(view) * values(steps), steps + 1)

        return lambda t: jd.Aggregator(no_gradients, lambda view: view.new_zeros(()), weigh(t))

    hyper_parameters_are_values(build(3), {"t": 0.7}, J)
    with pytest.raises(AssertionError, match="jacfwd differs from differences"):
        hyper_parameters_are_values(build(2), {"t": 0.7}, J)


def test_a_range_without_neighbours_is_refused():
    with pytest.raises(ValueError, match=r"hyper_parameters_are_values: found no valid numbers next to 1.0. Test"):
        hyper_parameters_are_values(rule(torch.exp, 1.0, 1.0), {"t": 1.0}, J)


class WrongBackward(torch.autograd.Function):
    """A square whose backward derivative is wrong and whose forward derivative is right."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, slope):
        return 3 * ctx.saved_tensors[0] * slope

    @staticmethod
    def jvp(ctx, tangent):
        return 2 * ctx.saved_tensors[0] * tangent


@pytest.mark.parametrize(
    ("weigh", "error", "message"),
    [
        (lambda t: t.square().detach(), AssertionError, "jacfwd differs from differences"),
        (lambda t: 1.01 * t.square() - 0.01 * t.square().detach(), AssertionError, "jacfwd differs from differences"),
        (WrongBackward.apply, AssertionError, "jacrev differs from differences"),
        (lambda t: (t - 0.7).abs().sqrt() + t, AssertionError, "is not finite"),
        (lambda t: t.item(), RuntimeError, r"item\(\)"),
        (lambda t: t if t > 0 else -t, RuntimeError, "data-dependent control flow"),
    ],
    ids=["constant", "off by a percent", "backward", "infinite", "read", "branch"],
)
def test_what_is_wrong_is_noticed(weigh, error, message):
    with pytest.raises(error, match=message):
        hyper_parameters_are_values(rule(weigh), {"t": 0.7}, J)


def test_a_tensor_that_gives_other_directions_is_noticed():
    build = lambda t: rule(torch.exp)(t if isinstance(t, float) else t + 1e-6)
    with pytest.raises(AssertionError, match=r"t=0.7: a tensor gives other directions than the number"):
        hyper_parameters_are_values(build, {"t": 0.7}, J)


FEW = hypothesis.settings(max_examples=5, derandomize=True, database=None, deadline=None)


@pytest.mark.parametrize("name", RULES)
def test_rules_of_the_package_have_derivatives_by_the_jacobian(name):
    found = laws_of(rule_of(name), differentiable, jacobians=jacobians_for(name), settings=FEW)
    assert found["differentiable"], found


@pytest.mark.parametrize("temperature", [0.1, 1.0, 10.0])
def test_a_rule_may_have_a_unit_of_its_own(temperature):
    rule = jd.stateless(gramian, lambda G: torch.softmax(-G.diagonal() / temperature, 0))
    found = laws_of(rule, differentiable, settings=FEW)
    assert found["differentiable"], found


@pytest.mark.parametrize(
    ("weigh", "message"),
    [
        (lambda G: G.detach().diagonal() / G.sum(), "jacfwd differs from differences"),
        (lambda G: 1.01 * G.diagonal() - 0.01 * G.diagonal().detach(), "jacfwd differs from differences"),
        (lambda G: WrongBackward.apply(G.diagonal()), "jacrev differs from differences"),
        (lambda G: (G.diagonal() - G.diagonal()).sqrt(), "J: jacfwd is not finite"),
        (lambda G: (G.diagonal() - 1).abs().sqrt(), "J: jacfwd is not finite"),  # where the second row has this length
    ],
    ids=["detached", "off by a percent", "backward", "infinite", "infinite at J"],
)
def test_a_wrong_derivative_by_the_jacobian_is_noticed(weigh, message):
    with pytest.raises(AssertionError, match=message):
        differentiable(jd.stateless(gramian, weigh), J)


def test_kinks_and_memory_are_differentiated():
    differentiable(jd.stateless(gramian, lambda G: (G.diagonal() - 1).relu()), J)  # the second row has a length of 1
    keep = lambda G, memory: (G.diagonal() + memory, memory + G.diagonal())
    differentiable(jd.Aggregator(gramian, lambda G: torch.zeros_like(G[0]), keep), J)
    lost = lambda G, memory: (G.diagonal() + memory, memory + G.diagonal().detach())
    with pytest.raises(AssertionError, match="jacfwd differs from differences"):
        differentiable(jd.Aggregator(gramian, lambda G: torch.zeros_like(G[0]), lost), J)


@pytest.mark.parametrize("name", [name for name, entry in RULES.items() if entry.invalid])
def test_losses_outside_the_domain_give_a_direction_that_is_not_finite(name):
    rule = rule_of(name)

    def direction(losses):
        return jd.aggregate(rule, torch.ones(3, 2), losses=losses).direction

    for number in RULES[name].invalid:
        one, all_of_them = (torch.tensor(x, dtype=torch.float64) for x in ([1.0, number, 2.0], [number] * 3))
        cosine = (name, number) == ("cosmos", 0.0)  # it has an angle unless all are zero
        for losses in [all_of_them] if cosine else [one, all_of_them]:
            assert not direction(losses).isfinite().any()
    assert direction(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)).isfinite().all()  # not for another reason
