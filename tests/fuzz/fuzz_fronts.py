"""Valid calls of what stands around Pareto fronts."""

import torch
from fuzz_values import eye, given, ones, tensor, zeros
from garbage import CALLABLE, NOT_NEGATIVE, OPTION, POSITIVE, SWITCH, Call, kinds

import functional_jd as jd
from functional_jd import fronts


def losses(params):
    return torch.stack([params["w"].square().sum(), (params["w"] - 1).square().sum()])


def points():
    return {"points": tensor([[0.0, 1.0], [1.0, 0.0]])}


def weights_of(population):
    """The weights of two solutions with two losses."""
    L = points()["points"]
    seen = L if population.view.products == "none" else (eye(2).double().expand(2, 2, 2), L)
    return population.weigh(seen)


def _train(compile, **others):
    return fronts.train(compile=False if compile is True else compile, **others)  # which takes its time


MATRIX = kinds({"wrong_shape"})

FRONTS = {
    "lattice": Call(fronts.lattice, lambda: {"m": 2, "divisions": 2}),
    "non_dominated": Call(fronts.non_dominated, points, {"points": MATRIX}),
    "knee": Call(fronts.knee, points, {"points": MATRIX}),
    "hypervolume": Call(fronts.hypervolume, lambda: {**points(), "reference": ones(2)}, {"reference": kinds({"nans"})}),
    "hypervolume_gradient": Call(
        lambda **given: weights_of(fronts.hypervolume_gradient(**given)),
        lambda: {"reference": [2.0, 2.0]},
        {"reference": kinds({"numpy"})},
    ),
    "moo_svgd": Call(
        lambda **given: weights_of(fronts.moo_svgd(**given)),
        lambda: {"repulsion": 1.0, "bandwidth": 0.1},
        {"repulsion": NOT_NEGATIVE, "bandwidth": POSITIVE | OPTION},
    ),
    "pmtl": Call(
        lambda **given: jd.aggregate(fronts.pmtl(**given)(ones(2)), eye(2), losses=tensor([1.0, 2.0])),
        lambda: {"preferences": fronts.lattice(2, 2), "warmup": 1},
        {"warmup": kinds({"zero"})},
    ),
    "tch_set": Call(
        lambda **given: weights_of(fronts.tch_set(**given)),
        lambda: {"mu": 0.1, "weights": [1.0, 2.0], "reference": [0.0, 0.0]},
        {"mu": POSITIVE, "weights": OPTION | kinds({"numpy"}), "reference": OPTION | kinds({"numpy"})},
    ),
    "train": Call(
        _train,
        given(
            "optimizer buffers engine has_aux",
            start=lambda: {"w": zeros(2)},
            losses=lambda: losses,
            rule=lambda: jd.tchebycheff,
            preferences=lambda: fronts.lattice(2, 2),
            **{"batches": [()], "scale": None, "on_step": None, "chunk_size": 2, "patience": 3},
            **{"compile": False, "progress": False},
        ),
        {"scale": OPTION, "chunk_size": OPTION, "on_step": OPTION | CALLABLE, "patience": OPTION, "progress": SWITCH}
        | {"compile": SWITCH, "rule": kinds({"builder"})},
        frozenset({"losses", "rule", "on_step", "start"}),
        names=("train", "train_state", "fit", "step", "tchebycheff"),
    ),
}
