"""Several processes, each with its own batch, do what one would do with all of it: with replicas, or with shards."""

from functional_jd.distributed.drift import check_replicas
from functional_jd.distributed.replicas import agree, mean_jacobian, replicate, replicated
from functional_jd.distributed.sharded import sharded
from functional_jd.distributed.uneven import weighted_by_examples

__all__ = [
    "agree",
    "check_replicas",
    "mean_jacobian",
    "replicate",
    "replicated",
    "sharded",
    "weighted_by_examples",
]
