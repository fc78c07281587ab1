"""Several processes, each with its own batch, do what one would do with all of it: with replicas, or with shards."""

from functional_jd.distributed.ranks import check_replicas, leave, weighted_by_examples
from functional_jd.distributed.sharded import sharded
from functional_jd.engines.replicas import agree, mean_jacobian, replicate, replicated

__all__ = [
    "agree",
    "check_replicas",
    "leave",
    "mean_jacobian",
    "replicate",
    "replicated",
    "sharded",
    "weighted_by_examples",
]
