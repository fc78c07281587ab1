"""How every public function is called on a device, and why some are not.

A call takes `given`, whose tensors stand on one device, and returns a pytree of what is to be there.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from matplotlib import pyplot as plt
from torch.distributed.device_mesh import init_device_mesh
from zoo import numbers

import functional_jd as jd
from functional_jd import distributed, fronts, plotting, precision, testing


def given() -> dict[str, Any]:
    """The inputs of all calls."""
    return {
        "params": {"w": numbers(4, 3), "b": numbers(3, seed=1)},
        "x": numbers(5, 4, seed=2),
        "y": numbers(5, 3, seed=3),
        "rows": {"w": numbers(3, 2, 4, seed=4), "b": numbers(3, 5, seed=5)},
        "other": {"w": numbers(3, 2, 4, seed=6), "b": numbers(3, 5, seed=7)},
        "matrix": numbers(3, 6, seed=8),
        "losses": torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64),
        "weights": torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64),
        "flags": torch.tensor([True, False, True]),
        "key": jd.random.key(3),
        "points": numbers(6, 2, seed=9),
        "scale": jd.scale_state(2.0**8, shape=3),
    }


def losses_of(params, x, y):
    error = (torch.tanh(x @ params["w"] + params["b"]) - y).square()
    return {"error": error.mean(), "worst": error.amax(), "size": params["w"].square().sum()}


def example_loss(params, x, y):
    return (torch.tanh(x @ params["w"] + params["b"]) - y).square().mean()


EXAMPLES = jd.per_example(example_loss)
TASKS = jd.multitask(
    lambda shared, x, y: torch.tanh(x @ shared["w"]),
    lambda own, h, x, y: {"a": (h + own["b"] - y).square().mean(), "b": (h * own["b"]).sum()},
)


def tasks(g):
    return {"shared": {"w": g.params["w"]}, "heads": {"b": g.params["b"]}}


def method(**others: Any) -> dict[str, Any]:
    return {"losses": losses_of, "aggregator": jd.config(), "optimizer": jd.sgd(0.1, 0.9)} | others


def begun(g, scale=None, **others):
    return jd.train_state(g.params, g.x, g.y, scale=scale, **method(**others))


def two_steps(g, *batch, params=None, scale=None, engine="auto", **others):
    """The state after two steps, and what the second tells."""
    how, params, batch = method(**others), g.params if params is None else params, batch or (g.x, g.y)
    state = jd.train_state(params, *batch, scale=scale, engine=engine, **how)
    for _ in range(2):
        state, info = jd.step(state, *batch, engine=engine, **how)
    return state, tuple(info)


def rule(build, *args: Any, **hyper: Any) -> Any:
    """The rule is started, and called twice."""

    def call(g):
        made = build(g, *args, **hyper)
        made = made[0] if isinstance(made, tuple) and not hasattr(made, "update") else made
        first = jd.aggregate(made, g.rows, None, g.other, losses=g.losses)
        return jd.aggregate(made, g.rows, first.state, g.other, losses=g.losses)

    return call


def named(name: str, *args: Any, **hyper: Any) -> Any:
    return rule(lambda g: getattr(jd, name)(*args, **hyper))


def by_key(name: str) -> Any:
    return rule(lambda g: getattr(jd, name)(g.key))


EACH = [1.0, 2.0, 1.0]

RULES = {
    **{
        name: named(name)
        for name in (
            *("aligned_mtl", "auto_clipped", "config", "db_mtl", "dualproj", "dwa", "excess_mtl", "famo", "imtl_g"),
            *("geometric_mean", "gradnorm", "imtl_l", "levenberg_marquardt", "mean", "mgda", "moco", "modo"),
            *("nash_mtl", "pcd", "sdmgrad", "stch", "tchebycheff", "total", "upgrad", "uw"),
        )
    },
    **{name: by_key(name) for name in ("graddrop", "gradvac", "pcgrad", "random_weights")},
    "cagrad": named("cagrad", 0.5),
    "clipped": named("clipped", 1.0),
    "constant": rule(lambda g: jd.constant(g.weights)),
    "cosmos": named("cosmos", 1.0, EACH),
    "cr_mogm": named("cr_mogm", jd.upgrad(), 0.5),
    "epo": named("epo", EACH),
    "fairgrad": named("fairgrad", 1.0),
    "grouped": named("grouped", {"w": jd.upgrad(), "b": jd.mean()}),
    "held": named("held", jd.upgrad()),
    "krum": named("krum", 0, 1),
    "natural_gradient": named("natural_gradient", 0.1),
    "pbi": named("pbi", 5.0, EACH),
    "scalarized": named("scalarized", torch.amax),
    "stateless": named("stateless", jd.views.gramian, lambda G: G.diagonal().rsqrt()),
    "trimmed_mean": named("trimmed_mean", 1),
}


def taken(build) -> Any:
    """The optimizer takes two steps."""

    def call(g):
        optimizer, params = build(g), g.params
        state = optimizer.init(params)
        for _ in range(2):
            params, state = optimizer.update(g.params, state, params)
        return params, state

    return call


class Transformation:
    """What `from_transformation` takes."""

    def init(self, params):
        return ()

    def update(self, updates, state, params):
        return {name: -0.1 * x for name, x in updates.items()}, state


def by_size(name, leaf):
    return "small" if leaf.ndim < 2 else "large"


OPTIMIZERS = {
    "adamw": taken(lambda g: jd.adamw(0.01)),
    "sgd": taken(lambda g: jd.sgd(0.1, 0.9)),
    "from_torch": taken(lambda g: jd.from_torch(torch.optim.Adam, lr=0.01)),
    "from_transformation": taken(lambda g: jd.from_transformation(Transformation())),
    "by_label": taken(lambda g: jd.by_label({"small": jd.sgd(0.1), "large": jd.adamw(0.01)}, by_size)),
    "noised": taken(lambda g: jd.noised(jd.sgd(0.1), g.key, 1.0, max_norm=1.0, batch_size=4)),
    "line_search": lambda g: two_steps(g, optimizer=jd.line_search(jd.sgd(1.0), [1.0, 0.1, 0.0])),
    "clip_by_norm": lambda g: jd.optimizers.clip_by_norm(g.params, 0.5),
    "clip_by_value": lambda g: jd.optimizers.clip_by_value(g.params, 0.5),
    "global_norm": lambda g: jd.optimizers.global_norm(g.params),
}


def differentiated(make, *given_weights):
    def call(g):
        found, values, pullback = make(losses_of)(g.params, g.x, g.y)
        return found, values, pullback(g.weights)

    return call


def weighted(g):
    values, pullback = jd.weighted_fn(losses_of)(g.params, g.x, g.y)
    return values, pullback(g.weights)


def module_of(g):
    module = torch.nn.Linear(4, 3, device=g.x.device, dtype=g.x.dtype)
    return jd.functional(module)({"weight": g.params["w"].mT, "bias": g.params["b"]}, {}, g.x)[0]


def at_buffers_of(g):
    losses = lambda params, buffers, *batch: (losses_of(params, *batch)["error"] * buffers["factor"], buffers)
    held = jd.objectives.at_buffers(losses, {"factor": g.x.new_tensor(0.5)})
    return jd.jacobian_fn(held)(g.params, g.x, g.y)


def parts(g):
    return jd.objectives.partition(g.params, lambda name, _: name == "w")


def checkpoint(g):
    return jd.to_checkpoint(begun(g, scale=g.scale))


def privately(g):
    how: Any = {"max_norm": 1.0, "noise_multiplier": 1.0, "batch_size": 5, "optimizer": jd.sgd(0.1), "key": g.key}
    how = jd.private(example_loss, **how)
    return jd.step(jd.train_state(g.params, g.x, g.y, **how), g.x, g.y, **how)[0].params


TRAINING = {
    "jacobian_fn": lambda g: jd.jacobian_fn(losses_of)(g.params, g.x, g.y),
    "gramian_fn": differentiated(jd.gramian_fn),
    "squared_norms_fn": differentiated(jd.squared_norms_fn),
    "cross_gramian_fn": lambda g: jd.cross_gramian_fn(EXAMPLES)(g.params, (g.x, g.y), (g.x[:2], g.y[:2])),
    "weighted_fn": weighted,
    "weights_fn": lambda g: tuple(jd.weights_fn(losses_of, jd.upgrad(), group=False)(g.params, g.x, g.y)),
    "functional": module_of,
    "at_buffers": at_buffers_of,
    "partition": parts,
    "merge": lambda g: jd.objectives.merge(*parts(g)),
    "per_example": lambda g: (EXAMPLES(g.params, g.x, g.y), two_steps(g, losses=EXAMPLES, aggregator=jd.upgrad())),
    "multitask": lambda g: (TASKS(tasks(g), g.x, g.y), two_steps(g, params=tasks(g), losses=TASKS)),
    "train_state": lambda g: begun(g, scale=g.scale),
    "step": lambda g: two_steps(g, scale=g.scale),
    "steps": lambda g: [
        (state.params, tuple(info))
        for state, info in jd.steps(partial(jd.step, **method()), begun(g), [(g.x, g.y)] * 2)
    ],
    "compiled": lambda g: jd.compiled(jd.step, backend="eager")(begun(g, scale=g.scale), g.x, g.y, **method())[0],
    "fit": lambda g: jd.fit(partial(jd.step, **method()), begun(g, scale=g.scale), [(g.x, g.y)] * 2),
    "chosen_engine": lambda g: jd.chosen_engine(begun(g), g.x, g.y, losses=losses_of, aggregator=jd.upgrad()).engine,
    "private": privately,
    "to_checkpoint": checkpoint,
    "from_checkpoint": lambda g: jd.from_checkpoint(checkpoint(g), like=begun(g, scale=g.scale)),
    "jacobian_engine": lambda g: two_steps(g, engine=jd.engines.jacobian_engine(mode="vmap")),
    "gramian_engine": lambda g: two_steps(g, engine=jd.engines.gramian_engine()),
    "weighted_engine": lambda g: two_steps(g, engine=jd.engines.weighted_engine(), aggregator=jd.mean()),
    "features_engine": lambda g: two_steps(
        g, params=tasks(g), losses=TASKS, engine=jd.engines.features_engine(), aggregator=jd.mgda()
    ),
    "objective_names": lambda g: jd.objective_names(g.rows),
}


class Double(torch.autograd.Function):
    """A custom function, for `custom`."""

    forward = staticmethod(lambda x: 2 * x)
    setup_context = staticmethod(lambda ctx, inputs, output: None)
    backward = staticmethod(lambda ctx, g: 2 * g)


def low(f):
    return lambda g: f(torch.float16)(g.params["w"].float() @ g.y.mT.float())


def halved(g):
    f = jd.autocast(lambda p, x, y: losses_of(p, x, y), torch.float16)
    return jd.jacobian_fn(f)({name: p.float() for name, p in g.params.items()}, g.x.float(), g.y.float())


PRECISION = {
    "autocast": halved,
    "custom": lambda g: torch.func.grad(lambda w: precision.custom(Double).apply(w).square().sum())(g.params["w"]),
    "float32_island": lambda g: jd.autocast(precision.float32_island(torch.exp))(g.params["w"].float()),
    "policy": lambda g: precision.policy("compute=float16,output=float32").cast_to_compute(g.params),
    "scale": lambda g: precision.scale(g.scale, g.losses),
    "unscale": lambda g: jd.unscale(g.scale, g.rows),
    "update_scale": lambda g: jd.update_scale(g.scale, g.flags, losses_finite=g.flags),
    "select": lambda g: precision.select(g.flags, g.rows, g.other),
    "scaled_grad": lambda g: precision.scaled_grad(lambda w: w.square().sum(), 2.0**10)(g.params["w"]),
    "scale_state": lambda g: jd.scale_state(shape=3, device=g.x.device),
    "no_scale": lambda g: precision.no_scale(device=g.x.device),
    "scale_state_to_dict": lambda g: precision.scale_state_to_dict(g.scale),
    "scale_state_from_dict": lambda g: precision.scale_state_from_dict(
        precision.scale_state_to_dict(g.scale), device=g.x.device
    ),
}

RANDOM = {
    "key": lambda g: jd.random.key(5, device=g.x.device),
    "split": lambda g: jd.random.split(g.key, 3),
    "fold_in": lambda g: jd.random.fold_in(g.key, 7),
    "uniform": lambda g: jd.random.uniform(g.key, (5, 2)),
    "normal": lambda g: jd.random.normal(g.key, (40,)),
    "permutation": lambda g: jd.random.permutation(g.key, 9),
    "keyed": lambda g: jd.random.keyed(lambda x: torch.nn.functional.dropout(x, 0.5) + torch.rand_like(x))(g.key, g.x),
}

VIEWS = {
    name: partial(lambda name, g: getattr(jd.views, name)(g.rows, g.other, losses=g.losses), name)
    for name in (
        *("cross_gramian", "full_jacobian", "gramian", "gramian_and_losses", "jacobian_and_losses", "losses"),
        *("no_gradients", "norms", "norms_and_losses"),
    )
}
AGGREGATION = {
    **VIEWS,
    "with_losses": lambda g: jd.views.with_losses(jd.views.norms)(g.rows, losses=g.losses),
    "aggregate": rule(lambda g: jd.upgrad(g.weights)),
    "combine": lambda g: jd.aggregation.combine(g.rows, g.weights),
    "dwa_end_epoch": lambda g: jd.dwa_end_epoch(jd.aggregate(jd.dwa(), g.rows, losses=g.losses).state),
    "famo_after_step": lambda g: jd.famo_after_step(
        jd.aggregate(jd.famo(), g.rows, losses=g.losses).state, g.losses / 2
    ),
}


def diagnosed(g):
    return jd.diagnostics.diagnose(g.rows, g.weights, gramian=False)


DIAGNOSTICS = {
    "diagnose": lambda g: tuple(diagnosed(g)),
    "advise": lambda g: jd.diagnostics.advise([diagnosed(g)] * 3, [g.losses] * 3).verdict,
    "describe": lambda g: jd.diagnostics.describe(diagnosed(g), ["a", "b", "c"]),
}


def preferred(preference):
    return jd.tchebycheff(preference)


def two_losses(params, x, y):
    return torch.stack([example_loss(params, x, y), params["w"].square().sum()])


def populated(g, rule):
    start = {name: torch.stack([x, -x, x / 2]) for name, x in g.params.items()}
    return fronts.train(start, [(g.x, g.y)] * 2, losses=two_losses, rule=rule, optimizer=jd.sgd(0.1))


FRONTS = {
    "hypervolume": lambda g: fronts.hypervolume(g.points, torch.full_like(g.points[0], 3.0)),
    "knee": lambda g: fronts.knee(g.points),
    "non_dominated": lambda g: fronts.non_dominated(g.points),
    "hypervolume_gradient": lambda g: populated(g, fronts.hypervolume_gradient([9.0, 9.0])),
    "moo_svgd": lambda g: populated(g, fronts.moo_svgd()),
    "pmtl": lambda g: fronts.train(
        g.params,
        [(g.x, g.y)] * 2,
        losses=two_losses,
        rule=fronts.pmtl(fronts.lattice(2, 3), warmup=1),
        preferences=fronts.lattice(2, 3),
        optimizer=jd.sgd(0.1),
    ),
    "train": lambda g: fronts.train(
        g.params,
        [(g.x, g.y)] * 2,
        losses=two_losses,
        rule=preferred,
        preferences=fronts.lattice(2, 3),
        optimizer=jd.sgd(0.1),
        compile=False,
    ),
}


def shared_step(g, engine):
    rule = jd.mean() if engine == "weighted" else jd.upgrad()
    return two_steps(g, engine=distributed.replicated(engine), aggregator=rule)


def on_mesh(g):
    mesh = init_device_mesh(g.x.device.type, (1,))
    return two_steps(g, losses=distributed.sharded(losses_of, mesh))


DISTRIBUTED = {
    "agree": lambda g: distributed.agree(g.flags),
    "check_replicas": lambda g: distributed.check_replicas(g.params),
    "mean_jacobian": lambda g: distributed.mean_jacobian(g.rows),
    "replicate": lambda g: distributed.replicate(g.rows),
    "replicated": lambda g: [shared_step(g, engine) for engine in ("jacobian", "weighted")],
    "sharded": on_mesh,
    "weighted_by_examples": lambda g: distributed.weighted_by_examples(g.losses, 5),
}


def drawn(plot) -> Any:
    """The lines, points and pictures of a plot, on the CPU."""

    def call(g):
        plot(g)
        found = []
        for ax in plt.gcf().axes:
            found += [line.get_xydata() for line in ax.lines]
            found += [np.ma.filled(points.get_offsets()) for points in ax.collections]
            found += [np.ma.filled(picture.get_array()) for picture in ax.images]
        plt.close("all")
        return [torch.as_tensor(numbers).double() for numbers in found]

    return call


def told(g):
    state, infos = begun(g, scale=g.scale), []
    for _ in range(3):
        state, info = jd.step(state, g.x, g.y, **method())
        infos.append(info)
    return infos


def diagnoses(g):
    return [diagnosed(g)] * 3


QUADRATICS = plotting.quadratics()._replace(steps=3)

PLOTTING = {
    "cone": drawn(lambda g: plotting.cone(g.matrix[:2, :2], {"mean": jd.mean(), "upgrad": jd.upgrad()})),
    "conflicts": drawn(lambda g: plotting.conflicts(diagnoses(g))),
    "descend": lambda g: plotting.descend(QUADRATICS, jd.upgrad(), starts=g.points),
    "front": drawn(lambda g: plotting.front(g.points)),
    "heatmap": drawn(lambda g: plotting.heatmap(g.matrix @ g.matrix.mT)),
    "history": drawn(lambda g: plotting.history(told(g), [g.scale] * 3)),
    "losses": drawn(lambda g: plotting.losses(told(g))),
    "norms": drawn(lambda g: plotting.norms(told(g))),
    "parallel": drawn(lambda g: plotting.parallel(g.points)),
    "scales": drawn(lambda g: plotting.scales([g.scale] * 3, told(g))),
    "trajectories": drawn(
        lambda g: plotting.trajectories(QUADRATICS._replace(starts=g.points), {"mean": jd.mean()}, contours=False)
    ),
    "weights": drawn(lambda g: plotting.weights(told(g))),
}

LAWS = (
    *("batched", "finite", "homogeneous", "linear_under_row_scaling", "low_precision", "non_conflicting"),
    *("non_finite", "on_the_simplex", "permutation_equivariant", "pure", "shaped", "tree_equals_flat"),
    *("strongly_stationary", "weakly_stationary", "differentiable"),
)
TESTING = {
    **{
        name: partial(lambda name, g: getattr(testing, name)(jd.mgda(), g.matrix, losses=g.losses), name)
        for name in LAWS
        if name != "linear_under_row_scaling"
    },
    "linear_under_row_scaling": lambda g: testing.linear_under_row_scaling(jd.mean(), g.matrix),
    "rotation_blind": lambda g: testing.rotation_blind(jd.mgda(), g.matrix),
    "hyper_parameters_are_values": lambda g: testing.hyper_parameters_are_values(
        jd.uw, {"rate": 0.5}, g.rows, losses=g.losses
    ),
}

CALLS: dict[str, Any] = {
    **{**RULES, **OPTIMIZERS, **TRAINING, **PRECISION, **AGGREGATION, **DIAGNOSTICS},
    **{
        f"{home}.{name}": call
        for home, calls in (
            ("random", RANDOM),
            ("fronts", FRONTS),
            ("distributed", DISTRIBUTED),
            ("plotting", PLOTTING),
            ("testing", TESTING),
        )
        for name, call in calls.items()
    },
}
"""By name, with the package where names are its own, what is called with the inputs."""

ON_THE_HOST = {
    **{f"plotting.{name}": "pictures are of the host" for name in PLOTTING if name != "descend"},
    "to_checkpoint": "version, names and digests are for files",
    "from_torch": "torch counts steps there, where its kernels do not take a count on the device",
}
"""The calls of whose results some stand on the host, and why."""

COARSE = {"autocast": torch.float16}
"""The least precise dtype that is computed in, where results do not tell."""

RECORDS = (
    *("AffineWeights", "Aggregation", "Aggregator", "Advice", "Diagnosis", "Engine", "EngineChoice", "ExampleSets"),
    *("Declared", "Kind", "Observation", "Pullback", "fronts.Population"),
    *("FoundWeights", "fronts.Front", "Multitask", "MultitaskJacobian", "Optimizer", "plotting.Path", "PerExample"),
    *("Plan", "Policy", "plotting.Problem", "ScaleState", "Sharded", "StepInfo", "TrainState", "View"),
    *("testing.Counterexample", "testing.Findings", "testing.Layer", "testing.Range"),
)
WITHOUT = {
    **dict.fromkeys(RECORDS, "a record, of what the functions return or take"),
    **dict.fromkeys(("SlowPathWarning", "TrainingStalled"), "an exception"),
    **dict.fromkeys(("testing.ALWAYS", "testing.BY_CLAIM", "random"), "no function"),
    **dict.fromkeys(("plotting.PALETTE", "plotting.PROBLEMS"), "no function"),
    **dict.fromkeys(("plotting.quadratics", "plotting.fonseca_fleming", "plotting.two_valleys"), "takes no tensors"),
    **dict.fromkeys(("plotting.legend", "plotting.look", "plotting.quiet"), "takes no tensors"),
    **dict.fromkeys(("testing.jacobians", "testing.gramians", "testing.param_trees"), "draws examples, on the CPU"),
    **dict.fromkeys(("testing.obeys", "testing.laws_of"), "calls a law with drawn examples, on the CPU"),
    "PLAIN": "a record, of functions that others call",
    "require": "looks at a plan, at no values",
    "testing.compiled": "compiles, which no simulated device does",
    "fronts.lattice": "takes no tensors",
    "distributed.leave": "ends the groups of the process, and takes no arguments",
}
"""The public names that are not called on a device, and why."""


def on(tensors: dict[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(**tensors)
