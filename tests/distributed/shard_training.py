"""How the ranks train in the tests of sharded parameters, and what they look for afterwards."""

import gc
import itertools
import os

import torch
import torch.distributed as dist
from shard_models import MODELS, rank, ranks
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
RATE, ADAMW_EPS = 1e-2, 1e-5
OPTIMIZERS = {
    "plain": lambda: fj.sgd(0.1),
    "sgd": lambda: fj.sgd(0.1, momentum=0.9),
    "adamw": lambda: fj.adamw(RATE, eps=ADAMW_EPS),
}


def cases(first, dtype=torch.float32, *, half=False):
    """Problems and rules: each model with one, or half of the models, as always on 4 ranks, where they have others than
    on 2; all pairs in the profile "thorough".
    """
    thorough, four = os.environ.get("HYPOTHESIS_PROFILE") == "thorough", ranks() == 4
    for (i, model), (j, rule) in itertools.product(enumerate(MODELS.values()), enumerate(RULES.values())):
        chosen = (j - i) % len(RULES) == (first + four) % len(RULES) and not ((half or four) and (i + first) % 2)
        if thorough or chosen:
            yield *model(dtype), rule()


def spread(job, tasks):
    """What the job makes of each task, on all ranks: each rank does its part of them."""
    held = [None] * ranks()
    dist.all_gather_object(held, [job(*task) for task in tasks[rank() :: ranks()]])
    return [held[i % ranks()][i // ranks()] for i in range(len(tasks))]


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


def total_weight(infos):
    """The largest sum of weights in a step: a direction has the roundings of rows as often as it has the rows."""
    weights = [info.weights for info in infos if info.moved]
    return max(float(w.abs().sum()) if isinstance(w, torch.Tensor) else len(tree_leaves(w)[0]) for w in weights)


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
