"""Valid calls of what stands around Pareto fronts."""

import torch
from fuzz_values import Argument, call, eye, ones, tensor, zeros
from garbage import CALLABLE, NOT_NEGATIVE, OPTION, POSITIVE, SWITCH, kinds

import functional_jd as jd
from functional_jd import fronts


def losses(params):
    return torch.stack([params["w"].square().sum(), (params["w"] - 1).square().sum()])


def points():
    return tensor([[0.0, 1.0], [1.0, 0.0]])


def _weights_of(build):
    """The weights of two solutions with two losses, by a rule for several solutions."""

    def weigh(**given):
        population = build(**given)
        L = points()
        return population.weigh(L if population.view.products == "none" else (eye(2).double().expand(2, 2, 2), L))

    return weigh


def _train(compile, **others):
    return fronts.train(compile=False if compile is True else compile, **others)  # which takes its time


def _pmtl(**given):
    return jd.aggregate(fronts.pmtl(**given)(ones(2)), eye(2), losses=tensor([1.0, 2.0]))


POINTS = Argument(points, kinds({"wrong_shape"}))
NUMPY = kinds({"numpy"})

FRONTS = {
    "lattice": call(fronts.lattice, m=2, divisions=2),
    "non_dominated": call(fronts.non_dominated, points=POINTS),
    "knee": call(fronts.knee, points=POINTS),
    "hypervolume": call(fronts.hypervolume, points=points, reference=Argument(lambda: ones(2), kinds({"nans"}))),
    "hypervolume_gradient": call(
        _weights_of(fronts.hypervolume_gradient), fronts.hypervolume_gradient, reference=Argument([2.0, 2.0], NUMPY)
    ),
    "moo_svgd": call(
        _weights_of(fronts.moo_svgd),
        fronts.moo_svgd,
        repulsion=Argument(1.0, NOT_NEGATIVE),
        bandwidth=Argument(0.1, POSITIVE | OPTION),
    ),
    "pmtl": call(_pmtl, fronts.pmtl, warmup=Argument(1, kinds({"zero"}))),
    "tch_set": call(
        _weights_of(fronts.tch_set),
        fronts.tch_set,
        mu=Argument(0.1, POSITIVE),
        weights=Argument([1.0, 2.0], OPTION | NUMPY),
        reference=Argument([0.0, 0.0], OPTION | NUMPY),
    ),
    "train": call(
        _train,
        fronts.train,
        start=Argument(lambda: {"w": zeros(2)}, function=True),
        losses=lambda: losses,
        rule=Argument(lambda: jd.tchebycheff, kinds({"builder"}), function=True),
        batches=Argument([()]),
        scale=None,
        on_step=Argument(None, OPTION | CALLABLE, function=True),
        compile=Argument(False, SWITCH),
        said_by=("train", "train_state", "fit", "step", "tchebycheff"),
    ),
}
