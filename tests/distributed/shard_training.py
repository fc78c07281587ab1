"""How the ranks train in the tests of sharded parameters, and what they look for afterwards."""

import gc
import itertools
import os

import torch
from shard_models import ranks
from torch.utils._pytree import tree_leaves, tree_map

import functional_jd as fj

STEPS = 10

RULES = {
    "mean": fj.mean,
    "upgrad": fj.upgrad,
    "config": fj.config,
    "graddrop": lambda: fj.graddrop(fj.random.key(3)),
    "nash_mtl": fj.nash_mtl,
}
OPTIMIZERS = {"sgd": lambda: fj.sgd(0.1, momentum=0.9), "adamw": lambda: fj.adamw(1e-2, eps=1e-5)}


def most_pairs(models, rules):
    """Models and rules: each model with two rules and each rule with a model; all pairs in the profile "thorough"."""
    for (i, model), (j, rule) in itertools.product(enumerate(models.values()), enumerate(rules.values())):
        if (j - i) % len(rules) in (0, 2) or os.environ.get("HYPOTHESIS_PROFILE") == "thorough":
            yield model, rule


def some_cases(models, rules, first=0):
    """At least one rule for each model and one model for each rule, starting with one of the rules."""
    models, rules = list(models.values()), list(rules.values())
    for i in range(max(len(models), len(rules))):
        yield models[i % len(models)](), rules[(i + first) % len(rules)]()


def by_part(losses):
    """The mean of the losses of each rank's part of the batch, in one process: parts of a batch round differently."""

    def of_whole(p, *batch):
        parts = [losses(p, *part) for part in zip(*(x.chunk(ranks()) for x in batch), strict=True)]
        return tree_map(lambda *values: torch.stack([v.float() for v in values]).mean(0), *parts)

    return of_whole


def trained(params, batch, method, n=STEPS, **options):
    state, infos = fj.train_state(params, *batch, **options, **method), []
    for _ in range(n):
        state, info = fj.step(state, *batch, **method)
        infos.append(info)
    return state, infos


def none_is_whole(known):
    """Whether this process holds no plain tensor with as many elements as the largest leaf, but for what is known."""
    gc.collect()
    largest = max(leaf.numel() for leaf in tree_leaves(known))
    own = {id(leaf) for leaf in tree_leaves(known)}
    found = [x for x in gc.get_objects() if type(x) is torch.Tensor and x.numel() == largest and id(x) not in own]
    return not found


def keeps_placements(state, params):
    trees = [state.params, *(tree for tree in state.optimizer if isinstance(tree, dict))]
    return all(
        x.placements == p.placements
        for tree in trees
        for x, p in zip(tree_leaves(tree), tree_leaves(params), strict=True)
    )
